"""Extractor and trainer side by side on one bounded spool, as real processes, and what becomes of it when one dies."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import pytest
from spool_helpers import (
    MAX_SHARD_BYTES,
    NUM_EPOCHS,
    NUM_SAMPLES,
    SPOOL_BYTES,
    SizeWatch,
    extractor,
    manifest_lines,
    num_consumed,
    spool_size,
    trained_ids,
    trainer,
    wait_until,
    write_prompts,
)

from dflash_kit.shards import open_shards, verify_shards
from dflash_kit.spool import ConsumedJournal
from helpers import requires_vllm
from train.state import RunFolder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("spool-prompts") / "p.jsonl")


def assert_all_trained(folder: Path, out: Path, steps_file: Path) -> None:
    """Every sample in every epoch exactly once, but for those that are held out; nothing is left in the spool."""
    entries = manifest_lines(folder, "shard")
    extracted = Counter(row_id for entry in entries for row_id in entry["ids"])
    samples = {row_id.partition("@")[0] for row_id in extracted}
    assert (len(samples), len(extracted), set(extracted.values())) == (NUM_SAMPLES, NUM_SAMPLES * NUM_EPOCHS, {1})
    held_out = set(open_shards(out.with_name(out.name + ".state") / "held-out").ids)
    assert 0 < len(held_out) <= 3 and held_out < samples
    assert trained_ids(steps_file) == dict.fromkeys(samples - held_out, NUM_EPOCHS)
    # The trainer's own count, which goes through its saved states: a row's last token has no state but is trained on.
    lengths = [
        length
        for entry in entries
        for row_id, length in zip(entry["ids"], entry["lengths"], strict=True)
        if row_id.partition("@")[0] not in held_out
    ]
    state = RunFolder(out)
    counters = json.loads((state.step_folder(state.steps()[-1]) / "counters.json").read_text())
    assert counters["tokens"] in (sum(lengths), sum(lengths) + len(lengths))
    assert (spool_size(folder), list(folder.glob("shard-*"))) == (0, [])
    report = verify_shards(folder)
    assert report.ok and (report.rows, report.consumed_rows) == (0, NUM_SAMPLES * NUM_EPOCHS)
    assert len(open_shards(folder)) == 0
    assert (out / "model.safetensors").is_file()


def total_bytes(folder: Path) -> int:
    return sum(entry["bytes"] for entry in manifest_lines(folder, "shard"))


def test_three_epochs_pass_through_a_spool_of_a_fraction_of_their_size(
    tiny_target: Path, prompts: Path, tmp_path: Path
) -> None:
    folder, out, steps, go = tmp_path / "s", tmp_path / "drafter", tmp_path / "steps.jsonl", tmp_path / "go"
    with SizeWatch(folder) as watch:
        training = trainer(folder, out, steps, hold_at=0, go=go)
        wait_until(lambda: training.says("waiting for an extractor to begin"), training)
        extracting = extractor(tiny_target, prompts, folder)
        wait_until(lambda: watch.peak_bytes > SPOOL_BYTES // 2, extracting, training)
        go.touch()
        statuses = (extracting.status(), training.status())
    assert statuses == (0, 0), "\n".join(extracting.lines + training.lines)
    assert total_bytes(folder) > 3 * SPOOL_BYTES
    assert SPOOL_BYTES // 2 < watch.peak_bytes <= SPOOL_BYTES and watch.num_samples > 30
    assert extracting.says("parity   2 rows")  # though the trainer has deleted them by then
    assert_all_trained(folder, out, steps)


def test_either_may_be_killed_and_the_totals_are_the_same(tiny_target: Path, prompts: Path, tmp_path: Path) -> None:
    folder, out, steps, go = tmp_path / "s", tmp_path / "drafter", tmp_path / "steps.jsonl", tmp_path / "go"
    with SizeWatch(folder) as watch:
        # No trainer: the extractor waits.
        extracting = extractor(tiny_target, prompts, folder)
        wait_until(lambda: extracting.says("spool full, waiting for the trainer"), extracting)
        size = spool_size(folder)
        assert size > SPOOL_BYTES - 2 * (MAX_SHARD_BYTES + (16 << 10))
        extracting.kill()

        # No extractor, and rows to come: the trainer uses what there is and says so.
        training = trainer(folder, out, steps, "--spool_timeout_s=3")
        assert training.status() == 2
        assert training.says("error: no extractor of") and not training.says("Traceback")
        assert num_consumed(folder) > 0

        # Both again; the trainer is killed on its way.
        extracting = extractor(tiny_target, prompts, folder)
        before = num_consumed(folder)
        training = trainer(folder, out, steps, hold_at=before + 6)
        wait_until(lambda: num_consumed(folder) >= before + 6, extracting, training)
        training.kill()
        wait_until(lambda: extracting.says("spool full"), extracting)
        before = num_consumed(folder)
        training = trainer(folder, out, steps, hold_at=before + 1, go=go)
        wait_until(lambda: num_consumed(folder) > before and training.says("resumed at step"), extracting, training)

        # And the extractor, while the trainer goes on.
        extracting.kill()
        go.touch()
        extracting = extractor(tiny_target, prompts, folder)
        statuses = (extracting.status(), training.status())
    assert statuses == (0, 0), "\n".join(extracting.lines + training.lines)
    assert watch.peak_bytes <= SPOOL_BYTES
    assert_all_trained(folder, out, steps)


def test_two_extractors_and_a_stop_on_request(tiny_target: Path, prompts: Path, tmp_path: Path) -> None:
    folder, out, steps, go = tmp_path / "s", tmp_path / "drafter", tmp_path / "steps.jsonl", tmp_path / "go"
    shares = ("--spool_bytes", str(2 * SPOOL_BYTES))
    with SizeWatch(folder) as watch:
        extracting = extractor(tiny_target, prompts, folder, *shares, "--num_workers", "2")
        training = trainer(folder, out, steps, hold_at=4, go=go)
        wait_until(lambda: num_consumed(folder) >= 4, extracting, training)
        training.terminate()
        go.touch()
        assert training.status() == 0 and training.says("as asked")
        training = trainer(folder, out, steps)
        statuses = (extracting.status(), training.status())
    assert statuses == (0, 0), "\n".join(extracting.lines + training.lines)
    assert watch.peak_bytes <= 2 * SPOOL_BYTES
    assert_all_trained(folder, out, steps)


@requires_vllm
def test_vllm_waits_for_room_and_goes_on(tiny_target: Path, prompts: Path, tmp_path: Path) -> None:
    """The engine's own process waits; here the test stands for the trainer."""
    folder = tmp_path / "s"
    with SizeWatch(folder) as watch:
        extracting = extractor(tiny_target, prompts, folder, "--engine", "vllm", "--max_num_seqs", "8")
        wait_until(lambda: extracting.says("spool full, waiting for the trainer"), extracting)
        size = -1
        while spool_size(folder) != size:  # more than one lane may have something to write
            size = spool_size(folder)
            time.sleep(2)  # many polls of the writer and of the driver
        assert size > SPOOL_BYTES // 2 and total_bytes(folder) < 2 * SPOOL_BYTES
        journal = ConsumedJournal(folder)
        while extracting.is_running():
            journal.consume([entry["file"] for entry in manifest_lines(folder, "shard")])
            time.sleep(0.05)
    assert extracting.status() == 0, "\n".join(extracting.lines)
    assert watch.peak_bytes <= SPOOL_BYTES
    assert extracting.says("parity   2 rows")
    report = verify_shards(folder)
    assert report.ok and report.rows + report.consumed_rows == NUM_SAMPLES * NUM_EPOCHS
    assert [line["kind"] for line in manifest_lines(folder, "end")] == ["end"]
