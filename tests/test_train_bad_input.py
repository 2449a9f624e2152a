"""Data that cannot be learnt from or read, and runs that do not fit: one line each, and what was saved stays whole."""

from __future__ import annotations

import json
import math
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_cli import refusal
from test_train_loop import metrics, poison
from train_helpers import make_shards, run_in_two_processes, small_run

from dflash_kit.checkpoint import read_provenance
from dflash_kit.errors import KitError
from dflash_kit.shards import open_shards
from helpers import make_tiny_target
from train.cli import main
from train.memory import is_out_of_memory
from train.report import write_report
from train.state import RunFolder, _orderly


@pytest.fixture(scope="module")
def shards_folder(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("bad") / "shards", tiny_target, max_shard_bytes=1 << 14)


def bad_steps(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in RunFolder(out).bad_steps.read_text().splitlines()]


# -- steps that are skipped -----------------------------------------------------------------------------------------


def test_each_skipped_step_leaves_its_rows_and_a_resumed_run_has_them_once(
    shards_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, arguments = tmp_path / "out", small_run(shards_folder, tmp_path / "out", optim__max_bad_steps=3)
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, {1, 4, 5, 6})
        with pytest.raises(KitError) as caught:
            main(arguments)
    found = bad_steps(out)
    assert [line["step"] for line in found] == [2, 5, 6, 7]
    assert {line["reason"] for line in found} == {"non-finite loss or gradient"}
    ids = set(open_shards(shards_folder).ids)
    assert all(line["ids"] and set(line["ids"]) <= ids for line in found)
    assert str(RunFolder(out).bad_steps) in str(caught.value) and found[-1]["ids"][0] in str(caught.value)
    poison(monkeypatch, {8})  # it goes on behind step 4, and what was bad behind that is good now
    assert main(arguments) == 0
    assert [line["step"] for line in bad_steps(out)] == [2, 9]


