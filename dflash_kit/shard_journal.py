"""Appending to a manifest: one durable line after the other, under a lock, never behind a torn line."""

import fcntl
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .errors import KitError
from .shard_entry import ShardEntry
from .shard_format import ShardsHeader
from .shard_manifest import read_manifest
from .spool import SpoolRecord


class Journal:
    """Appends lines to a manifest, each durable when the call returns; holds a lock on it."""

    def __init__(self, path: Path, *, lock_wait_s: float) -> None:
        """Open (or create) and lock the manifest; nothing in it is changed yet.

        Args:
            path: the manifest, in an existing folder.
            lock_wait_s: how long to wait for another writer; a killed run's engine may take a moment to end.

        Raises:
            KitError: another process writes it.
        """
        self._path = path
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
                        f"another process is writing {self._path}; stop it, or give each process a rank of its own"
                    ) from error
                time.sleep(0.1)
            except OSError as error:
                raise KitError(
                    f"{self._path} cannot be locked: {error.strerror}; use a file system with locks (flock)"
                ) from error

    def start_after(self, whole_bytes: int) -> None:
        """Cut off a torn line behind ``whole_bytes`` and append from there."""
        os.ftruncate(self._file, whole_bytes)
        os.lseek(self._file, whole_bytes, os.SEEK_SET)
        os.fsync(self._file)
        self._end_bytes = whole_bytes

    def append_header(self, header: ShardsHeader) -> None:
        """Write the first line."""
        self._append({"kind": "header", **header.to_dict()})

    def append_split(self, world_size: int) -> None:
        """Note that the samples are split into so many shares from here on."""
        self._append({"kind": "split", "world_size": world_size})

    def append_shard(self, entry: ShardEntry) -> None:
        """Journal a finished shard."""
        self._append({"kind": "shard", **asdict(entry)})

    def append_summary(self, summary: dict[str, Any]) -> None:
        """Journal the end of a run."""
        self._append({"kind": "summary", **summary})

    def append_parity(self, failure: dict[str, Any] | None, ids: list[str]) -> None:
        """Journal a parity check of these rows: what failed, or that they passed."""
        self._append(parity_line(failure, ids))

    def append_spool(self, record: SpoolRecord) -> None:
        """Note that shards are deleted once they were used, and how many rows will come."""
        self._append({"kind": "spool", **asdict(record)})

    def append_end(self) -> None:
        """Note that every row of a spool's writer is in a finished shard."""
        self._append({"kind": "end"})

    def close(self) -> None:
        """Close the file and release the lock."""
        os.close(self._file)

    def _append(self, line: dict[str, Any]) -> None:
        data = encoded(line)
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
            os.fsync(self._file)
        except OSError:
            self.start_after(self._end_bytes)  # leave the manifest as it was before
            raise
        self._end_bytes += len(data)


def encoded(line: dict[str, Any]) -> bytes:
    """A line of a manifest as it is written."""
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def parity_line(failure: dict[str, Any] | None, ids: list[str]) -> dict[str, Any]:
    """What a manifest says of a parity check of these rows: what failed, or that they passed."""
    outcome = {"kind": "parity_passed"} if failure is None else {"kind": "parity_failed", **failure}
    return {**outcome, "ids": ids}


def journal_parity(path: Path, failure: dict[str, Any] | None, ids: list[str]) -> None:
    """Note a parity check in a manifest that nobody writes any more (its writer gets half a minute to end).

    Args:
        path: the manifest.
        failure: ``sample``, ``layer`` and ``difference``; None: the check was passed.
        ids: rows that were looked at.

    Raises:
        KitError: somebody writes the manifest, or it cannot be written.
    """
    _append_to(path, lambda journal: journal.append_parity(failure, ids))


def journal_spool(path: Path, record: SpoolRecord) -> None:
    """Note the beginning of an extraction into a spool; see ``journal_parity``."""
    _append_to(path, lambda journal: journal.append_spool(record))


def journal_end(path: Path) -> None:
    """Note that every row of a spool's writer is in a finished shard; see ``journal_parity``."""
    _append_to(path, Journal.append_end)


def _append_to(path: Path, append: Callable[[Journal], None]) -> None:
    journal = Journal(path, lock_wait_s=30.0)
    try:
        journal.start_after(read_manifest(path).whole_bytes)
        append(journal)
    except OSError as error:
        raise KitError(f"cannot write to {path}: {error.strerror or error}; make room") from error
    finally:
        journal.close()


def is_being_written(path: Path) -> bool:
    """Whether a live process holds the lock of this manifest."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks here: our own manifest's lock says so
        return False
    finally:
        os.close(descriptor)
    return False
