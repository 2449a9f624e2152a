"""The drafter's configuration, and its published ``config.json`` layout (old and new keys)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import KitError
from .foreign_config import published_layout
from .layer_kinds import FULL, SLIDING, WHAT, convention, read_layer_causal, read_layer_types
from .raw_config import RawConfig
from .taps import tap_layer_ids
from .target import TargetSpec

MAX_SIZE, MAX_LAYERS = 1 << 20, 1024
"""Far above any drafter: beyond them a damaged file would ask for all memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """Shape and conventions of a DFlash drafter; everything a checkpoint must say explicitly."""

    hidden_size: int
    """The target's hidden size D."""
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    """Base of the plain, full-dimension rotary embedding; the target's, without any scaling."""
    max_position_embeddings: int
    block_size: int
    """Anchor plus masked slots; ``block_size - 1`` tokens are drafted."""
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    """0-based target layers whose output is tapped."""
    num_target_layers: int
    layer_types: tuple[str, ...]
    """One of ``full_attention`` or ``sliding_attention`` for each drafter layer."""
    layer_causal: tuple[bool, ...]
    """For each layer, whether a slot sees only itself and earlier slots of its block."""
    sliding_window: int | None = None
    """Visible when query position - key position < sliding_window, in sliding layers."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def num_taps(self) -> int:
        return len(self.target_layer_ids)

    @property
    def num_draft_tokens(self) -> int:
        return self.block_size - 1

    @classmethod
    def from_target(
        cls,
        spec: TargetSpec,
        *,
        mask_token_id: int,
        num_hidden_layers: int = 5,
        num_sliding_layers: int = 0,
        sliding_window: int | None = None,
        sliding_causal: bool = True,
        full_causal: bool = False,
        block_size: int = 16,
        num_taps: int = 5,
        target_layer_ids: Sequence[int] | None = None,
        intermediate_size: int | None = None,
    ) -> "DrafterConfig":
        """A drafter for a target that only its configuration is known of. Sliding layers come first.

        The target's partial rotary factor, M-RoPE and RoPE scaling are left behind on purpose.

        Raises:
            KitError: taps or layers that do not fit.
        """
        if not 0 <= num_sliding_layers <= num_hidden_layers:
            raise KitError(
                f"num_sliding_layers is {num_sliding_layers}; allowed is 0..{num_hidden_layers} (the drafter's layers)"
            )
        taps = tap_layer_ids(spec.num_layers, num_taps) if target_layer_ids is None else target_layer_ids
        kinds = (SLIDING,) * num_sliding_layers + (FULL,) * (num_hidden_layers - num_sliding_layers)
        require_reserved(mask_token_id, spec)
        return cls(
            hidden_size=spec.hidden_size,
            intermediate_size=intermediate_size or spec.intermediate_size,
            num_attention_heads=spec.num_attention_heads,
            num_key_value_heads=spec.num_key_value_heads,
            head_dim=spec.head_dim,
            vocab_size=spec.vocab_size,
            rms_norm_eps=1e-6,
            rope_theta=spec.rope_theta,
            max_position_embeddings=spec.max_position_embeddings,
            block_size=block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=tuple(taps),
            num_target_layers=spec.num_layers,
            layer_types=kinds,
            layer_causal=tuple(sliding_causal if kind == SLIDING else full_causal for kind in kinds),
            sliding_window=sliding_window if num_sliding_layers else None,
        )

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "DrafterConfig":
        """Read a published ``config.json``: ``block_size`` at the top (older) or inside ``dflash_config`` (newer).

        One of speculators is brought into that layout first; see ``foreign_config``.

        Raises:
            KitError: a missing key, a value of a wrong type or outside its range (key, value and range are named), or
                a rotary embedding that this drafter does not have.
        """
        raw = published_layout(raw)
        top = RawConfig(raw, WHAT)
        nested = top.mapping("dflash_config")
        both = RawConfig({**raw, **nested}, WHAT, "at the top level or in dflash_config")
        own_keys = ("block_size", "mask_token_id", "target_layer_ids")
        if not any(both.has(key) for key in own_keys):
            raise KitError(
                f"config.json (model_type {raw.get('model_type')}) is not a DFlash drafter's: it has none of "
                f"{', '.join(own_keys)}; give the folder that training wrote"
            )
        hidden_size, num_heads = both.whole("hidden_size", at_most=MAX_SIZE), both.whole("num_attention_heads")
        layer_types = read_layer_types(both, both.whole("num_hidden_layers", at_most=MAX_LAYERS))
        window = None
        if SLIDING in layer_types:
            window = both.whole("swa_window_size") if both.has("swa_window_size") else top.whole("sliding_window")
        return cls(
            hidden_size=hidden_size,
            intermediate_size=both.whole("intermediate_size", at_most=MAX_SIZE),
            num_attention_heads=num_heads,
            num_key_value_heads=both.whole("num_key_value_heads"),
            head_dim=top.whole("head_dim", hidden_size // num_heads, at_most=MAX_SIZE),
            vocab_size=both.whole("vocab_size"),
            rms_norm_eps=top.number("rms_norm_eps", 1e-6),
            rope_theta=_plain_rope_theta(top),
            max_position_embeddings=top.whole("max_position_embeddings", 32768),
            block_size=both.whole("block_size", at_most=MAX_SIZE),
            mask_token_id=both.whole("mask_token_id", at_least=0),
            target_layer_ids=both.items("target_layer_ids", int, "layer ids"),
            num_target_layers=both.whole("num_target_layers"),
            layer_types=layer_types,
            layer_causal=read_layer_causal(top, RawConfig(nested, WHAT), layer_types),
            sliding_window=window,
        )

    def to_dict(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """The published layout, with ``block_size`` in both places and all four sliding-window keys.

        ``is_causal`` is written only where one flag for all layers is true (vLLM lets it override every layer);
        a mix of causal and bidirectional layers is spelled out in ``dflash_config.layer_causal``.
        """
        sliding = SLIDING in self.layer_types
        dflash: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "block_size": self.block_size,
            "layer_causal": list(self.layer_causal),
            "use_swa": sliding,
        }
        if sliding:
            dflash["swa_window_size"] = self.sliding_window
        config: dict[str, Any] = {
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "model_type": "qwen3",
            "block_size": self.block_size,
            "dflash_config": dflash,
            "num_target_layers": self.num_target_layers,
            "target_hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "layer_types": list(self.layer_types),
            "sliding_window": self.sliding_window,
            "use_sliding_window": sliding,
            "max_window_layers": self.num_hidden_layers if not sliding else 0,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": False,
            "vocab_size": self.vocab_size,
            "dtype": dtype,
        }
        if len(set(self.layer_causal)) == 1 and self.layer_causal != convention(self.layer_types):
            config["is_causal"] = dflash["causal"] = self.layer_causal[0]
        return config

    def differences(self, other: "DrafterConfig") -> list[str]:
        """Names and both values of the fields that differ, for refusals."""
        return [
            f"{name}: {getattr(self, name)!r} against {getattr(other, name)!r}"
            for name in self.__dataclass_fields__
            if getattr(self, name) != getattr(other, name)
        ]


def require_reserved(mask_token_id: int, spec: TargetSpec) -> None:
    """Refuse a mask token that the target itself says or reads.

    Raises:
        KitError: it is the target's pad, bos or eos token.
    """
    if mask_token_id in (spec.pad_token_id, spec.bos_token_id, *spec.eos_token_ids):
        raise KitError(
            f"mask_token_id {mask_token_id} is the target's pad, bos or eos token; name a reserved id instead"
        )


def _plain_rope_theta(top: RawConfig) -> float:
    for values in (top.values, top.mapping("rope_scaling"), top.mapping("rope_parameters")):
        kind = values.get("rope_type", values.get("type", "default"))
        partial = values.get("partial_rotary_factor", 1.0)
        sections = values.get("mrope_section")
        if kind not in ("default", None) or partial not in (1, None) or sections:
            raise KitError(
                f"drafter config asks for rope_type={kind!r}, partial_rotary_factor={partial}, mrope_section={sections}; "
                "a DFlash drafter has plain full rotary positions, so this setting leaked from the target: "
                "export the drafter again without it"
            )
    parameters = RawConfig(top.mapping("rope_parameters"), WHAT)
    where = parameters if parameters.has("rope_theta") else top
    if not where.has("rope_theta"):
        raise KitError("drafter config has no rope_theta (top level or rope_parameters)")
    return where.number("rope_theta")


def _check(config: DrafterConfig) -> None:
    bad_types = set(config.layer_types) - {FULL, SLIDING}
    if bad_types or not config.layer_types:
        raise KitError(
            f"layer_types is {list(config.layer_types)}; each must be {FULL!r} or {SLIDING!r}, and one is needed"
        )
    if len(config.layer_causal) != len(config.layer_types):
        raise KitError(f"layer_causal has {len(config.layer_causal)} entries for {len(config.layer_types)} layers")
    if config.block_size < 2:
        raise KitError(f"block_size is {config.block_size}; at least 2 is needed (anchor and one slot)")
    if SLIDING in config.layer_types and (config.sliding_window is None or config.sliding_window < config.block_size):
        raise KitError(
            f"sliding_window is {config.sliding_window}; sliding layers need a window of at least block_size={config.block_size}"
        )
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise KitError(
            f"mask_token_id {config.mask_token_id} has no embedding row; allowed is 0..{config.vocab_size - 1}"
        )
    taps = config.target_layer_ids
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= config.num_target_layers:
        raise KitError(
            f"target_layer_ids {list(taps)} must ascend without repetition within 0..{config.num_target_layers - 1}"
        )
    if config.head_dim % 2:
        raise KitError(f"head_dim is {config.head_dim}; rotary positions turn pairs, so it must be even")
    if config.num_attention_heads % config.num_key_value_heads:
        raise KitError(
            f"{config.num_attention_heads} heads cannot share {config.num_key_value_heads} key-value heads evenly"
        )
