"""Kinds of drafter layers, full and sliding, and how a published ``config.json`` says which layer is what."""

from collections.abc import Sequence

from .errors import KitError
from .raw_config import RawConfig

FULL = "full_attention"
SLIDING = "sliding_attention"
CONVENTION = {FULL: False, SLIDING: True}
"""Causal inside the block when a config is silent: sliding layers are, full layers are not (SGLang, vLLM)."""

WHAT = "drafter config"


def convention(layer_types: Sequence[str]) -> tuple[bool, ...]:
    """The causal flag of each layer where a config is silent."""
    return tuple(CONVENTION[kind] for kind in layer_types)


def read_layer_types(both: RawConfig, num_layers: int) -> tuple[str, ...]:
    """The kind of each layer; ``KitError`` where the config contradicts itself."""
    if both.has("layer_types"):
        kinds = both.items("layer_types", str, f"{FULL!r} and {SLIDING!r}")
        if len(kinds) not in (0, num_layers):
            raise KitError(f"{WHAT} has layer_types of {len(kinds)} layers, but num_hidden_layers = {num_layers}")
        if kinds:
            return kinds
    # Without explicit types transformers slides the layers from max_window_layers on, if sliding is switched on at all.
    uses_swa = both.flag("use_swa")
    if not both.flag("use_sliding_window") and not uses_swa:
        return (FULL,) * num_layers
    if not both.has("swa_window_size") and not both.has("sliding_window"):
        raise KitError("drafter config switches sliding windows on but gives no sliding_window")
    first = 0 if uses_swa else both.whole("max_window_layers", 28, at_least=0)
    return tuple(SLIDING if i >= first else FULL for i in range(num_layers))


def read_layer_causal(top: RawConfig, nested: RawConfig, layer_types: Sequence[str]) -> tuple[bool, ...]:
    """The causal flag of each layer: layer by layer, one for all, or by convention."""
    if nested.has("layer_causal"):
        return nested.items("layer_causal", bool, "true and false")
    flag = top.flag("is_causal")
    flag = nested.flag("causal") if flag is None else flag
    return convention(layer_types) if flag is None else (flag,) * len(layer_types)
