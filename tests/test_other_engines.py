"""transformers' generate as an engine of the evaluation, what other engines refuse, and how vLLM's rounds are counted."""

import itertools
import json
import random
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from drafting import make_engine, make_trained, tiny_drafter

from decode.cli import main
from decode.conversation import Conversation
from decode.engine import Method
from decode.generate_engine import GenerateEngine
from decode.inputs import read_inputs
from decode.other_engines import longest_context
from decode.results import PromptResult
from decode.settings import EvalConfig
from decode.vllm_engine import VllmSetup, reason_against_vllm, start_vllm
from decode.vllm_rounds import Counters, read_rounds
from dflash_kit.acceptance import RoundLog
from dflash_kit.benchmark_prompts import load_benchmark
from dflash_kit.drafter import Drafter
from dflash_kit.errors import KitError, run_cli
from dflash_kit.hf_assistant import DFlashAssistant
from dflash_kit.publish import model_card
from dflash_kit.target import load_target, load_tokenizer
from helpers import requires_vllm

LIMIT_TOKENS = 24
PROMPTS = ["What is 2 + 3?", "Name a colour.", "Say hello.", "Count to nine."]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, prompts, and a drafter (sliding and full layers) trained on its answers."""
    root = tmp_path_factory.mktemp("other")
    make_trained(root, PROMPTS)
    return root


def evaluate(made: Path, out: Path, *more: str) -> int:
    return run_cli(
        main,
        [
            f"--ckpt={made / 'drafter'}",
            f"--benchmarks={made / 'prompts.jsonl'}",
            f"--max_new_tokens={LIMIT_TOKENS}",
            f"--out={out}",
            *more,
        ],
    )


def responses(out: Path) -> dict[Any, Any]:
    lines = (out / "results.jsonl").read_text().splitlines()[1:]
    return {
        (result.prompt_id, response.turn, response.method): response
        for result in (PromptResult.from_dict(json.loads(line)) for line in lines)
        for response in result.responses
    }


def test_generate_decodes_the_same_tokens_in_the_same_rounds(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(made, tmp_path / "theirs", "--engine=transformers-generate") == 0
    said = capsys.readouterr().out
    assert "ddtree is left out: engine transformers-generate verifies no trees" in said and "lossless" in said
    assert evaluate(made, tmp_path / "ours", "--methods=ar,chain", "--engine=portable") == 0
    theirs, ours = responses(tmp_path / "theirs"), responses(tmp_path / "ours")
    assert theirs.keys() == ours.keys() and len(ours) == 4 * len(PROMPTS)
    num_last = 0
    for key, response in ours.items():
        assert theirs[key].token_ids == response.token_ids
        logs = theirs[key].log, response.log
        if logs[1].cut == "length" and logs[1].num_accepted[-1] == 1:  # one token left: generate drafts nothing
            num_last += 1
            assert logs[0].num_accepted == (*logs[1].num_accepted[:-1], 0) and logs[0].cut is None
        else:
            assert (logs[0].num_accepted, logs[0].cut) == (logs[1].num_accepted, logs[1].cut), key
    assert num_last < len(PROMPTS)
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("theirs", "ours")]
    assert reports[0]["run"]["engine"].startswith("transformers 5")
    for entry, other in zip(*(report["results"] for report in reports), strict=True):
        assert entry.keys() == other.keys()
        assert (
            entry["tokens_per_s"] > 0 and entry["rounds"] == other["rounds"] and entry["differing_tokens"] in (0, None)
        )
        assert entry["acceptance_length_pooled"] == pytest.approx(other["acceptance_length_pooled"], abs=0.1)
    assert reports[0]["results"][1]["acceptance_length_pooled"] > 1.3  # there was something to compare


def test_generate_says_which_last_round_an_end_token_cut(made: Path) -> None:
    """An end token at accepted draft tokens and at bonus tokens: cut and counted as by our own walk."""
    model, tokenizer = load_target(made / "target"), load_tokenizer(made / "target")
    drafter = Drafter.from_pretrained(made / "drafter")
    assistant, chain = DFlashAssistant(drafter), Method("chain", drafter.config.num_draft_tokens)
    plain, cuts = make_engine(model, drafter), []
    for text in PROMPTS:
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        whole = plain.decode(plain.prefill(ids, LIMIT_TOKENS, chain.budget), chain)
        ends = itertools.accumulate(a + 1 for a in whole.log.num_accepted)  # places of the bonus tokens
        places = [end - back for end, a in zip(ends, whole.log.num_accepted, strict=True) if a for back in (0, 1)]
        for place in places[:4]:
            eos = whole.token_ids[min(place, len(whole.token_ids) - 1)]
            ours = make_engine(model, drafter, eos=(eos,))
            want = ours.decode(ours.prefill(ids, LIMIT_TOKENS, chain.budget), chain)
            theirs = GenerateEngine(model, assistant, eos_token_ids=(eos,), max_context=512)
            got = theirs.decode(theirs.prefill(ids, LIMIT_TOKENS, chain.budget), chain)
            assert got.token_ids == want.token_ids
            assert (got.log.num_accepted, got.log.cut) == (want.log.num_accepted, want.log.cut), (text, eos)
            cuts.append(want.log.cut)
    assert {"eos", None} <= set(cuts), cuts


def test_the_cards_python_runs_as_printed(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter, target = str(made / "drafter"), str(made / "target")
    config = Drafter.from_pretrained(drafter).config
    card = model_card(drafter, config, {}, {"results": []}, target)
    code = card[card.index("    from transformers") :].replace("max_new_tokens=256", "max_new_tokens=24")
    names: dict[str, Any] = {}
    exec(textwrap.dedent(code), names)  # noqa: S102  our own text
    plain = names["target"].generate(**names["inputs"], do_sample=False, max_new_tokens=24)
    assert names["output"].tolist() == plain.tolist() and plain.shape[1] == names["inputs"]["input_ids"].shape[1] + 24
    assert names["tokenizer"].decode(plain[0]) in capsys.readouterr().out
    assert "V2 runner" in card  # sliding and full layers


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine=transformers-generate", "--temperature=1"], "it is for temperature 0"),
        (["--engine=transformers-generate", "--methods=ddtree"], "engine transformers-generate verifies no trees"),
        (["--engine=vllm", "--replay=shards"], "leave engine vllm out"),
        (["--engine=portable", "--engine_args.quantization=fp8"], "engine_args are vLLM's, and engine is portable"),
        pytest.param(
            ["--engine=vllm"], "sliding and full layers together on GPUs only", marks=requires_vllm, id="mixed-on-cpu"
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused_in_one_line(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert evaluate(made, tmp_path / "out", *options) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and words in error
    assert not (tmp_path / "out").exists()


def test_vllm_keeps_room_for_answers_that_grow_when_they_are_tokenized_again(made: Path) -> None:
    tokenizer, benchmark = load_tokenizer(made / "target"), str(made / "prompts.jsonl")
    config = EvalConfig(ckpt=str(made / "drafter"), benchmarks=benchmark, max_new_tokens=LIMIT_TOKENS)
    prompts = load_benchmark(benchmark)
    room = longest_context(config, read_inputs(config), {benchmark: prompts}, tokenizer)
    for prompt in prompts:
        conversation = Conversation(tokenizer, prompt.turns, prompt.id)
        conversation.ask(0)
        conversation.answer([0xFF] * LIMIT_TOKENS)  # bytes that are no text
        last = conversation.ask(1)
        assert len(last) > 3 * LIMIT_TOKENS
        assert len(last) + LIMIT_TOKENS <= room < 512


def test_causal_flags_that_vllm_cannot_read_are_refused(made: Path) -> None:
    config = tiny_drafter(made / "target")[0].config
    assert reason_against_vllm(config, on_cpu=False) is None
    kinds = config.layer_types
    for causal in ((True, True), (False, False), (False, True)):
        odd = replace(config, layer_causal=causal)
        reason = reason_against_vllm(odd, on_cpu=False)
        assert (reason is None) == (len(set(causal)) == 1), (kinds, causal)


def test_a_number_of_ranks_that_is_none_is_one_line() -> None:
    shape: dict[str, Any] = {"num_draft_tokens": 7, "eos_token_ids": (), "dtype": "float32"}
    for value in ("abc", 0):
        setup = VllmSetup(
            target="t",
            ckpt="c",
            max_context=9,
            max_positions=9,
            engine_args={"tensor_parallel_size": value},
            **shape,
        )
        with pytest.raises(KitError, match="tensor_parallel_size is .*; a whole number from 1 on is needed"):
            start_vllm(setup, "ar")


def test_rounds_read_from_vllms_steps_are_those_of_the_walk() -> None:
    """Random chains, cut at random limits: what vLLM would show of each gives back num_accepted and the cut."""
    draw, depth = random.Random(0), 5
    num_cut = 0
    for _ in range(500):
        limit = draw.randint(1, 20)
        steps, uncut, kept, cut = [1], [], [], None
        while sum(steps) < limit:
            accepted = draw.choice([0, 0, 1, 2, depth])
            left = limit - sum(steps)
            uncut.append(accepted)
            kept.append(min(accepted, left))
            cut = "length" if accepted >= left else None
            steps.append(min(accepted + 1, left))
        counted = Counters(len(uncut), sum(uncut), tuple(sum(a >= k for a in uncut) for k in range(1, depth + 1)))
        found = read_rounds(steps, counted)
        assert found.num_accepted == tuple(kept) and found.is_cut == (cut is not None) and found.agrees
        assert RoundLog(num_accepted=found.num_accepted, cut=cut).new_tokens == sum(steps)
        num_cut += found.is_cut
        if uncut:  # counters that tell another story are noticed
            wrong = Counters(counted.drafts, counted.accepted + 1, counted.by_position)
            assert not read_rounds(steps, wrong).agrees
    assert 50 < num_cut < 450
    assert read_rounds([1, 1, 1], Counters(0, 0, ())) == read_rounds([1, 1, 1], Counters(0, 0, (0, 0)))
