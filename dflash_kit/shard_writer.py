"""Writing shards so that a kill at any instant loses no finished shard and repeats no row.

A shard grows as ``shard-NNNNN.arrow.incomplete``, is fsynced, renamed, and then journalled in the manifest.
A rerun drops incomplete files, adopts shards that were renamed but not journalled, and mends a torn last
manifest line.

Several shards may grow at once, one in each lane: two threads that write to one file wait for each other, two that
write to two files do not. Numbers are given out when a shard is begun; one that was dropped leaves a gap.
"""

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from .errors import KitError, require_free_bytes
from .shard_checks import check_row
from .shard_file import GrowingShard, ShardFile, sync_folder, to_stored
from .shard_format import INCOMPLETE_SUFFIX, MANIFEST_NAME, SHARD_GLOB, Row, ShardsHeader, file_checksum
from .shard_manifest import Journal, Manifest, ShardEntry, read_manifest

DEFAULT_SHARD_BYTES = 256 << 20
DEFAULT_SHARD_AGE_S = 120.0


@dataclass(frozen=True, slots=True)
class _Lane:
    """A growing shard, and where it will lie."""

    shard: GrowingShard
    final: Path
    started_s: float


class ShardWriter:
    """Appends rows to a shards folder; one writer at a time, guarded by a lock on the manifest.

    Threads may add rows at the same time, each in a lane of its own.

    Args:
        folder: a new or empty folder, or one that was written with the same header (then the writer resumes).
        header: what the rows are.
        max_shard_bytes: a shard is finished when it reaches this size.
        max_shard_age_s: or when it is this old, so that a kill costs little work.
        lock_wait_s: how long to wait for another writer to end.

    Raises:
        KitError: the folder holds something else, was written with another header, or is being written.
    """

    def __init__(
        self,
        folder: str | Path,
        header: ShardsHeader,
        *,
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
        max_shard_age_s: float = DEFAULT_SHARD_AGE_S,
        lock_wait_s: float = 30.0,
    ) -> None:
        if max_shard_bytes < 1 or max_shard_age_s <= 0:
            raise KitError("max_shard_bytes and max_shard_age_s must be positive")
        self.folder = Path(folder)
        self.header = header
        self.max_shard_bytes = max_shard_bytes
        self.max_shard_age_s = max_shard_age_s
        self.done_ids: set[str] = set()
        """Ids in finished shards, those of earlier runs included."""
        self.num_rows = self.num_tokens = self.num_bytes = 0
        """Totals over finished shards, those of earlier runs included."""
        self._ids: set[str] = set()  # done_ids and the ids of growing shards
        self._lanes: dict[int, _Lane] = {}
        self._next_index = 0
        self._shared = threading.Lock()  # guards the ids, the totals, the next index and the journal
        inspect_folder(self.folder, header)
        make_folder(self.folder)
        self._journal = Journal(self.folder, lock_wait_s=lock_wait_s)
        try:
            self._recover()
        except BaseException:
            self._journal.close()
            raise

    def add(self, row: Row, *, lane: int = 0, taps_are_sound: bool = False) -> None:
        """Append a row; its hidden states are rounded to the stored dtype.

        Args:
            row: the row.
            lane: which of the growing shards takes it; two threads never use the same lane at once.
            taps_are_sound: its hidden states were checked on the device already (``TapInspection``).

        Raises:
            KitError: the row is not fit to train on (see ``check_row``), its id is there already, or the
                disk is full (then finished shards are intact and the unfinished one is dropped).
        """
        check_row(row, self.header, taps_are_sound=taps_are_sound)
        with self._shared:
            if row.id in self._ids:
                raise KitError(f"sample {row.id} was captured twice; ids must be unique")
            self._ids.add(row.id)
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
                self._journal.append_shard(entry)
                self._take(entry)
        except OSError as error:
            raise self._full(lane, None, error) from error

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Journal what a run did (drop counts by reason and the like)."""
        try:
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
        if kind is None:
            self.close()
        else:
            self.abandon()

    def _open_lane(self, lane: int) -> _Lane:
        require_free_bytes(self.folder, 1 << 20, "the next shard")
        with self._shared:
            final = self.folder / f"shard-{self._next_index:05d}.arrow"
            self._next_index += 1
        shard = GrowingShard(final.with_name(final.name + INCOMPLETE_SUFFIX), self.header)
        self._lanes[lane] = _Lane(shard, final, time.monotonic())
        return self._lanes[lane]

    def _drop(self, lane: int) -> None:
        """Delete the growing shard of a lane: its rows are to be captured again."""
        growing = self._lanes.pop(lane, None)
        if growing is not None:
            growing.shard.abandon()
            with self._shared:
                self._ids.difference_update(growing.shard.ids)

    def _take(self, entry: ShardEntry) -> None:
        """Count a journalled shard."""
        self.done_ids.update(entry.ids)
        self._ids.update(entry.ids)
        self.num_rows += entry.rows
        self.num_tokens += entry.tokens
        self.num_bytes += entry.bytes
        self._next_index = max(self._next_index, _index_of(entry.file) + 1)

    def _recover(self) -> None:
        """Bring the folder to the state after its last finished shard; the lock is held."""
        manifest = inspect_folder(self.folder, self.header)
        self._journal.start_after(manifest.whole_bytes)
        if manifest.header is None:
            self._journal.append_header(self.header)
        for leftover in self.folder.glob(SHARD_GLOB + INCOMPLETE_SUFFIX):
            leftover.unlink()
        for entry in manifest.shards:
            self._take(entry)
        for path in orphans(self.folder, manifest):
            self._adopt(path)
        sync_folder(self.folder)

    def _adopt(self, path: Path) -> None:
        """Journal a shard that was renamed, hence complete and durable, when the run was killed."""
        shard = ShardFile(path)
        shard.header.require_compatible(self.header, f"shard {path}")
        rows = [shard.row(i)[0] for i in range(shard.num_rows)]
        ids, lengths = [row.id for row in rows], [len(row.input_ids) for row in rows]
        if self._ids.intersection(ids):
            raise KitError(f"shard {path} is not in the manifest and repeats rows of others; move it away")
        entry = ShardEntry(
            file=path.name,
            rows=len(ids),
            tokens=sum(lengths),
            lengths=lengths,
            ids=ids,
            checksum=file_checksum(self.header.checksum, path),
            bytes=shard.num_bytes,
        )
        self._journal.append_shard(entry)
        self._take(entry)

    def _full(self, lane: int | None, row_id: str | None, error: OSError) -> KitError:
        """Drop a lane's growing shard after a write error, and say so."""
        if lane is not None:
            self._drop(lane)
        if row_id is not None:
            with self._shared:
                self._ids.discard(row_id)
        return KitError(
            f"cannot write to {self.folder}: {error.strerror or error}; its {self.num_rows} rows in finished "
            "shards are intact: make room and run the same command again to resume"
        )


