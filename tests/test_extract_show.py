"""Samples on the screen: what is learnt can be told apart, with and without colours, and nothing starts or is written."""

import io
import json

from rich.console import Console

from extract.cli import main
from extract.prompts import Sample
from extract.show import parts, show_samples
from helpers import make_byte_tokenizer


def sample_of(text, spans, **changes):
    ids = make_byte_tokenizer()(text)["input_ids"]
    settings = {"id": "abc", "source": "p:1", "token_ids": ids, "loss_spans": spans, "max_new_tokens": 0} | changes
    return Sample(**settings)


def shown(sample, **settings):
    console = Console(file=io.StringIO(), width=20, highlight=False, **settings)
    show_samples([sample], make_byte_tokenizer(), console)
    return console.file.getvalue()


def test_ranges_cover_every_token_once():
    assert list(parts(6, [(1, 3), (3, 4)])) == [(0, 1, False), (1, 3, True), (3, 4, True), (4, 6, False)]
    assert list(parts(3, [(0, 3)])) == [(0, 3, True)]
    assert list(parts(2, [])) == [(0, 2, False)]


def test_without_colours_brackets_stand_around_what_is_learnt():
    sample = sample_of("ask [bold]\nanswer it\x1b[2J at some length", [(11, 17)])
    text = shown(sample)
    assert "ask [bold]\n⟦answer⟧ it␛[2J at some length\n" in text  # no markup, no wrapping, no control of the terminal
    assert f"{len(sample.token_ids)} tokens, 6 supervised in 1 range(s)" in text
    numbers = " ".join(map(str, sample.token_ids[11:17]))
    assert f" ⟦{numbers}⟧ " in text
    assert "\x1b" not in text
    assert "⟦answer⟧" in shown(sample, force_terminal=True, no_color=True)


def test_on_a_terminal_colour_takes_the_place_of_brackets():
    text = shown(sample_of("ask answer", [(4, 10)]), force_terminal=True, color_system="standard")
    assert "⟦" not in text
    assert "\x1b[1;32manswer\x1b[0m" in text


def test_an_answer_to_come_is_announced():
    text = shown(sample_of("ask", None, max_new_tokens=9))
    assert "prompt of 3 tokens; the target answers with up to 9, all supervised" in text
    assert "⟦" not in text


def test_the_command_shows_and_stops_with_a_real_tokenizer(smollm2, tmp_path, monkeypatch, capsys):
    def engine_version():
        raise AssertionError("no engine is asked for")

    monkeypatch.setattr("extract.cli.ENGINE_VERSIONS", {"vllm": engine_version})
    talk = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is 4."}]
    lines = [{"messages": talk}, {"prompt": "Why?"}, {"text": "Once upon a time"}, {"prompt": "not shown"}]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--model", str(smollm2), "--prompts", str(path), "--out", str(tmp_path / "s"), "--show", "3"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n⟦It is 4.<|im_end|>⟧\n" in out
    assert "⟦ upon a time⟧" in out
    assert "Why?<|im_end|>\n<|im_start|>assistant\n" in out
    assert "up to 1024, all supervised" in out
    assert "not shown" not in out
    assert json.loads(out.splitlines()[-1]) == {"shown": 3, "asked": 3, "dropped": {}}
    assert list(tmp_path.iterdir()) == [path]
