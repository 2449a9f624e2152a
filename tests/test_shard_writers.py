"""Many writers in one folder: no row lost or repeated, nobody touches another's files, readers see one sequence."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter

import pytest
import torch
from many_writers import FAULTS, NUM_ROWS, NUM_WRITERS, hashed_row
from test_shards import make_header, make_row

from dflash_kit.errors import KitError
from dflash_kit.interrupts import uninterrupted
from dflash_kit.shard_share import Share
from dflash_kit.shards import ShardWriter, open_shards, verify_shards
from helpers import REPO, run_command

IDS = [hashed_row(i).id for i in range(200)]


def write(folder, indices, header=None, **settings) -> None:
    with ShardWriter(folder, header or make_header(), **settings) as writer:
        for index in indices:
            writer.add(make_row(index))


def names(folder, ending=".arrow") -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(ending))


# Shares


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 1000])
def test_each_sample_falls_into_one_share_which_is_its_hash(world_size):
    shares = [Share(rank, world_size) for rank in range(world_size)]
    for sample_id in IDS[:40]:
        assert [share.rank for share in shares if share.takes(sample_id)] == [int(sample_id[:16], 16) % world_size]


def test_file_names_tell_the_rank_and_sort_by_it():
    assert (Share().manifest_name, Share().shard_name(12)) == ("manifest.jsonl", "shard-00012.arrow")
    assert (Share(3, 8).manifest_name, Share(3, 8).shard_name(12)) == (
        "manifest-r00003.jsonl",
        "shard-r00003-00012.arrow",
    )
    assert Share(3, 8).shard_index("shard-r00003-123456.arrow") == 123456
    assert Share(3, 8).shard_index("shard-r00004-00012.arrow") is None
    assert Share(3, 8).shard_index("shard-00012.arrow") is None
    assert Share().shard_index("shard-r00003-00012.arrow") is None
    ranks = [0, 9, 10, 99, 100, 99_999]
    made = [Share(rank, 100_000).manifest_name for rank in ranks]
    assert made == sorted(made)


@pytest.mark.parametrize(
    ("rank", "world_size", "said"), [(8, 8, r"0\.\.7"), (-1, 2, r"0\.\.1"), (0, 0, r"1\.\.100000")]
)
def test_a_rank_outside_of_the_world_is_refused_with_the_range(rank, world_size, said):
    with pytest.raises(KitError, match=said):
        Share(rank, world_size)


# Processes


def test_eight_processes_write_at_once_and_the_killed_ones_come_back(tmp_path):
    folder = tmp_path / "s"
    result = run_command("tests/many_writers.py", folder, PYTHONPATH=str(REPO))
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["killed"] == sorted(FAULTS)
    assert told["least_at_work"] >= 3  # they came back among others that were writing
    found = {row.id: row for row in open_shards(folder)}
    assert len(open_shards(folder)) == len(found) == NUM_ROWS
    for index in range(NUM_ROWS):
        want = hashed_row(index)
        assert torch.equal(found[want.id].input_ids, want.input_ids.int())
        assert torch.equal(found[want.id].hidden_states, want.hidden_states.bfloat16())
    report = verify_shards(folder)
    assert (report.problems, report.notes, report.rows) == ([], [], NUM_ROWS)
    for rank in range(NUM_WRITERS):
        lines = (folder / f"manifest-r{rank:05d}.jsonl").read_text().splitlines()
        entries = [entry for entry in map(json.loads, lines) if entry["kind"] == "shard"]
        assert all(entry["file"].startswith(f"shard-r{rank:05d}-") for entry in entries)
        assert {row_id for entry in entries for row_id in entry["ids"]} == {
            hashed_row(i).id for i in range(NUM_ROWS) if Share(rank, NUM_WRITERS).takes(hashed_row(i).id)
        }


def test_recovery_leaves_the_files_of_others_alone(tmp_path):
    folder = tmp_path / "s"
    write(folder, [1])
    write(folder, [2], rank=1, world_size=4)
    foreign = ["shard-00007.arrow", "shard-r00001-00005.arrow", "shard-r00003-00000.arrow"]
    for name in foreign:
        (folder / name).write_bytes(b"somebody renames this just now")
        (folder / f"{name}.incomplete").write_bytes(b"somebody writes this just now")
    (folder / "shard-r00002-00000.arrow.incomplete").write_bytes(b"our own, from a killed run")
    write(folder, [3], rank=2, world_size=4)
    for name in foreign:
        assert (folder / name).read_bytes() == b"somebody renames this just now"
        assert (folder / f"{name}.incomplete").read_bytes() == b"somebody writes this just now"
    assert not (folder / "shard-r00002-00000.arrow.incomplete").exists()
    assert open_shards(folder).ids == ["row2", "row3", "row1"]
    report = verify_shards(folder)
    assert (len(report.problems), len(report.notes)) == (3, 3)


def test_another_number_of_processes_skips_what_anybody_has_done(tmp_path):
    folder = tmp_path / "s"
    write(folder, [1, 2])
    write(folder, [3], rank=5, world_size=8)
    with ShardWriter(folder, make_header(), rank=1, world_size=2) as writer:
        assert writer.done_ids == {"row1", "row2", "row3"}
        assert writer.num_rows == 0  # of its own
        with pytest.raises(KitError, match="row3 was captured twice"):
            writer.add(make_row(3))
        writer.add(make_row(4))
    with ShardWriter(folder, make_header()) as writer:
        assert writer.done_ids == {"row1", "row2", "row3", "row4"}
        assert writer.num_rows == 2


def test_an_unjournalled_shard_whose_rows_others_have_by_now_is_dropped(tmp_path):
    folder = tmp_path / "s"
    write(folder, [1, 2], rank=1, world_size=2)
    manifest = folder / "manifest-r00001.jsonl"
    manifest.write_bytes(
        b"".join(manifest.read_bytes().splitlines(keepends=True)[:2])
    )  # killed before it was journalled
    write(folder, [2])  # one process took over meanwhile
    with ShardWriter(folder, make_header(), rank=1, world_size=2) as writer:
        assert writer.done_ids == {"row2"}
        assert writer.notes[0].startswith("shard-r00001-00000.arrow was dropped")
        assert "1 of its 2 rows" in writer.notes[0]
        writer.add(make_row(1))
    assert sorted(open_shards(folder).ids) == ["row1", "row2"]
    assert verify_shards(folder).problems == verify_shards(folder).notes == []


def test_the_same_rank_twice_at_once_is_refused(tmp_path):
    with (
        ShardWriter(tmp_path, make_header(), rank=1, world_size=2),
        ShardWriter(tmp_path, make_header(), rank=0, world_size=2),
        pytest.raises(KitError, match=r"another process is writing .*manifest-r00001\.jsonl"),
    ):
        ShardWriter(tmp_path, make_header(), rank=1, world_size=2, lock_wait_s=0.2)


@pytest.mark.parametrize(("first", "second"), [((0, 1), (0, 2)), ((0, 2), (0, 1)), ((3, 4), (0, 2)), ((0, 2), (3, 4))])
def test_two_splits_at_once_are_refused(tmp_path, first, second):
    with (
        ShardWriter(tmp_path, make_header(), rank=first[0], world_size=first[1]),
        pytest.raises(KitError, match="the same --world_size"),
    ):
        ShardWriter(tmp_path, make_header(), rank=second[0], world_size=second[1], lock_wait_s=0.2)
    write(tmp_path, [1], rank=second[0], world_size=second[1])  # afterwards it may


def test_shares_of_one_split_do_not_wait_for_each_other(tmp_path):
    writers = [ShardWriter(tmp_path, make_header(), rank=rank, world_size=4, lock_wait_s=0) for rank in range(4)]
    for rank, writer in enumerate(writers):
        writer.add(make_row(rank))
    for writer in writers:
        writer.close()
    assert open_shards(tmp_path).ids == ["row0", "row1", "row2", "row3"]


# Readers


def test_rows_come_in_the_order_of_manifest_names_whoever_was_first(tmp_path):
    orders = []
    for name, writers in (("a", [(2, 3), (0, 1), (0, 3), (1, 3)]), ("b", [(0, 3), (1, 3), (2, 3), (0, 1)])):
        for rank, world_size in writers:
            first = 10 * rank + (100 if world_size == 1 else 0)
            write(tmp_path / name, [first, first + 1], rank=rank, world_size=world_size)
        orders.append(open_shards(tmp_path / name).ids)
        assert [row.id for row in open_shards(tmp_path / name)] == orders[-1]
    assert orders[0] == orders[1] == [f"row{i}" for i in (0, 1, 10, 11, 20, 21, 100, 101)]


def test_headers_that_differ_are_refused_with_both_values_and_files(tmp_path):
    write(tmp_path, [1], rank=0, world_size=2)
    write(tmp_path / "other", [2], make_header(engine_version="9"), rank=1, world_size=2)
    for path in (tmp_path / "other").iterdir():
        path.rename(tmp_path / path.name)
    (tmp_path / "other").rmdir()
    for action in (open_shards, verify_shards, lambda folder: ShardWriter(folder, make_header())):
        with pytest.raises(KitError) as error:
            action(tmp_path)
        for said in ('engine_version is "0" in manifest-r00000.jsonl', '"9" in manifest-r00001.jsonl'):
            assert said in str(error.value)


def test_a_target_that_lies_elsewhere_on_another_host_is_the_same(tmp_path):
    write(tmp_path, [1], rank=0, world_size=2)
    write(tmp_path, [2], make_header(target_name="elsewhere"), rank=1, world_size=2)
    assert open_shards(tmp_path).header.target_name == "t"


def test_an_id_of_two_writers_is_refused_with_both_files(tmp_path):
    folder = tmp_path / "s"
    write(folder, [1, 2], rank=0, world_size=2)
    write(tmp_path / "other", [3, 2], rank=1, world_size=2)
    for path in (tmp_path / "other").iterdir():
        path.rename(folder / path.name)
    said = (
        r"row2 is in shard-r00000-00000\.arrow \(manifest-r00000\.jsonl\) "
        r"and again in shard-r00001-00000\.arrow \(manifest-r00001\.jsonl\)"
    )
    for action in (open_shards, lambda folder: ShardWriter(folder, make_header())):
        with pytest.raises(KitError, match=said):
            action(folder)
    (problem,) = verify_shards(folder).problems
    assert "row2 is in" in problem
    for name in ("manifest-r00001.jsonl", "shard-r00001-00000.arrow"):  # the advice that is given
        (folder / name).unlink()
    assert open_shards(folder).ids == ["row1", "row2"]


@pytest.mark.parametrize("left", [b"", b'{"kind":"header","format_ver'])
def test_a_writer_killed_before_its_header_counts_as_empty(tmp_path, left):
    write(tmp_path, [1, 2], rank=0, world_size=2)
    (tmp_path / "manifest-r00001.jsonl").write_bytes(left)
    assert open_shards(tmp_path).ids == ["row1", "row2"]
    assert verify_shards(tmp_path).ok
    write(tmp_path, [3], rank=1, world_size=2)
    assert open_shards(tmp_path).ids == ["row1", "row2", "row3"]


def test_a_torn_last_line_of_one_writer_loses_its_last_shard_only(tmp_path):
    for rank in range(2):
        write(tmp_path, [10 * rank, 10 * rank + 1], rank=rank, world_size=2, max_shard_bytes=1)
    manifest = tmp_path / "manifest-r00000.jsonl"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    assert open_shards(tmp_path).ids == ["row0", "row10", "row11"]


def test_a_missing_shard_of_another_writer_is_found(tmp_path):
    write(tmp_path, [1], rank=0, world_size=2)
    (tmp_path / "shard-r00000-00000.arrow").unlink()
    with pytest.raises(KitError, match=r"shard-r00000-00000\.arrow is missing"):
        ShardWriter(tmp_path, make_header(), rank=1, world_size=2)


def test_lost_manifests_are_not_taken_for_a_fresh_start(tmp_path):
    write(tmp_path, [1], rank=0, world_size=2)
    write(tmp_path, [2], rank=1, world_size=2)
    (tmp_path / "manifest-r00001.jsonl").unlink()
    with pytest.raises(KitError, match=r"shards of manifest-r00001\.jsonl but that has no header"):
        ShardWriter(tmp_path, make_header(), rank=1, world_size=2)


def test_other_settings_are_refused_before_a_manifest_is_made(tmp_path):
    write(tmp_path, [1], rank=0, world_size=2)
    with pytest.raises(KitError, match="engine_version"):
        ShardWriter(tmp_path, make_header(engine_version="9"), rank=1, world_size=2)
    assert names(tmp_path, ".jsonl") == ["manifest-r00000.jsonl"]


def test_summaries_add_up_over_one_split_and_are_not_guessed_over_two(tmp_path):
    for rank in range(2):
        with ShardWriter(tmp_path, make_header(), rank=rank, world_size=2) as writer:
            writer.add(make_row(rank))
            writer.write_summary({"asked": 3 + rank, "dropped": {"too_long": rank, "duplicate": 1}})
    summed = {"asked": 7, "dropped": {"too_long": 1, "duplicate": 2}, "world_size": 2}
    assert open_shards(tmp_path).summary == summed
    with ShardWriter(tmp_path, make_header()) as writer:
        writer.write_summary({"asked": 7, "dropped": {}})
    assert open_shards(tmp_path).summary is None


def test_one_share_can_be_verified_while_others_write(tmp_path):
    write(tmp_path, [1], rank=0, world_size=2)
    write(tmp_path, [2], rank=1, world_size=2)
    path = tmp_path / "shard-r00000-00000.arrow"
    path.write_bytes(path.read_bytes()[:-1])
    assert verify_shards(tmp_path, Share(1, 2)).problems == []
    assert len(verify_shards(tmp_path, Share(0, 2)).problems) == 1
    assert len(verify_shards(tmp_path).problems) == 1


# Ctrl-C and SIGTERM


def write_until(error, folder, index) -> None:
    with ShardWriter(folder, make_header()) as writer:
        writer.add(make_row(index))
        raise error


def test_an_interrupted_writer_finishes_its_shards(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write_until(KeyboardInterrupt(), tmp_path / "s", 1)
    with pytest.raises(ValueError, match="a bug"):
        write_until(ValueError("a bug"), tmp_path / "s", 2)
    assert open_shards(tmp_path / "s").ids == ["row1"]


def test_a_closed_generator_finishes_its_shards(tmp_path):
    def rows():
        with ShardWriter(tmp_path / "s", make_header()) as writer:
            for index in range(9):
                writer.add(make_row(index))
                yield index

    generator = rows()
    assert [next(generator), next(generator)] == [0, 1]
    generator.close()
    assert open_shards(tmp_path / "s").ids == ["row0", "row1"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_the_block_has_ended(signum):
    heard = []
    before = signal.signal(signum, lambda *_: heard.append("heard"))
    try:
        with uninterrupted():
            with uninterrupted():
                os.kill(os.getpid(), signum)
                heard.append("inner")
            heard.append("outer")
        assert heard == ["inner", "outer", "heard"]
        os.kill(os.getpid(), signum)
        assert heard[-2:] == ["heard", "heard"]
    finally:
        signal.signal(signum, before)


INTERRUPTED = """
import sys
sys.path[:0] = [{repo!r}, {repo!r} + "/tests"]
import test_shards as t
from dflash_kit.interrupts import sigterm_interrupts
with sigterm_interrupts(), t.ShardWriter({folder!r}, t.make_header()) as writer:
    for i in range(10**6):
        writer.add(t.make_row(i, 40))
        print(i, flush=True)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_process_interrupted_at_any_moment_leaves_whole_shards(tmp_path, signum):
    code = INTERRUPTED.format(repo=str(REPO), folder=str(tmp_path / "s"))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    for _ in range(50):
        child.stdout.readline()
    child.send_signal(signum)
    told = 50 + len(child.stdout.read().splitlines())
    child.communicate(timeout=240)
    ids = open_shards(tmp_path / "s").ids
    assert told <= len(ids) <= told + 1
    assert Counter(ids).most_common(1)[0][1] == 1
    report = verify_shards(tmp_path / "s")
    assert report.problems == report.notes == []
    assert names(tmp_path / "s", ".incomplete") == []
