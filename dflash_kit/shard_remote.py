"""Reading and verifying shards in an object store: the same rows, over files in a cache on this host."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import KitError
from .shard_cache import ShardCache
from .shard_entry import ShardEntry
from .shard_file import ShardFile
from .shard_folder import make_folder
from .shard_manifest import Manifests
from .shard_share import Share, manifest_of_shard
from .shard_store import ShardStore, read_store_manifests
from .shard_verify import ShardsReport, find_lost_rows, verify_entries
from .shards import Shards

_FETCHES = 8


class RemoteShards(Shards):
    """Rows of shards in an object store; see ``Shards``.

    Opening reads the manifests. A shard is fetched into the cache when one of its rows is asked for, and mapped there.

    Args:
        url: of the run.
        check: compare each row with its checksum the first time it is read.
        cache: where shards lie on this host; None: ``ShardCache.of_environment``.

    Raises:
        KitError: see ``Shards``, or a shard is larger than the whole cache.
    """

    def __init__(self, url: str, *, check: bool = True, cache: ShardCache | None = None) -> None:
        self._store = ShardStore(url)
        self._cache = cache or ShardCache.of_environment()
        super().__init__(url, check=check)
        for name, _, num_bytes, _ in self._shards:  # now, and not in the middle of a training run
            self._cache.require_fit(name, num_bytes)

    def _manifests(self) -> Manifests:
        return read_store_manifests(self._store, list(self._store.sizes()))

    def _open(self, name: str, num_bytes: int, checksum: str) -> ShardFile:
        for _ in range(_FETCHES):
            path = self._cache.fetch(self._store, name, num_bytes, checksum, release=self._let_go)
            try:
                return ShardFile(path)
            except KitError:
                if path.exists():  # else another process has made room for its own
                    raise
        raise KitError(
            f"the cache {self._cache.folder} is too small for the processes that share it: shard {name} was deleted "
            f"{_FETCHES} times before it could be read; allow more than {self._cache.max_bytes:,} bytes"
        )

    def _let_go(self) -> None:
        """Close mapped files that the cache has deleted: until then they take room on the disk."""
        for index in [index for index, file in self._files.items() if not file.path.exists()]:
            del self._files[index]


def verify_store(url: str, share: Share | None = None) -> ShardsReport:
    """``verify_shards`` for an object store: every shard is fetched anew, one at a time, beside the cache.

    Raises:
        KitError: no shards there, or manifests that cannot be read or do not agree.
    """
    store = ShardStore(url)
    sizes = store.sizes()
    manifests = read_store_manifests(store, list(sizes))
    folder = ShardCache.of_environment().folder
    make_folder(folder)
    with tempfile.TemporaryDirectory(prefix="verify-", dir=folder.parent) as scratch:

        @contextmanager
        def fetched(entry: ShardEntry) -> Iterator[Path]:
            path = Path(scratch) / entry.file
            try:
                store.get_file(entry.file, path)
                yield path
            finally:
                path.unlink(missing_ok=True)

        report = verify_entries(store.url, manifests, share, fetched)
    if share is None:
        _find_unlisted(sorted(sizes), manifests, report)
        find_lost_rows(manifests, report)
    return report


def _find_unlisted(names: list[str], manifests: Manifests, report: ShardsReport) -> None:
    """Shards that no manifest lists: their upload was not journalled, or is about to be."""
    listed = {entry.file for entry in manifests.shards}
    known = {part.name for part in manifests.parts}
    for name in names:
        manifest = manifest_of_shard(name)
        if manifest is None or name in listed:
            continue
        if manifest in known:
            report.notes.append(
                f"{name}: not in {manifest}: being uploaded, or left by a killed run, whose samples were or will be "
                "captured anew; it takes room and nothing else"
            )
        else:
            report.problems.append(f"{name}: {manifest} is gone; restore it from a copy, or delete the shard")
