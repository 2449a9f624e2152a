"""Where the shards of an extraction go: into a folder, or into an object store by way of a staging folder."""

import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dflash_kit.config import save_config
from dflash_kit.errors import KitError, require_free_bytes
from dflash_kit.shard_folder import inspect_folder, make_folder
from dflash_kit.shard_journal import journal_parity, parity_line
from dflash_kit.shard_manifest import Manifests, read_manifest
from dflash_kit.shard_share import Share
from dflash_kit.shard_staging import Staging, default_staging
from dflash_kit.shard_store import ShardStore, is_url
from dflash_kit.shard_store_journal import StoreJournal, inspect_store
from dflash_kit.shard_upload import Uploader
from dflash_kit.shards import ShardsHeader, ShardWriter

from .settings import ExtractConfig

CONFIG_NAME = "extract.yaml"


class Place:
    """A shards folder, and what an extraction does there beside writing rows; as a context manager: while it is used.

    Args:
        folder: where the writer writes.
        share: what this process takes.
    """

    def __init__(self, folder: Path, share: Share) -> None:
        self.name = str(folder)
        """For people, and for whoever reads the shards."""
        self.folder = folder
        """Where the writer writes."""
        self.share = share
        self.earlier_bytes = 0
        """Size of this share's shards of earlier runs, once open, where the writer does not know of them."""
        self.description: str | None = None
        """What people should know of it before the work; None: nothing."""

    def inspect(self, header: ShardsHeader) -> Manifests:
        """What is there, if this process can write into it; nothing is changed."""
        return inspect_folder(self.folder, header, self.share)

    def open(self, header: ShardsHeader) -> tuple[set[str], list[str]]:
        """Mend what a killed run left, and take its rows over.

        Returns:
            Ids of all rows that are there; what cost rows, a line each.
        """
        with ShardWriter(self.folder, header, **asdict(self.share)) as writer:
            return writer.done_ids, writer.notes

    def keep_config(self, config: ExtractConfig) -> None:
        """Store the resolved settings beside the shards."""
        save_config(config, self.folder / CONFIG_NAME)

    def require_room(self, num_bytes: int, *, num_writers: int = 1) -> None:
        """Refuse to write so many bytes, by so many processes together, when the disk has less."""
        require_free_bytes(self.folder, num_bytes, "the extraction")

    def keep_pace(self) -> None:
        """Called between two reports of the engine: wait where shards are written faster than they can be taken."""

    def settle(self) -> None:
        """Wait until all finished shards are where readers look for them; the writer is closed."""

    def complete(self, header: ShardsHeader, summary: dict[str, Any]) -> None:
        """Write the summary that a run killed behind its last row has left out; otherwise it is there."""
        if read_manifest(self.folder / self.share.manifest_name).summary is None:
            with ShardWriter(self.folder, header, **asdict(self.share)) as writer:
                writer.write_summary(summary)

    def record_parity(self, failure: dict[str, Any] | None, ids: list[str]) -> None:
        """Note the outcome of a parity check beside the shards."""
        journal_parity(self.folder / self.share.manifest_name, failure, ids)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing was opened."""


class StorePlace(Place):
    """Objects under a URL; the writer writes into a staging folder on this host, from which shards are uploaded."""

    def __init__(self, config: ExtractConfig, share: Share) -> None:
        self._store = ShardStore(config.out)
        self._staging = Staging(Path(config.staging or default_staging()), self._store, share)
        super().__init__(self._staging.folder, share)
        self._max_bytes = config.staging_bytes
        self._uploader: Uploader | None = None
        self._journal: StoreJournal | None = None
        self.name = self._store.url
        self.description = (
            f"store    {self.name}, by way of {self.folder} (capture waits while {self._max_bytes / 2**20:,.0f} MiB of "
            "finished shards are there)"
        )

    def inspect(self, header: ShardsHeader) -> Manifests:
        return inspect_store(self._store, header, self.share)

    def open(self, header: ShardsHeader) -> tuple[set[str], list[str]]:
        self._staging.take()
        self._journal = StoreJournal(self._store, header, self.share)
        notes = self._staging.mend(header)
        self._uploader = Uploader(self.folder, self._journal)
        self._uploader.upload_left()
        self.earlier_bytes = self._journal.num_bytes
        self._staging.empty()
        self._uploader.start()
        if self.name.lower().startswith("memory:"):
            notes.append(f"{self.name} lives in this process alone and is gone when it ends; name a store that stays")
        return self._journal.done_ids, notes + self._uploader.notes

    def keep_config(self, config: ExtractConfig) -> None:
        make_folder(self.folder.parent)  # the launcher of several processes takes no staging folder itself
        file = self.folder.with_name(f"{self.folder.name}.yaml")
        save_config(config, file)
        self._store.put_file(file, CONFIG_NAME)
        file.unlink()

    def require_room(self, num_bytes: int, *, num_writers: int = 1) -> None:
        require_free_bytes(self.folder, min(num_bytes, num_writers * self._max_bytes), "the staging of shards")

    def keep_pace(self) -> None:
        assert self._uploader is not None
        self._uploader.keep_pace(self._max_bytes)

    def settle(self) -> None:
        assert self._uploader is not None
        self._uploader.finish()
        self._staging.empty()

    def complete(self, header: ShardsHeader, summary: dict[str, Any]) -> None:
        """Not in a store: a summary that a killed run has left out stays missing there; rows are counted without it."""

    def record_parity(self, failure: dict[str, Any] | None, ids: list[str]) -> None:
        assert self._journal is not None
        self._journal.append(parity_line(failure, ids))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None and self._uploader is not None and self._uploader.staged_bytes:
                print(
                    f"uploading the finished shards that wait in {self.folder}; Ctrl-C leaves them to the next run",
                    file=sys.stderr,
                )
                with suppress(KitError):  # what ended the run is told, and often it is this
                    self._uploader.finish()
        finally:
            self._staging.release()


def place_of(config: ExtractConfig, share: Share) -> Place:
    """The place that ``--out`` names."""
    return StorePlace(config, share) if is_url(config.out) else Place(Path(config.out), share)
