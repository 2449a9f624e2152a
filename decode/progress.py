"""Progress of an evaluation on stderr: a live bar on a terminal, a line per prompt elsewhere."""

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dflash_kit.acceptance import AR, RoundLog
from dflash_kit.live_bar import LiveBar
from dflash_kit.time_words import RATE_MEMORY_S, time_left

from .live import method_label

Method = tuple[str, int]


class EvaluationProgress(LiveBar):
    """Shows prompts done, running acceptance lengths and tokens per second of every method.

    Args:
        num_prompts: prompts of all benchmarks together.
        num_done: prompts that an earlier run finished.
    """

    def __init__(self, num_prompts: int, num_done: int) -> None:
        self._console = Console(stderr=True)
        self._totals: dict[Method, list[float]] = {}  # accepted and bonus tokens, rounds, new tokens, seconds
        self._num_prompts, self._num_done, self._num_before = num_prompts, num_done, num_done
        self._t0 = time.monotonic()
        self._bar = Progress(
            TextColumn("eval"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rates]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            speed_estimate_period=RATE_MEMORY_S,
        )
        self._task = self._bar.add_task("eval", total=num_prompts, completed=num_done, rates="starting …")

    def __enter__(self) -> Self:
        self._t0 = time.monotonic()
        return super().__enter__()

    def add_response(self, method: Method, log: RoundLog) -> None:
        """Take in one response."""
        rounds = len(log.num_accepted)
        total = self._totals.setdefault(method, [0.0, 0.0, 0.0, 0.0])
        for i, value in enumerate((sum(log.num_accepted) + rounds, rounds, log.new_tokens - 1, log.decode_s or 0.0)):
            total[i] += value
        self._bar.update(self._task, rates=self._rates())

    def finish_prompt(self, name: str) -> None:
        """Count one prompt."""
        self._num_done += 1
        self._bar.update(self._task, completed=self._num_done)
        if not self._console.is_terminal:
            line = f"eval {self._num_done}/{self._num_prompts} {name} done; so far {self._rates()}{self._left()}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def _left(self) -> str:
        num_left = self._num_prompts - self._num_done
        seconds_each = (time.monotonic() - self._t0) / (self._num_done - self._num_before)
        return f"; {time_left(num_left * seconds_each)}" if num_left else ""

    def _rates(self) -> str:
        """Such as ``ar 12.1 tok/s, chain τ 1.62 15.2 tok/s``."""
        parts = []
        for method, (tokens, rounds, new_tokens, seconds) in self._totals.items():
            words = [method_label(method)]
            if rounds and method[0] != AR:
                words.append(f"τ {tokens / rounds:.2f}")
            if seconds:
                words.append(f"{new_tokens / seconds:.1f} tok/s")
            parts.append(" ".join(words))
        return ", ".join(parts)
