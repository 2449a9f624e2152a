"""A writer thread behind a bounded queue: the engine hands over rows and goes on with its next batch.

When the disk is slower than the engine the queue fills up and ``submit`` blocks: memory stays bounded.
"""

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


class ShardSink:
    """Feeds a ``ShardWriter`` from a thread of its own.

    A row that cannot be written (a broken capture, a full disk) stops the writing: the first error is kept
    for ``status`` and later rows are let go, so that the engine never hangs on a sink that has failed.
    """

    def __init__(self, writer: ShardWriter, *, max_pending_bytes: int = DEFAULT_PENDING_BYTES) -> None:
        self._writer = writer
        self._max_pending_bytes = max_pending_bytes
        self._queue: deque[PendingRow] = deque()
        self._pending_bytes = 0
        self._accepted: list[tuple[str, int]] = []
        self._error: str | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._write_rows, name="shard-writer", daemon=True)
        self._thread.start()

    def submit(self, pending: PendingRow) -> None:
        """Queue a row; blocks while the queue is full (one row always fits, however large)."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_room(pending.num_bytes))
            self._queue.append(pending)
            self._pending_bytes += pending.num_bytes
            self._changed.notify_all()

    def fail(self, message: str) -> None:
        """Record an error that happened while a row was being captured."""
        with self._changed:
            self._error = self._error or message
            self._changed.notify_all()

    def status(self) -> dict[str, Any]:
        """What happened since the last call: ``accepted`` (id, tokens) pairs, ``error`` or None, totals."""
        with self._changed:
            accepted, self._accepted = self._accepted, []
            return {
                "accepted": accepted,
                "error": self._error,
                "pending_bytes": self._pending_bytes,
                "bytes": self._writer.num_bytes,
            }

    def flush(self) -> dict[str, Any]:
        """Wait until every queued row is in a finished shard; returns the status."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue)
        try:
            with self._writing:
                self._writer.flush()
        except KitError as error:
            self.fail(str(error))
        return self.status()

    def finish(self, summary: dict[str, Any] | None) -> dict[str, Any]:
        """Write what is queued, finish the growing shard, journal a summary if there was no error, and close."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
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
        return not self._queue or self._pending_bytes + num_bytes <= self._max_pending_bytes

    def _write_rows(self) -> None:
        # Checks and rounding take one thread; a second OpenMP pool would fight the engine for its cores. The
        # setting counts for this thread only. (vLLM's CPU worker replaces the public torch.set_num_threads.)
        torch._C.set_num_threads(1)
        while (pending := self._next()) is not None:
            try:
                if pending.wait is not None:
                    pending.wait()
                if self._error is None:
                    with self._writing:
                        self._writer.add(pending.row)
                    self._done(pending, accepted=True)
                    continue
            except KitError as error:
                self.fail(str(error))
            except Exception as error:  # a bug must reach the driver as an error, not as a hang
                self.fail(f"sample {pending.row.id}: {type(error).__name__}: {error}")
            self._done(pending, accepted=False)

    def _next(self) -> PendingRow | None:
        """The oldest row, left in the queue until it is written; None when closing and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            return self._queue[0] if self._queue else None

    def _done(self, pending: PendingRow, *, accepted: bool) -> None:
        with self._changed:
            self._queue.popleft()
            self._pending_bytes -= pending.num_bytes
            if accepted:
                self._accepted.append((pending.row.id, len(pending.row.input_ids)))
            self._changed.notify_all()
