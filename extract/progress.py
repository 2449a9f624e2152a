"""Progress of an extraction: a live bar on a terminal, a line now and then elsewhere, and the totals."""

import json
import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dflash_kit.live_bar import LiveBar
from dflash_kit.spool import FULL_TEXT
from dflash_kit.time_words import RATE_MEMORY_S, time_left

from . import capture
from .gpu_meter import GpuMeter

LINE_EVERY_S = 15.0
LEAST_SHARE = 1 / 32
"""Of the rows, before the time left is estimated: of many answers at a time all but a few short ones end together."""


class Tally:
    """Counts what an engine reports, and the seconds since it began; shows nothing."""

    def __init__(self) -> None:
        self.num_rows = self.num_tokens = self.num_bytes = self.num_said = self.num_failed = 0
        self._t0 = self._first_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start, the engine's start included."""
        return time.monotonic() - self._t0

    @property
    def working_s(self) -> float:
        """Seconds since the engine reported for the first time."""
        return time.monotonic() - self._first_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing was opened."""

    def update(self, report: capture.Progress) -> None:
        """Take a report of the engine."""
        if self._first_s == self._t0:
            self._first_s = time.monotonic()
        self.num_rows += report.num_rows
        self.num_tokens += report.num_tokens
        self.num_bytes = report.num_bytes
        self.num_said += report.num_said
        self.num_failed += report.num_failed

    def totals(self) -> dict[str, float]:
        """What the last line of output says about the work; rates once the engine was up."""
        working_s = max(self.working_s, 1e-9)
        return {
            "tokens_added": self.num_tokens,
            "bytes": self.num_bytes,
            "elapsed_s": round(self.elapsed_s, 1),
            "tokens_per_s": round(self.num_tokens / working_s, 1),
            "rows_per_s": float(f"{self.num_rows / working_s:.3g}"),
        }


class ExtractionProgress(LiveBar, Tally):
    """Shows rows, rates, time left, bytes, drops and the use of GPUs on stderr while engines work, for people.

    Args:
        num_rows: rows that the run is to add.
        num_drops: lines of the prompts file that were left out; samples at which the engine fails are added.
        label: first word of the line.
        num_gpus: GPUs that work, out of those that are visible.
    """

    FOR_PEOPLE = True

    def __init__(self, num_rows: int, num_drops: int, label: str = "extract", *, num_gpus: int = 1) -> None:
        super().__init__()
        self._gpus = GpuMeter(num_gpus)
        self._total_rows = num_rows
        self._num_drops = num_drops
        self._label = label
        self._console = Console(stderr=True)
        self._has_bar = self._console.is_terminal and self.FOR_PEOPLE
        self._bar = Progress(
            TextColumn(label),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rates]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._has_bar,
            speed_estimate_period=RATE_MEMORY_S,
        )
        self._task = self._bar.add_task(label, total=num_rows, rates="engine starts …")
        self._line_s = self._t0
        self._full_s = self._t0 - LINE_EVERY_S  # when it was last said that the spool is full

    def expect(self, num_rows: int, num_drops: int) -> None:
        """There is more to do: another process has told its plan."""
        self._total_rows += num_rows
        self._num_drops += num_drops
        self._bar.update(self._task, total=self._total_rows)

    def note(self, text: str) -> None:
        """Print a line beside the bar."""
        if self._has_bar:
            self._console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def update(self, report: capture.Progress) -> None:
        """Take a report of the engine."""
        super().update(report)
        self._gpus.sample()
        rates = f"{FULL_TEXT}, {self._rates()}" if report.is_waiting else self._rates()
        self._bar.update(self._task, completed=self.num_rows + self.num_failed, rates=rates)
        now_s = time.monotonic()
        is_news = report.is_waiting and now_s - self._full_s >= LINE_EVERY_S
        if not self._has_bar and (is_news or now_s - self._line_s >= LINE_EVERY_S):
            self._line_s = now_s
            self._full_s = now_s if report.is_waiting else self._full_s
            print(self._line(rates, is_waiting=report.is_waiting), file=sys.stderr, flush=True)

    def _line(self, rates: str, *, is_waiting: bool) -> str:
        return f"{self._label} {self.num_rows}/{self._total_rows} rows, {rates}, {self._time_left()}"

    def _rates(self) -> str:
        seconds = self.working_s
        if seconds < 1:
            return "engine at work"
        num_drops = self._num_drops + self.num_failed
        drops = f", {num_drops} dropped" if num_drops else ""
        gpu = "" if self._gpus.last_percent is None else f", GPU {self._gpus.last_percent:.0f} %"
        # Rows end together, words come steadily.
        said = f"{self.num_said / seconds:.0f} answer tokens/s, " if self.num_said else ""
        return (
            f"{self.num_rows / seconds:.2g} rows/s, {self.num_tokens / seconds:.0f} tokens/s, {said}"
            f"{self.num_bytes / 2**20:.0f} MiB in shards{drops}{gpu}"
        )

    def totals(self) -> dict[str, float]:
        """As ``Tally.totals``, with the mean use of the GPUs where it can be known."""
        percent = self._gpus.mean_percent
        return {**super().totals(), **({} if percent is None else {"gpu_percent": round(percent, 1)})}

    def _time_left(self) -> str:
        left_s = self._left_s()
        if left_s is None:
            return "too few rows are finished to say how long" if self.num_rows else "no row is finished yet"
        return time_left(left_s)

    def _left_s(self) -> float | None:
        if self.num_rows == 0 or self.num_rows < self._total_rows * LEAST_SHARE:
            return None
        return (self._total_rows - self.num_rows - self.num_failed) * self.working_s / self.num_rows


class JsonProgress(ExtractionProgress):
    """The same for programs: one JSON object a line on stderr, on a terminal as elsewhere."""

    FOR_PEOPLE = False

    def _line(self, rates: str, *, is_waiting: bool) -> str:
        left_s, totals = self._left_s(), self.totals()
        totals["tokens"] = totals.pop("tokens_added")
        return json.dumps(
            {
                "event": "progress",
                "rows": self.num_rows,
                "rows_to_do": self._total_rows,
                "dropped": self._num_drops + self.num_failed,
                **totals,
                "left_s": None if left_s is None else round(left_s, 1),
                "spool_full": is_waiting,
            }
        )


PROGRESS: dict[str, type[ExtractionProgress]] = {"text": ExtractionProgress, "json": JsonProgress}
"""What shows the work, by the setting ``progress``."""