def test_rows_with_too_few_supervised_tokens_for_a_block(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One supervised token has no successor to predict: there is an anchor and nothing to draft."""
    shards = make_shards(tmp_path / "shards", tiny_target, response_tokens=1)
    line = refusal(capsys, small_run(shards, tmp_path / "out", optim__max_bad_steps=2))
    assert "2 steps in a row" in line and "no supervised token" in line and "two supervised tokens in a row" in line
    assert "none was saved" in line
    (first, second) = bad_steps(tmp_path / "out")
    assert first["reason"] == "no supervised token" and second["ids"]
    logged = metrics(tmp_path / "out")
    assert "NaN" not in RunFolder(tmp_path / "out").metrics.read_text() and logged[0]["loss"] is None
    assert [line["flop_per_s"] for line in logged] == [0, 0]  # no speed of steps that computed nothing
    write_report(RunFolder(tmp_path / "out"))


def test_a_row_length_that_cuts_the_responses_off_is_named(
    shards_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, small_run(shards_folder, tmp_path / "out", data__seq_len=4, optim__max_bad_steps=1))
    assert "raise data.seq_len if it cuts the responses off" in line


# -- shards that cannot be read -------------------------------------------------------------------------------------


def break_one(shards: Path, copy: Path) -> tuple[Path, list[str]]:
    """Flip bytes in the middle of one shard of a copy; returns it and the ids of its rows."""
    shutil.copytree(shards, copy)
    entries = [json.loads(line) for line in (copy / "manifest.jsonl").read_text().splitlines()]
    entry = [line for line in entries if "ids" in line][2]
    file = copy / entry["file"]
    content = bytearray(file.read_bytes())
    content[len(content) // 3 : len(content) // 3 + 2000] = bytes(2000)
    file.write_bytes(content)
    return file, entry["ids"]


def test_a_damaged_shard_stops_the_run_by_name_and_a_flag_goes_on_without_it(
    shards_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards, out = tmp_path / "shards", tmp_path / "out"
    file, _ = break_one(shards_folder, shards)
    changes = {"save_every_steps": 1, "data__rows_per_step": 1, "optim__max_steps": 16, "replay__max_rows": 0}
    line = refusal(capsys, small_run(shards, out, **changes))
    assert str(file) in line and "data.skip_unreadable true" in line
    assert not out.exists()
    before = RunFolder(out).steps()
    assert main(small_run(shards, out, data__skip_unreadable=True, **changes)) == 0  # the same run goes on
    shown = capsys.readouterr().out
    assert (f"resumed at step {before[-1]}" in shown) == bool(before)
    assert shown.count("left out: ") >= 1 and str(file) in shown
    count = metrics(out)[-1]["unreadable_rows"]
    assert read_provenance(out)["metrics"]["unreadable_rows"] == count > 0
    assert f"unreadable {count}" in shown


def test_what_is_left_out_changes_nothing_else(shards_folder: Path, tmp_path: Path) -> None:
    from test_train_loop import make_trainer

    shards = tmp_path / "shards"
    _, ids = break_one(shards_folder, shards)
    whole = make_trainer(shards_folder, tmp_path / "a", replay__max_rows=0).job
    part = make_trainer(shards, tmp_path / "b", replay__max_rows=0, data__skip_unreadable=True).job
    left_out = set()
    for index in whole.plan.rows(0, 8):
        one, two = whole.packer(index), part.packer(index)
        gone = {row_id for row_id, _ in two.unreadable}
        left_out |= gone
        assert [row_id for row_id in one.ids if row_id not in gone] == list(two.ids)
        if not gone:
            assert torch.equal(one.features, two.features) and torch.equal(one.layout.anchors, two.layout.anchors)
    assert left_out and left_out <= set(ids)


@pytest.mark.slow
@pytest.mark.parametrize("skip", [True, False])
def test_two_processes_of_which_one_meets_the_damage_end_together(
    shards_folder: Path, tmp_path: Path, skip: bool
) -> None:
    shards, out = tmp_path / "shards", tmp_path / "out"
    file, _ = break_one(shards_folder, shards)
    changes = {"optim__max_steps": 10, "data__skip_unreadable": skip, "replay__every_steps": 0}
    done = run_in_two_processes(small_run(shards, out, **changes))
    assert (done.returncode == 0) == skip, done.stderr[-2000:]
    assert str(file) in (done.stdout if skip else done.stderr)


def test_a_held_out_row_that_cannot_be_read(
    shards_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = tmp_path / "held-out"
    file, ids = break_one(shards_folder, shards)
    train = make_shards(tmp_path / "train", Path(open_shards(shards).header.target_name), prefix="other")
    changes = {"eval_shards": shards, "replay__max_rows": 99, "optim__max_steps": 2, "replay__every_steps": 1}
    line = refusal(capsys, small_run(train, tmp_path / "out", **changes))
    assert str(file) in line and "held out for replay" in line
    assert main(small_run(train, tmp_path / "out", data__skip_unreadable=True, **changes)) == 0
    shown = capsys.readouterr().out
    count = metrics(tmp_path / "out", "replay")[-1]["unreadable_rows"]
    assert 0 < count <= len(ids)
    assert f"left out of this replay: {count} of 24 held-out rows" in shown and str(file) in shown


def test_shards_of_two_targets_in_one_folder(
    shards_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(shards_folder, mixed)
    other = make_shards(tmp_path / "other", make_tiny_target(tmp_path / "target", num_hidden_layers=5), prefix="other")
    for file in other.iterdir():
        name = file.name.replace("shard-", "shard-r00001-").replace("manifest", "manifest-r00001")
        (mixed / name).write_bytes(file.read_bytes().replace(b"shard-0", b"shard-r00001-0"))
    line = refusal(capsys, small_run(mixed, tmp_path / "out"))
    hashes = [open_shards(folder).header.config_hash for folder in (shards_folder, other)]
    assert "config_hash" in line and all(text in line for text in hashes), line
    assert not RunFolder(tmp_path / "out").state.exists()


# -- runs that do not fit -------------------------------------------------------------------------------------------


@contextmanager
def little_memory(more_bytes: int) -> Iterator[None]:
    """Let this process have only so much address space beyond what it has."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + more_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_batch_that_does_not_fit_says_the_estimate_and_what_to_lower(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    fits = small_run(make_shards(tmp_path / "shards", tiny_target, response_tokens=900, num_rows=3), out)
    changes = {"data.seq_len": 2700, "data.anchors": 2600, "drafter.block_size": 16, "optim.max_steps": 3}
    large = [f"--{name}={value}" for name, value in (changes | {"replay.max_rows": 0}).items()]
    with little_memory(1 << 30):
        line = refusal(capsys, [*fits, *large])
    assert "does not fit into memory" in line and "allocate memory" in line
    assert "lower data.anchors (now 2600) or data.seq_len (2700)" in line and "no state was saved yet" in line
    estimate = float(line.split("a process needs ")[1].split(" GiB")[0])
    assert math.isclose(estimate, 2600 * 16 * (2700 + 2600 * 16) * 10 / 2**30, rel_tol=0.3)  # most of it are masks
    assert not out.exists()


def test_only_a_lack_of_memory_is_called_that() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_a_lack_of_memory_while_saving_is_no_full_disk(tmp_path: Path) -> None:
    def fail(error: Exception) -> None:
        (tmp_path / "step").mkdir()
        raise error

    with pytest.raises(torch.OutOfMemoryError):
        _orderly(lambda: fail(torch.OutOfMemoryError("CUDA out of memory")), tmp_path / "step")
    with pytest.raises(KitError, match="cannot be written: full; free some space"):
        _orderly(lambda: fail(RuntimeError("full")), tmp_path / "step")
    assert not (tmp_path / "step").exists()
