"""The folder on this host in which shards lie until they are uploaded: whose it is, and what a killed run left in it."""

import fcntl
import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from .errors import KitError
from .shard_folder import make_folder
from .shard_format import ShardsHeader
from .shard_journal import is_being_written
from .shard_manifest import read_manifest
from .shard_share import Share
from .shard_store import ShardStore
from .shard_writer import ShardWriter


def default_staging() -> Path:
    """Where staging folders lie unless another place is named: below the system's temporary folder."""
    return Path(tempfile.gettempdir()) / f"dflash-kit-staging-{os.getuid()}"


class Staging:
    """The staging folder of one rank of one run; ``take`` it before anything is done in it.

    Args:
        parent: folder of staging folders; they are named by store, rank and number of ranks.
        store: where the shards go.
        share: the rank.

    Raises:
        KitError: ``parent`` lies in the store, where it would be taken for objects.
    """

    def __init__(self, parent: Path, store: ShardStore, share: Share) -> None:
        if store.folder is not None and parent.resolve().is_relative_to(store.folder.resolve()):
            raise KitError(
                f"staging {parent} lies in the store {store.url} itself; name a folder elsewhere with --staging"
            )
        self.folder = parent.absolute() / f"{store.key}-r{share.rank:05d}-of-{share.world_size:05d}"
        self._share = share
        self._manifest = self.folder / share.manifest_name
        self._descriptor = -1

    def take(self, *, wait_s: float = 30.0) -> None:
        """Lock the folder for this process, and wait until a killed run's engine has let go of it.

        Raises:
            KitError: another process of this host has it, or it cannot be made.
        """
        make_folder(self.folder)
        lock = self.folder.with_name(self.folder.name + ".lock")  # inside, the writer would take it for foreign
        deadline_s = time.monotonic() + wait_s
        try:
            self._descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
            while not self._is_free():
                if time.monotonic() >= deadline_s:
                    raise KitError(
                        f"another process is writing by way of {self.folder}; stop it, or give each process a rank of its own"
                    )
                time.sleep(0.1)
        except OSError as error:
            raise KitError(f"{lock} cannot be locked ({error.strerror}); name another --staging") from error

    def mend(self, header: ShardsHeader) -> list[str]:
        """Bring what a killed run left into order: every complete shard is journalled here, and nothing else is.

        Returns:
            What cost rows, a line each.
        """
        if not any(self.folder.iterdir()):
            return []
        self._forget_uploaded()
        with ShardWriter(self.folder, header, **asdict(self._share)) as writer:
            return writer.notes

    def empty(self) -> None:
        """Delete what is left once all shards are uploaded, so that the next writer begins anew."""
        left = sorted(self.folder.glob("shard-*.arrow"))
        if left:
            raise KitError(f"{left[0]} was not uploaded; this is a bug")
        shutil.rmtree(self.folder)
        make_folder(self.folder)

    def release(self) -> None:
        """Let go of the folder; an empty one is deleted."""
        if self._descriptor < 0:
            return
        if not any(self.folder.iterdir()):
            self.folder.rmdir()
        os.close(self._descriptor)
        self._descriptor = -1

    def _is_free(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return not is_being_written(self._manifest)

    def _forget_uploaded(self) -> None:
        """Take journalled shards that are gone out of the manifest here: they were uploaded, the store lists them."""
        if not self._manifest.exists():
            return
        manifest = read_manifest(self._manifest)
        gone = {entry.file for entry in manifest.shards if not (self.folder / entry.file).exists()}
        if not gone:
            return
        lines = self._manifest.read_bytes()[: manifest.whole_bytes].splitlines(keepends=True)
        partial = self._manifest.with_name(self._manifest.name + ".incomplete")
        partial.write_bytes(b"".join(line for line in lines if json.loads(line).get("file") not in gone))
        os.replace(partial, self._manifest)
