"""Writer threads behind a bounded queue: the engine hands over rows and goes on with its next batch.

When the disk is slower than the engine the queue fills up and ``submit`` blocks: memory stays bounded.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .errors import KitError
from .shard_format import Row
from .shard_writer import ShardWriter

DEFAULT_PENDING_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class PendingRow:
    """A row whose tensors may still be on their way to the host."""

    row: Row
    """The row; its hidden states are valid once ``wait`` has returned."""
    num_bytes: int
    """Host memory that it holds."""
    wait: Callable[[], object] | None = None
    """Blocks until the copy is complete; None when it is."""
    taps_are_sound: Callable[[], bool] = lambda: False
    """Whether the device found nothing wrong (``sound_tokens``); to be asked once ``wait`` has returned."""


class ShardSink:
    """Feeds a ``ShardWriter`` from threads of its own, one in each of the writer's lanes.

    The lowest idle lane takes the next row, so a slow engine fills one shard at a time and a fast one several. A row
    that cannot be written (a broken capture, a full disk) stops the writing: the first error is kept for ``status``
    and later rows are let go, so that the engine never hangs on a sink that has failed.

    Args:
        writer: where the rows go; closed by ``finish``.
        max_pending_bytes: host memory that queued rows may hold.
        num_lanes: threads.
    """

    def __init__(
        self, writer: ShardWriter, *, max_pending_bytes: int = DEFAULT_PENDING_BYTES, num_lanes: int = 1
    ) -> None:
        self._writer = writer
        self._max_pending_bytes = max_pending_bytes
        self._queue: deque[PendingRow] = deque()  # empty while a lane is idle
        self._pending_bytes = 0
        self._accepted: list[tuple[str, int]] = []
        self._error: str | None = None
        self._closing = False
        self._idle = set(range(num_lanes))
        self._handed: dict[int, PendingRow] = {}  # by lane
        # One condition each, since who is woken for nothing takes the interpreter from the engine.
        self._lock = threading.Lock()
        self._has_room_now, self._is_settled = threading.Condition(self._lock), threading.Condition(self._lock)
        self._wakes = [threading.Condition(self._lock) for _ in range(num_lanes)]
        self._threads = [
            threading.Thread(target=self._write_rows, args=(lane,), name=f"shard-writer-{lane}", daemon=True)
            for lane in range(num_lanes)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, pending: PendingRow) -> None:
        """Queue a row; blocks while the queue is full (one row always fits, however large)."""
        with self._lock:
            self._has_room_now.wait_for(lambda: self._has_room(pending.num_bytes))
            self._pending_bytes += pending.num_bytes
            if self._idle:
                lane = min(self._idle)
                self._idle.remove(lane)
                self._handed[lane] = pending
                self._wakes[lane].notify()
            else:
                self._queue.append(pending)

    def fail(self, message: str) -> None:
        """Record an error that happened while a row was being captured."""
        with self._lock:
            self._error = self._error or message

    def status(self) -> dict[str, Any]:
        """What happened since the last call: ``accepted`` (id, tokens) pairs, ``error`` or None, totals, and whether a spool is full."""
        with self._lock:
            accepted, self._accepted = self._accepted, []
            return {
                "accepted": accepted,
                "error": self._error,
                "pending_bytes": self._pending_bytes,
                "bytes": self._writer.num_bytes,
                "spool_full": self._writer.is_waiting,
            }

    def flush(self) -> dict[str, Any]:
        """Wait until every queued row is in a finished shard; returns the status. Nothing may be submitted meanwhile."""
        with self._lock:
            self._is_settled.wait_for(lambda: len(self._idle) == len(self._threads))
        finishing = [threading.Thread(target=self._finish_shard, args=(lane,)) for lane in range(len(self._threads))]
        for thread in finishing:
            thread.start()
        for thread in finishing:
            thread.join()
        return self.status()

    def finish(self, summary: dict[str, Any] | None) -> dict[str, Any]:
        """Write what is queued, finish the growing shards, journal a summary if there was no error, and close.

        Without a summary the run has failed or was ended: then rows that wait for a spool's trainer are let go.
        """
        if summary is None:
            self._writer.stop_waiting()
        with self._lock:
            self._closing = True
            for wake in self._wakes:
                wake.notify()
        for thread in self._threads:
            thread.join()
        try:
            self._writer.flush()
            if summary is not None and self._error is None:
                self._writer.write_summary(summary)
        except KitError as error:
            self.fail(str(error))
        finally:
            self._writer.close()
        return self.status()

    def _has_room(self, num_bytes: int) -> bool:
        return not self._pending_bytes or self._pending_bytes + num_bytes <= self._max_pending_bytes

    def _write_rows(self, lane: int) -> None:
        # Checks and rounding take one thread; a second OpenMP pool would fight the engine for its cores. The
        # setting counts for this thread only. (vLLM's CPU worker replaces the public torch.set_num_threads.)
        torch._C.set_num_threads(1)
        while (pending := self._next(lane)) is not None:
            accepted = False
            try:
                if pending.wait is not None:
                    pending.wait()
                if self._error is None:
                    self._writer.add(pending.row, lane=lane, taps_are_sound=pending.taps_are_sound())
                    accepted = True
            except KitError as error:
                self.fail(str(error))
            except Exception as error:  # a bug must reach the driver as an error, not as a hang
                self.fail(f"sample {pending.row.id}: {type(error).__name__}: {error}")
            self._done(pending, lane, accepted=accepted)
        self._finish_shard(lane)

    def _finish_shard(self, lane: int) -> None:
        """Finish the lane's shard at the end, beside the other lanes: each waits for the disk on its own."""
        try:
            self._writer.flush_lane(lane)
        except KitError as error:
            self.fail(str(error))
        except Exception as error:  # as above
            self.fail(f"finishing a shard: {type(error).__name__}: {error}")

    def _next(self, lane: int) -> PendingRow | None:
        """The row that is handed to this lane; None when closing."""
        with self._lock:
            self._wakes[lane].wait_for(lambda: lane in self._handed or self._closing)
            return self._handed.pop(lane, None)

    def _done(self, pending: PendingRow, lane: int, *, accepted: bool) -> None:
        """A lane that is through takes the oldest row that waits."""
        with self._lock:
            self._pending_bytes -= pending.num_bytes
            self._has_room_now.notify()
            if accepted:
                self._accepted.append((pending.row.id, len(pending.row.input_ids)))
            if self._queue:
                self._handed[lane] = self._queue.popleft()
            else:
                self._idle.add(lane)
                self._is_settled.notify()


def num_writer_lanes() -> int:
    """Threads that write: one brings about 2 GB/s into memory-backed files, and small machines need their cores."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2))
