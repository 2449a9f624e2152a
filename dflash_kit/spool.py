"""A spool: a shards folder of bounded size, between an extractor at work and a trainer that deletes what it has used.

    manifest*.jsonl    as in any shards folder, with lines of two more kinds: ``spool`` (limit, epochs, rows to come) when
                       an extractor begins, ``end`` when every row is in a finished shard
    consumed.jsonl     the trainer's journal: shards that it has used, a line each, written before the file is deleted
    extractor.lock     held (shared) by every extractor as long as it lives, its engine's start included

Manifests keep the entries of used shards, so that their rows are never extracted again.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import KitError

CONSUMED_NAME = "consumed.jsonl"
LOCK_NAME = "extractor.lock"
EPOCH_MARK = "@"
FULL_TEXT = "spool full, waiting for the trainer"


@dataclass(frozen=True, kw_only=True, slots=True)
class SpoolRecord:
    """What an extractor says of its spool when it begins."""

    limit_bytes: int
    """Bytes that the shards of all extractors together may take."""
    epochs: int
    """How often each sample is extracted."""
    rows: int
    """Rows of this extractor's share over all epochs, those done already included."""


def epoch_id(sample_id: str, epoch: int) -> str:
    """Id of a sample's row in an epoch, from 0; the first epoch's is the sample's own."""
    return f"{sample_id}{EPOCH_MARK}{epoch}" if epoch else sample_id


def sample_of(row_id: str) -> str:
    """Id of the sample whose row this is, the same in every epoch."""
    return row_id.partition(EPOCH_MARK)[0]


def read_consumed(folder: Path) -> set[str]:
    """Names of the shards that the trainer has used; a torn last line is left out.

    Raises:
        KitError: a complete line that is not one of ours.
    """
    path = folder / CONSUMED_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise KitError(f"{path} cannot be read: {error.strerror}") from error
    names = set()
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            file = json.loads(line)["file"]
            if not isinstance(file, str) or "/" in file:
                raise ValueError(f"file is {file!r}")
        except (ValueError, TypeError, KeyError) as error:
            raise KitError(f"{path} line {number} is damaged ({error}); restore it from a copy") from error
        names.add(file)
    return names


class ConsumedJournal:
    """The trainer's journal of used shards; one trainer a spool, guarded by a lock.

    Raises:
        KitError: another trainer uses the spool, or the journal cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = folder / CONSUMED_NAME
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise KitError(f"{path} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._names = read_consumed(folder)
            whole_bytes = path.read_bytes().rfind(b"\n") + 1
            os.ftruncate(self._file, whole_bytes)
            os.lseek(self._file, whole_bytes, os.SEEK_SET)
            for name in self._names:  # left by a trainer that was killed between its two steps
                (folder / name).unlink(missing_ok=True)
        except BlockingIOError as error:
            os.close(self._file)
            raise KitError(f"another trainer uses the spool {folder}; stop it, or name another folder") from error
        except OSError as error:
            os.close(self._file)
            raise KitError(f"{path} cannot be used: {error.strerror}") from error
        except KitError:
            os.close(self._file)
            raise

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def consume(self, names: Sequence[str]) -> None:
        """Journal shards as used, durably, then delete them; those journalled already are left out.

        Raises:
            KitError: the journal cannot be written or a shard not deleted.
        """
        new = [name for name in names if name not in self._names]
        data = "".join(json.dumps({"file": name}) + "\n" for name in new).encode()
        try:
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
            self._names.update(new)
            for name in new:
                (self._folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise KitError(f"used shards in {self._folder} cannot be deleted: {error.strerror}") from error

    def close(self) -> None:
        """Let another trainer in."""
        os.close(self._file)


@contextmanager
def extractor_at_work(folder: Path) -> Iterator[None]:
    """Show that an extractor lives, until the block ends or the process dies."""
    descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    except OSError as error:
        raise KitError(f"{folder / LOCK_NAME} cannot be locked: {error.strerror}") from error
    finally:
        os.close(descriptor)


def has_extractor(folder: Path) -> bool:
    """Whether some extractor of this spool lives."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def spool_record(line: dict[str, Any]) -> SpoolRecord:
    """Read a manifest's ``spool`` line; ``ValueError`` for what cannot be one."""
    record = SpoolRecord(**line)
    for name in ("limit_bytes", "epochs", "rows"):
        value = getattr(record, name)
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} is {value!r}; a count belongs there")
    return record
