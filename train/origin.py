"""The drafter that a run starts from (``--init``): a published checkpoint, or one of this trainer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dflash_kit.checkpoint import read_config, read_provenance, weights_sha256
from dflash_kit.drafter import Drafter
from dflash_kit.drafter_config import FULL, SLIDING, DrafterConfig
from dflash_kit.errors import KitError
from dflash_kit.foreign_config import says_target_layers
from dflash_kit.hub import checkpoint_folder
from dflash_kit.shards import ShardsHeader
from dflash_kit.target import TargetSpec

from .settings import DrafterSettings, TrainConfig
from .state import RunFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """A drafter to start from."""

    name: str
    """Folder or hub id, as it was given."""
    config: DrafterConfig
    weights_sha256: str
    folder: Path | None
    """Where it lies; None where a resumed run does not need it any more."""

    def identity(self) -> dict[str, str]:
        """What provenance and fingerprint record."""
        return {"name": self.name, "weights_sha256": self.weights_sha256}

    def weights(self) -> dict[str, Tensor]:
        """Its tensors as stored, on the CPU.

        Raises:
            KitError: a tensor is missing, unknown or misshapen.
        """
        assert self.folder is not None, "a resumed run has its weights in its state"
        return dict(Drafter.from_pretrained(self.folder).state_dict())


def find_origin(config: TrainConfig, run: RunFolder, spec: TargetSpec) -> Origin | None:
    """The drafter that ``--init`` names, None where there is none.

    Once a run has a saved state, what it recorded is enough: a hub id is not looked up again, and a folder may be gone.
    A checkpoint of speculators does not say how many layers its target has: those of this target, then.

    Raises:
        KitError: neither a readable checkpoint folder nor a hub id.
    """
    if config.init is None:
        return None
    recorded = run.recorded()
    before = recorded.get("init") or {}
    if before.get("name") == config.init and run.has_weights() and not Path(config.init).is_dir():
        return Origin(
            name=config.init,
            config=DrafterConfig.from_dict(recorded["drafter_config"]),
            weights_sha256=before["weights_sha256"],
            folder=None,
        )
    folder = checkpoint_folder(config.init, "init")
    raw = read_config(folder)
    drafter = DrafterConfig.from_dict(raw)
    if not says_target_layers(raw):
        drafter = replace(drafter, num_target_layers=max(spec.num_layers, drafter.num_target_layers))
    return Origin(
        name=config.init,
        config=drafter,
        weights_sha256=weights_sha256(folder),
        folder=folder,
    )


def require_settings(origin: Origin, settings: DrafterSettings) -> None:
    """Refuse shape settings that were given and that differ from what the drafter has.

    Raises:
        KitError: names each of them, with both values.
    """
    has = shape_settings(origin.config)
    odd = [f"drafter.{k} is {v} but it has {has[k]}" for k, v in settings.given().items() if v != has[k]]
    if odd:
        raise KitError(f"init {origin.name} keeps its shape: {'; '.join(odd)}; leave that out, or train without init")


def require_fit(origin: Origin, header: ShardsHeader, spec: TargetSpec) -> None:
    """Refuse a drafter of another target or of other taps than the shards hold.

    Raises:
        KitError: names each difference, with both values.
    """
    drafter = origin.config
    pairs: dict[str, tuple[Any, Any]] = {
        "target_layer_ids": (list(drafter.target_layer_ids), list(header.target_layer_ids)),
        "hidden_size": (drafter.hidden_size, header.hidden_size),
        "vocab_size": (drafter.vocab_size, header.vocab_size),
        "num_target_layers": (drafter.num_target_layers, spec.num_layers),
    }
    # Drafters of this trainer also say which target they were trained on.
    theirs = {} if origin.folder is None else read_provenance(origin.folder).get("shards_header") or {}
    for name in ("config_hash", "tokenizer_hash"):
        if theirs.get(name) is not None:
            pairs[f"target's {name}"] = (theirs[name], getattr(header, name))
    odd = [
        f"{name} is {mine} there but {other} in the shards" for name, (mine, other) in pairs.items() if mine != other
    ]
    if odd:
        raise KitError(
            f"init {origin.name} does not fit the shards of {header.target_name}: {'; '.join(odd)}; "
            "extract shards with its target and taps, or name another drafter"
        )


def shape_settings(drafter: DrafterConfig) -> dict[str, Any]:
    """What ``DrafterSettings`` would have to say to get this drafter.

    None stands for a setting that nothing in the drafter follows, a text for what no setting can say.
    """
    sliding = [i for i, kind in enumerate(drafter.layer_types) if kind == SLIDING]
    leading = sliding == list(range(len(sliding)))
    return {
        "num_hidden_layers": drafter.num_hidden_layers,
        "num_sliding_layers": len(sliding) if leading else f"sliding layers {sliding}",
        "sliding_window": drafter.sliding_window,
        "sliding_causal": _flag_of(drafter, SLIDING),
        "full_causal": _flag_of(drafter, FULL),
        "block_size": drafter.block_size,
        "intermediate_size": drafter.intermediate_size,
        "mask_token_id": drafter.mask_token_id,
    }


def _flag_of(drafter: DrafterConfig, kind: str) -> bool | str | None:
    flags: Sequence[bool] = [
        causal for each, causal in zip(drafter.layer_types, drafter.layer_causal, strict=True) if each == kind
    ]
    if len(set(flags)) > 1:
        return f"layer by layer {flags}"
    return flags[0] if flags else None
