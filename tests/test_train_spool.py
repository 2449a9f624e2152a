"""Training on a spool in one process: the plan of its steps, kills at chosen instants, refusals, a stop while waiting."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from spool_helpers import num_consumed
from test_train_cli import refusal
from train_helpers import PowerCutError, assert_same_run, cut_power, make_shards, run_in_two_processes, small_run

from dflash_kit.errors import KitError
from dflash_kit.shard_journal import journal_end, journal_spool
from dflash_kit.shard_manifest import read_manifest
from dflash_kit.shards import open_shards
from dflash_kit.spool import SpoolRecord, epoch_id, extractor_at_work
from train import spool_source
from train.cli import main
from train.progress import Reporter
from train.spool_plan import SpoolPlan
from train.state import RunFolder

NUM_ROWS = 36


def make_spool(folder: Path, target: Path, *, ends: bool = True, limit_bytes: int = 200_000) -> Path:
    """A spool of nine shards as an extractor leaves it; without an end where it was killed."""
    make_shards(folder, target, num_rows=NUM_ROWS, max_shard_bytes=30_000)
    manifest = folder / "manifest.jsonl"
    journal_spool(manifest, SpoolRecord(limit_bytes=limit_bytes, epochs=1, rows=NUM_ROWS))
    if ends:
        journal_end(manifest)
    return folder


@pytest.fixture(scope="module")
def finished_spool(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_spool(tmp_path_factory.mktemp("spool") / "shards", tiny_target)


def arguments(folder: Path, out: Path, **changes: Any) -> list[str]:
    settings = {"optim__max_steps": None, "data__feature_noise": 0.05, "save_every_steps": 100, "spool_timeout_s": 1}
    return small_run(folder, out, **(settings | changes))


@pytest.fixture(scope="module")
def unbroken(finished_spool: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    root = tmp_path_factory.mktemp("unbroken")
    shutil.copytree(finished_spool, root / "shards")
    assert main(arguments(root / "shards", root / "out")) == 0
    return root / "out"


# The plan


@pytest.mark.parametrize(("rows_per_step", "world_size"), [(1, 1), (3, 1), (4, 2), (5, 3)])
def test_steps_hold_every_row_once_whatever_the_windows_and_the_restarts(
    finished_spool: Path, rows_per_step: int, world_size: int
) -> None:
    shards = open_shards(finished_spool)
    entries = read_manifest(finished_spool / "manifest.jsonl").shards
    held_out = set(shards.ids[3:5])

    def new_plan() -> SpoolPlan:
        sizes = {"seq_len": 64, "rows_per_step": rows_per_step, "seed": 7}
        return SpoolPlan(finished_spool, shards.header, held_out, **sizes)

    plan, coming, step = new_plan(), [entries[:1], entries[1:4], entries[4:5], entries[5:]], 0
    found: list[str] = []
    fractions = []
    while not plan.is_over(step):
        if not plan.has_step(step):
            if coming:
                plan.add(coming.pop(0))
            else:
                plan.is_closed = True
            continue
        fractions.append(plan.rows_before_step(step))
        places = [place for rank in range(world_size) for place in plan.step(step, rank, world_size)]
        assert len(places) == world_size * -(-rows_per_step // world_size)
        for window, index in places:
            if window is not None:
                found += [window.shards.ids[window.train_rows[member]] for member in index.members]
        step += 1
        state = json.loads(json.dumps(plan.state(step)))
        released = plan.release(step)
        assert released == state["used"]
        if step % 2:  # killed here
            is_closed, plan = plan.is_closed, new_plan()
            plan.restore(state)
            for files in state["windows"]:
                plan.add([entry for entry in entries if entry.file in files])
            plan.is_closed = is_closed
    assert Counter(found) == dict.fromkeys(set(shards.ids) - held_out, 1)
    assert fractions == sorted(fractions) and fractions[0] == 0 and fractions[-1] < NUM_ROWS
    assert plan.rows_before_step(step) == NUM_ROWS


# Kills


@pytest.mark.parametrize(
    ("place", "name", "call"),
    [
        ("train.spool_feed", "keep_held_out", 1),
        ("train.loop", "begin_step", 6),
        ("train.spool_source", "sync_folder", 1),  # it is saved, and nothing is journalled as used
        ("train.spool_source", "sync_folder", 2),
        ("train.loop", "finish", 1),
    ],
)
def test_a_run_killed_at_any_instant_resumes_bit_for_bit(
    finished_spool: Path, unbroken: Path, tmp_path: Path, place: str, name: str, call: int
) -> None:
    spool, out = tmp_path / "shards", tmp_path / "out"
    shutil.copytree(finished_spool, spool)
    with pytest.MonkeyPatch.context() as patch:
        cut_power(patch, sys.modules[place], name, call)
        with pytest.raises(PowerCutError):
            main(arguments(spool, out))
    torch.manual_seed(99)
    assert main(arguments(spool, out)) == 0
    assert_same_run(out, unbroken, RunFolder(unbroken).steps()[-1])
    assert list(spool.glob("*.arrow")) == []


def test_shards_stay_until_a_saved_state_is_past_them(finished_spool: Path, tmp_path: Path) -> None:
    spool, out = tmp_path / "shards", tmp_path / "out"
    shutil.copytree(finished_spool, spool)
    before = set(spool.glob("*.arrow"))
    with pytest.MonkeyPatch.context() as patch:
        cut_power(patch, sys.modules["train.outcome"], "save_state", 1)
        with pytest.raises(PowerCutError):
            main(arguments(spool, out))
    assert set(spool.glob("*.arrow")) == before and num_consumed(spool) == 0
    assert main(arguments(spool, out)) == 0
    held_out = open_shards(RunFolder(out).state / "held-out")
    assert 0 < len(held_out) <= 3 and len(list(held_out)) == len(held_out)


@pytest.mark.slow
def test_two_processes_share_a_spool(finished_spool: Path, unbroken: Path, tmp_path: Path) -> None:
    spool, out = tmp_path / "shards", tmp_path / "out"
    shutil.copytree(finished_spool, spool)
    result = run_in_two_processes(arguments(spool, out))
    assert result.returncode == 0, result.stderr
    assert list(spool.glob("*.arrow")) == []
    counters = [
        json.loads((RunFolder(run).step_folder(RunFolder(run).steps()[-1]) / "counters.json").read_text())
        for run in (out, unbroken)
    ]
    assert [counters[0][name] for name in ("step", "tokens")] == [counters[1][name] for name in ("step", "tokens")]


# What does not go


def test_without_an_extractor_or_an_end_the_trainer_says_so(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spool, out = make_spool(tmp_path / "shards", tiny_target, ends=False), tmp_path / "out"
    line = refusal(capsys, arguments(spool, out))
    assert "no extractor of" in line and "for 1 s" in line and "spool_timeout_s" in line
    journal_end(spool / "manifest.jsonl")
    assert main(arguments(spool, out)) == 0
    assert list(spool.glob("*.arrow")) == []


def test_an_end_counts_once_no_extractor_lives(finished_spool: Path, tmp_path: Path, monkeypatch) -> None:
    """As when an ended spool is gone on with: the next extractor lives before it says what it will write."""
    monkeypatch.setattr(spool_source, "PATIENCE_S", 0.0)
    shutil.copytree(finished_spool, tmp_path / "shards")
    source = spool_source.SpoolSource(tmp_path / "shards", timeout_s=60)
    with extractor_at_work(tmp_path / "shards"):
        num_rows = 0
        while (news := source.look(starved=True)).window:
            num_rows += sum(entry.rows for entry in news.window)
        assert (num_rows, news.is_ended) == (NUM_ROWS, False)
    assert source.look(starved=True).is_ended
    source.close()


def test_a_stop_while_waiting_saves_and_the_same_command_goes_on(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool, out = make_spool(tmp_path / "shards", tiny_target, ends=False, limit_bytes=4_000_000), tmp_path / "out"
    said: list[str] = []

    def say(reporter: Reporter, text: str) -> None:
        said.append(text)
        if "waiting for the extractor" in text:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Reporter, "say", say)
    with extractor_at_work(spool):
        assert main(arguments(spool, out)) == 0
    assert "waiting for the extractor" in "".join(said)
    assert not out.exists() and len(RunFolder(out).steps()) == 1
    journal_end(spool / "manifest.jsonl")
    assert main(arguments(spool, out)) == 0
    assert out.exists() and list(spool.glob("*.arrow")) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optim__max_steps": 5}, ["optim.max_steps is 5", "to its end"]),
        ({"data__seq_len": 4096}, ["8,192 tokens", "200,000 bytes allows a quarter"]),
        ({"spool_timeout_s": 0}, ["spool_timeout_s is 0"]),
    ],
)
def test_settings_that_do_not_go_with_a_spool_are_one_line(
    finished_spool: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], words: list[str]
) -> None:
    line = refusal(capsys, arguments(finished_spool, tmp_path / "out", **changes))
    assert all(word in line for word in words), line
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_spool(tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = make_shards(tmp_path / "shards", tiny_target, num_rows=4)
    line = refusal(capsys, arguments(shards, tmp_path / "out", spool="true"))
    assert "no extractor has begun a spool" in line and "within 1 s" in line
    assert not (tmp_path / "out.state").exists()


def test_a_failed_parity_check_stops_training(finished_spool: Path, tmp_path: Path) -> None:
    spool = tmp_path / "shards"
    shutil.copytree(finished_spool, spool)
    failed = {"kind": "parity_failed", "sample": epoch_id("a", 1), "layer": 2, "difference": 0.5, "ids": []}
    with (spool / "manifest.jsonl").open("a") as file:
        file.write(json.dumps(failed) + "\n")
    with pytest.raises(KitError, match=r"parity check \(sample a@1, layer 2"):
        main(arguments(spool, tmp_path / "out"))
