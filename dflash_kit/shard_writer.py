"""Writing shards so that a kill at any instant loses no finished shard and repeats no row.

A shard grows as ``shard-NNNNN.arrow.incomplete``, is fsynced, renamed, and then journalled in the manifest.
A rerun drops the incomplete file, adopts a shard that was renamed but not journalled, and mends a torn last
manifest line.
"""

import time
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


class ShardWriter:
    """Appends rows to a shards folder; one writer at a time, guarded by a lock on the manifest.

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
        self._ids: set[str] = set()  # done_ids and the ids of the growing shard
        self._shard: GrowingShard | None = None
        self._shard_started_s = 0.0
        self._next_index = 0
        inspect_folder(self.folder, header)
        make_folder(self.folder)
        self._journal = Journal(self.folder, lock_wait_s=lock_wait_s)
        try:
            self._recover()
        except BaseException:
            self._journal.close()
            raise

    def add(self, row: Row) -> None:
        """Append a row; its hidden states are rounded to the stored dtype.

        Raises:
            KitError: the row is not fit to train on (see ``check_row``), its id is there already, or the
                disk is full (then finished shards are intact and the unfinished one is dropped).
        """
        check_row(row, self.header)
        if row.id in self._ids:
            raise KitError(f"sample {row.id} was captured twice; ids must be unique")
        try:
            if self._shard is None:
                self._shard = self._open_shard()
            self._shard.add(to_stored(row, self.header))
        except OSError as error:
            raise self._full(error) from error
        self._ids.add(row.id)
        age_s = time.monotonic() - self._shard_started_s
        if self._shard.num_bytes >= self.max_shard_bytes or age_s >= self.max_shard_age_s:
            self.flush()

    def flush(self) -> None:
        """Finish the growing shard, if there is one: on return its rows are durable."""
        if self._shard is None:
            return
        final = self.folder / f"shard-{self._next_index:05d}.arrow"
        try:
            entry = self._shard.finish(final)
            self._shard = None
            self._journal.append_shard(entry)
        except OSError as error:
            raise self._full(error) from error
        self._take(entry)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Journal what a run did (drop counts by reason and the like)."""
        try:
            self._journal.append_summary(summary)
        except OSError as error:
            raise self._full(error) from error

    def close(self) -> None:
        """Finish the growing shard and release the folder."""
        try:
            self.flush()
        finally:
            self._journal.close()

    def abandon(self) -> None:
        """Drop the growing shard and release the folder; finished shards stay."""
        if self._shard is not None:
            self._shard.abandon()
            self._shard = None
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

    def _open_shard(self) -> GrowingShard:
        require_free_bytes(self.folder, 1 << 20, "the next shard")
        path = self.folder / f"shard-{self._next_index:05d}.arrow{INCOMPLETE_SUFFIX}"
        self._shard_started_s = time.monotonic()
        return GrowingShard(path, self.header)

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

    def _full(self, error: OSError) -> KitError:
        """Drop the growing shard after a write error, and say so."""
        if self._shard is not None:
            self._shard.abandon()
            self._shard = None
        self._ids = set(self.done_ids)
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
