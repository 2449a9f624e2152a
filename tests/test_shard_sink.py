"""The writer thread: back-pressure instead of growing memory, the first error kept, nothing lost at the end."""

import threading
import time
from dataclasses import replace

import pytest
from test_shards import assert_rows_are, make_header, make_row

from dflash_kit import writeback
from dflash_kit.shard_file import GrowingShard
from dflash_kit.shard_sink import PendingRow, ShardSink
from dflash_kit.shards import ShardWriter, open_shards


class Gate:
    """Stands for a copy from the GPU that has not ended."""

    def __init__(self):
        self.event = threading.Event()

    def wait(self):
        assert self.event.wait(timeout=240)


@pytest.fixture
def sink(tmp_path):
    return ShardSink(ShardWriter(tmp_path / "s", make_header()), max_pending_bytes=100)


def test_rows_wait_for_their_copies_and_arrive_in_order(sink, tmp_path):
    gate = Gate()
    sink.submit(PendingRow(make_row(1), 10, gate.wait))
    sink.submit(PendingRow(make_row(2), 10))
    time.sleep(0.05)
    assert sink.status()["accepted"] == []
    gate.event.set()
    status = sink.finish({"asked": 2})
    assert [row_id for row_id, _ in status["accepted"]] == ["row1", "row2"]
    assert status["error"] is None
    assert open_shards(tmp_path / "s").ids == ["row1", "row2"]
    assert open_shards(tmp_path / "s").summary == {"asked": 2}


def test_a_full_queue_blocks_until_there_is_room(sink):
    gate = Gate()
    sink.submit(PendingRow(make_row(1), 1000, gate.wait))  # one row always fits, however large
    submitted = threading.Event()

    def submit_more():
        sink.submit(PendingRow(make_row(2), 60))
        submitted.set()

    threading.Thread(target=submit_more).start()
    assert not submitted.wait(timeout=0.2)
    assert sink.status()["pending_bytes"] == 1000
    gate.event.set()
    assert submitted.wait(timeout=240)
    assert len(sink.finish(None)["accepted"]) <= 2


def test_the_first_error_is_kept_and_later_rows_are_let_go(sink, tmp_path):
    sink.submit(PendingRow(make_row(1), 10))
    broken = make_row(2)
    sink.submit(PendingRow(replace(broken, hidden_states=broken.hidden_states * 0), 10))
    for index in range(3, 40):  # far more than the queue holds: a failed sink must not block the engine
        sink.submit(PendingRow(make_row(index), 90))
    status = sink.finish({"asked": 39})
    assert "row2" in status["error"]
    assert "all zero" in status["error"]
    assert [row_id for row_id, _ in status["accepted"]] == ["row1"]
    assert open_shards(tmp_path / "s").ids == ["row1"]  # rows that were right are kept
    assert open_shards(tmp_path / "s").summary is None


def test_a_bug_in_the_writer_is_reported_by_sample(sink, monkeypatch):
    def fail(row, **others):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(sink._writer, "add", fail)
    sink.submit(PendingRow(make_row(7), 10))
    assert sink.finish(None)["error"] == "sample row7: ZeroDivisionError: a bug"


def until_accepted(sink, count, timeout_s=240):
    """Poll until so many rows were accepted in all; returns their ids."""
    ids, end_s = [], time.monotonic() + timeout_s
    while len(ids) < count and time.monotonic() < end_s:
        ids += [row_id for row_id, _ in sink.status()["accepted"]]
        time.sleep(0.005)
    return ids


def until_busy(sink, count, timeout_s=240):
    """Wait until so many lanes have taken a row."""
    end_s = time.monotonic() + timeout_s
    while len(sink._threads) - len(sink._idle) < count and time.monotonic() < end_s:
        time.sleep(0.005)


def test_lanes_write_beside_each_other_and_every_row_arrives_once(tmp_path):
    writer = ShardWriter(tmp_path / "s", make_header(), max_shard_bytes=3000)
    sink = ShardSink(writer, max_pending_bytes=500, num_lanes=4)
    gate = Gate()
    sink.submit(PendingRow(make_row(0), 10, gate.wait))  # the first lane waits for its copy
    for index in range(1, 60):
        sink.submit(PendingRow(make_row(index), 10))
    assert len(until_accepted(sink, 59)) == 59  # the others went on meanwhile
    gate.event.set()
    status = sink.finish({"asked": 60})
    assert status["error"] is None
    assert_rows_are(tmp_path / "s", range(60))
    assert len(list((tmp_path / "s").glob("shard-*.arrow"))) > 4
    with ShardWriter(tmp_path / "s", make_header()) as again:
        assert len(again.done_ids) == 60


