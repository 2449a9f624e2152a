"""Moves finished shards from a staging folder to an object store, beside the process that writes them.

The writer (``ShardWriter``) knows nothing of the store. Its manifest in the staging folder is read line by line: a shard is
uploaded whole, then journalled in the store, then deleted here. Killed in between, the shard lies here still: its ids tell
whether it was journalled. Where the staging folder is lost, too, its samples are captured anew, and the upload that nobody
journalled is written over.
"""

import json
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from .errors import KitError
from .shard_entry import ShardEntry
from .shard_store_journal import StoreJournal

POLL_S = 0.1


class Uploader:
    """Uploads what a writer finishes, from a thread of its own.

    Args:
        folder: the staging folder, a shards folder of one rank.
        journal: of that rank, in the store.
    """

    def __init__(self, folder: Path, journal: StoreJournal) -> None:
        self.notes: list[str] = []
        """Shards that were dropped because others had their rows, a line each."""
        self._folder = folder
        self._journal = journal
        self._offset_bytes = 0
        self._error: KitError | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shard-upload", daemon=True)

    @property
    def staged_bytes(self) -> int:
        """Size of the finished shards that are still here."""
        total = 0
        for path in self._folder.glob("shard-*.arrow"):
            with suppress(FileNotFoundError):  # uploaded just now
                total += path.stat().st_size
        return total

    def upload_left(self) -> None:
        """Upload what an earlier run has left, in this thread; no writer is at work.

        Raises:
            KitError: a shard that cannot be uploaded; it stays here.
        """
        try:
            for line in self._new_lines():
                if line["kind"] == "shard" or not self._journal.has(line):
                    self._take(line)
        except KitError as error:
            raise self._told(error) from error
        self._offset_bytes = 0

    def start(self) -> None:
        """Upload from now on, until ``finish``."""
        self._thread.start()

    def keep_pace(self, max_bytes: int) -> None:
        """Wait while more than ``max_bytes`` of finished shards are here; ``KitError`` once an upload has failed."""
        while self._error is None and self.staged_bytes > max_bytes:
            time.sleep(POLL_S)
        self._raise_error()

    def finish(self) -> None:
        """Wait until everything that was finished is in the store; the writer is closed. Again: nothing happens.

        Raises:
            KitError: a shard that cannot be uploaded; it stays here.
        """
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._raise_error()

    def _run(self) -> None:
        try:
            while True:
                is_ending = self._ending.is_set()  # asked first: lines that came before it are taken
                lines = self._new_lines()
                for line in lines:
                    self._take(line)
                if is_ending and not lines:
                    return
                self._ending.wait(POLL_S) if not is_ending else None
        except KitError as error:
            self._error = self._told(error)
        except Exception as error:  # a bug must end the run, not leave shards behind in silence
            self._error = self._told(KitError(f"upload failed: {type(error).__name__}: {error}"))

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _told(self, error: KitError) -> KitError:
        num_left = len(list(self._folder.glob("shard-*.arrow")))
        return KitError(
            f"{error}; {num_left} finished shards wait in {self._folder}: run the same command again to upload them and "
            "resume"
        )

    def _new_lines(self) -> list[dict[str, Any]]:
        """What the writer has journalled since the last call."""
        try:
            with (self._folder / self._journal.share.manifest_name).open("rb") as file:
                file.seek(self._offset_bytes)
                data = file.read()
        except FileNotFoundError:  # it has not begun
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset_bytes += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def _take(self, line: dict[str, Any]) -> None:
        if line["kind"] == "shard":
            self._upload(ShardEntry.from_dict(line), line)
        elif line["kind"] not in ("header", "split"):  # the store's manifest has its own
            self._journal.append(line)

    def _upload(self, entry: ShardEntry, line: dict[str, Any]) -> None:
        path = self._folder / entry.file
        repeated = self._journal.done_ids.intersection(entry.ids)
        if not repeated:
            self._journal.require_unchanged()  # else the name may be another's
            name = self._journal.next_shard_name()
            self._journal.store.put_file(path, name)
            self._journal.append_shard({**line, "file": name})
        elif len(repeated) < entry.rows:  # all of them: it was journalled, and not deleted
            self.notes.append(
                f"{path} was dropped: a killed run had not uploaded it, and {len(repeated)} of its {entry.rows} rows are "
                "in other shards by now"
            )
        path.unlink(missing_ok=True)
