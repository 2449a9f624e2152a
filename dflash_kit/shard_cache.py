"""Shards of object stores on this host: fetched when they are read, the least recently used ones deleted.

Any number of processes share one folder. A shard lies there under its checksum, so that one that was extracted anew under the
same name is another one. While it is fetched, ``NAME.SIZE.incomplete`` stands for it: its lock tells that somebody is at
it, its name the room that it takes.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import KitError
from .shard_folder import make_folder
from .shard_format import INCOMPLETE_SUFFIX, file_checksum
from .shard_store import ShardStore

FOLDER_VARIABLE = "DFLASH_KIT_CACHE"
BYTES_VARIABLE = "DFLASH_KIT_CACHE_BYTES"
DEFAULT_CACHE_BYTES = 64 << 30
_BUSY_WAIT_S = 0.05


class ShardCache:
    """Shards of any stores, up to a number of bytes.

    Args:
        folder: made when it is needed.
        max_bytes: what all shards in it may take together, those that are being fetched included.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes

    @classmethod
    def of_environment(cls) -> "ShardCache":
        """The cache that ``DFLASH_KIT_CACHE`` and ``DFLASH_KIT_CACHE_BYTES`` name; the user's own, 64 GiB, by default."""
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = Path(os.environ.get(FOLDER_VARIABLE) or home / "dflash-kit" / "shards")
        text = os.environ.get(BYTES_VARIABLE) or str(DEFAULT_CACHE_BYTES)
        if not text.isdecimal() or int(text) < 1:
            raise KitError(f"{BYTES_VARIABLE} is {text!r}; it must be a whole number of bytes, at least 1")
        return cls(folder.absolute(), int(text))

    def require_fit(self, name: str, num_bytes: int) -> None:
        """Refuse a shard that is larger than the whole cache, ``KitError``."""
        if num_bytes > self.max_bytes:
            raise KitError(
                f"shard {name} has {num_bytes:,} bytes, more than the cache {self.folder} may hold ({self.max_bytes:,}); "
                f"raise {BYTES_VARIABLE}"
            )

    def fetch(
        self,
        store: ShardStore,
        name: str,
        num_bytes: int,
        checksum: str,
        *,
        release: Callable[[], object] = lambda: None,
    ) -> Path:
        """The shard's file here, fetched if need be and then checked against the manifest.

        Args:
            store: where it lies.
            name: of the shard.
            num_bytes: its size, as the manifest says.
            checksum: ``algorithm:hex`` of the whole, as the manifest says.
            release: called after files were deleted, and before the next one is written: lets go of mappings of them.

        Raises:
            KitError: it cannot be fetched or is damaged, is larger than the whole cache, or the disk is full.
        """
        target = self.folder / store.key / f"{checksum.rsplit(':', 1)[-1]}-{name}"
        make_folder(target.parent)
        while True:
            with suppress(FileNotFoundError):
                _used_now(target)
                return target
            descriptor = self._reserve(target, num_bytes)
            if descriptor is None:
                continue
            partial = _partial(target, num_bytes)
            try:
                release()
                _fetch_sound(store, name, num_bytes, checksum, partial)
                _used_now(partial)
                os.rename(partial, target)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)

    def _reserve(self, target: Path, num_bytes: int) -> int | None:
        """Make room and stand for the shard, locked.

        Returns:
            Descriptor of the file that stands for it; None after waiting for somebody: look again.
        """
        self.require_fit(target.name, num_bytes)
        partial = _partial(target, num_bytes)
        with self._locked():
            descriptor = os.open(partial, os.O_RDWR | os.O_CREAT, 0o644)
            is_ours = _try_lock(descriptor)
            if is_ours and not target.exists() and self._make_room(num_bytes, partial):
                return descriptor
            if is_ours:  # fetched meanwhile, or others fetch as much as the cache may hold
                partial.unlink()
        try:
            if is_ours:
                time.sleep(_BUSY_WAIT_S)
            else:
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # until the other one has it, or is dead
        finally:
            os.close(descriptor)
        return None

    def _make_room(self, num_bytes: int, own: Path) -> bool:
        """Delete the shards that were used longest ago until ``num_bytes`` more fit; False: they cannot yet."""
        used, found = num_bytes, []
        for path in self.folder.glob("*/*"):
            if path == own:
                continue
            if path.name.endswith(INCOMPLETE_SUFFIX):
                if _is_locked(path):
                    used += int(path.name.removesuffix(INCOMPLETE_SUFFIX).rsplit(".", 1)[-1])
                else:  # its process was killed
                    path.unlink(missing_ok=True)
                continue
            with suppress(FileNotFoundError):
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
                used += status.st_size
        for _, size, path in sorted(found):
            if used <= self.max_bytes:
                break
            path.unlink(missing_ok=True)
            used -= size
        return used <= self.max_bytes

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone among all processes, for the moment in which room is made and taken."""
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _fetch_sound(store: ShardStore, name: str, num_bytes: int, checksum: str, file: Path) -> None:
    store.get_file(name, file)
    if file.stat().st_size != num_bytes or file_checksum(checksum.split(":")[0], file) != checksum:
        raise KitError(
            f"shard {store.url}/{name} is damaged: its size or checksum is not that of the manifest; restore the object from "
            "a copy"
        )


def _used_now(path: Path) -> None:
    now_ns = time.time_ns()  # the kernel's own stamp is some milliseconds coarse
    os.utime(path, ns=(now_ns, now_ns))


def _partial(target: Path, num_bytes: int) -> Path:
    return target.with_name(f"{target.name}.{num_bytes}{INCOMPLETE_SUFFIX}")


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:  # complete by now; then its file is counted, or it was given up
        return False
    try:
        return not _try_lock(descriptor)
    finally:
        os.close(descriptor)
