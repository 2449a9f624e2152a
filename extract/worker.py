"""One of several processes of an extraction on one host: does its share, and tells ``launcher`` of it in JSON lines.

Its command line is that of ``dump.py`` with a rank. It ends in order, its shards finished, when its stdin ends: then
the launcher is gone, or wants it to.
"""

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from dflash_kit.shards import ShardsHeader

from . import capture, cli
from .places import Place
from .plan import Plan
from .progress import Tally
from .screen import Screen

EVENT_EVERY_S = 0.5


class Events(Screen):
    """Tells in JSON lines on stdout what others tell people."""

    def plan(self, plan: Plan, header: ShardsHeader, place: Place) -> None:
        """Once, when the share is known and the folder is ready."""
        tell("plan", to_do=len(plan.samples), max_bytes=plan.max_bytes(header), dropped=dict(plan.drops))

    def progress(self, plan: Plan, num_gpus: int) -> Tally:
        """What tells of the work while it lasts."""
        return _EventTally()

    def say(self, line: str) -> None:
        """On stderr, whose lines the launcher passes on."""
        print(line, file=sys.stderr, flush=True)

    def done(self, result: dict[str, Any]) -> None:
        """Once, when everything is in finished shards."""
        tell("done", result=result)


class _EventTally(Tally):
    """Tells the totals now and then."""

    _next_s = 0.0
    _is_waiting = False

    def update(self, report: capture.Progress) -> None:
        super().update(report)
        self._is_waiting = report.is_waiting
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + EVENT_EVERY_S
            self._tell()

    def __exit__(self, *error: object) -> None:
        self._tell()

    def _tell(self) -> None:
        counts = {"rows": self.num_rows, "tokens": self.num_tokens, "bytes": self.num_bytes, "failed": self.num_failed}
        tell("progress", **counts, is_waiting=self._is_waiting)


def tell(event: str, **values: Any) -> None:
    """Print one event; nobody hears it when the launcher is gone, which then ends us."""
    with suppress(BrokenPipeError):
        print(json.dumps({"event": event, **values}), flush=True)


def main(argv: list[str] | None = None) -> int:
    """Extract the share that the command line names."""
    threading.Thread(target=_end_with_launcher, name="launcher-watch", daemon=True).start()
    return cli.main(argv, Events())


def _end_with_launcher() -> None:
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
