"""Writers into an object store; a program that test_shard_store.py runs, in which writers are killed at the worst moments.

One process is started and forked, so that torch is imported once.
"""

import json
import os
import signal
import sys
from pathlib import Path

from many_writers import hashed_row
from test_shards import make_header

from dflash_kit.shard_share import Share
from dflash_kit.shard_store import ShardStore
from dflash_kit.shards import ShardWriter
from extract.places import place_of
from extract.settings import ExtractConfig

NUM_ROWS = 32
SHARD_BYTES = 2500
FAULTS = (
    "while a shard is uploaded",
    "between upload and journal",
    "while the manifest is put",
    "between journal and deletion",
)


def write_to_store(
    url: str, staging: Path, indices: range, *, rank: int = 0, world_size: int = 1, staging_bytes: int = 1 << 30
) -> list[str]:
    """Write the rows of these indices that the store lacks, as an extraction does; returns the ids of new rows."""
    config = ExtractConfig(model="m", prompts="p", out=url, staging=str(staging), staging_bytes=staging_bytes)
    share, added = Share(rank, world_size), []
    with place_of(config, share) as place:
        done_ids, _ = place.open(make_header())
        done_ids = set(done_ids)
        with ShardWriter(
            place.folder, make_header(), rank=rank, world_size=world_size, max_shard_bytes=SHARD_BYTES
        ) as writer:
            for row in map(hashed_row, indices):
                if share.takes(row.id) and row.id not in done_ids:
                    writer.add(row)
                    added.append(row.id)
                    place.keep_pace()
            writer.flush()
            writer.write_summary({"asked": sum(share.takes(hashed_row(i).id) for i in indices), "dropped": {}})
        place.settle()
    return added


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def break_at(fault: str, count: int) -> None:
    """Let this process be killed when its count-th shard gets that far."""
    real_put_file, real_put, real_unlink = ShardStore.put_file, ShardStore.put, Path.unlink
    num_shards = 0

    def put_file(store, file, name):
        nonlocal num_shards
        num_shards += 1
        if num_shards == count and fault == "while a shard is uploaded":
            Path(f"{store._root}/{name}.incomplete").write_bytes(file.read_bytes()[:99])
            die()
        real_put_file(store, file, name)
        if num_shards == count and fault == "between upload and journal":
            die()

    def put(store, name, data):
        if num_shards == count and fault == "while the manifest is put":
            Path(f"{store._root}/{name}.incomplete").write_bytes(data[:-9])
            die()
        real_put(store, name, data)

    def unlink(path, **settings):
        if num_shards == count and fault == "between journal and deletion" and path.suffix == ".arrow":
            die()
        real_unlink(path, **settings)

    ShardStore.put_file, ShardStore.put, Path.unlink = put_file, put, unlink


def start(url: str, staging: Path, rank: int, world_size: int, fault: str) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if fault:
                break_at(fault, count=2)
            write_to_store(url, staging, range(NUM_ROWS), rank=rank, world_size=world_size)
            status = 0
        except BaseException as error:
            print(f"{url}, rank {rank}: {error}", file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def runs(folder: str) -> dict[str, list[tuple[str, Path, int, int, str]]]:
    """Runs by name, those of one name one after the other.

    Each fault on a host that stays, and on one that is away until another has done its work; and four writers at once.
    """
    found = {}
    for number, fault in enumerate(FAULTS):
        for host, hosts in (("same", "aaa"), ("fresh", "aba")):
            name = f"{number}-{host}"
            faults = (fault, "", "")
            found[name] = [
                (f"file://{folder}/{name}", Path(folder) / f"staging-{name}-{which}", 0, 1, now)
                for which, now in zip(hosts, faults, strict=True)
            ]
        found[f"four-{number}"] = [
            (f"file://{folder}/four", Path(folder) / "staging", number, 4, now) for now in (fault, "", "")
        ]
    return found


def main(folder: str) -> None:
    waiting = runs(folder)
    told: dict[str, list[int]] = {name: [] for name in waiting}
    running = {start(*left.pop(0)): name for name, left in waiting.items()}
    while running:
        pid, status = os.wait()
        name = running.pop(pid)
        told[name].append(status)
        if waiting[name]:
            running[start(*waiting[name].pop(0))] = name
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
