"""Drafter configurations of other trainers in the published layout, or the reason why they cannot be.

speculators nests the layers' shape in ``transformer_layer_config`` (values that equal the family's defaults left out), names
taps by *boundary* (0 is the embedding, k the output of layer k - 1) and switches the causality of sliding layers by one flag.
"""

from collections.abc import Mapping
from typing import Any

from .errors import KitError
from .raw_config import RawConfig

NESTED, FLAG = "transformer_layer_config", "sliding_window_non_causal"
BOUNDARY_KEYS = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
OTHER_KINDS = {
    "dflash2": "DFlash2 (convolutions and a path selector)",
    "dspark": "DSpark (a Markov head between the slots)",
    "domino": "Domino (a recurrent head)",
}
"""Relatives of DFlash by a part of their architecture's name, and what a plain drafter lacks of them."""
WHAT = "drafter config"
BORROWED = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
"""Tensors that checkpoints of other trainers may hold, copies of the target's: the target's own are used."""
PREFIX = "model."


def published_layout(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The same configuration with the published keys; one in the published layout comes back as it is.

    Raises:
        KitError: another kind of drafter than a plain DFlash one, or a needed key is missing.
    """
    _require_plain(raw)
    if NESTED in raw:
        return _flattened(raw)
    nested = raw.get("dflash_config")
    boundaries = next((raw[key] for key in BOUNDARY_KEYS if raw.get(key) is not None), None)
    if boundaries is None or not isinstance(nested, dict | None) or "target_layer_ids" in {**raw, **(nested or {})}:
        return dict(raw)
    return {**raw, "dflash_config": {**(nested or {}), "target_layer_ids": _layer_ids(boundaries)}}


def says_target_layers(raw: Mapping[str, Any]) -> bool:
    """Whether a configuration tells how many layers its target has; speculators' do not."""
    return raw.get("num_target_layers") is not None


def verifier_name(raw: Mapping[str, Any]) -> str | None:
    """The target that a checkpoint of speculators names."""
    named = raw.get("speculators_config")
    verifier = named.get("verifier") if isinstance(named, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return name if isinstance(name, str) and name else None


def own_name(tensor: str) -> str | None:
    """The published name of a tensor, None for one that a drafter borrows from its target."""
    name = tensor.removeprefix(PREFIX)
    return None if name in BORROWED else name


def _require_plain(raw: Mapping[str, Any]) -> None:
    names = raw.get("architectures")
    named = [raw.get("speculators_model_type"), raw.get("projector_type"), *(names if isinstance(names, list) else [])]
    for name in named:
        for part, words in OTHER_KINDS.items():
            if isinstance(name, str) and part in name.lower():
                raise KitError(f"the checkpoint is a {words} drafter ({name}); this version reads plain DFlash ones")
    kind = raw.get("speculators_model_type")
    if kind not in (None, "dflash"):
        raise KitError(f"the checkpoint is a {kind} model of speculators; only its dflash ones are DFlash drafters")
    nested = raw.get("dflash_config")
    for values in (raw, nested if isinstance(nested, dict) else {}):
        for key, words in (("shift_label", "labels shifted by one"), ("sample_from_anchor", "a draft token in slot 0")):
            if values.get(key):
                raise KitError(f"{WHAT} has {key} = {values[key]!r}: {words}, which a DFlash drafter does not have")


def _flattened(raw: Mapping[str, Any]) -> dict[str, Any]:
    top = RawConfig(raw, WHAT)
    layers = _completed(top.mapping(NESTED))
    inner = RawConfig(layers, f"{WHAT}'s {NESTED}")
    hidden_size, vocab_size = inner.whole("hidden_size"), inner.whole("vocab_size")
    if top.has("draft_vocab_size") and top.whole("draft_vocab_size") != vocab_size:
        raise KitError(
            f"the checkpoint has a head of its own over {top.whole('draft_vocab_size')} of the target's {vocab_size} tokens "
            "(draft_vocab_size); only drafters that share the target's head can be read"
        )
    if top.has("target_hidden_size") and top.whole("target_hidden_size") != hidden_size:
        raise KitError(
            f"the checkpoint is {hidden_size} wide for a target of {top.whole('target_hidden_size')} (target_hidden_size); a "
            "drafter that shares the target's embedding has its width"
        )
    if layers.get("attention_bias"):
        raise KitError(
            f"{WHAT}'s {NESTED} has attention_bias = true; the projections of a DFlash drafter have no biases"
        )
    boundaries = top.items(BOUNDARY_KEYS[0], int, "layer ids")
    kinds = inner.items("layer_types", str, "attention kinds")
    # Without the flag a checkpoint is of a version that knew no causal layers (as vLLM reads it).
    is_sliding_causal = top.flag(FLAG) is False
    published = {
        **layers,
        "block_size": top.whole("block_size"),
        "dflash_config": {
            "mask_token_id": top.whole("mask_token_id", at_least=0),
            "target_layer_ids": _layer_ids(list(boundaries)),
            "layer_causal": [is_sliding_causal and kind == "sliding_attention" for kind in kinds],
        },
    }
    count = raw.get("num_target_layers")
    # The least that fits; whoever knows the target compares only where it was said.
    published["num_target_layers"] = max(boundaries) if count is None else count
    return published


def _completed(layers: dict[str, Any]) -> dict[str, Any]:
    """All values of a layer configuration, those that the file leaves out as the family's own."""
    from transformers import AutoConfig

    family = layers.get("model_type", "qwen3")
    try:
        values = AutoConfig.for_model(**{"model_type": family, **layers}).to_dict()
    except Exception as error:  # of transformers' own checks, which differ by version
        raise KitError(f"{WHAT}'s {NESTED} of family {family!r} cannot be read: {error}") from error
    # transformers drops the window of a configuration that does not switch sliding on by its own key.
    return values | {key: layers[key] for key in ("sliding_window", "layer_types") if layers.get(key) is not None}


def _layer_ids(boundaries: Any) -> list[int]:
    """Layers whose output is tapped; boundary k is the output of layer k - 1."""
    if not isinstance(boundaries, list) or not boundaries or not all(type(i) is int for i in boundaries):
        raise KitError(f"{WHAT} has {BOUNDARY_KEYS[0]} = {boundaries!r}; it must be a list of layer ids")
    if min(boundaries) < 1:
        raise KitError(
            f"{WHAT} has {BOUNDARY_KEYS[0]} = {boundaries}; boundary {min(boundaries)} is no layer's output (1 is that of the "
            "first layer), so the drafter reads what no tap holds"
        )
    return [i - 1 for i in boundaries]
