"""The writer thread: back-pressure instead of growing memory, the first error kept, nothing lost at the end."""

import threading
import time
from dataclasses import replace

import pytest
from test_shards import make_header, make_row

from dflash_kit.shard_sink import PendingRow, ShardSink
from dflash_kit.shards import ShardWriter, open_shards


class Gate:
    """Stands for a copy from the GPU that has not ended."""

    def __init__(self):
        self.event = threading.Event()

    def wait(self):
        assert self.event.wait(timeout=30)


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
    assert submitted.wait(timeout=30)
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
    def fail(row):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(sink._writer, "add", fail)
    sink.submit(PendingRow(make_row(7), 10))
    assert sink.finish(None)["error"] == "sample row7: ZeroDivisionError: a bug"
