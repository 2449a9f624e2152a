"""Writers that are killed at any point: the next one has each row once, and finished shards stay as they were.

The writers are processes of their own, children of one that has imported everything: the imports took nearly all the time.
"""

import json
import os
import signal
import subprocess
import sys

import pytest
from test_shards import assert_rows_are, make_header, make_row

from dflash_kit.shards import ShardWriter, open_shards, verify_shards
from helpers import REPO

FORKS = """
import json, os, signal, sys
sys.path[:0] = [{repo!r}, {repo!r} + "/tests"]
import test_shards
told = []
for code, num_printed in json.load(sys.stdin):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            os.dup2(writer, 1)
            exec(code, {{"most": num_printed + 3 if num_printed else 10**9}})
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as printed:
        for _ in range(num_printed):
            printed.readline()
        if num_printed:
            os.kill(pid, signal.SIGKILL)  # it writes on meanwhile, a few rows at most
        printed.read()
    told.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(json.dumps(told))
"""
CHILD = """
import os, signal, sys, time
sys.path[:0] = [{repo!r}, {repo!r} + "/tests"]
import test_shards as t
from dflash_kit import shard_file, shard_journal
point, count = {point!r}, {count}
calls = 0

def at(name, real, *, before=True):
    "Kill this process at the count-th call of `real`, before or after it."
    def wrapped(*args, **kwargs):
        global calls
        calls += name == point
        if name == point and calls == count:
            before or real(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    return wrapped

def half_written(journal, line):
    real_write = os.write
    def write_half(file, data):
        real_write(file, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    os.write = write_half
    real_append(journal, line)

real_append = shard_journal.Journal._append
def append(journal, line):
    global calls
    calls += point == "half a journal line"
    return (half_written if point == "half a journal line" and calls == count else real_append)(journal, line)

shard_journal.Journal._append = append
os.rename = at("after rename", at("before rename", os.rename), before=False)
os.fsync = at("before fsync", os.fsync)
shard_file.GrowingShard.add = at("row", shard_file.GrowingShard.add)
shard_journal.Journal.append_shard = at("after journal", shard_journal.Journal.append_shard, before=False)
with t.ShardWriter({folder!r}, t.make_header(), max_shard_bytes=4000) as writer:
    for i in {order}:
        if "row%d" % i not in writer.done_ids:
            if not most:
                time.sleep(600)  # until it is killed
            writer.add(t.make_row(i))
            print(i, flush=True)
            most -= 1
"""
ORDER = [7, 0, 11, 3, 9, 1, 10, 2, 8, 5, 4, 6]  # rows finish out of order
KILLS = [
    ("row", 1),
    ("row", 6),
    ("before fsync", 1),
    ("before fsync", 5),
    ("before rename", 2),
    ("after rename", 1),
    ("after rename", 3),
    ("half a journal line", 1),
    ("half a journal line", 3),
    ("after journal", 2),
]


def run_writers(*writers: tuple[str, int]) -> list[int]:
    """Run programs one after the other, killing each when it has printed so many lines (0: never); their exit statuses."""
    command = [sys.executable, "-c", FORKS.format(repo=str(REPO))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, input=json.dumps(writers), capture_output=True, text=True, timeout=300, check=True
    )
    return json.loads(done.stdout)


def writer_of(folder, order, point="", count=0) -> str:
    """A program that writes these rows, unless they are there, and kills itself at the count-th time at a point."""
    return CHILD.format(repo=str(REPO), folder=str(folder), order=list(order), point=point, count=count)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Folders of writers that killed themselves, and their exit statuses, by point and count."""
    folders = [tmp_path_factory.mktemp("killed") for _ in KILLS]
    statuses = run_writers(
        *((writer_of(folder / "s", ORDER, *kill), 0) for folder, kill in zip(folders, KILLS, strict=True))
    )
    return dict(zip(KILLS, zip(folders, statuses, strict=True), strict=True))


@pytest.mark.parametrize(("point", "count"), KILLS)
def test_killed_at_any_point_a_rerun_has_each_row_once(killed, point, count):
    tmp_path, status = killed[point, count]
    assert status == -signal.SIGKILL
    journalled = 0
    if (tmp_path / "s" / "manifest.jsonl").read_bytes().count(b"\n") > 0:
        journalled = len(open_shards(tmp_path / "s"))  # what is readable after the kill is sound
        problems = verify_shards(tmp_path / "s").problems
        assert all("not in a manifest" in problem for problem in problems)  # the rerun takes it over
    with ShardWriter(tmp_path / "s", make_header(), max_shard_bytes=4000) as writer:
        assert len(writer.done_ids) >= journalled
        if point == "after rename":
            assert len(writer.done_ids) > journalled  # the renamed shard was adopted
        for index in ORDER:
            if f"row{index}" not in writer.done_ids:
                writer.add(make_row(index))
    assert_rows_are(tmp_path / "s", range(12))
    assert not list((tmp_path / "s").glob("*.incomplete"))


def test_killed_again_and_again_from_outside(tmp_path):
    program = writer_of(tmp_path / "s", [(7 * i) % 60 for i in range(60)])
    assert run_writers((program, 1), (program, 17), (program, 25), (program, 0)) == [-signal.SIGKILL] * 3 + [0]
    assert_rows_are(tmp_path / "s", range(60))