def inspect_folder(folder: Path, header: ShardsHeader) -> Manifest:
    """What a folder holds, if it can be written with this header; nothing is changed.

    Returns:
        The manifest; one without a header for a new or empty folder.

    Raises:
        KitError: a file, a folder with other things in it, other shards, or a journalled shard that is
            missing.
    """
    if folder.exists() and not folder.is_dir():
        raise KitError(f"{folder} is a file; name a folder for the shards")
    if not folder.is_dir() or not any(folder.iterdir()):
        return Manifest()
    if not (folder / MANIFEST_NAME).exists():
        raise KitError(
            f"{folder} is not empty and not a shards folder; nothing was written: name a new or empty folder"
        )
    manifest = read_manifest(folder)
    if manifest.header is None:
        if orphans(folder, manifest):
            raise KitError(f"{folder} holds shards but its manifest has no header; restore it or name a new folder")
        return manifest
    manifest.header.require_compatible(header, f"cannot add to {folder}")
    for entry in manifest.shards:
        path = folder / entry.file
        if not path.exists() or path.stat().st_size != entry.bytes:
            raise KitError(f"shard {path} is missing or cut short; restore it or extract into a new folder")
    return manifest


def orphans(folder: Path, manifest: Manifest) -> list[Path]:
    """Shards with their final name that the manifest does not list."""
    listed = {entry.file for entry in manifest.shards}
    return sorted(path for path in folder.glob(SHARD_GLOB) if path.name not in listed)


def make_folder(folder: Path) -> None:
    """Create a folder with its parents, or say why that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KitError(f"folder {folder} cannot be made: {error.strerror}") from error


def _index_of(file: str) -> int:
    return int(file.removeprefix("shard-").removesuffix(".arrow"))
