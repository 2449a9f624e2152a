"""Reading shards: a sequence of rows over memory-mapped Arrow files. The contract's names live here.

Opening a folder reads its manifests and nothing else, however many shards there are and however many processes wrote
them; a shard is opened when one of its rows is asked for. Each row is checked against its checksum the first time it is read. The row
rule (which tokens have hidden states, what ``next_token`` is) stands in ``shard_format``.
"""

import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

from .errors import KitError
from .shard_entry import ShardEntry
from .shard_file import ShardFile
from .shard_folder import REPETITION_HELP
from .shard_format import NO_NEXT_TOKEN, Row, ShardsHeader, row_checksum
from .shard_manifest import Manifests, read_manifests, without_garbage_collection
from .shard_states import with_readable_states
from .shard_store import is_url
from .shard_verify import ShardsReport, verify_shards
from .shard_writer import ShardWriter

__all__ = [
    "NO_NEXT_TOKEN",
    "Row",
    "ShardWriter",
    "Shards",
    "ShardsHeader",
    "ShardsReport",
    "open_shards",
    "verify_shards",
]

MAX_OPEN_FILES = 64


class Shards(Sequence[Row]):
    """Rows of a shards folder: writer by writer (in the order of their manifests' names), as they were finished.

    Of a spool, those that the trainer has not used yet.

    Tensors share the page cache with the file (no copy; of compressed shards and the states of fp8 shards they are made for
    each row); they stay valid as long as they are referenced.
    Instances can be pickled to worker processes, which map the files anew.
    """

    def __init__(self, folder: str | Path, *, check: bool = True) -> None:
        """Read the manifests.

        Args:
            folder: a shards folder.
            check: compare each row with its checksum the first time it is read.

        Raises:
            KitError: not a shards folder, a damaged manifest, two headers that differ, or an id that stands twice.
        """
        self.folder = Path(folder) if isinstance(folder, Path) or not is_url(folder) else folder
        self._check = check
        with without_garbage_collection():
            self._read_manifests()
        self._files: OrderedDict[int, ShardFile] = OrderedDict()
        self._checked: set[int] = set()
        self._lock = threading.Lock()

    def _read_manifests(self) -> None:
        manifests = self._manifests()
        if manifests.header is None:
            raise KitError(f"{self.folder} has a manifest without a header; its extraction never began: extract again")
        repetition = manifests.repetition()
        if repetition is not None:
            raise KitError(f"{self.folder}: {repetition}; {REPETITION_HELP}")
        self.header: ShardsHeader = manifests.header
        self.summary: dict[str, Any] | None = manifests.summary
        """Summary of the last run that completed, added up over its processes; None when none did."""
        self._take_entries([entry for entry in manifests.shards if entry.file not in manifests.consumed])

    @classmethod
    def of(cls, folder: Path, header: ShardsHeader, entries: Sequence[ShardEntry], *, check: bool = True) -> "Shards":
        """The rows of some shards of a folder; no manifest is read."""
        shards = cls.__new__(cls)
        shards.folder, shards.header, shards.summary = folder, header, None
        shards._check, shards._files, shards._checked = check, OrderedDict(), set()
        shards._lock = threading.Lock()
        shards._take_entries(entries)
        return shards

    def _take_entries(self, entries: Sequence[ShardEntry]) -> None:
        self._shards = [(entry.file, entry.rows, entry.bytes, entry.checksum) for entry in entries]
        self._ends = list(accumulate(entry.rows for entry in entries))
        self.lengths: list[int] = [length for entry in entries for length in entry.lengths]
        """Tokens with states, per row."""
        self.ids: list[str] = [row_id for entry in entries for row_id in entry.ids]
        """Row ids."""

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        """A row; ``KitError`` when its shard is missing, of another header, or damaged."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return with_readable_states(self.stored(index))

    def stored(self, index: int) -> Row:
        """A row as it is stored: of fp8 shards codes and scales; otherwise as ``[index]``."""
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        shard_index = bisect_right(self._ends, position)
        first = self._ends[shard_index - 1] if shard_index else 0
        with self._lock:  # rows are read by several threads
            file = self._file(shard_index)
        row, checksum = file.row(position - first)
        self._verify(row, checksum, position, file.path)
        return row

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict(), "_checked": set(), "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def _manifests(self) -> Manifests:
        return read_manifests(Path(self.folder))

    def _open(self, name: str, num_bytes: int, checksum: str) -> ShardFile:
        return ShardFile(Path(self.folder) / name)

    def _file(self, shard_index: int) -> ShardFile:
        """The mapped shard, from a cache of recently used ones."""
        file = self._files.get(shard_index)
        if file is None:
            name, num_rows, num_bytes, checksum = self._shards[shard_index]
            file = self._open(name, num_bytes, checksum)
            file.header.require_compatible(self.header, f"shard {file.path}")
            if (file.num_rows, file.num_bytes) != (num_rows, num_bytes):
                raise KitError(f"shard {file.path} does not match the manifest; it was changed after it was written")
            self._files[shard_index] = file
        self._files.move_to_end(shard_index)
        if len(self._files) > MAX_OPEN_FILES:
            self._files.popitem(last=False)
        return file

    def _verify(self, row: Row, checksum: int, position: int, path: Path) -> None:
        if row.id != self.ids[position] or len(row.input_ids) != self.lengths[position]:
            raise KitError(f"shard {path} holds row {row.id!r} where the manifest lists {self.ids[position]!r}")
        if not self._check or position in self._checked:
            return
        if row_checksum(self.header.checksum, row) != checksum:
            raise KitError(
                f"shard {path} is damaged: row {row.id} does not match its checksum; restore the file or extract again"
            )
        self._checked.add(position)


def open_shards(folder: str | os.PathLike[str], *, check: bool = True) -> Shards:
    """Open a shards folder: a sequence of rows with ``.header``, ``.lengths``, ``.ids``; see ``Shards``.

    ``folder`` may be an object store's URL (``s3://…``): its shards come to a cache on this host, see ``RemoteShards``.
    """
    if is_url(folder):
        from .shard_remote import RemoteShards  # which builds on this module

        return RemoteShards(str(folder), check=check)
    return Shards(Path(folder), check=check)
