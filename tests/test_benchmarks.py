"""Benchmarks that need a GPU for their figures do run on a CPU in a small form, and report what fails instead of ending."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import HAS_GPU, REPO

sys.path.append(str(REPO / "benchmarks"))

import decode_hybrid
import measuring

TINY = ["--shape", "tiny", "--context", "20", "--budgets", "5,20", "--repetitions", "1"]
on_cpu = pytest.mark.skipif(HAS_GPU, reason="with a GPU it takes its own path")


@pytest.fixture(autouse=True)
def settings() -> Any:
    """What the benchmark sets in its process."""
    yield
    torch.set_grad_enabled(True)


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


@on_cpu
def test_hybrid_passes_are_timed_and_agree(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    decode_hybrid.main([*TINY, "--out", str(tmp_path / "r.json")])
    found = last_line(capsys)
    assert found == json.loads((tmp_path / "r.json").read_text())
    assert {*found["portable"]} == {"prefill_s", "step_ms", "5", "20"}
    assert all(isinstance(found["fused"][budget]["eager_ms"], float) for budget in ("0", "5", "20"))
    for budget in (5, 20):
        assert 0 < found[f"state_per_node_{budget}"]["last_layer_differs_by"] < 1e-5
    assert found["relative_error"]["of_the_path"] < 1e-5
    assert set(found["over_one_step"]) == {"0", "5", "20"}


@on_cpu
@pytest.mark.parametrize("broken", ["tree_delta", "HybridTarget"])
def test_a_fused_engine_that_fails_leaves_the_portable_figures(
    broken: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class CompilationError(Exception):
        """As Triton's, of no kind that others share."""

    def fail(*_args: object, **_kwargs: object) -> None:
        raise CompilationError("at 3:7: no such layout")

    monkeypatch.setattr(decode_hybrid if broken == "HybridTarget" else decode_hybrid.hybrid_target, broken, fail)
    decode_hybrid.main([*TINY])
    found = last_line(capsys)
    assert isinstance(found["portable"]["20"], float) and isinstance(found["portable"]["step_ms"], float)
    told = found["fused_error"] if broken == "HybridTarget" else found["fused"]["20"]["eager_ms"]
    assert told == "CompilationError: at 3:7: no such layout"
    assert found.get("fused_step_ms") is None


@on_cpu
def test_a_shape_that_does_not_fit_gives_way(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = decode_hybrid.make_model

    def make_small(shape: dict[str, Any]) -> Any:
        if shape["hidden_size"] == 5120:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make(decode_hybrid.SHAPES["tiny"])

    monkeypatch.setattr(decode_hybrid, "make_model", make_small)
    report = measuring.Report(0, None)
    assert decode_hybrid.make("27b", report).config.hidden_size == 64
    found = report.finish()
    assert found["does_not_fit"] == {"27b": "OutOfMemoryError: CUDA out of memory"}
    assert found["shape"] == "9b"


def test_a_report_is_printed_when_the_time_is_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(measuring, "_kill_children", lambda: None)
    report = measuring.Report(0.05, None, benchmark="x")
    report.add(portable=3.5)
    report.at("fused: budget 64")
    for _ in range(200):
        if ended:
            break
        time.sleep(0.01)
    assert ended == [measuring.OUT_OF_TIME]
    found = last_line(capsys)
    assert (found["benchmark"], found["portable"]) == ("x", 3.5)
    assert "at: fused: budget 64" in found["unfinished"]
