"""Long work says how long it still takes, where nobody sees a bar as well; and an engine has room for what fills the context."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from decode.progress import EvaluationProgress
from dflash_kit.target import TargetSpec
from dflash_kit.time_words import duration, time_left
from extract.cli import make_header
from extract.jobs import make_job
from extract.places import place_of
from extract.plan import Plan
from extract.prompts import Sample
from extract.settings import ExtractConfig
from train.progress import step_line


def test_durations_in_words() -> None:
    assert [duration(s) for s in (0.034, 45, 119, 300, 7300)] == ["0.034 s", "45 s", "119 s", "5 min", "2.0 h"]
    assert time_left(44.6) == "about 45 s left"


def test_an_evaluation_counts_from_its_own_first_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    with EvaluationProgress(10, 4) as progress:  # four of an earlier run
        for passed_s in (60, 20, 10, 10, 10, 10):
            now_s += passed_s
            progress.finish_prompt("x")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("about 5 min left")
    assert lines[1].endswith("about 3 min left")  # 4 prompts of 40 s
    assert "left" not in lines[-1]


def test_a_training_line_counts_the_steps_that_are_left() -> None:
    values: dict[str, Any] = {
        "step": 100, "loss": 1.0, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 1.0, "flop_per_s": 1e9, "mfu": None,
        "s_per_step": 0.5, "data_wait_share": 0.0, "slot_accuracy": [0.5], "skipped_steps": 0, "unreadable_rows": 0,
    }  # fmt: skip
    assert step_line(values, 300).endswith("  about 100 s left")
    assert "left" not in step_line(values, 100)
    assert "left" not in step_line(values, "~300")  # a spool's end is a guess


def test_an_answer_up_to_the_end_of_the_context_fits_the_engine(tiny_target: Path, tmp_path: Path) -> None:
    """vLLM is started with room for one token more than ``longest_tokens`` and refuses more than the target's context."""
    config = ExtractConfig(
        model=str(tiny_target), prompts="p", out=str(tmp_path / "s"), engine="transformers", num_taps=3
    )
    spec = TargetSpec.from_pretrained(tiny_target)
    sample = Sample(id="0" * 32, source="p:1", token_ids=[1] * 500, loss_spans=None, max_new_tokens=12)
    assert sample.max_tokens == spec.max_position_embeddings
    place = place_of(config, config.shares[0])
    job = make_job(config, spec, make_header(config, spec), Plan(samples=[sample]), place)
    assert job.longest_tokens + 1 == spec.max_position_embeddings
