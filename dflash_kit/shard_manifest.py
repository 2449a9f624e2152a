"""The manifest of a shards folder: reading it, mending a torn last line, appending to it.

One JSON object a line. Kinds: ``header`` (the first line), ``shard`` (one finished shard), ``summary`` (one
    run).
"""

import fcntl
import json
import os
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import KitError
from .shard_format import MANIFEST_NAME, ShardsHeader


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """Journal line of one finished shard."""

    file: str
    """File name inside the folder."""
    rows: int
    """Number of rows."""
    tokens: int
    """Sum of ``lengths``."""
    lengths: list[int]
    """Tokens with states, per row."""
    ids: list[str]
    """Row ids, in the order of the file."""
    checksum: str
    """``algorithm:hex`` of the whole file."""
    bytes: int
    """Size of the file."""


@dataclass(slots=True)
class Manifest:
    """What the complete lines of a manifest say."""

    header: ShardsHeader | None = None
    shards: list[ShardEntry] = field(default_factory=list)
    summary: dict[str, Any] | None = None
    whole_bytes: int = 0
    """Length of the complete lines; whatever follows is a torn line."""


def read_manifest(folder: Path) -> Manifest:
    """Parse the complete lines; a torn last line (killed while journalling) is left out, nothing is changed.

    Raises:
        KitError: no manifest, or a complete line that is not one of ours.
    """
    path = folder / MANIFEST_NAME
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise KitError(f"{folder} is not a shards folder: it has no {MANIFEST_NAME}") from error
    except OSError as error:
        raise KitError(f"{path} cannot be read: {error.strerror}") from error
    manifest = Manifest(whole_bytes=data.rfind(b"\n") + 1)
    for number, line in enumerate(data[: manifest.whole_bytes].splitlines(), start=1):
        try:
            _take_line(manifest, json.loads(line), number)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise KitError(f"{path} line {number} is damaged ({error}); restore the manifest from a copy") from error
    return manifest


def _take_line(manifest: Manifest, line: dict[str, Any], number: int) -> None:
    kind = line.pop("kind")
    if (kind == "header") != (number == 1):
        raise ValueError(f"kind {kind!r} where the {'header' if number == 1 else 'journal'} belongs")
    if kind == "header":
        manifest.header = ShardsHeader.from_dict(line)
    elif kind == "shard":
        known = {f.name for f in fields(ShardEntry)}
        entry = ShardEntry(**{k: v for k, v in line.items() if k in known})
        if not entry.rows == len(entry.lengths) == len(entry.ids) or entry.tokens != sum(entry.lengths):
            raise ValueError(f"counts of {entry.file} disagree with each other")
        manifest.shards.append(entry)
    elif kind == "summary":
        manifest.summary = line
    else:
        raise ValueError(f"unknown kind {kind!r}")


class Journal:
    """Appends lines to a manifest, each durable when the call returns; holds a lock on the folder."""

    def __init__(self, folder: Path, *, lock_wait_s: float) -> None:
        """Open (or create) and lock the manifest; nothing in it is changed yet.

        Args:
            folder: an existing folder.
            lock_wait_s: how long to wait for another writer; a killed run's engine may take a moment to end.

        Raises:
            KitError: another process writes there.
        """
        self._path = folder / MANIFEST_NAME
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise KitError(f"{self._path} cannot be written: {error.strerror}") from error
        self._end_bytes = 0
        try:
            self._lock(lock_wait_s)
        except BaseException:
            self.close()
            raise

    def _lock(self, wait_s: float) -> None:
        deadline_s = time.monotonic() + wait_s
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() >= deadline_s:
                    raise KitError(
                        f"another process is writing {self._path.parent}; stop it or name another folder"
                    ) from error
                time.sleep(0.1)

    def start_after(self, whole_bytes: int) -> None:
        """Cut off a torn line behind ``whole_bytes`` and append from there."""
        os.ftruncate(self._file, whole_bytes)
        os.lseek(self._file, whole_bytes, os.SEEK_SET)
        os.fsync(self._file)
        self._end_bytes = whole_bytes

    def append_header(self, header: ShardsHeader) -> None:
        """Write the first line."""
        self._append({"kind": "header", **header.to_dict()})

    def append_shard(self, entry: ShardEntry) -> None:
        """Journal a finished shard."""
        self._append({"kind": "shard", **asdict(entry)})

    def append_summary(self, summary: dict[str, Any]) -> None:
        """Journal the end of a run."""
        self._append({"kind": "summary", **summary})

    def close(self) -> None:
        """Close the file and release the lock."""
        os.close(self._file)

    def _append(self, line: dict[str, Any]) -> None:
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
            os.fsync(self._file)
        except OSError:
            self.start_after(self._end_bytes)  # leave the manifest as it was before
            raise
        self._end_bytes += len(data)
