"""What the user sees, and metrics.jsonl, which holds the same numbers."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dflash_kit.acceptance import Acceptance
from dflash_kit.time_words import time_left

from .counters import writes
from .tracking import Tracker

WAIT_LINE_EVERY_S = 15.0
METHOD_NAMES = {"chain": "chain", "ddtree": "DDTree"}


class Reporter:
    """Prints in the main process only: a bar on a terminal, plain lines elsewhere.

    Args:
        metrics: file to append to; None writes none.
        active: whether this is the main process.
        max_steps: length of the bar; None: not known yet.
        tracker: gets the numbers, too, and ends with the reporter.
    """

    def __init__(self, metrics: Path | None, *, active: bool, max_steps: int | None, tracker: Tracker) -> None:
        self.console = Console(quiet=not active, highlight=False, soft_wrap=True)
        self._metrics = metrics if active else None
        self._tracker = tracker
        self._bar = Progress(
            TextColumn("train"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            disable=not (active and self.console.is_terminal),
        )
        self._task = self._bar.add_task("train", total=max_steps, note="")
        self._speed = self._quality = ""
        self._unreadable: set[str] = set()

    def __enter__(self) -> "Reporter":
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()
        self._tracker.finish()

    def say(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, markup=False)

    def advance(self, step: int, loss: float, max_steps: int | None) -> None:
        """Move the bar; behind it stand the loss, the speed of the last interval and the last replay."""
        note = "  ".join(filter(None, (f"loss {loss:.3f}", self._speed, self._quality)))
        self._bar.update(self._task, completed=step, total=max_steps, note=note)

    def say_unreadable(self, found: Sequence[tuple[str, str]], num_so_far: int) -> None:
        """Name conversations that were left out, those with the same trouble once."""
        for row_id, trouble in found:
            kind = trouble.replace(row_id, "")
            if kind not in self._unreadable:
                self._unreadable.add(kind)
                self.say(f"left out: {trouble} ({num_so_far} conversations left out so far)")

    def record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl, with null for what is not finite, and tell the tracker and the bar.

        Raises:
            KitError: it cannot be written.
        """
        if kind == "train":
            self._speed = f"{speed_words(values)}  wait {values['data_wait_share']:.1%}"
        else:
            self._quality = _lengths_words(values["methods"])
        if self._metrics is not None:
            line = {"kind": kind, "step": step, "time_utc": _utc(), **values}
            line = {name: None if isinstance(v, float) and not isfinite(v) else v for name, v in line.items()}
            with writes(self._metrics), self._metrics.open("a") as file:
                file.write(json.dumps(line) + "\n")
            self._tracker.log(kind, step, values)


def step_line(values: dict[str, Any], max_steps: int | str) -> str:
    """The line of a training interval; ``max_steps`` may be words where it is an estimate, and no time left is told then."""
    rates = " ".join("-" if rate is None else f"{rate:.2f}" for rate in values["slot_accuracy"])
    norm = values["grad_norm"]
    line = (
        f"step {values['step']}/{max_steps}  loss {values['loss']:.4f}  lr {values['lr']:.2e}  "
        f"grad {'-' if norm is None else f'{norm:.2f}'}  {speed_words(values)}  "
        f"data-wait {values['data_wait_share']:.1%}  slots {rates}"
    )
    if values["skipped_steps"]:
        line += f"  skipped {values['skipped_steps']}"
    if values["unreadable_rows"]:
        line += f"  unreadable {values['unreadable_rows']}"
    if values.get("peak_gib") is not None:
        line += f"  peak {values['peak_gib']:.1f} GiB"
    if isinstance(max_steps, int) and max_steps > values["step"]:
        line += f"  {time_left((max_steps - values['step']) * values['s_per_step'])}"
    return line


