"""Room in a spool, for one writer: a shard is begun only when it fits beside those that the trainer has not used yet."""

import os
import threading
from pathlib import Path

from .errors import KitError
from .shard_format import ShardsHeader
from .spool import FULL_TEXT

LEAST_SHARDS = 8
"""Shards that a writer's part of a spool must hold: the trainer keeps up to half of it until its next saved state."""
SHARD_OVERHEAD_BYTES = 16 << 10
ROW_OVERHEAD_BYTES = 2 << 10
POLL_S = 0.2


def stored_bytes(num_tokens: int, header: ShardsHeader) -> int:
    """Bytes that a row adds to a shard, at most."""
    return num_tokens * (header.bytes_per_token + 9) + ROW_OVERHEAD_BYTES


def writer_part(spool_bytes: int, num_writers: int, max_shard_bytes: int, longest_row_bytes: int) -> int:
    """Bytes of a spool for each of its writers, none of which has to ask another.

    Raises:
        KitError: that is less than a few shards.
    """
    part = spool_bytes // num_writers
    shard_bytes = max(max_shard_bytes, longest_row_bytes) + SHARD_OVERHEAD_BYTES
    least = LEAST_SHARDS * shard_bytes
    if part < least:
        whose = f" for each of {num_writers} processes" if num_writers > 1 else ""
        raise KitError(
            f"spool_bytes {spool_bytes:,} is {part:,} bytes{whose}, which is less than {LEAST_SHARDS} shards of "
            f"{shard_bytes:,} bytes (max_shard_bytes, or the longest row where that is more); allowed is "
            f"{least * num_writers:,} or more: raise it, or lower max_shard_bytes"
        )
    return part


class SpoolRoom:
    """Counts a writer's shards: finished ones until their file is gone, growing ones at their largest size.

    Args:
        folder: the spool.
        limit_bytes: the writer's part of it.
        max_shard_bytes: size at which a shard is finished.
    """

    def __init__(self, folder: Path, limit_bytes: int, max_shard_bytes: int) -> None:
        self._folder, self._limit_bytes, self._max_shard_bytes = folder, limit_bytes, max_shard_bytes
        self._finished: dict[str, int] = {}
        self._reserved: dict[int, int] = {}
        self._num_waiting = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    @property
    def max_lanes(self) -> int:
        """Shards that may grow at once and leave half of the room for finished ones."""
        return max(1, self._limit_bytes // (2 * (self._max_shard_bytes + SHARD_OVERHEAD_BYTES)) - 1)

    @property
    def is_waiting(self) -> bool:
        """Whether a row waits for room."""
        return self._num_waiting > 0

    def fits(self, shard_bytes: int, shard_rows: int, row_bytes: int) -> bool:
        """Whether a growing shard stays within its size with one more row, its footer included."""
        footer = 64 * (shard_rows + 1)
        return shard_bytes + footer + row_bytes <= self._max_shard_bytes

    def reserve(self, lane: int, row_bytes: int) -> bool:
        """Take room for the next shard of a lane, to begin with this row; True where the lane has it already."""
        wanted = max(self._max_shard_bytes, row_bytes) + SHARD_OVERHEAD_BYTES
        with self._lock:
            if self._reserved.get(lane, 0) >= wanted:
                return True
            for name in [name for name in self._finished if not os.path.exists(self._folder / name)]:
                del self._finished[name]
            others = sum(size for other, size in self._reserved.items() if other != lane)
            if sum(self._finished.values()) + others + wanted > self._limit_bytes:
                return False
            self._reserved[lane] = wanted
            return True

    def wait(self, lane: int, row_bytes: int) -> None:
        """``reserve``, waiting for the trainer; ``KitError`` after ``stop``."""
        if self.reserve(lane, row_bytes):
            return
        with self._lock:
            self._num_waiting += 1
        try:
            while not self.reserve(lane, row_bytes):
                if self._stopped.wait(POLL_S):
                    raise KitError(f"ended while it waited ({FULL_TEXT})")
        finally:
            with self._lock:
                self._num_waiting -= 1

    def stop(self) -> None:
        """Let those that wait go, without room."""
        self._stopped.set()

    def take(self, name: str, num_bytes: int) -> None:
        """Count a finished shard, or another file, as long as it is there."""
        with self._lock:
            self._finished[name] = num_bytes

    def release(self, lane: int) -> None:
        """A lane has no growing shard any more."""
        with self._lock:
            self._reserved.pop(lane, None)
