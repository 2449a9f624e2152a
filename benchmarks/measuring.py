"""What the benchmarks share: timing, what becomes of a failure, and a report that is printed whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from decode.cuda_graphs import capture
from dflash_kit.errors import KitError

ON_GPU = torch.cuda.is_available()
OUT_OF_TIME = 3
"""Exit status of a benchmark that was cut short."""


class Report:
    """Figures as they come, each group printed at once; the last line of output is one JSON object with all of them.

    Args:
        limit_s: seconds after which what is there is printed and the process ends, whatever it is at (a kernel that
            compiles for ever); 0: no limit.
        out: file for the JSON object, too.
        facts: what is known at the start.
    """

    def __init__(self, limit_s: float, out: Path | None, **facts: Any) -> None:
        self._began_s = time.perf_counter()
        self._limit_s, self._out, self._figures = limit_s, out, facts
        self._at = "start"
        self._lock = threading.RLock()
        self._done = threading.Event()
        if limit_s:
            threading.Thread(target=self._watch, daemon=True).start()

    @property
    def left_s(self) -> float:
        """Seconds until the limit."""
        return self._limit_s - (time.perf_counter() - self._began_s) if self._limit_s else float("inf")

    def at(self, step: str) -> None:
        """What is begun now."""
        with self._lock:
            self._at = step

    def add(self, **figures: Any) -> None:
        """Keep these, and print them."""
        with self._lock:
            self._figures |= figures
            print(json.dumps(figures), flush=True)

    def finish(self, **figures: Any) -> dict[str, Any]:
        """Print the whole."""
        with self._lock:
            self._done.set()
            self._figures |= figures | {"took_s": round(time.perf_counter() - self._began_s, 1)}
            line = json.dumps(self._figures)
            if self._out:
                self._out.write_text(line + "\n")
            print(line, flush=True)
            return self._figures

    def _watch(self) -> None:
        if self._done.wait(self._limit_s):
            return
        with self._lock:
            if not self._done.is_set():
                self.finish(unfinished=f"out of time after {self._limit_s:.0f} s, at: {self._at}")
                _kill_children()
                os._exit(OUT_OF_TIME)


def _kill_children() -> None:
    """End what this process has started: engines would go on without it."""
    with contextlib.suppress(ImportError):
        import psutil

        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()


def numbers(text: str) -> list[int]:
    """Integers with commas between, of a command line (``type=numbers``)."""
    return [int(word) for word in text.split(",")]


def attempt(work: Callable[[], Any]) -> Any:
    """What ``work`` gives, or its error in one line: a failure must not stop the measurement."""
    try:
        return work()
    except Exception as error:  # Triton's compiler raises errors of its own kinds
        with contextlib.suppress(Exception):
            now_s()
        if ON_GPU and isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
        text = str(error).strip().splitlines()
        if isinstance(error, KitError):
            return f"KitError: {' '.join(text)}"
        return f"{type(error).__name__}: {text[0][:200] if text else ''}"


def eager_ms(work: Callable[[], Any], repetitions: int) -> float:
    """Median of the wall-clock time of a run, from an idle device to an idle device, after two runs to warm up."""
    times = []
    for i in range(repetitions + 2):
        begin_s = now_s()
        work()
        if i >= 2:
            times.append(1e3 * (now_s() - begin_s))
    return round(statistics.median(times), 4)


def graph_ms(work: Callable[[], Any]) -> float | None:
    """Median device time of the work as a CUDA graph; None without a GPU."""
    if not ON_GPU:
        return None
    return round(captured_ms(work), 4)


def captured_ms(work: Callable[[], Any]) -> float:
    """Median device time of the work as a CUDA graph; without a GPU that of the work as it is."""
    return time_ms(capture(work).replay if ON_GPU else work)


def time_ms(work: Callable[[], Any], repeats: int = 20, inner: int = 3) -> float:
    """Median over ``repeats`` of the device time of ``inner`` runs, per run; three runs by the clock without a GPU."""
    if not ON_GPU:
        return eager_ms(work, 3)
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(inner):
            work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / inner)
    return statistics.median(times)


def now_s() -> float:
    """Seconds, once the device is idle."""
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def allocated() -> int:
    """Bytes of device memory in use."""
    return torch.cuda.memory_allocated() if ON_GPU else 0


def most_allocated() -> int:
    """The most bytes of device memory in use since this was asked last."""
    if not ON_GPU:
        return 0
    most = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return most


def mib(number: float) -> float:
    """Bytes as MiB."""
    return round(number / 2**20, 1)
