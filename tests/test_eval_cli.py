"""The evaluation command as users run it: reports, resuming, refusals, replay, and the lossless check."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import decode_once, greedy_header, make_engine, record_row, tiny_drafter, train_briefly
from safetensors.torch import load_file, save_file

from decode.cli import main
from decode.conversation import Conversation
from decode.results import PromptResult
from dflash_kit.errors import run_cli
from dflash_kit.shards import ShardWriter
from dflash_kit.target import TargetSpec, load_target, load_tokenizer
from helpers import make_tiny_target, run_command

LIMIT_TOKENS = 20
PROMPTS = [
    {"id": "one", "prompt": "What is 2 + 3?"},
    {"id": "talk", "turns": ["Name a colour.", "And another?"]},
    {"id": "three", "messages": [{"role": "user", "content": "Say hello."}]},
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, a drafter trained on its answers, prompts, and shards of the first turns."""
    root = tmp_path_factory.mktemp("eval")
    target = make_tiny_target(root / "target")
    spec, tokenizer, model = TargetSpec.from_pretrained(target), load_tokenizer(target), load_target(target)
    drafter, ends = tiny_drafter(target, sharpness=1.0)
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    engine = make_engine(model, None, eos=spec.eos_token_ids)
    rows = []
    for row in PROMPTS:
        turns = row.get("turns") or [row.get("prompt") or row["messages"][0]["content"]]
        prompt = Conversation(tokenizer, tuple(turns), row["id"], enable_thinking=False).ask(0)
        said = decode_once(engine, prompt, "ar", 0, LIMIT_TOKENS).token_ids
        rows.append(record_row(model, drafter, prompt, said, row["id"]))
    train_briefly(drafter, ends, rows, steps=40)
    header = greedy_header(spec, drafter)
    with ShardWriter(root / "shards", header) as writer:
        for row in rows:
            writer.add(row)
    provenance = {"target": str(target), "shards_header": header.to_dict()}
    drafter.save_pretrained(root / "drafter", dtype=torch.float32, provenance=provenance)
    return root


def evaluate(made: Path, out: Path, *more: str, ckpt: Path | None = None, benchmark: str | None = None) -> int:
    """Run the command in this process."""
    return run_cli(
        main,
        [
            f"--ckpt={ckpt or made / 'drafter'}",
            f"--benchmarks={benchmark or made / 'prompts.jsonl'}",
            f"--max_new_tokens={LIMIT_TOKENS}",
            "--budgets=4,16",
            f"--out={out}",
            *more,
        ],
    )


def read_report(out: Path) -> dict[str, Any]:
    return json.loads((out / "report.json").read_text())


def read_results(out: Path) -> list[PromptResult]:
    lines = (out / "results.jsonl").read_text().splitlines()
    return [PromptResult.from_dict(json.loads(line)) for line in lines[1:]]


def tokens_by_response(out: Path) -> dict[Any, Any]:
    return {
        (result.prompt_id, response.turn, response.method): (response.token_ids, response.log.num_accepted)
        for result in read_results(out)
        for response in result.responses
    }


