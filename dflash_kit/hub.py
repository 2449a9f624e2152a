"""Drafter checkpoints by name: a folder, or a hub id whose published files are fetched into the hub's own cache."""

from pathlib import Path

from .errors import KitError
from .hub_connection import is_path, missing_folder, why_missing

HUB_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json")
"""All that is fetched of a hub id; the index names the files of weights that are split."""


def checkpoint_folder(name: str | Path, what: str = "checkpoint", more_files: tuple[str, ...] = ()) -> Path:
    """The folder itself, or the files of a hub id in the hub's cache.

    Args:
        name: folder or ``organisation/name``.
        what: what it is called in messages.
        more_files: names of files to fetch beside them, where they are.

    Raises:
        KitError: neither a folder nor a hub id, or one that cannot be fetched.
    """
    text = str(name)
    if text and Path(text).is_dir():
        return Path(text)
    if text.count("/") != 1 or is_path(text) or Path(text).exists():
        why = "which is no folder" if text and Path(text).exists() else missing_folder(text)
        raise KitError(f"{what} is {text!r}, {why}; it must be a folder with config.json and safetensors, or a hub id")
    reason = why_missing(text)
    if reason is not None:
        raise KitError(f"{what} {text!r} is no folder here and cannot be fetched from the hub: {reason}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(text, allow_patterns=[*HUB_FILES, *more_files]))
    except Exception as error:  # the hub's client raises its HTTP library's errors, which differ by version
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise KitError(
            f"{what} {text!r} is no folder here and cannot be fetched from the hub: {missing_folder(text)}; on the hub: {first}"
        ) from error