def test_a_slow_engine_fills_one_shard_at_a_time(tmp_path):
    sink = ShardSink(ShardWriter(tmp_path / "s", make_header()), num_lanes=4)
    for index in range(8):
        sink.submit(PendingRow(make_row(index), 10))
        assert until_accepted(sink, 1) == [f"row{index}"]
    sink.finish(None)
    assert [path.name for path in sorted((tmp_path / "s").glob("shard-*.arrow"))] == ["shard-00000.arrow"]


def test_a_flush_finishes_the_shards_of_all_lanes(tmp_path):
    sink = ShardSink(ShardWriter(tmp_path / "s", make_header()), num_lanes=3)
    gates = [Gate() for _ in range(3)]
    for index, gate in enumerate(gates):
        sink.submit(PendingRow(make_row(index), 10, gate.wait))
    until_busy(sink, 3)
    for gate in gates:
        gate.event.set()
    sink.flush()
    assert_rows_are(tmp_path / "s", range(3))
    assert len(list((tmp_path / "s").glob("shard-*.arrow"))) == 3
    sink.finish(None)


def test_one_broken_row_leaves_the_other_lanes_rows(tmp_path):
    sink = ShardSink(ShardWriter(tmp_path / "s", make_header()), num_lanes=2)
    gates = [Gate(), Gate()]
    broken = make_row(1)
    sink.submit(PendingRow(replace(broken, hidden_states=broken.hidden_states * 0), 10, gates[0].wait))
    sink.submit(PendingRow(make_row(2), 10, gates[1].wait))
    until_busy(sink, 2)
    gates[1].event.set()
    assert until_accepted(sink, 1) == ["row2"]
    gates[0].event.set()
    status = sink.finish({"asked": 2})
    assert "row1" in status["error"]
    assert_rows_are(tmp_path / "s", [2])


def test_a_dropped_shard_leaves_a_gap_and_its_rows_can_be_written_again(tmp_path):
    with ShardWriter(tmp_path / "s", make_header()) as writer:
        writer.add(make_row(1), lane=0)
        writer.add(make_row(2), lane=1)
        writer._drop(0)  # as after a write error
        writer.add(make_row(3), lane=2)
        writer.add(make_row(1), lane=2)
    assert_rows_are(tmp_path / "s", [1, 2, 3])
    names = sorted(path.name for path in (tmp_path / "s").glob("shard-*.arrow"))
    assert names == ["shard-00001.arrow", "shard-00002.arrow"]


# The end: what is left to wait for


@pytest.mark.parametrize("how", ["flush", "finish"])
def test_shards_of_several_lanes_are_finished_side_by_side(how, tmp_path, monkeypatch):
    """Each waits for the disk; one after the other they would wait so many times."""
    sink = ShardSink(ShardWriter(tmp_path / "s", make_header()), num_lanes=2)
    gate, both = Gate(), threading.Barrier(2)
    sink.submit(PendingRow(make_row(1), 10, gate.wait))
    sink.submit(PendingRow(make_row(2), 10))  # the second lane's, since the first one waits
    while len(sink._writer._growing_ids) < 1:
        time.sleep(0.001)
    gate.event.set()
    real = GrowingShard.finish

    def finish(shard, final):
        both.wait(timeout=120)  # raises when nobody else comes
        return real(shard, final)

    monkeypatch.setattr(GrowingShard, "finish", finish)
    status = sink.flush() if how == "flush" else sink.finish({"asked": 2})
    assert status["error"] is None
    assert sorted(open_shards(tmp_path / "s").ids) == ["row1", "row2"]
    if how == "flush":
        assert sink.finish(None)["error"] is None


def test_a_bug_while_shards_are_finished_is_reported(sink, monkeypatch):
    sink.submit(PendingRow(make_row(1), 10))
    monkeypatch.setattr(GrowingShard, "finish", lambda shard, final: 1 / 0)
    assert sink.flush()["error"] == "finishing a shard: ZeroDivisionError: division by zero"
    monkeypatch.undo()
    assert open_after(sink) == ["row1"]


def open_after(sink):
    sink.finish(None)
    return open_shards(sink._writer.folder).ids


def test_bytes_are_sent_to_the_disk_as_they_come_each_once(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(writeback, "STEP_BYTES", 1000)
    monkeypatch.setattr(writeback, "_sync_file_range", lambda file, start, size, flags: sent.append((start, size)))
    with ShardWriter(tmp_path / "s", make_header()) as writer:
        for index in range(20):
            writer.add(make_row(index))
    assert len(sent) > 2
    ends = [start + size for start, size in sent]
    assert [start for start, _ in sent] == [0, *ends[:-1]]
    assert all(size >= 1000 for _, size in sent)
    (path,) = (tmp_path / "s").glob("*.arrow")
    assert path.stat().st_size - 1000 < ends[-1] <= path.stat().st_size


def test_without_such_a_call_files_are_written_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(writeback, "_sync_file_range", None)
    with ShardWriter(tmp_path / "s", make_header()) as writer:
        writer.add(make_row(1))
    assert open_shards(tmp_path / "s").ids == ["row1"]
