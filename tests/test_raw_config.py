"""A drafter's config.json with wrong types or impossible values: one line that names key, value and what is allowed."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_drafter import VECTORS, tiny_config

from dflash_kit.drafter_config import FULL, SLIDING, DrafterConfig
from dflash_kit.errors import KitError


def raw_config(**changes: Any) -> dict[str, Any]:
    """A published config with changed values, at the top level or in ``dflash_config`` where they stand there."""
    raw = json.loads(json.dumps(tiny_config().to_dict()))
    for key, value in changes.items():
        if key in raw["dflash_config"]:
            raw["dflash_config"][key] = value
        if key in raw or key not in raw["dflash_config"]:
            raw[key] = value
    return raw


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("num_hidden_layers", "two", "a whole number from 1 to 1024"),
        ("num_hidden_layers", 2.5, "a whole number"),
        ("num_hidden_layers", 10**9, "a whole number"),
        ("num_hidden_layers", True, "a whole number"),
        ("hidden_size", "64", "a whole number"),
        ("hidden_size", 10**12, "a whole number"),
        ("num_attention_heads", 0, "a whole number from 1"),
        ("num_key_value_heads", 0, "a whole number from 1"),
        ("num_key_value_heads", -2, "a whole number from 1"),
        ("head_dim", [8], "a whole number"),
        ("vocab_size", None, "is needed"),
        ("mask_token_id", "49", "a whole number from 0"),
        ("block_size", {}, "a whole number"),
        ("target_layer_ids", "123", "a list of layer ids"),
        ("target_layer_ids", 3, "a list of layer ids"),
        ("target_layer_ids", ["1", "3"], "a list of layer ids"),
        ("dflash_config", [1], "a JSON object"),
        ("dflash_config", "x" * 500, "a JSON object"),
        ("layer_types", "full_attention", "a list of"),
        ("layer_types", [[], []], "a list of"),
        ("layer_causal", [0, 1], "a list of true and false"),
        ("layer_causal", False, "a list of true and false"),
        ("swa_window_size", "12", "a whole number"),
        ("rms_norm_eps", "1e-6", "a number above 0"),
        ("rms_norm_eps", float("nan"), "a number above 0"),
        ("rope_parameters", {"rope_theta": "10000"}, "a number above 0"),
        ("rope_parameters", [], "a JSON object"),
        ("rope_scaling", "yarn", "a JSON object"),
    ],
)
def test_a_value_of_a_wrong_kind_is_named(key: str, value: Any, allowed: str) -> None:
    with pytest.raises(KitError, match="drafter config has") as caught:
        DrafterConfig.from_dict(raw_config(**{key: value}))
    said = str(caught.value)
    assert allowed in said
    assert ("rope_theta" if isinstance(value, dict) and "rope_theta" in value else key) in said
    assert len(said) < 200


def test_layers_that_are_counted_twice_agree() -> None:
    with pytest.raises(KitError, match=r"layer_types of \d layers, but num_hidden_layers = 7"):
        DrafterConfig.from_dict(raw_config(num_hidden_layers=7))
    with pytest.raises(KitError, match="head_dim is 7"):
        DrafterConfig.from_dict(raw_config(head_dim=7))


def test_what_a_config_may_leave_out_or_null() -> None:
    usual = tiny_config()
    raw = raw_config(is_causal=None, use_cache=True)
    for key in ("head_dim", "rms_norm_eps", "rope_parameters", "rope_scaling"):
        raw[key] = None
    assert DrafterConfig.from_dict(raw) == usual
    plain = raw_config(sliding_window=-1, layer_types=[FULL, FULL, FULL], layer_causal=[False] * 3)
    assert DrafterConfig.from_dict(plain).sliding_window is None, "a window without sliding layers is no matter"
    del plain["layer_types"], plain["dflash_config"]["layer_causal"], plain["dflash_config"]["swa_window_size"]
    plain |= {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}
    plain["dflash_config"]["use_swa"] = False
    assert DrafterConfig.from_dict(plain).layer_types == (FULL, SLIDING, SLIDING)


@pytest.mark.parametrize("name", ["drafter_full", "drafter_mixed"])
def test_published_configs_are_read(name: str) -> None:
    file = Path(VECTORS / name / "config.json")
    if not file.exists():
        pytest.skip("reference vectors are not beside the checkout")
    DrafterConfig.from_dict(json.loads(file.read_text()))