@pytest.fixture(scope="module")
def finished(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Report folder of an unbroken greedy run, made by the launcher in a process of its own."""
    out = tmp_path_factory.mktemp("reports") / "unbroken"
    done = run_command(
        "decode/eval.py",
        *("--ckpt", made / "drafter", "--benchmarks", made / "prompts.jsonl", "--max_new_tokens", str(LIMIT_TOKENS)),
        *("--budgets", "4,16", "--out", out),
    )
    assert done.returncode == 0, done.stderr
    assert "lossless" in done.stdout
    assert "ddtree-16" in done.stdout
    assert "τ" in done.stderr
    assert "tok/s" in done.stderr
    assert "float32" in done.stdout
    return out


def test_report_of_a_live_run(made: Path, finished: Path) -> None:
    report = read_report(finished)
    assert report["checkpoint"] == str(made / "drafter")
    assert report["target"] == str(made / "target")
    assert [(e["method"], e["budget"]) for e in report["results"]] == [
        ("ar", 0),
        ("chain", 7),
        ("ddtree", 4),
        ("ddtree", 16),
    ]
    for entry in report["results"]:
        assert entry["prompts"] == 3
        assert entry["responses"] == 4  # one prompt has two turns
        assert entry["acceptance_length_pooled"] == pytest.approx(1 + sum(entry["position_rates"]))
        assert entry["tokens_per_s"] > 0
        assert set(entry["ms_per_round"]) == {"draft", "build", "verify", "walk", "commit", "total"}
        assert entry["new_tokens"] == report["results"][0]["new_tokens"]
        assert entry["differing_tokens"] == (None if entry["method"] == "ar" else 0)
    assert report["results"][0]["speedup"] == 1.0
    assert report["results"][1]["acceptance_length_pooled"] > 1.3  # the drafter was trained on these answers
    assert (finished / "report.html").stat().st_size > 10_000
    assert (finished / "eval.yaml").exists()


def test_second_turn_follows_the_answer_of_the_first(made: Path, finished: Path) -> None:
    tokenizer, model = load_tokenizer(made / "target"), load_target(made / "target")
    found = tokens_by_response(finished)
    first = list(found["talk", 0, ("ar", 0)][0])
    messages = [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": tokenizer.decode(first, skip_special_tokens=True)},
        {"role": "user", "content": "And another?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    said = model.generate(prompt, max_new_tokens=LIMIT_TOKENS, do_sample=False)[0, prompt.shape[1] :].tolist()
    for method in (("ar", 0), ("chain", 7), ("ddtree", 16)):
        assert list(found["talk", 1, method][0]) == said


def test_finished_run_is_not_decoded_again(
    made: Path, finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, results = read_report(finished), (finished / "results.jsonl").read_bytes()
    monkeypatch.setattr("decode.engines.load_target", lambda *args, **kwargs: pytest.fail("nothing is left to decode"))
    assert evaluate(made, finished) == 0
    assert "3 done before" in capsys.readouterr().out
    assert read_report(finished)["results"] == before["results"]
    assert (finished / "results.jsonl").read_bytes() == results


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_killed_run_resumes(made: Path, tmp_path: Path, temperature: str) -> None:
    """Cut the results file inside its second prompt, as a kill would: a rerun ends with the same tokens."""
    flag = f"--temperature={temperature}"
    assert evaluate(made, tmp_path / "whole", flag) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    lines = (tmp_path / "whole" / "results.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "cut" / "results.jsonl").write_bytes(lines[0] + lines[1] + lines[2][:40])
    (tmp_path / "cut" / "report.json").unlink()
    assert evaluate(made, tmp_path / "cut", flag) == 0
    assert tokens_by_response(tmp_path / "cut") == tokens_by_response(tmp_path / "whole")
    assert [r.prompt_id for r in read_results(tmp_path / "cut")] == ["one", "talk", "three"]
    assert (
        read_report(tmp_path / "cut")["results"][3]["rounds"] == read_report(tmp_path / "whole")["results"][3]["rounds"]
    )


def test_other_settings_are_refused(made: Path, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in finished.iterdir()}
    for flag, words in (
        ("--budgets=4", "budgets = ['4', '16'], but this run has budgets = ['4']"),
        ("--temperature=1", "temperature = 0.0, but this run has temperature = 1.0"),
        ("--max_new_tokens=9", "max_new_tokens = 20, but this run has max_new_tokens = 9"),
    ):
        assert evaluate(made, finished, flag) == 2
        error = capsys.readouterr().err
        assert words.replace("['4', '16']", "[4, 16]").replace("['4']", "[4]") in error
        assert error.count("\n") == 1
    assert {path.name: path.read_bytes() for path in finished.iterdir()} == before


def test_folder_with_something_else_is_refused(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert evaluate(made, tmp_path) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    (tmp_path / "results.jsonl").write_text("not json\n")
    assert evaluate(made, tmp_path) == 2
    assert "is not a results file" in capsys.readouterr().err


def copy_checkpoint(made: Path, folder: Path, **config: Any) -> Path:
    """The drafter with a changed config; ``provenance=None`` leaves its provenance out."""
    shutil.copytree(made / "drafter", folder)
    if config.pop("provenance", True) is None:
        (folder / "provenance.json").unlink()
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | config))
    return folder


def test_checkpoint_that_does_not_fit_is_refused(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(ckpt: Path, *more: str) -> str:
        capsys.readouterr()
        assert evaluate(made, tmp_path / "out", *more, ckpt=ckpt) == 2
        captured = capsys.readouterr().err
        assert captured.count("\n") == 1
        assert captured.startswith("error: ")
        assert not (tmp_path / "out").exists()
        return captured

    broken = copy_checkpoint(made, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    del tensors["layers.1.mlp.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors")
    assert "layers.1.mlp.up_proj.weight" in refused(broken)
    (broken / "model.safetensors").write_bytes(b"nothing")
    assert "safetensors" in refused(broken)

    nameless = copy_checkpoint(made, tmp_path / "nameless", provenance=None)
    assert "--target" in refused(nameless)
    wide = make_tiny_target(tmp_path / "wide", hidden_size=96)
    assert "hidden size is 64 in the checkpoint and 96 in the target" in refused(nameless, f"--target={wide}")
    deep = make_tiny_target(tmp_path / "deep", num_hidden_layers=8)
    assert "number of target layers is 6 in the checkpoint and 8" in refused(nameless, f"--target={deep}")
    large = make_tiny_target(tmp_path / "large", vocab_size=304)
    assert "vocabulary size is 300 in the checkpoint and 304" in refused(nameless, f"--target={large}")

    other = tmp_path / "other"
    shutil.copytree(made / "target", other)
    rules = json.loads((other / "tokenizer.json").read_text())
    vocab = rules["model"]["vocab"]
    first, second = list(vocab)[:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(rules))
    message = refused(made / "drafter", f"--target={other}")
    assert "tokenizer hash is" in message
    header = json.loads((made / "drafter" / "provenance.json").read_text())["shards_header"]
    assert header["tokenizer_hash"] in message
    absent = str(tmp_path / "absent")
    message = refused(made / "drafter", f"--target={absent}")
    assert "cannot be loaded: no such folder" in message
    assert "--target" not in message
    moved = copy_checkpoint(made, tmp_path / "moved")
    provenance = json.loads((moved / "provenance.json").read_text()) | {"target": absent}
    (moved / "provenance.json").write_text(json.dumps(provenance))
    assert "the checkpoint names this one; --target" in refused(moved)
    assert "(model_type qwen3) is not a DFlash drafter's" in refused(made / "target")


def test_changed_template_is_only_a_warning(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    shutil.copytree(made / "target", other)
    template = other / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert evaluate(made, tmp_path / "out", f"--target={other}", "--limit=1", "--methods=ar,chain") == 0
    assert "warning: the target's chat template is not the one" in capsys.readouterr().err
    assert len(read_report(tmp_path / "out")["warnings"]) == 1


def test_bad_requests_are_refused(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    malformed = tmp_path / "malformed.jsonl"
    malformed.write_text('{"prompt": "fine"}\n{"prompt": \n')
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"id": "endless", "prompt": "x" * 600}) + "\n")
    for arguments, words in (
        ({"benchmark": "gsm9k"}, "unknown benchmark 'gsm9k'"),
        ({"benchmark": str(malformed)}, "malformed.jsonl line 2"),
        ({"benchmark": str(empty)}, "holds no prompts"),
        ({"benchmark": str(tmp_path / "absent.jsonl")}, "cannot read"),
        ({"benchmark": f"{made / 'prompts.jsonl'},{long}"}, "prompt endless of"),
        ({"more": ["--budgets=0,4"]}, "budgets"),
        ({"more": ["--budgets=four"]}, "budgets"),
        ({"more": ["--methods=chain,tree"]}, "methods is 'chain,tree'; allowed: ar, chain, ddtree"),
        ({"more": ["--temperature=-1"]}, "temperature is -1"),
        ({"more": ["--max_new_tokens=0"]}, "max_new_tokens is 0"),
        ({"more": ["--limit=0"]}, "limit is 0"),
        ({"more": ["--dtype=bfloat16"]}, "many times slower"),
        ({"more": ["--budgetts=4"]}, "did you mean '--budgets'"),
    ):
        more = arguments.pop("more", [])
        assert evaluate(made, tmp_path / "out", *more, **arguments) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
        assert not (tmp_path / "out").exists()


def test_dry_run_writes_nothing(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(made, tmp_path / "out", "--dry_run") == 0
    printed = capsys.readouterr().out
    assert "3 of" in printed
    assert "ar, chain, ddtree-4, ddtree-16" in printed
    assert not (tmp_path / "out").exists()
    assert evaluate(made, tmp_path / "out", "--dry_run", f"--replay={made / 'shards'}") == 0
    assert not (tmp_path / "out").exists()


def test_replay_gives_what_live_decoding_gives(made: Path, tmp_path: Path) -> None:
    """The shards hold the same prompts' first turns: every number but the speeds agrees with a live run."""
    singles = tmp_path / "singles.jsonl"
    rows = [row | {"turns": row["turns"][:1]} if "turns" in row else row for row in PROMPTS]
    singles.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert evaluate(made, tmp_path / "live", benchmark=str(singles)) == 0
    assert evaluate(made, tmp_path / "replayed", f"--replay={made / 'shards'}") == 0
    live, replayed = read_report(tmp_path / "live"), read_report(tmp_path / "replayed")
    assert [e["method"] for e in replayed["results"]] == ["chain", "ddtree", "ddtree"]
    speeds = {"ms_per_round", "tokens_per_s", "speedup", "best_budget", "benchmark"}
    speeds |= {"differing_tokens", "diverging_responses", "largest_gap"}
    for ours, theirs in zip(replayed["results"], live["results"][1:], strict=True):
        assert {k: v for k, v in ours.items() if k not in speeds} == {
            k: v for k, v in theirs.items() if k not in speeds
        }
        assert ours["tokens_per_s"] is None
        assert ours["speedup"] is None
        assert ours["ms_per_round"] == {}
    assert "<svg" in (tmp_path / "replayed" / "report.html").read_text()


def test_replay_refuses_shards_that_do_not_fit(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay = f"--replay={made / 'shards'}"
    other_taps = copy_checkpoint(made, tmp_path / "taps", dflash_config={
        **json.loads((made / "drafter" / "config.json").read_text())["dflash_config"], "target_layer_ids": [0, 4]
    })  # fmt: skip
    assert evaluate(made, tmp_path / "out", replay, ckpt=other_taps) == 2
    assert "have taps of layers [1, 3], but checkpoint" in capsys.readouterr().err
    other = make_tiny_target(tmp_path / "other", rope_theta=77.0)
    assert evaluate(made, tmp_path / "out", replay, f"--target={other}") == 2
    assert "config_hash" in capsys.readouterr().err.splitlines()[-1]
    assert evaluate(made, tmp_path / "out", f"--replay={tmp_path / 'absent'}") == 2
    assert evaluate(made, tmp_path / "out", replay, "--methods=ar") == 2
    assert "methods needs chain or ddtree" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_differing_tokens_fail_the_run(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A planted fault: the cache keeps the first rows of a verification, whichever path was accepted."""

    def commit_in_order(self: Any, rows: torch.Tensor) -> None:
        self.length += rows.numel()

    monkeypatch.setattr("decode.cache.PathCache.commit", commit_in_order)
    assert evaluate(made, tmp_path / "out") == 1
    assert "tokens differ from autoregressive decoding in float32" in capsys.readouterr().err
    tree = read_report(tmp_path / "out")["results"][-1]
    assert tree["differing_tokens"] > 0


def test_bundled_benchmarks_by_name(made: Path, tmp_path: Path) -> None:
    roomy = make_tiny_target(tmp_path / "roomy", max_position_embeddings=8192)
    flags = ("--limit=1", "--methods=ar,chain", "--max_new_tokens=4", f"--target={roomy}")
    assert evaluate(made, tmp_path / "out", *flags, benchmark="mt-bench,gsm8k,humaneval") == 0
    report = read_report(tmp_path / "out")
    assert [e["benchmark"] for e in report["results"][::2]] == ["mt-bench", "gsm8k", "humaneval"]
    assert [e["responses"] for e in report["results"][::2]] == [2, 1, 1]
