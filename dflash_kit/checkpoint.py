"""The drafter checkpoint on disk: ``config.json``, ``model.safetensors`` and ``provenance.json``, nothing else.

The layout is the published DFlash one, so that vLLM, SGLang, transformers and the reference code read it.
Trainer state lives beside a checkpoint, never inside it.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import KitError, require_dir_empty
from .finite import is_finite
from .foreign_config import own_name

CONFIG_NAME = "config.json"
TENSORS_NAME = "model.safetensors"
PROVENANCE_NAME = "provenance.json"


def write_checkpoint(
    folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], provenance: Mapping[str, Any]
) -> Path:
    """Write a checkpoint beside its place and rename it, so that it is there whole or not at all.

    A folder that is a link stays one: the checkpoint goes where it leads.

    Raises:
        KitError: the folder is not empty, or the disk is full (what was begun is removed).
    """
    folder = follow_link(folder)
    require_dir_empty(folder, "checkpoint folder")
    begun = folder.with_name(folder.name + ".incomplete")
    shutil.rmtree(begun, ignore_errors=True)
    try:
        begun.mkdir(parents=True)
        save_file(
            {k: v.detach().cpu().contiguous() for k, v in tensors.items()}, begun / TENSORS_NAME, {"format": "pt"}
        )
        (begun / CONFIG_NAME).write_text(json.dumps(dict(config), indent=2) + "\n")
        (begun / PROVENANCE_NAME).write_text(json.dumps(dict(provenance), indent=2, default=str) + "\n")
        _sync(begun)
        if folder.exists():
            folder.rmdir()
        os.replace(begun, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(begun, ignore_errors=True)
        raise KitError(f"checkpoint {folder} cannot be written: {error}; free some space and run again") from error
    return folder


def follow_link(folder: str | Path) -> Path:
    """Where a folder that is a symbolic link leads, whether or not it is there yet; any other path as it is.

    Raises:
        KitError: the link leads to itself.
    """
    folder = Path(folder)
    if not folder.is_symlink():
        return folder
    real = Path(os.path.realpath(folder))
    if real.is_symlink():
        raise KitError(f"{folder} is a link that leads to itself; name a folder")
    return real


def read_config(folder: str | Path) -> dict[str, Any]:
    """The checkpoint's ``config.json``; ``KitError`` where it is missing or malformed."""
    raw = _read_object(Path(folder) / CONFIG_NAME)
    if raw is None:
        raise KitError(f"checkpoint {folder} has no {CONFIG_NAME}; give the folder that training wrote")
    return raw


def read_provenance(folder: str | Path) -> dict[str, Any]:
    """The checkpoint's ``provenance.json``, empty for a checkpoint of another program, which has none.

    Raises:
        KitError: the file is malformed; without it nothing tells whether a target fits.
    """
    provenance = _read_object(Path(folder) / PROVENANCE_NAME) or {}
    for key in ("shards_header", "metrics", "fingerprint"):
        if not isinstance(provenance.get(key), dict | None):
            raise KitError(f"{Path(folder) / PROVENANCE_NAME}: {key} is {provenance[key]!r}; a JSON object is needed")
    return provenance


def _read_object(file: Path) -> dict[str, Any] | None:
    """The JSON object of a file, None where there is no such file."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise KitError(f"{file} cannot be read: {error}; restore it, or take another checkpoint") from error
    if not isinstance(raw, dict):
        raise KitError(f"{file} holds a {type(raw).__name__}; a JSON object is needed")
    return raw


def read_tensors(folder: str | Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of a checkpoint, with names and shapes exactly as expected (also from several safetensors files).

    Copies of the target's embedding and head, as other trainers write them, are left out.

    Args:
        expected: the drafter's own state dict; only names and shapes are used.

    Raises:
        KitError: names the first missing, unknown, misshapen or non-finite tensors.
    """
    files = _tensor_files(Path(folder))
    found: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(str(file), framework="pt") as tensors:
                names = {name: own_name(name) for name in tensors.keys()}  # noqa: SIM118
                found.update({own: tensors.get_tensor(name) for name, own in names.items() if own is not None})
        except (SafetensorError, OSError) as error:
            raise KitError(f"{file} cannot be read as safetensors: {error}") from error
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unknown:
        raise KitError(
            f"checkpoint {folder} does not match its config: {len(missing)} tensors missing {missing[:3]}, "
            f"{len(unknown)} unknown {unknown[:3]}"
        )
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape:
            raise KitError(
                f"checkpoint {folder}: {name} has shape {tuple(tensor.shape)}, its config asks for {tuple(expected[name].shape)}"
            )
        if not is_finite(tensor):
            raise KitError(
                f"checkpoint {folder}: {name} holds NaN or infinity, so its drafts mean nothing; take an earlier checkpoint"
            )
    return found


def borrowed_tensors(folder: str | Path) -> list[str]:
    """Names of a checkpoint's tensors that are not read, since a drafter borrows them from its target."""
    found = []
    for file in _tensor_files(Path(folder)):
        try:
            with safe_open(str(file), framework="pt") as tensors:
                found += [name for name in tensors.keys() if own_name(name) is None]  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise KitError(f"{file} cannot be read as safetensors: {error}") from error
    return sorted(found)


def weights_sha256(folder: str | Path) -> str:
    """SHA-256 of a checkpoint's weight files, in the order of their names (as ``cat FILES | sha256sum`` says).

    Raises:
        KitError: no safetensors there, or a file that cannot be read.
    """
    hasher = hashlib.sha256()
    for file in _tensor_files(Path(folder)):
        try:
            with file.open("rb") as handle:
                while chunk := handle.read(1 << 22):
                    hasher.update(chunk)
        except OSError as error:
            raise KitError(f"{file} cannot be read: {error}") from error
    return hasher.hexdigest()


def _tensor_files(folder: Path) -> list[Path]:
    """The one weight file, or those that the index of a sharded checkpoint names."""
    if (folder / TENSORS_NAME).exists():
        return [folder / TENSORS_NAME]
    file = folder / f"{TENSORS_NAME}.index.json"
    index = _read_object(file)
    if index is None:
        raise KitError(f"checkpoint {folder} has no {TENSORS_NAME}; only safetensors are read")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise KitError(f"{file} has no weight_map of tensor names to file names; fetch the checkpoint again")
    return [folder / name for name in sorted(set(weight_map.values()))]


def _sync(folder: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
