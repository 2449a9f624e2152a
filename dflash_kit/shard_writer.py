"""Writing shards so that a kill at any instant loses no finished shard and repeats no row.

A shard grows as ``shard-NNNNN.arrow.incomplete``, is fsynced, renamed, and then journalled in the manifest.
A rerun first brings the folder back to that state (``shard_recovery``).

Several shards may grow at once, one in each lane: two threads that write to one file wait for each other, two that
write to two files do not. Numbers are given out when a shard is begun; one that was dropped leaves a gap.
"""

import os
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from .errors import KitError, free_bytes, require_free_bytes
from .interrupts import uninterrupted
from .shard_checks import check_row
from .shard_entry import ShardEntry
from .shard_file import GrowingShard, to_stored
from .shard_folder import make_folder, require_same_kind
from .shard_format import INCOMPLETE_SUFFIX, Row, ShardsHeader
from .shard_journal import Journal
from .shard_recovery import recover
from .shard_share import Share
from .shard_states import with_stored_states
from .spool_room import SpoolRoom, stored_bytes

DEFAULT_SHARD_BYTES = 256 << 20
DEFAULT_SHARD_AGE_S = 120.0


@dataclass(frozen=True, slots=True)
class _Lane:
    """A growing shard, and where it will lie."""

    shard: GrowingShard
    final: Path
    started_s: float


