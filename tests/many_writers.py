"""Eight processes that write into one shards folder at once; a program that test_shard_writers.py runs.

Four of them are killed at the worst moments and started again while the others go on. One process is started and forked, so
that torch is imported once.
"""

import hashlib
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from test_shards import make_header, make_row

from dflash_kit import shard_file, shard_journal
from dflash_kit.shard_share import Share
from dflash_kit.shards import Row, ShardWriter

NUM_WRITERS = 8
NUM_ROWS = 240
FAULTS = {0: "before the rename", 1: "after the rename", 2: "half a journal line", 3: "while a shard grows"}


def hashed_row(index: int) -> Row:
    """The row of an index, with an id as extraction makes them."""
    return replace(make_row(index), id=hashlib.blake2b(str(index).encode(), digest_size=16).hexdigest())


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def break_at(fault: str, count: int) -> None:
    """Let this process be killed at the count-th time that it gets there."""
    calls = 0

    def at(real, *, before=None, after=None):
        def wrapped(*args):
            nonlocal calls
            calls += 1
            if calls == count and before:
                before(*args)
            result = real(*args)
            if calls == count and after:
                after(*args)
            return result

        return wrapped

    def write_half(journal, line):
        os.write(journal._file, json.dumps(line).encode()[:40])
        die()

    if fault == "before the rename":
        os.rename = at(os.rename, before=die)
    elif fault == "after the rename":
        os.rename = at(os.rename, after=die)
    elif fault == "half a journal line":
        shard_journal.Journal._append = at(shard_journal.Journal._append, before=write_half)
    elif fault == "while a shard grows":
        shard_file.GrowingShard.add = at(shard_file.GrowingShard.add, after=die)


def write_share(folder: str, rank: int, fault: str, all_back: Path) -> None:
    """What one process does: the rows of its share that nobody has written.

    Those that are not killed wait after half of them until the others have come back.
    """
    break_at(fault, count=5)
    share = Share(rank, NUM_WRITERS)
    with ShardWriter(folder, make_header(), rank=rank, world_size=NUM_WRITERS, max_shard_bytes=2500) as writer:
        for index in range(NUM_ROWS):
            row = hashed_row(index)
            if share.takes(row.id) and row.id not in writer.done_ids:
                writer.add(row)
            while rank >= len(FAULTS) and index == NUM_ROWS // 2 and not all_back.exists():
                time.sleep(0.01)


def start(folder: str, rank: int, fault: str, all_back: Path) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            write_share(folder, rank, fault, all_back)
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def main(folder: str) -> None:
    all_back = Path(folder + ".back")
    running = {start(folder, rank, FAULTS.get(rank, ""), all_back): rank for rank in range(NUM_WRITERS)}
    killed, at_work = [], []
    while running:
        pid, status = os.wait()
        rank = running.pop(pid)
        if os.WIFSIGNALED(status):
            killed.append(rank)
            at_work.append(len(running))
            running[start(folder, rank, "", all_back)] = rank
            if len(killed) == len(FAULTS):
                all_back.touch()
        elif status != 0:
            raise SystemExit(f"writer {rank} ended with {status}")
    print(json.dumps({"killed": sorted(killed), "least_at_work": min(at_work)}))


if __name__ == "__main__":
    main(sys.argv[1])
