"""A spool's room, its journals, and how readers take used shards."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
from spool_helpers import extractor_arguments, manifest_lines, spool_size, write_prompts
from test_shards import make_header, make_row, write

from dflash_kit.errors import KitError
from dflash_kit.shard_journal import journal_end, journal_spool
from dflash_kit.shard_sink import PendingRow, ShardSink
from dflash_kit.shards import ShardWriter, open_shards, verify_shards
from dflash_kit.spool import ConsumedJournal, SpoolRecord, epoch_id, extractor_at_work, has_extractor, sample_of
from dflash_kit.spool_follower import SpoolFollower
from dflash_kit.spool_room import SHARD_OVERHEAD_BYTES, writer_part
from extract.cli import main
from extract.prompts import Sample
from extract.spool import over_epochs

SHARD_BYTES = 20_000
LIMIT_BYTES = 8 * (SHARD_BYTES + SHARD_OVERHEAD_BYTES)


def spool_writer(folder: Path, **settings) -> ShardWriter:
    return ShardWriter(folder, make_header(), max_shard_bytes=SHARD_BYTES, spool_bytes=LIMIT_BYTES, **settings)


# Room


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(500, 1), (300, 40), (20, 2000)])
def test_a_writer_never_takes_more_than_its_part(tmp_path: Path, num_rows: int, num_tokens: int) -> None:
    """With rows far smaller than their overhead, usual ones, and ones that are larger than a shard."""
    folder = tmp_path / "s"
    rows = [make_row(i, num_tokens) for i in range(num_rows)]
    peak, journal = 0, None
    with spool_writer(folder) as writer:
        for row in rows:
            if not writer.has_room(row):
                journal = journal or ConsumedJournal(folder)
                there = sorted(path.name for path in folder.glob("shard-*.arrow"))
                assert there and spool_size(folder) > LIMIT_BYTES // 3
                journal.consume(there[:1])
                assert writer.has_room(row)
            writer.add(row)
            peak = max(peak, spool_size(folder))
    assert max(peak, spool_size(folder)) <= LIMIT_BYTES
    assert journal is not None
    report = verify_shards(folder)
    assert report.ok and report.rows + report.consumed_rows == num_rows and report.consumed_rows > 0


def test_lanes_wait_for_room_and_are_let_go_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    sink = ShardSink(spool_writer(folder), max_pending_bytes=1 << 30, num_lanes=3)
    for index in range(200):
        sink.submit(PendingRow(make_row(index, 40), 10))
    accepted = []
    deadline_s = time.monotonic() + 240
    while not (status := sink.status())["spool_full"]:
        accepted += status["accepted"]
        assert time.monotonic() < deadline_s and status["error"] is None
        time.sleep(0.01)
    accepted += status["accepted"] + sink.finish(None)["accepted"]
    assert spool_size(folder) <= LIMIT_BYTES
    assert 0 < len(accepted) < 200
    assert sorted(open_shards(folder).ids) == sorted(row_id for row_id, _ in accepted)
    assert verify_shards(folder).ok


def test_a_waiting_lane_goes_on_when_the_trainer_has_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    writer = spool_writer(folder)
    sink = ShardSink(writer, max_pending_bytes=1 << 30, num_lanes=min(writer.max_lanes or 9, 3))
    for index in range(200):
        sink.submit(PendingRow(make_row(index, 40), 10))
    journal, done = ConsumedJournal(folder), threading.Event()

    def consume() -> None:
        while not done.wait(0.01):
            journal.consume([path.name for path in folder.glob("shard-*.arrow")])

    thread = threading.Thread(target=consume)
    thread.start()
    status = sink.finish({"asked": 200})
    done.set()
    thread.join()
    assert status["error"] is None and len(status["accepted"]) == 200
    with spool_writer(folder) as again:  # used rows count as done
        assert again.done_ids == {f"row{i}" for i in range(200)}


def test_a_limit_below_a_few_shards_is_one_line_with_both_sizes() -> None:
    assert writer_part(8 * (100_000 + SHARD_OVERHEAD_BYTES), 1, 100_000, 5) == 8 * (100_000 + SHARD_OVERHEAD_BYTES)
    with pytest.raises(KitError, match=r"less than 8 shards of 116,384 bytes .* allowed is 931,072 or more"):
        writer_part(931_071, 1, 100_000, 5)
    with pytest.raises(KitError, match=r"for each of 2 processes.*allowed is 1,862,144 or more"):
        writer_part(1_000_000, 2, 100_000, 5)
    with pytest.raises(KitError, match="shards of 1,016,384 bytes"):  # a row that is larger than a shard
        writer_part(1_000_000, 1, 100_000, 1_000_000)


# Journals and readers


def test_readers_leave_used_shards_out_and_miss_lost_ones(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    write(folder, [make_row(i) for i in range(12)], max_shard_bytes=4000)
    files = sorted(path.name for path in folder.glob("shard-*.arrow"))
    assert len(files) >= 4
    journal = ConsumedJournal(folder)
    journal.consume(files[:2])
    assert not (folder / files[0]).exists()
    shards, report = open_shards(folder), verify_shards(folder)
    assert report.ok and report.consumed_shards == 2 and report.rows == len(shards) == len(list(shards))
    assert report.rows + report.consumed_rows == 12
    with ShardWriter(folder, make_header()) as writer:
        assert writer.done_ids == {f"row{i}" for i in range(12)}
    (folder / files[2]).unlink()  # by somebody else
    assert files[2] in verify_shards(folder).problems[0]
    with pytest.raises(KitError, match=files[2]):
        ShardWriter(folder, make_header())


def test_the_journal_of_used_shards_survives_a_kill(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    write(folder, [make_row(i) for i in range(12)], max_shard_bytes=4000)
    first, second, third = sorted(path.name for path in folder.glob("shard-*.arrow"))[:3]
    journal = ConsumedJournal(folder)
    with pytest.raises(KitError, match="another trainer uses the spool"):
        ConsumedJournal(folder)
    journal.consume([first])
    journal.close()
    with (folder / "consumed.jsonl").open("a") as file:  # killed behind the first of these, in the middle of the second
        file.write(json.dumps({"file": second}) + "\n" + json.dumps({"file": third})[:-3])
    again = ConsumedJournal(folder)
    assert second in again and third not in again
    assert not (folder / second).exists() and (folder / third).exists()
    again.consume([third])
    again.close()
    lines = [json.loads(line)["file"] for line in (folder / "consumed.jsonl").read_text().splitlines()]
    assert lines == [first, second, third]
    (folder / "consumed.jsonl").write_text('{"file": "../x"}\n')
    with pytest.raises(KitError, match=r"consumed\.jsonl line 1 is damaged"):
        open_shards(folder)


def test_a_follower_sees_each_shard_once_and_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    follower = SpoolFollower(folder)
    assert follower.look() == [] and not follower.is_spool
    seen: list[str] = []
    for rank in (0, 1):
        manifest = folder / f"manifest-r{rank:05d}.jsonl"
        with ShardWriter(folder, make_header(), rank=rank, world_size=2):
            pass
        journal_spool(manifest, SpoolRecord(limit_bytes=9, epochs=3, rows=6))
        for start in range(6 * rank, 6 * rank + 6, 3):
            with ShardWriter(folder, make_header(), rank=rank, world_size=2) as writer:
                for index in range(start, start + 3):
                    writer.add(make_row(index))
            with manifest.open("a") as file:  # a line that is being written
                file.write('{"kind":"sh')
            seen += [row_id for entry in follower.look() for row_id in entry.ids]
            assert follower.look() == []
        journal_end(manifest)
        follower.look()
        assert follower.is_ended == (rank == 1)
        assert (follower.limit_bytes, follower.epochs, follower.total_rows) == (9, 3, 12)
    assert seen == [f"row{i}" for i in range(12)]
    journal_spool(folder / "manifest-r00001.jsonl", SpoolRecord(limit_bytes=9, epochs=3, rows=8))  # more to do
    follower.look()
    assert (follower.is_ended, follower.total_rows) == (False, 14)


def test_the_end_of_an_earlier_split_does_not_count_where_a_later_one_announces_more(tmp_path: Path) -> None:
    folder, follower = tmp_path / "s", SpoolFollower(tmp_path / "s")

    def begin(rank: int, world_size: int, epochs: int, rows: int) -> Path:
        with ShardWriter(folder, make_header(), rank=rank, world_size=world_size) as writer:
            name = writer.share.manifest_name
        journal_spool(folder / name, SpoolRecord(limit_bytes=9, epochs=epochs, rows=rows))
        follower.look()
        return folder / name

    journal_end(begin(0, 1, 1, 10))
    follower.look()
    assert follower.is_ended
    parts = [begin(0, 2, 2, 11), begin(1, 2, 2, 9)]  # two processes go on with another epoch
    assert (follower.is_ended, follower.total_rows) == (False, 20)
    for part in parts:
        assert not follower.is_ended
        journal_end(part)
        follower.look()
    assert follower.is_ended


def test_a_process_without_rows_ends_its_share_of_a_spool(tiny_target, prompts, tmp_path) -> None:
    folder = tmp_path / "s"
    follower = SpoolFollower(folder)
    for rank in (0, 1):
        assert not follower.is_ended
        share = ("--epochs=1", "--limit=1", "--world_size=2", f"--rank={rank}", "--spool_bytes=2000000")
        assert main(extractor_arguments(tiny_target, prompts, folder, *share)) == 0
        follower.look()
    rows = [part["rows"] for part in manifest_lines(folder, "spool")]
    assert sorted(rows) == [0, 1] and follower.is_ended and follower.total_rows == 1


def test_an_extractor_shows_that_it_lives(tmp_path: Path) -> None:
    assert not has_extractor(tmp_path)
    with extractor_at_work(tmp_path), extractor_at_work(tmp_path):
        assert has_extractor(tmp_path)
    assert not has_extractor(tmp_path)


# The command


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "p.jsonl")


def test_epochs_hold_every_sample_once_in_orders_of_their_own(tiny_target, prompts, tmp_path, capsys) -> None:
    assert main(extractor_arguments(tiny_target, prompts, tmp_path / "s", "--dry_run")) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["to_do"] == 120
    assert not (tmp_path / "s").exists()

    samples = [Sample(id=f"{i:032x}", source="p", token_ids=[1], loss_spans=None, max_new_tokens=1) for i in range(30)]
    found = [sample.id for sample in over_epochs(samples, 3, seed=5)]
    assert found == [sample.id for sample in over_epochs(samples, 3, seed=5)]
    parts = [found[start : start + 30] for start in (0, 30, 60)]
    assert [{sample_of(row_id) for row_id in part} for part in parts] == [{sample.id for sample in samples}] * 3
    orders = [[sample_of(row_id) for row_id in part] for part in parts]
    assert len({tuple(order) for order in orders}) == 3
    assert set(parts[2]) == {epoch_id(sample.id, 2) for sample in samples} and len(set(found)) == 90


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--spool_bytes=100000", r"spool_bytes 100,000 is 100,000 bytes, which is less than 8 shards"),
        ("--spool_bytes=-1", r"spool_bytes is -1; allowed: 0"),
        ("--spool_bytes=0", r"epochs is 3 without spool_bytes"),
        ("--epochs=0", r"epochs is 0; at least 1"),
    ],
)
def test_refused_settings_leave_nothing_behind(tiny_target, prompts, tmp_path, option, said) -> None:
    with pytest.raises(KitError, match=said):
        main(extractor_arguments(tiny_target, prompts, tmp_path / "s", option))
    assert not (tmp_path / "s").exists()


def test_shards_that_stay_and_a_spool_are_not_mixed(tiny_target, prompts, tmp_path) -> None:
    stay = extractor_arguments(tiny_target, prompts, tmp_path / "s", "--spool_bytes=0", "--epochs=1", "--limit=2")
    assert main(stay) == 0
    with pytest.raises(KitError, match="written to stay"):
        main(extractor_arguments(tiny_target, prompts, tmp_path / "s"))
    spool = extractor_arguments(tiny_target, prompts, tmp_path / "spool", "--epochs=1", "--limit=2")
    assert main(spool) == 0 and main(spool) == 0
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "spool" / "manifest.jsonl").read_text().splitlines()]
    assert kinds == ["header", "spool", "shard", "summary", "parity_passed", "end"]
    assert not list((tmp_path / "spool").glob("parity*"))
    with pytest.raises(KitError, match="is a spool"):
        main([*spool, "--spool_bytes=0"])
    shutil.rmtree(tmp_path / "spool")