class ShardWriter:
    """Appends rows to a shards folder; one writer a share, guarded by a lock on its manifest.

    Threads may add rows at the same time, each in a lane of its own. Ctrl-C and SIGTERM wait until a row is written;
    a writer that they end as a context manager finishes its growing shards.

    Args:
        folder: a new or empty folder, or one that was written with the same header (then the writer resumes).
        header: what the rows are.
        rank: this writer's share of the samples, and so the names of its files.
        world_size: number of shares; who takes which sample is for the caller to keep to (``Share.takes``).
        max_shard_bytes: a shard is finished when it reaches this size.
        max_shard_age_s: or when it is this old, so that a kill costs little work.
        lock_wait_s: how long to wait for another writer to end.
        spool_bytes: this writer's part of a spool: no shard is begun that would not fit beside those that the trainer
            has not used yet; 0: no limit.
        keep_first: in a spool, the name of a link to the first shard that is finished, which the trainer leaves alone.

    Raises:
        KitError: the folder holds something else, was written with another header, or is being written under the
            same rank or another split.
    """

    def __init__(
        self,
        folder: str | Path,
        header: ShardsHeader,
        *,
        rank: int = 0,
        world_size: int = 1,
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
        max_shard_age_s: float = DEFAULT_SHARD_AGE_S,
        lock_wait_s: float = 30.0,
        spool_bytes: int = 0,
        keep_first: str | None = None,
    ) -> None:
        if max_shard_bytes < 1 or max_shard_age_s <= 0:
            raise KitError("max_shard_bytes and max_shard_age_s must be positive")
        self.folder = Path(folder)
        self.header = header
        self.share = Share(rank, world_size)
        self.max_shard_bytes = max_shard_bytes
        self.max_shard_age_s = max_shard_age_s
        self.done_ids: set[str] = set()
        """Ids in finished shards, those of earlier runs and of other writers included."""
        self.num_rows = self.num_tokens = self.num_bytes = 0
        """Totals over this writer's finished shards, those of earlier runs included."""
        self.notes: list[str] = []
        """What was mended at the start and cost rows that a run may have reported, a line each."""
        self._growing_ids: set[str] = set()
        self._lanes: dict[int, _Lane] = {}
        self._next_index = 0
        self._room = SpoolRoom(self.folder, spool_bytes, max_shard_bytes) if spool_bytes else None
        self._keep_first = keep_first
        if keep_first is not None:
            (self.folder / keep_first).unlink(missing_ok=True)
        self._shared = threading.Lock()  # guards the ids, the totals, the next index and the journal
        require_same_kind(self.folder, header)
        make_folder(self.folder)
        self._journal = Journal(self.folder / self.share.manifest_name, lock_wait_s=lock_wait_s)
        try:
            self._recover(lock_wait_s)
        except BaseException as error:
            self._journal.close()
            if isinstance(error, OSError):
                raise self._full(None, None, error) from error
            raise

    def add(self, row: Row, *, lane: int = 0, taps_are_sound: bool = False) -> None:
        """Append a row; its states are rounded to the stored dtypes.

        Args:
            row: the row.
            lane: which of the growing shards takes it; two threads never use the same lane at once.
            taps_are_sound: its hidden states were checked on the device already (``sound_tokens``).

        Raises:
            KitError: the row is not fit to train on (see ``check_row``), its id is there already, or the
                disk is full (then finished shards are intact and the unfinished one is dropped).
        """
        # What is stored counts: rounding makes large values infinite and small ones zero.
        row = with_stored_states(row, self.header)
        check_row(row, self.header, taps_are_sound=taps_are_sound)
        if self._room is not None:
            self._finish_when_full(row, lane, self._room)
            self._room.wait(lane, stored_bytes(len(row.input_ids), self.header))
        with uninterrupted():
            self._add(row, lane)

    def has_room(self, row: Row, *, lane: int = 0) -> bool:
        """Whether ``add`` takes the row at once; False where it would wait for a spool's trainer."""
        if self._room is None:
            return True
        self._finish_when_full(row, lane, self._room)
        return self._room.reserve(lane, stored_bytes(len(row.input_ids), self.header))

    @property
    def is_waiting(self) -> bool:
        """Whether a row waits in ``add`` for a spool's trainer."""
        return self._room is not None and self._room.is_waiting

    @property
    def max_lanes(self) -> int | None:
        """Shards that may grow at once; None: as many as one likes."""
        return None if self._room is None else self._room.max_lanes

    def stop_waiting(self) -> None:
        """Refuse rows that wait for a spool's trainer: they were not added."""
        if self._room is not None:
            self._room.stop()

    def _finish_when_full(self, row: Row, lane: int, room: SpoolRoom) -> None:
        growing = self._lanes.get(lane)
        row_bytes = stored_bytes(len(row.input_ids), self.header)
        if growing is not None and not room.fits(growing.shard.num_bytes, len(growing.shard.ids), row_bytes):
            with uninterrupted():
                self.flush_lane(lane)

    def _add(self, row: Row, lane: int) -> None:
        with self._shared:
            if row.id in self.done_ids or row.id in self._growing_ids:
                raise KitError(f"sample {row.id} was captured twice; ids must be unique")
            self._growing_ids.add(row.id)
        try:
            growing = self._lanes.get(lane) or self._open_lane(lane)
            growing.shard.add(to_stored(row, self.header))
        except OSError as error:
            raise self._full(lane, row.id, error) from error
        age_s = time.monotonic() - growing.started_s
        if growing.shard.num_bytes >= self.max_shard_bytes or age_s >= self.max_shard_age_s:
            self.flush_lane(lane)

    def flush(self) -> None:
        """Finish all growing shards: on return their rows are durable."""
        with uninterrupted():
            for lane in sorted(self._lanes):
                self.flush_lane(lane)

    def flush_lane(self, lane: int) -> None:
        """Finish the growing shard of one lane, if it has one."""
        growing = self._lanes.get(lane)
        if growing is None:
            return
        try:
            entry = growing.shard.finish(growing.final)
            del self._lanes[lane]
            with self._shared:
                if self._keep_first is not None:
                    self._keep(growing.final, entry, self._keep_first)
                self._journal.append_shard(entry)
                self._take(entry)
            if self._room is not None:
                self._room.release(lane)
        except OSError as error:
            raise self._full(lane, None, error) from error

    def _keep(self, final: Path, entry: ShardEntry, name: str) -> None:
        """Link the first shard before its trainer can hear of it."""
        try:
            os.link(final, self.folder / name)
        except OSError:  # a file system without links
            shutil.copyfile(final, self.folder / name)
        self._keep_first = None
        if self._room is not None:
            self._room.take(name, entry.bytes)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Journal what a run did (drop counts by reason and the like), with the number of shares if it was one."""
        if self.share.world_size > 1:
            summary = {**summary, "world_size": self.share.world_size}
        try:
            with uninterrupted():
                self._journal.append_summary(summary)
        except OSError as error:
            raise self._full(None, None, error) from error

    def close(self) -> None:
        """Finish all growing shards and release the folder."""
        try:
            self.flush()
        finally:
            self._journal.close()

    def abandon(self) -> None:
        """Drop all growing shards and release the folder; finished shards stay."""
        for lane in list(self._lanes):
            self._drop(lane)
        self._journal.close()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An end between two rows (a generator that is closed, Ctrl-C) says nothing against those that were added.
        if kind is None or issubclass(kind, KeyboardInterrupt | GeneratorExit):
            self.close()
        else:
            self.abandon()

    def _open_lane(self, lane: int) -> _Lane:
        require_free_bytes(self.folder, 1 << 20, "the next shard")
        with self._shared:
            final = self.folder / self.share.shard_name(self._next_index)
            self._next_index += 1
        shard = GrowingShard(final.with_name(final.name + INCOMPLETE_SUFFIX), self.header)
        self._lanes[lane] = _Lane(shard, final, time.monotonic())
        return self._lanes[lane]

    def _drop(self, lane: int) -> None:
        """Delete the growing shard of a lane: its rows are to be captured again."""
        growing = self._lanes.pop(lane, None)
        if growing is not None:
            growing.shard.abandon()
            if self._room is not None:
                self._room.release(lane)
            with self._shared:
                self._growing_ids.difference_update(growing.shard.ids)

    def _take(self, entry: ShardEntry) -> None:
        """Count a shard of this writer that is journalled."""
        self.done_ids.update(entry.ids)
        self._growing_ids.difference_update(entry.ids)
        if self._room is not None:
            self._room.take(entry.file, entry.bytes)
        self.num_rows += entry.rows
        self.num_tokens += entry.tokens
        self.num_bytes += entry.bytes
        self._next_index = max(self._next_index, (self.share.shard_index(entry.file) or 0) + 1)

    def _recover(self, wait_s: float) -> None:
        """Bring this writer's files to the state after its last finished shard; the lock is held."""
        found = recover(self.folder, self.header, self.share, self._journal, wait_s=wait_s)
        self.done_ids.update(found.other_ids)
        self.notes += found.notes
        for entry in found.shards:
            self._take(entry)

    def _full(self, lane: int | None, row_id: str | None, error: OSError) -> KitError:
        """Drop a lane's growing shard after a write error, and say so."""
        if lane is not None:
            self._drop(lane)
        if row_id is not None:
            with self._shared:
                self._growing_ids.discard(row_id)
        return KitError(
            f"cannot write to {self.folder}: {error.strerror or error} ({free_bytes(self.folder):,} bytes free); its "
            f"{self.num_rows} rows in finished shards are intact: make room and run the same command again to resume"
        )