def speed_words(values: dict[str, Any]) -> str:
    """Tokens a second, and the share of the measured matrix rate that the step's arithmetic reaches."""
    rate = values["flop_per_s"]
    unit, size = ("TFLOP/s", 1e12) if rate >= 1e12 else ("GFLOP/s", 1e9)
    share = "–" if values["mfu"] is None else f"{values['mfu']:.0%}"
    return f"{values['tokens_per_s']:,.0f} tok/s  MFU {share} ({rate / size:,.1f} {unit})"


def replay_line(step: int, found: dict[tuple[str, int], Acceptance], *, best: bool) -> str:
    """The line of a replay: acceptance length of every method."""
    return f"replay at step {step}: " + acceptance_text(found) + ("  (best so far)" if best else "")


def acceptance_text(found: dict[tuple[str, int], Acceptance]) -> str:
    """Acceptance length τ of every method, and how many rounds it rests on."""
    parts = [
        f"{method_label(name, budget)} τ {value.acceptance_length_pooled:.3f}"
        for (name, budget), value in found.items()
        if value.acceptance_length_pooled is not None
    ]
    rounds = next((value.rounds for (name, _), value in found.items() if name == "chain"), 0)
    return " · ".join(parts) + f"  ({rounds} chain rounds)"


def _lengths_words(methods: dict[str, dict[str, Any]]) -> str:
    """Replayed acceptance lengths, short enough for the bar."""
    lengths = {name: found["acceptance_length_pooled"] for name, found in methods.items()}
    return " ".join(f"{name} τ {length:.2f}" for name, length in lengths.items() if length is not None)


def method_label(name: str, budget: int) -> str:
    """How a method is called: chain, DDTree-64."""
    return METHOD_NAMES[name] if name == "chain" else f"{METHOD_NAMES[name]}-{budget}"


class Meter:
    """Sums over the steps of one logging interval.

    Args:
        num_slots: B - 1.
        peak_flop_per_s: what matrix products reach on all processes' devices together; None: not wanted here.
    """

    def __init__(self, num_slots: int, peak_flop_per_s: float | None = None) -> None:
        self._num_slots, self._peak_flop_per_s = num_slots, peak_flop_per_s
        self._wait_line_s: float | None = None
        self._paused_s = 0.0
        self.reset()

    def reset(self) -> None:
        """Begin a new interval."""
        self.t0 = time.perf_counter()
        self._paused_s = 0.0
        self.loss_sum = self.weight_sum = self.data_wait_s = self.flops = 0.0
        self.tokens = self.steps = 0
        self.correct = [0.0] * self._num_slots
        self.counted = [0.0] * self._num_slots

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of replays and saves out of the speed."""
        t0 = time.perf_counter()
        yield
        self._paused_s += time.perf_counter() - t0

    def is_wait_worth_a_line(self) -> bool:
        """Whether to say that a step is waited for: at first, then every ``WAIT_LINE_EVERY_S``."""
        now_s = time.perf_counter()
        if self._wait_line_s is not None and now_s - self._wait_line_s < WAIT_LINE_EVERY_S:
            return False
        self._wait_line_s = now_s
        return True

    def add_slots(self, correct: Sequence[float], counted: Sequence[float]) -> None:
        """Hits and trials of each slot."""
        self.correct = [a + b for a, b in zip(self.correct, correct, strict=True)]
        self.counted = [a + b for a, b in zip(self.counted, counted, strict=True)]

    def values(self) -> dict[str, Any]:
        """Means of the interval, ready for metrics.jsonl."""
        passed_s = max(time.perf_counter() - self.t0 - self._paused_s, 1e-9)
        return {
            "loss": self.loss_sum / self.weight_sum if self.weight_sum else float("nan"),
            "tokens_per_s": self.tokens / passed_s,
            "flop_per_s": self.flops / passed_s,
            "mfu": self.flops / passed_s / self._peak_flop_per_s if self._peak_flop_per_s else None,
            "s_per_step": passed_s / max(self.steps, 1),
            "data_wait_share": self.data_wait_s / passed_s,
            "slot_accuracy": [c / n if n else None for c, n in zip(self.correct, self.counted, strict=True)],
        }


def _utc() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
