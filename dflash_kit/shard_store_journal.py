"""The journal of a rank whose shards go to an object store: its manifest, put anew as a whole with each line.

Objects cannot be appended to. One small object a shard would make readers ask for 100,000 objects; a whole manifest is
one object a writer, in the format of a shards folder, and even at the end of 100,000 shards of 256 MiB by one writer it has
45 MB, a fifth of a shard.

Trusted: that no two processes at work have the same rank, and that processes of two splits (``world_size``) do not work at
once. Checked: each start changes the manifest, and whoever finds it changed since it last wrote stops before it writes. So
of two processes of one rank the later goes on.
"""

import os
import secrets
import socket
from typing import Any

from .errors import KitError
from .shard_folder import REPETITION_HELP
from .shard_format import ShardsHeader
from .shard_journal import encoded
from .shard_manifest import Manifest, Manifests
from .shard_share import Share
from .shard_store import ShardStore, read_store_manifests

_TAIL_BYTES = 4096


def inspect_store(store: ShardStore, header: ShardsHeader, share: Share) -> Manifests:
    """What a store holds, if this share's process can write into it with this header; nothing is changed.

    Raises:
        KitError: objects that are no shards, other shards, an id in two shards, or a journalled shard that is missing.
    """
    sizes = store.sizes()
    if not sizes:
        return Manifests()
    manifests = read_store_manifests(store, list(sizes))
    own = manifests.of(share.manifest_name)
    for part in manifests.parts:  # a header without shards is what a start that failed has left; it binds nobody
        if part.header is not None and part.shards:
            part.header.require_compatible(header, f"cannot add to {store.url}")
    repetition = manifests.repetition()
    if repetition is not None:
        raise KitError(f"{store.url}: {repetition}; {REPETITION_HELP}")
    _require_shards(store, manifests, own, sizes)
    return manifests


def _require_shards(store: ShardStore, manifests: Manifests, own: Manifest, sizes: dict[str, int]) -> None:
    """Refuse a store in which a journalled shard is missing, or one of our own is cut short."""
    entries = [(entry, part is own) for part in manifests.parts for entry in part.shards]
    if any(entry.file not in sizes for entry, _ in entries):
        sizes = store.sizes()  # others may have uploaded between the listing and the reading of manifests
    for entry, is_own in entries:
        if entry.file not in sizes or (is_own and sizes[entry.file] != entry.bytes):
            raise KitError(
                f"shard {store.url}/{entry.file} is missing or cut short; restore it or extract to another URL"
            )


class StoreJournal:
    """Adds lines to one rank's manifest in a store, each durable when the call returns.

    Args:
        store: the run's objects.
        header: what the shards are.
        share: whose manifest.

    Raises:
        KitError: see ``inspect_store``, or the store cannot be written to.
    """

    def __init__(self, store: ShardStore, header: ShardsHeader, share: Share) -> None:
        self.store = store
        self.share = share
        manifests = inspect_store(store, header, share)
        own = manifests.of(share.manifest_name)
        self.done_ids = {row_id for part in manifests.parts for entry in part.shards for row_id in entry.ids}
        """Ids in journalled shards, those of other writers (as they were at the start) included."""
        self.num_bytes = sum(entry.bytes for entry in own.shards)
        """Size of this rank's journalled shards."""
        self._next_index = 1 + max((share.shard_index(entry.file) or 0 for entry in own.shards), default=-1)
        self._text = self._begin(own, header)

    def next_shard_name(self) -> str:
        """Name of the next shard: whatever an upload that was not journalled has left there, it is written over."""
        return self.share.shard_name(self._next_index)

    def append_shard(self, line: dict[str, Any]) -> None:
        """Journal an uploaded shard: the writer's own line, with the object's name."""
        self.append(line)
        self.done_ids.update(line["ids"])
        self.num_bytes += line["bytes"]
        self._next_index += 1

    def append(self, line: dict[str, Any]) -> None:
        """Journal anything else."""
        self.require_unchanged()
        text = self._text + encoded(line)
        self.store.put(self.share.manifest_name, text)
        self._text = text

    def has(self, line: dict[str, Any]) -> bool:
        """Whether the manifest has this line."""
        return (b"\n" + encoded(line)) in self._text

    def require_unchanged(self) -> None:
        """Refuse to go on when another process has written this manifest."""
        size, tail = self.store.tail(self.share.manifest_name, _TAIL_BYTES)
        if (size, tail) != (len(self._text), self._text[-_TAIL_BYTES:]):
            raise KitError(
                f"another process has written {self.store.url}/{self.share.manifest_name} since this one began as rank "
                f"{self.share.rank} of {self.share.world_size}; give each process a rank of its own"
            )

    def _begin(self, own: Manifest, header: ShardsHeader) -> bytes:
        """Put the manifest with a line that no other start has written."""
        text = encoded({"kind": "header", **header.to_dict()})
        if own.shards:
            text = self.store.read([own.name])[0][: own.whole_bytes]
        writer = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(4)}"
        text += encoded({"kind": "split", "world_size": self.share.world_size, "writer": writer})
        self.store.put(self.share.manifest_name, text)
        return text
