"""What a folder holds, and whether a writer may begin in it; nothing here changes what is there."""

import os
import time
from pathlib import Path

from .errors import KitError
from .shard_format import ShardsHeader
from .shard_journal import is_being_written
from .shard_manifest import Manifest, Manifests, read_headers, read_manifest, read_manifests, require_agreement
from .shard_share import Share, manifest_names, manifest_of_shard
from .spool import read_consumed


def inspect_folder(folder: Path, header: ShardsHeader, share: Share) -> Manifests:
    """What a folder holds, if this share's process can write into it with this header; nothing is changed.

    Returns:
        The manifests of all writers; none for a new or empty folder.

    Raises:
        KitError: a file, a folder with other things in it, other shards, an id in two shards, or a journalled shard
            that is missing.
    """
    return read_sound_manifests(folder, share) if require_same_kind(folder, header) else Manifests()


def read_sound_manifests(folder: Path, share: Share) -> Manifests:
    """The manifests of a shards folder, checked as ``inspect_folder`` does; their headers agree with each other."""
    manifests = read_manifests(folder)
    own = manifests.of(share.manifest_name)
    _require_agreement_at_work(folder, manifests)
    require_header(folder, own, share)
    repetition = manifests.repetition()
    if repetition is not None:
        raise KitError(f"{folder}: {repetition}; {REPETITION_HELP}")
    _require_shards(folder, manifests, own)
    return manifests


def _require_agreement_at_work(folder: Path, manifests: Manifests) -> None:
    """Refuse writers of two kinds that have just begun, none of which has a shard yet."""
    headers = [(part.name, part.header) for part in manifests.parts]
    known = [header for _, header in headers if header is not None]
    if any(header.difference(known[0]) is not None for header in known):  # then look at the locks, too
        parts = [part for part in manifests.parts if part.shards or is_being_written(folder / part.name)]
        require_agreement(folder, [(part.name, part.header) for part in parts])


REPETITION_HELP = (
    "processes of two splits (--world_size) wrote at once: move the manifest and the shards of one of the two writers "
    "away and run the extraction again"
)


def require_same_kind(folder: Path, header: ShardsHeader) -> bool:
    """Refuse a folder that cannot take shards of this header; of the manifests only the first lines are read.

    The header of a start that failed binds nobody: of a manifest that lists no shards and that nobody writes.

    Returns:
        Whether it is a shards folder already; False: it is new or empty.

    Raises:
        KitError: a file, a folder with other things in it, or shards of another header.
    """
    if folder.exists() and not folder.is_dir():
        raise KitError(f"{folder} is a file; name a folder for the shards")
    names = os.listdir(folder) if folder.is_dir() else []
    if not names:
        return False
    manifests = manifest_names(names)
    if not manifests:
        raise KitError(
            f"{folder} is not empty and not a shards folder; nothing was written: name a new or empty folder"
        )
    found = [
        (name, theirs)
        for name, theirs in read_headers(folder, manifests)
        if theirs is not None and (theirs.difference(header) is None or not _is_vacant(folder, name, names))
    ]
    require_agreement(folder, list(found))
    if found:
        found[0][1].require_compatible(header, f"cannot add to {folder}")
    return True


def _is_vacant(folder: Path, name: str, names: list[str]) -> bool:
    """Whether a manifest holds nothing but what a start that failed has left: a header, and no shards."""
    if any(manifest_of_shard(file) == name for file in names) or read_manifest(folder / name).shards:
        return False
    return not is_being_written(folder / name)


def require_header(folder: Path, own: Manifest, share: Share) -> None:
    """Refuse shards whose manifest is lost: they would be taken for those of a run that never began."""
    if own.header is None and orphans(os.listdir(folder), own, share):
        raise KitError(
            f"{folder} holds shards of {own.name} but that has no header; restore it, move its shards away, "
            "or name a new folder"
        )


def require_no_other_split(folder: Path, manifests: Manifests, share: Share, *, wait_s: float) -> None:
    """Refuse to write beside processes that split the samples otherwise: they would capture the same ones.

    Args:
        folder: the shards folder, in which this share's own manifest is locked and names its split.
        manifests: read after that; so of two processes that begin at once one sees the other.
        share: what this process takes.
        wait_s: how long to wait for such a process to end; a killed run's engine may take a moment.

    Raises:
        KitError: such a process is at work.
    """
    deadline_s = time.monotonic() + wait_s
    for part in manifests.parts:
        if part.world_size in (None, share.world_size):
            continue
        while is_being_written(folder / part.name):
            if time.monotonic() >= deadline_s:
                raise KitError(
                    f"another process is writing {folder / part.name} as one of {part.world_size}, this one is one of "
                    f"{share.world_size}; let it end first, or give all processes the same --world_size"
                )
            time.sleep(0.1)


def orphans(names: list[str], own: Manifest, share: Share) -> list[str]:
    """Shards of this share with their final name that its manifest does not list, out of the names in a folder."""
    listed = {entry.file for entry in own.shards}
    return sorted(name for name in names if share.shard_index(name) is not None and name not in listed)


def make_folder(folder: Path) -> None:
    """Create a folder with its parents, or say why that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KitError(f"folder {folder} cannot be made: {error.strerror}") from error


def _require_shards(folder: Path, manifests: Manifests, own: Manifest) -> None:
    """Refuse a folder in which a journalled shard is missing, or one of our own is cut short.

    Sizes of other writers' shards are theirs to check: a thousand writers that ask for each file's size would keep
    a shared file system busy.
    """
    present = set(os.listdir(folder))
    for part in manifests.parts:
        for entry in part.shards:
            if entry.file in manifests.consumed or (part is not own and entry.file in present):
                continue
            # A network file system may list a file late that can be opened already.
            path = folder / entry.file
            if not path.exists() or (part is own and path.stat().st_size != entry.bytes):
                if entry.file in read_consumed(folder):  # by a trainer that is at work
                    continue
                raise KitError(f"shard {path} is missing or cut short; restore it or extract into a new folder")
