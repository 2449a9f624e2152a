"""The checkpoints that an evaluation is asked for: folders or hub ids, each under a name of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from dflash_kit.checkpoint import PROVENANCE_NAME
from dflash_kit.errors import KitError
from dflash_kit.hub import checkpoint_folder

from .settings import split_list


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedCheckpoint:
    """One of the checkpoints."""

    name: str
    """Short and unique among them; the folder of its report."""
    given: str
    """As the user named it."""
    folder: Path
    """Where its files are."""


def find_checkpoints(text: str) -> list[NamedCheckpoint]:
    """Folders and hub ids with commas between them; a folder whose name has a comma stands alone.

    Raises:
        KitError: none, one that is neither a folder nor a hub id, or one twice.
    """
    given = [text] if Path(text).is_dir() else split_list(text)
    if not given:
        raise KitError(f"ckpt is {text!r}; name a checkpoint folder or hub id")
    folders = [checkpoint_folder(name, "ckpt", more_files=(PROVENANCE_NAME,)) for name in given]
    seen: dict[Path, str] = {}
    for name, folder in zip(given, folders, strict=True):
        before = seen.setdefault(folder.resolve(), name)
        if before is not name:
            raise KitError(f"ckpt names the same checkpoint twice: {before} and {name}; leave one out")
    names = unique_names([_parts(name, folder) for name, folder in zip(given, folders, strict=True)])
    return [
        NamedCheckpoint(name=name, given=one, folder=folder)
        for name, one, folder in zip(names, given, folders, strict=True)
    ]


def unique_names(paths: Sequence[tuple[str, ...]]) -> list[str]:
    """The last part of each path, with as many parts before it as tell it from the others.

    Args:
        paths: parts of distinct paths.
    """
    names = []
    for path in paths:
        length = 1
        while length < len(path) and sum(other[-length:] == path[-length:] for other in paths) > 1:
            length += 1
        names.append("-".join(path[-length:]))
    taken: dict[str, int] = {}
    for i, name in enumerate(names):  # a-b/c and a/b-c come out alike
        taken[name] = taken.get(name, 0) + 1
        if taken[name] > 1:
            names[i] = f"{name}-{taken[name]}"
    return names


def _parts(given: str, folder: Path) -> tuple[str, ...]:
    """Words of a hub id, or of the folder's whole path."""
    path = PurePath(given) if not Path(given).is_dir() else folder.absolute()
    return tuple(part for part in path.parts if part not in (path.anchor, "..", "."))
