"""The evaluation command with several prompts at a time: tokens, report, resuming, refusals, memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from batching import decode_batch, make_batch_engine
from drafting import tiny_drafter
from test_eval_cli import evaluate, made, read_report, tokens_by_response  # noqa: F401 (made is a fixture)
from test_hybrid import LINEAR

from decode import batch_memory
from decode.batch_memory import batch_memory as estimate
from decode.engine import Method
from dflash_kit.errors import KitError
from dflash_kit.target import load_target
from helpers import make_tiny_target


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_tokens_do_not_depend_on_the_batch(made: Path, tmp_path: Path, temperature: str) -> None:  # noqa: F811
    flag = f"--temperature={temperature}"
    assert evaluate(made, tmp_path / "alone", flag) == 0
    assert evaluate(made, tmp_path / "batch", flag, "--batch_size=2") == 0
    assert tokens_by_response(tmp_path / "batch") == tokens_by_response(tmp_path / "alone")
    lines = (tmp_path / "batch" / "results.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "batch" / "results.jsonl").write_bytes(lines[0] + lines[2] + lines[1][:40])  # a kill inside a line
    assert evaluate(made, tmp_path / "batch", flag, "--batch_size=2") == 0
    assert tokens_by_response(tmp_path / "batch") == tokens_by_response(tmp_path / "alone")


def test_report_says_what_a_batch_means(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    card = ("--push_to_hub=org/name", "--push_dry_run=true", "--base_model=org/base")
    assert evaluate(made, tmp_path / "out", "--batch_size=3", "--methods=ar,ddtree", *card) == 0
    captured = capsys.readouterr()
    assert "portable, 3 prompts at a time" in captured.out
    assert "batches of 3" in captured.out
    assert "3/3" in captured.err
    assert "float32, batches of 3." in (tmp_path / "out" / "model_card.md").read_text()
    report = read_report(tmp_path / "out")
    assert report["run"]["batch size"] == 3
    assert "3 prompts at a time share a round" in report["speeds"]
    assert "3 prompts at a time share a round" in (tmp_path / "out" / "report.html").read_text()
    logs = [
        (response["method"], response["budget"], response["log"])
        for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()[1:]
        for response in json.loads(line)["responses"]
    ]
    for entry in report["results"]:
        found = [log for method, budget, log in logs if (method, budget) == (entry["method"], entry["budget"])]
        rounds, seconds = sum(log["batch_rounds"] for log in found), sum(log["decode_s"] for log in found)
        assert rounds == pytest.approx(round(rounds))
        assert entry["ms_per_round"]["total"] == pytest.approx(1e3 * seconds / rounds)
        assert entry["tokens_per_s"] == pytest.approx((entry["new_tokens"] - entry["responses"]) / seconds)
        assert 1 < entry["responses_per_round"] <= 3
        assert entry["responses_per_round"] == pytest.approx(entry["rounds"] / rounds)


def test_dry_run_says_what_a_batch_takes(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert evaluate(made, tmp_path / "out", "--dry_run", "--batch_size=8") == 0
    assert "3 prompts at a time: about 0." in capsys.readouterr().out  # there are only three
    assert not (tmp_path / "out").exists()


def test_bad_requests_are_refused(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    for flags, words in (
        (["--batch_size=0"], "batch_size is 0; at least 1 is needed"),
        (["--batch_size=2", "--engine=vllm"], "engine vllm is given one prompt at a time; use --engine auto"),
        (["--batch_size=2", f"--replay={made / 'shards'}"], "replay decodes nothing"),
    ):
        assert evaluate(made, tmp_path / "out", *flags) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
        assert not (tmp_path / "out").exists()


def test_a_batch_that_does_not_fit(
    made: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--batch_size=3", "--methods=ar,ddtree")

    def refused() -> str:
        assert evaluate(made, tmp_path / "out", *flags) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert "lower batch_size, max_new_tokens or the largest of budgets" in error
        return error

    with monkeypatch.context() as patched:
        patched.setattr(batch_memory, "free_device_bytes", lambda _device: 1_000_000)
        assert "batch_size 3 needs about" in refused()
        assert not (tmp_path / "out").exists()

    def exhausted(*_args: Any, **_named: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    monkeypatch.setattr("decode.batch_target.BatchTarget.verify", exhausted)
    assert "memory of cpu is exhausted with batch_size 3" in refused()


@pytest.mark.parametrize("kind", [{}, {"model_type": "qwen3_5_text", **LINEAR}])
def test_estimated_caches_are_what_is_allocated(tmp_path: Path, kind: dict[str, Any]) -> None:
    folder = make_tiny_target(tmp_path / "target", **kind)
    model, (drafter, _) = load_target(folder), tiny_drafter(folder)
    engine = make_batch_engine(model, drafter, 3)
    decode_batch(engine, [[1] * 40, [2], [3]], [8, 8, 8], Method("ddtree", 16))
    target = engine.target
    held = [x for layer in target._cache.layers if layer.is_initialized for x in (layer.keys, layer.values)]
    held += [layer.states_SHKV for layer in target._delta.layers]
    assert engine._drafter is not None
    held += [x for pair in engine._drafter._states for x in pair]
    sizes = {"batch_size": 3, "num_tokens": 40 + 8 + 17, "num_rows": 17, "element_bytes": 4}
    found = estimate(model.config.get_text_config(), drafter.config, **sizes)
    assert found.caches == sum(x.numel() * 4 for x in held)


def test_the_proposed_batch_size_is_the_largest_that_fits(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (drafter, _) = load_target(tiny_target), tiny_drafter(tiny_target)
    monkeypatch.setattr(batch_memory, "free_device_bytes", lambda _device: 50_000_000)
    asked = {"longest_prompt": 100, "max_new_tokens": 100, "max_budget": 16}

    def require(size: int) -> None:
        batch_memory.require_batch_fits(model, drafter.config, batch_size=size, **asked)

    with pytest.raises(KitError) as caught:
        require(1000)
    fitting = int(str(caught.value).rsplit("(", 1)[1].split()[0])
    assert fitting > 1
    require(fitting)
    with pytest.raises(KitError, match="would fit"):
        require(fitting + 1)
