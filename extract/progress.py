"""Progress of an extraction: a live bar on a terminal, a line now and then elsewhere, and the totals."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from . import capture

LINE_EVERY_S = 15.0


class ExtractionProgress:
    """Shows rows, rates, time left and bytes on stderr while an engine works.

    Args:
        num_rows: rows that the run is to add.
        num_drops: lines of the prompts file that were left out.
    """

    def __init__(self, num_rows: int, num_drops: int) -> None:
        self.num_rows = self.num_tokens = self.num_bytes = 0
        self._total_rows = num_rows
        self._num_drops = num_drops
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("extract"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rates]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("extract", total=num_rows, rates="engine starts …")
        self._t0 = self._first_s = time.monotonic()
        self._line_s = self._t0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start, the engine's start included."""
        return time.monotonic() - self._t0

    @property
    def working_s(self) -> float:
        """Seconds since the engine reported for the first time."""
        return time.monotonic() - self._first_s

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, report: capture.Progress) -> None:
        """Take a report of the engine."""
        if self._first_s == self._t0:
            self._first_s = time.monotonic()
        self.num_rows += report.num_rows
        self.num_tokens += report.num_tokens
        self.num_bytes = report.num_bytes
        self._bar.update(self._task, completed=self.num_rows, rates=self._rates())
        now_s = time.monotonic()
        if not self._console.is_terminal and now_s - self._line_s >= LINE_EVERY_S:
            self._line_s = now_s
            print(f"extract {self.num_rows}/{self._total_rows} rows, {self._rates()}", file=sys.stderr)

    def _rates(self) -> str:
        seconds = max(self.working_s, 1e-9)
        drops = f", {self._num_drops} dropped" if self._num_drops else ""
        return (
            f"{self.num_rows / seconds:.1f} rows/s, {self.num_tokens / seconds:.0f} tokens/s, "
            f"{self.num_bytes / 2**20:.0f} MiB in shards{drops}"
        )
