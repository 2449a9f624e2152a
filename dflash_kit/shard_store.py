"""An object store as the place of shards, through fsspec: whole objects by name, retries, errors in one line.

A run is the objects under one URL, named as the files of a shards folder are: a copy of them all is a shards folder.
Trusted of a store: an object that is put appears whole or not at all, and from then on it is listed and read (S3, Google's
and Azure's promise both). ``file://`` writes beside the name and renames.
"""

import errno
import hashlib
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.registry import known_implementations

from .errors import KitError
from .shard_format import INCOMPLETE_SUFFIX
from .shard_manifest import Manifests, join_manifests, parse_manifest, without_garbage_collection
from .shard_share import manifest_names

RETRY_WAITS_S = (1.0, 2.0, 4.0, 8.0)
"""Between attempts at a request that failed; the driver may have retried on its own before that."""
READS_AT_ONCE = 16
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_LOCAL = ("file", "local")
# What another attempt cannot mend; the drivers translate their services' errors to these.
_LASTING = (FileNotFoundError, PermissionError, NotImplementedError, IsADirectoryError, NotADirectoryError, TypeError)

T = TypeVar("T")


def is_url(place: object) -> bool:
    """Whether a place of shards is an object store's URL and no folder."""
    return isinstance(place, str) and _URL.match(place) is not None


class ShardStore:
    """The objects directly under one URL. Can be pickled and forked: each process connects by itself.

    Args:
        url: ``protocol://…``; credentials and endpoints are the driver's own settings (environment, its files).

    Raises:
        KitError: a protocol that fsspec does not know, or whose package is not installed, or a relative path.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        protocol, _, path = self.url.partition("://")
        if protocol.lower() in _LOCAL and not path.startswith("/"):
            raise KitError(f"{url} has no absolute path, and would depend on where you are; write {protocol}:///{path}")
        self.key = hashlib.blake2b(self.url.encode(), digest_size=6).hexdigest()
        """Names this store in folders of this host."""
        self._fs: Any = None
        self._pid = -1
        self._connect()

    @property
    def folder(self) -> Path | None:
        """The folder on this host that the URL names; None: it is elsewhere."""
        self._connect()
        return Path(self._root) if self._renames else None

    def sizes(self) -> dict[str, int]:
        """Objects by name, with their sizes in bytes; empty where there are none, or no such bucket."""

        def find() -> list[dict[str, Any]]:
            try:
                return list(self._connect().ls(self._root, detail=True))
            except FileNotFoundError:
                return []

        found = {each["name"].rstrip("/").rsplit("/", 1)[-1]: each["size"] or 0 for each in self._try("list", find)}
        found.pop(self._root.rsplit("/", 1)[-1], None)  # some tools mark folders by an object of their name
        return found

    def read(self, names: list[str]) -> list[bytes]:
        """Whole objects."""
        with ThreadPoolExecutor(READS_AT_ONCE) as pool:
            return list(pool.map(self._read, names))

    def tail(self, name: str, num_bytes: int) -> tuple[int, bytes]:
        """Size of an object, and its last bytes."""

        def look() -> tuple[int, bytes]:
            size = int(self._connect().info(self._path(name))["size"])
            return size, self._connect().cat_file(self._path(name), start=max(0, size - num_bytes), end=size)

        return self._try(f"read {name}", look)

    def put(self, name: str, data: bytes) -> None:
        """Write an object, in place of one of that name."""
        self._put(name, lambda path: self._connect().pipe_file(path, data), len(data))

    def put_file(self, file: Path, name: str) -> None:
        """Write a file as an object, in place of one of that name."""
        self._put(name, lambda path: self._connect().put_file(str(file), path), file.stat().st_size)

    def get_file(self, name: str, file: Path) -> None:
        """Copy an object into a file."""
        self._try(f"fetch {name}", lambda: self._connect().get_file(self._path(name), str(file)))

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "key": self.key, "_pid": -1}

    def _connect(self) -> Any:
        if self._pid == os.getpid():
            return self._fs
        protocol = self.url.split("://")[0].lower()
        try:
            # Listings that a driver remembers would hide what other processes write.
            self._fs, root = fsspec.core.url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            package = known_implementations.get(protocol, {}).get("class", protocol).split(".")[0]
            raise KitError(
                f"{self.url}: {protocol}:// needs the package {package}, which is not installed: pip install {package}"
            ) from error
        except Exception as error:  # a driver may look for credentials or read its settings here
            raise KitError(f"{self.url} cannot be opened: {_reason(error)}") from error
        self._root = str(root).rstrip("/")
        self._renames = protocol in _LOCAL
        self._pid = os.getpid()
        return self._fs

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _read(self, name: str) -> bytes:
        data: bytes = self._try(f"read {name}", lambda: self._connect().cat_file(self._path(name)))
        return data

    def _put(self, name: str, put: Callable[[str], object], num_bytes: int) -> None:
        def put_whole() -> None:
            fs, path = self._connect(), self._path(name)
            if self._renames:
                fs.makedirs(self._root, exist_ok=True)
                put(path + INCOMPLETE_SUFFIX)
                fs.mv(path + INCOMPLETE_SUFFIX, path)
            else:
                put(path)
            size = fs.info(path)["size"]
            if size != num_bytes:
                raise OSError(f"{size} of {num_bytes} bytes arrived")

        self._try(f"write {name}", put_whole)

    def _try(self, what: str, action: Callable[[], T]) -> T:
        """Do it, again after a while where that may help; ``KitError`` with what the driver said last."""
        for attempt, wait_s in enumerate([*RETRY_WAITS_S, None], start=1):
            try:
                return action()
            except Exception as error:  # drivers raise their HTTP library's errors, which differ
                if wait_s is None or _lasts(error):
                    tried = f" ({attempt} attempts)" if attempt > 1 else ""
                    raise KitError(f"{self.url}: cannot {what}: {_reason(error)}{tried}") from error
                time.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")


def read_store_manifests(store: ShardStore, names: list[str]) -> Manifests:
    """The manifests among the objects of these names, as ``read_manifests`` reads those of a folder.

    Raises:
        KitError: no manifest, a damaged one, two of different headers, or shards that failed a parity check.
    """
    found = manifest_names(names)
    if not found:
        raise KitError(
            f"{store.url} holds no shards: there is no manifest.jsonl under it, or no such bucket; name the URL that was "
            "the --out of an extraction"
        )
    with without_garbage_collection():
        texts = zip(found, store.read(found), strict=True)
        parts = [parse_manifest(data, name, f"{store.url}/{name}") for name, data in texts]
    return join_manifests(store.url, parts)


def _lasts(error: Exception) -> bool:
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return is_full or isinstance(error, _LASTING) or "Credential" in type(error).__name__


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
