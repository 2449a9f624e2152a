"""What a rerun does to a folder before it writes: it brings its own files to the state after the last finished shard.

It drops incomplete files, adopts shards that were renamed but not journalled, and mends a torn last manifest line. It
touches nothing but the files of its own share (``shard_share``): other processes may be writing theirs.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from .errors import KitError
from .shard_entry import ShardEntry
from .shard_file import ShardFile, sync_folder
from .shard_folder import orphans, read_sound_manifests, require_header, require_no_other_split
from .shard_format import INCOMPLETE_SUFFIX, ShardsHeader, file_checksum
from .shard_journal import Journal
from .shard_manifest import Manifest, read_manifest
from .shard_share import Share


@dataclass(slots=True)
class Recovered:
    """What is in a folder once it is mended."""

    shards: list[ShardEntry] = field(default_factory=list)
    """This share's finished shards, those adopted last."""
    other_ids: set[str] = field(default_factory=set)
    """Ids in other writers' shards."""
    notes: list[str] = field(default_factory=list)
    """What cost rows that a run may have reported, a line each."""

    def repeated(self, ids: Collection[str]) -> int:
        """How many of these ids are in shards already."""
        own = {row_id for entry in self.shards for row_id in entry.ids}
        return len((own | self.other_ids).intersection(ids))


def recover(folder: Path, header: ShardsHeader, share: Share, journal: Journal, *, wait_s: float) -> Recovered:
    """Mend this share's files; its journal is locked.

    Args:
        folder: the shards folder.
        header: of the rows to come.
        share: what this process takes.
        journal: of the share's manifest, which gets the lines that are missing.
        wait_s: how long to wait for writers of another split to end.

    Raises:
        KitError: shards of another header, a lost manifest, a damaged shard, or writers of another split.
        OSError: the disk is full.
    """
    own = read_manifest(folder / share.manifest_name)
    require_header(folder, own, share)
    if own.header is not None and own.header != header:
        if own.shards or orphans(os.listdir(folder), own, share):
            own.header.require_compatible(header, f"cannot add to {folder}")
        else:  # left by a start that failed: begin anew
            own = Manifest(own.name)
    journal.start_after(own.whole_bytes)
    if own.header is None:
        journal.append_header(header)
    if own.world_size != share.world_size > 1:
        journal.append_split(share.world_size)
    manifests = read_sound_manifests(folder, share)
    require_no_other_split(folder, manifests, share, wait_s=wait_s)
    own = manifests.of(own.name)
    names = os.listdir(folder)
    for name in names:
        final_name = name.removesuffix(INCOMPLETE_SUFFIX)
        if final_name != name and share.shard_index(final_name) is not None:
            (folder / name).unlink()
    found = Recovered(shards=list(own.shards))
    found.other_ids = {row for part in manifests.parts if part is not own for entry in part.shards for row in entry.ids}
    for name in orphans(names, own, share):
        _adopt(folder / name, header, journal, found)
    sync_folder(folder)
    return found


def _adopt(path: Path, header: ShardsHeader, journal: Journal, found: Recovered) -> None:
    """Journal a shard that was renamed, hence complete and durable, when the run was killed.

    While this rank was away, a run of another split may have captured its rows again: then it is dropped.
    """
    shard = ShardFile(path)
    shard.header.require_compatible(header, f"shard {path}")
    try:
        rows = shard.sound_rows()
    except KitError as error:
        raise KitError(f"{error}; a killed run left it: delete it and run again, its rows are captured anew") from error
    ids, lengths = [row.id for row in rows], [len(row.input_ids) for row in rows]
    num_repeated = found.repeated(ids)
    if num_repeated:
        path.unlink()
        found.notes.append(
            f"{path.name} was dropped: a killed run had not journalled it, and {num_repeated} of its {len(ids)} "
            "rows are in other shards by now"
        )
        return
    entry = ShardEntry(
        file=path.name,
        rows=len(ids),
        tokens=sum(lengths),
        lengths=lengths,
        ids=ids,
        checksum=file_checksum(header.checksum, path),
        bytes=shard.num_bytes,
    )
    journal.append_shard(entry)
    found.shards.append(entry)
