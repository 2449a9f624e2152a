"""What an evaluation starts from: the checkpoint, the target it belongs to, and whether the two fit."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_kit.checkpoint import borrowed_tensors, read_config, read_provenance
from dflash_kit.drafter_config import DrafterConfig, require_reserved
from dflash_kit.errors import KitError
from dflash_kit.foreign_config import says_target_layers, verifier_name
from dflash_kit.target import TargetSpec, load_config

from .settings import EvalConfig
from .target_masks import attention_kinds


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """A checkpoint and its target, checked against each other; no weights are read yet."""

    checkpoint: str
    """What reports call the checkpoint."""
    target: str
    """Folder or hub id."""
    spec: TargetSpec
    drafter_config: DrafterConfig
    checkpoint_hash: str
    """Of the checkpoint's config and weights."""
    warnings: tuple[str, ...]
    """What does not stop an evaluation but explains bad acceptance."""


def read_inputs(config: EvalConfig, shown: str | None = None) -> Inputs:
    """Find the target and check that the checkpoint fits it.

    Args:
        config: its checkpoint is a folder.
        shown: what reports call the checkpoint; None: by its folder.

    Raises:
        KitError: no target is known, or shape, taps, vocabulary or tokenizer differ (both values are named).
    """
    raw = read_config(config.ckpt)
    drafter_config = DrafterConfig.from_dict(raw)
    provenance = read_provenance(config.ckpt)
    target = _target_name(config, provenance, verifier_name(raw))
    spec = _read_target(config, target)
    if config.replay is None:
        attention_kinds(load_config(target, config.target_revision).get_text_config())
    header = provenance.get("shards_header") or {}
    if not says_target_layers(raw):
        drafter_config = replace(
            drafter_config, num_target_layers=max(spec.num_layers, drafter_config.num_target_layers)
        )
    _require_fit(config.ckpt, target, drafter_config, spec, header)
    return Inputs(
        checkpoint=config.ckpt if shown is None else shown,
        target=target,
        spec=spec,
        drafter_config=drafter_config,
        checkpoint_hash=_checkpoint_hash(Path(config.ckpt)),
        warnings=(*_warnings(spec, header), *_unread(config.ckpt)),
    )


def _target_name(config: EvalConfig, provenance: dict[str, Any], verifier: str | None) -> str:
    trained_for = provenance.get("target") or (provenance.get("shards_header") or {}).get("target_name")
    named = config.target or trained_for or verifier
    if not named:
        raise KitError(f"checkpoint {config.ckpt} does not say which target it was trained for; name it with --target")
    return str(named)


def _read_target(config: EvalConfig, target: str) -> TargetSpec:
    try:
        return TargetSpec.from_pretrained(target, config.target_revision)
    except KitError as error:
        if config.target is None:
            raise KitError(f"{error} (the checkpoint names this one; --target names another place)") from error
        raise


def _require_fit(ckpt: str, target: str, drafter: DrafterConfig, spec: TargetSpec, header: dict[str, Any]) -> None:
    compared: list[tuple[str, Any, Any]] = [
        ("hidden size", drafter.hidden_size, spec.hidden_size),
        ("number of target layers", drafter.num_target_layers, spec.num_layers),
        ("vocabulary size", drafter.vocab_size, spec.vocab_size),
    ]
    if header.get("tokenizer_hash") is not None:
        compared.append(("tokenizer hash", header["tokenizer_hash"], spec.tokenizer_hash))
    for what, ours, theirs in compared:
        if ours != theirs:
            raise KitError(
                f"checkpoint {ckpt} does not fit target {target}: {what} is {ours} in the checkpoint and {theirs} in "
                "the target; give the target that it was trained for with --target"
            )
    try:
        require_reserved(drafter.mask_token_id, spec)
    except KitError as error:
        raise KitError(f"checkpoint {ckpt} does not fit target {target}: {error}") from error
    last = max(drafter.target_layer_ids)
    if last >= spec.num_layers:
        raise KitError(
            f"checkpoint {ckpt} taps layer {last} but target {target} has layers 0..{spec.num_layers - 1} only"
        )


def _warnings(spec: TargetSpec, header: dict[str, Any]) -> list[str]:
    found = []
    for name, what in (
        ("config_hash", "configuration"),
        ("template_hash", "chat template"),
        ("weights_hash", "weights"),
    ):
        if None not in (header.get(name), getattr(spec, name)) and header[name] != getattr(spec, name):
            found.append(
                f"the target's {what} is not the one the drafter was trained with "
                f"({getattr(spec, name)} here, {header[name]} then); acceptance may suffer"
            )
    return found


def _unread(ckpt: str) -> list[str]:
    names = borrowed_tensors(ckpt)
    if not names:
        return []
    return [f"the checkpoint holds its own {', '.join(names)}; the target's are used, of which they should be copies"]


def _checkpoint_hash(folder: Path) -> str:
    """Hash of config and weights, so that a report never mixes two checkpoints of one name."""
    hasher = hashlib.blake2b(digest_size=16)
    for file in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        with file.open("rb") as handle:
            while chunk := handle.read(1 << 22):
                hasher.update(chunk)
    return hasher.hexdigest()
