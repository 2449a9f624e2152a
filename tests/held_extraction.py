"""The extraction command, which goes no further than so many rows; tests that kill it there run this program.

    PYTHONPATH=. python tests/held_extraction.py NUM_ROWS ARGUMENT…

A process waits before it adds another row to its shards, or, as the client of a server, before it asks for another. So a signal
comes before the work is over, however slow the machine or the sender is. With several processes each is held at its own count.
A process that is held leaves a file in the folder HELD_MARKS, where that is set.
"""

import itertools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_kit.errors import run_cli
from dflash_kit.shard_share import Share
from dflash_kit.shards import ShardWriter
from extract import launcher
from extract.server import Server

HELD_S = 600.0
"""Longer than any test waits, and the end of a process that a failed test has left."""


def held(real: Callable[..., Any], num_rows: int) -> Callable[..., Any]:
    calls = itertools.count()

    def wrapped(*args: Any, **settings: Any) -> Any:
        if next(calls) >= num_rows:
            if marks := os.environ.get("HELD_MARKS"):
                (Path(marks) / str(os.getpid())).touch()
            threading.Event().wait(HELD_S)
            raise SystemExit(f"nobody has ended this process within {HELD_S:.0f} s")
        return real(*args, **settings)

    return wrapped


def main(num_rows: int, module: str, arguments: list[str]) -> int:
    command = launcher.worker_command

    def held_command(share: Share, argv: list[str]) -> list[str]:
        _, _, _, _, *argv = command(share, argv)
        return [sys.executable, __file__, str(num_rows), "--worker", *argv]

    launcher.worker_command = held_command
    ShardWriter.add = held(ShardWriter.add, num_rows)
    Server.complete = held(Server.complete, num_rows)
    return run_cli(module, arguments)


if __name__ == "__main__":
    _, count, *rest = sys.argv
    is_worker = rest[0] == "--worker"
    sys.exit(main(int(count), "extract.worker" if is_worker else "extract.cli", rest[is_worker:]))
