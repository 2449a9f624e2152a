"""Reads the packed rows of coming steps while the current one is computed."""

import functools
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from .batches import PackedRow, RowPacker
from .counters import Counters
from .packing import PackingPlan
from .schedule import Horizon


def reading_threads(num_threads: int) -> ThreadPoolExecutor:
    """Threads that read packed rows. Several share the cores, so each is to use one.

    Otherwise each would start an OpenMP team as large as the machine, and the thread that trains would have to share its core.
    """
    # The public ``set_num_threads`` is what some libraries replace; the setting counts for the calling thread.
    one_core = functools.partial(torch._C.set_num_threads, 1)
    return ThreadPoolExecutor(num_threads, thread_name_prefix="feed", initializer=one_core if num_threads > 1 else None)


class Feed:
    """The packed rows of each step, for one process, read ahead by threads.

    A small drafter's step takes a GPU less time than one thread needs to copy and pin the step's states.

    Args:
        plan: which rows belong to which step.
        packer: builds them.
        rank: of this process.
        world_size: number of processes.
        last_row: packed rows of the whole run, None without an end.
        prefetch: steps to read ahead.
        fixed_shapes: keep unfilled tails and unused blocks (GPUs), or trim them (CPU).
        num_threads: that read, a step each.
    """

    def __init__(
        self,
        plan: PackingPlan,
        packer: RowPacker,
        *,
        rank: int,
        world_size: int,
        last_row: int | None,
        prefetch: int,
        fixed_shapes: bool,
        num_threads: int = 1,
    ) -> None:
        self._plan, self._packer = plan, packer
        self._rank, self._world_size, self._last_row = rank, world_size, last_row
        self._prefetch, self._fixed_shapes = prefetch, fixed_shapes
        self._num_threads = num_threads
        self._plan_lock = threading.Lock()
        self._end = 0

    def steps(self, first: int, end: int) -> Iterator["Future[list[PackedRow]] | None"]:
        """One future for each step from ``first`` to ``end`` (exclusive); a failed read raises from its result."""
        self._end = end
        with reading_threads(self._num_threads) as pool:
            ahead: list[Future[list[PackedRow]]] = []
            coming = iter(range(first, end))
            try:
                for _ in range(first, end):
                    while len(ahead) < self._prefetch + 1 and (step := next(coming, None)) is not None:
                        ahead.append(pool.submit(self._read, step))
                    yield ahead.pop(0)
            finally:
                for future in ahead:
                    future.cancel()

    def is_last(self, step: int) -> bool:
        """Whether nothing comes after ``step`` steps."""
        return step == self._end

    def horizon(self, step: int) -> Horizon:
        """How far the run is before a step."""
        return Horizon(done=step, total=self._end, steps=self._end)

    def resume(self, counters: Counters) -> None:
        """Shards that stay need nothing but the step."""

    def wants_save(self, step: int) -> bool:
        """Whether a state is to be saved now; shards that stay wait for none."""
        return False

    def state(self, step: int) -> dict[str, Any] | None:
        """What the saved state after ``step`` steps must hold beside the step."""
        return None

    def release(self, step: int) -> None:
        """The state after ``step`` steps is saved."""

    @property
    def words(self) -> str:
        """What is waited for, where a step is."""
        return ""

    def close(self) -> None:
        """Nothing is held."""

    def _read(self, step: int) -> list[PackedRow]:
        with self._plan_lock:
            indices = self._plan.step(step, self._rank, self._world_size, last_row=self._last_row)
        return self._finished([self._packer(index) for index in indices])

    def _finished(self, rows: list[PackedRow]) -> list[PackedRow]:
        if not self._fixed_shapes:
            rows = [row.trimmed() for row in rows]
        return rows
