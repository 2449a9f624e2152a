"""Feeds training from a spool: steps as their shards come, the same in every process."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_kit.shards import Shards, open_shards
from dflash_kit.spool import sample_of

from .batches import PackedRow, RowPacker
from .counters import Counters
from .feed import Feed, reading_threads
from .job import Job
from .packing import PackedIndex
from .parallel import Parallel
from .schedule import Horizon
from .spool_place import SpoolPlace
from .spool_plan import SpoolPlan, Window
from .spool_source import HELD_OUT_NAME, POLL_S, HoldOut, News, SpoolSource, keep_held_out
from .state import RunFolder

SAVE_SHARE = 4
"""A state is saved when a quarter of the spool is used and waits for it."""
PAUSE_S = 1.0
"""How often the loop hears of it while a step is waited for."""


class SpoolFeed(Feed):
    """The packed rows of each step, for one process; all processes go through it together.

    Args:
        plan: the stream, which grows.
        packer: builds rows; each window puts its own shards in.
        source: the spool, in the main process; None in others.
        limit_bytes: size of the spool.
        state_folder: where saved states lie.
        parallel: the processes.
        prefetch: steps to read ahead.
        fixed_shapes: see ``Feed``.
    """

    def __init__(
        self,
        plan: SpoolPlan,
        packer: RowPacker,
        *,
        source: SpoolSource | None,
        limit_bytes: int,
        state_folder: Path,
        parallel: Parallel,
        prefetch: int,
        fixed_shapes: bool,
    ) -> None:
        self._spool, self._packer, self._source, self._parallel = plan, packer, source, parallel
        self._limit_bytes, self._state_folder = limit_bytes, state_folder
        self._prefetch, self._fixed_shapes = prefetch, fixed_shapes
        self._news = News()

    def resume(self, counters: Counters) -> None:
        """Put back the windows that a saved state had begun, and delete what it had used up."""
        state = counters.spool
        if state is None:
            return
        self._spool.restore(state)

        def take() -> list[Any]:
            assert self._source is not None
            self._source.discard(state["used"])
            return self._source.windows(state["windows"])

        for entries in self._parallel.on_main(take):
            self._spool.add(entries)

    def steps(self, first: int, end: int) -> Iterator["Future[list[PackedRow]] | None"]:
        """One future for each step from ``first`` on, to the end of the spool; None now and then while there is none."""
        with reading_threads(self._prefetch + 1 if self._fixed_shapes else 1) as pool:
            ahead: deque[Future[list[PackedRow]]] = deque()
            step = coming = first
            try:
                while True:
                    while not self._spool.has_step(step) and not self._spool.is_closed:
                        if not self._extend(starved=True):
                            yield None
                    while not self._spool.has_step(step + self._prefetch) and not self._spool.is_closed:
                        if not self._extend(starved=False):
                            break
                    while coming <= step + self._prefetch and self._spool.has_step(coming):
                        ahead.append(pool.submit(self._read_places, self._places(coming)))
                        coming += 1
                    if not ahead:
                        return
                    yield ahead.popleft()
                    step += 1
            finally:
                for future in ahead:
                    future.cancel()

    def is_last(self, step: int) -> bool:
        """Whether nothing comes after ``step`` steps, for certain."""
        return self._spool.is_over(step)

    def wants_save(self, step: int) -> bool:
        """Whether shards wait for a saved state that the extractor may need the room of."""
        used_bytes = self._spool.used_bytes(step)
        return used_bytes > 0 and (self._news.is_stuck or used_bytes >= self._limit_bytes // SAVE_SHARE)

    def state(self, step: int) -> dict[str, Any]:
        """What the saved state after ``step`` steps must hold."""
        return self._spool.state(step)

    def release(self, step: int) -> None:
        """The state after ``step`` steps is saved: delete the shards that lie before it."""
        files = self._spool.release(step)
        self._parallel.on_main(lambda: self._consume(files))

    def horizon(self, step: int) -> Horizon:
        """How far the run is before a step, in rows."""
        done, total = self._spool.rows_before_step(step), max(self._spool.total_rows, 1)
        return Horizon(done=min(done, total), total=total, steps=step * total // done if done else None)

    @property
    def words(self) -> str:
        """What is waited for."""
        return self._news.words

    def close(self) -> None:
        """Let another trainer use the spool."""
        if self._source is not None:
            self._source.close()

    def _consume(self, files: list[str]) -> None:
        assert self._source is not None
        self._source.consume(files, self._state_folder)

    def _extend(self, *, starved: bool) -> bool:
        """Look at the spool, in all processes at once; returns whether there was something new."""

        def look() -> News:
            assert self._source is not None
            until_s = time.monotonic() + (PAUSE_S if starved else 0.0)
            while True:
                news = self._source.look(starved=starved)
                if news.window or news.is_ended or time.monotonic() >= until_s:
                    return news
                time.sleep(POLL_S)

        self._news = self._parallel.on_main(look)
        self._spool.total_rows = self._news.total_rows or self._spool.total_rows
        if self._news.window:
            self._spool.add(self._news.window)
        self._spool.is_closed = self._news.is_ended
        return bool(self._news.window) or self._news.is_ended

    def _places(self, step: int) -> list[tuple[Window | None, PackedIndex]]:
        return self._spool.step(step, self._parallel.rank, self._parallel.world_size)

    def _read_places(self, places: list[tuple[Window | None, PackedIndex]]) -> list[PackedRow]:
        return self._finished([self._pack(window, index) for window, index in places])

    def _pack(self, window: Window | None, index: PackedIndex) -> PackedRow:
        if window is None:
            return self._packer(index)
        return replace(self._packer, shards=window.shards, row_indices=window.train_rows)(index)


def spool_feed(
    job: Job, spool: SpoolPlace, parallel: Parallel, folder: RunFolder, *, fixed_shapes: bool
) -> tuple[SpoolFeed, Shards | None]:
    """The feed of a run on a spool, and the rows that are held out for replay; all processes call it.

    Raises:
        KitError: another trainer uses the spool, or its first shards do not come.
    """
    config, data = job.config, job.config.data
    place = folder.state / HELD_OUT_NAME
    sources: list[SpoolSource] = []

    def hold_rows_out() -> bool:
        if not sources:
            sources.append(SpoolSource(spool.folder, timeout_s=config.spool_timeout_s))
        if config.eval_shards is not None:
            return True
        return keep_held_out(sources[0], spool, place, HoldOut(config.replay.max_rows, data.holdout_fraction))

    try:
        while not parallel.on_main(hold_rows_out):  # in turns that are shorter than what a process group waits for
            pass
    except BaseException:
        for source in sources:
            source.close()
        raise
    held_out = open_shards(place) if config.eval_shards is None and place.exists() else None
    replayed = held_out or job.eval_shards
    plan = SpoolPlan(
        spool.folder,
        spool.header,
        {sample_of(row_id) for row_id in replayed.ids},
        seq_len=data.seq_len,
        rows_per_step=data.rows_per_step,
        seed=config.seed,
    )
    feed = SpoolFeed(
        plan,
        job.packer.for_gpu() if fixed_shapes else job.packer,
        source=sources[0] if sources else None,
        limit_bytes=spool.limit_bytes,
        state_folder=folder.state,
        parallel=parallel,
        prefetch=data.prefetch,
        fixed_shapes=fixed_shapes,
    )
    return feed, held_out
