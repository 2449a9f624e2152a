"""Checkpoints: the published layout in both generations, what is refused, and that nothing is overwritten."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_drafter import tiny_config, tiny_drafter
from transformers import AutoConfig

from dflash_kit.drafter import Drafter
from dflash_kit.drafter_config import FULL, SLIDING, DrafterConfig
from dflash_kit.errors import KitError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return tiny_drafter().save_pretrained(tmp_path / "drafter", dtype=torch.float32, provenance={"target": "tiny"})


def edit_config(folder: Path, **changes: object) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw.update(changes)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not Ellipsis}))


def test_round_trip_keeps_config_and_every_bit(saved: Path) -> None:
    original, loaded = tiny_drafter(), Drafter.from_pretrained(saved)
    assert loaded.config == original.config
    for name, tensor in original.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
    assert sorted(p.name for p in saved.iterdir()) == ["config.json", "model.safetensors", "provenance.json"]


def test_older_generation_with_top_level_block_size_and_silent_flags(saved: Path) -> None:
    raw = json.loads((saved / "config.json").read_text())
    old = {k: v for k, v in raw.items() if k not in ("rope_parameters", "target_hidden_size")}
    old["dflash_config"] = {"mask_token_id": 49, "target_layer_ids": [1, 3]}
    assert DrafterConfig.from_dict(old).layer_causal == (True, False, True)  # the convention when a config is silent
    newer = {k: v for k, v in raw.items() if k != "block_size"}
    newer["dflash_config"] = {**old["dflash_config"], "block_size": 4}
    assert DrafterConfig.from_dict(newer).block_size == 4


@pytest.mark.parametrize("place", ["is_causal", "nested"])
def test_a_causal_flag_overrides_every_layer(saved: Path, place: str) -> None:
    raw = json.loads((saved / "config.json").read_text())
    raw["dflash_config"].pop("layer_causal")
    if place == "nested":
        raw["dflash_config"]["causal"] = False
    else:
        raw["is_causal"] = False
    assert DrafterConfig.from_dict(raw).layer_causal == (False, False, False)


def test_uniform_flags_are_exported_for_engines_and_mixed_ones_are_not() -> None:
    uniform = tiny_config(layer_types=(SLIDING, FULL), layer_causal=(False, False))
    assert uniform.to_dict()["is_causal"] is False and uniform.to_dict()["dflash_config"]["causal"] is False
    conventional = tiny_config(layer_types=(SLIDING, FULL), layer_causal=(True, False))
    assert "is_causal" not in conventional.to_dict()  # it would override all layers in vLLM
    for config in (uniform, conventional):
        assert DrafterConfig.from_dict(config.to_dict()) == config


def test_plain_autoconfig_keeps_the_sliding_layers(saved: Path) -> None:
    """transformers nulls sliding_window unless use_sliding_window is set, and derives missing layer types."""
    config = AutoConfig.from_pretrained(saved)
    assert config.model_type == "qwen3"
    assert config.sliding_window == 6 and config.use_sliding_window is True
    assert config.layer_types == [SLIDING, FULL, SLIDING]
    assert config.rope_parameters["rope_theta"] == 1e4 and config.rope_parameters["rope_type"] == "default"


def test_transformers_rotary_tables_equal_ours(saved: Path) -> None:
    """What serves a checkpoint builds its rotary embedding from the exported config: it must be the trained one."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config, drafter = AutoConfig.from_pretrained(saved), Drafter.from_pretrained(saved)
    positions = torch.arange(40)
    theirs = Qwen3RotaryEmbedding(config)(torch.zeros(1, 40, 8), positions[None])
    ours = drafter.rotary(positions, torch.float32)
    for left, right in zip(theirs, ours, strict=True):
        torch.testing.assert_close(left[0], right, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "leak",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [11, 11, 10]}},
        {"partial_rotary_factor": 0.5},
    ],
)
def test_rotary_settings_that_leaked_from_a_target_are_refused(saved: Path, leak: dict[str, object]) -> None:
    edit_config(saved, **leak)
    with pytest.raises(KitError, match="leaked from the target"):
        Drafter.from_pretrained(saved)


def test_a_missing_or_misshapen_tensor_is_named(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    removed = {k: v for k, v in tensors.items() if k != "layers.1.mlp.up_proj.weight"}
    save_file(removed, saved / "model.safetensors")
    with pytest.raises(KitError, match="layers.1.mlp.up_proj.weight"):
        Drafter.from_pretrained(saved)
    save_file({**tensors, "fc.weight": tensors["fc.weight"][:-1].contiguous()}, saved / "model.safetensors")
    with pytest.raises(KitError, match="fc.weight has shape"):
        Drafter.from_pretrained(saved)
    (saved / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(KitError, match="cannot be read"):
        Drafter.from_pretrained(saved)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_size", 1, "block_size"),
        ("num_target_layers", 3, "target_layer_ids"),
        ("layer_types", ["full", FULL, FULL], "layer_types"),
        ("num_attention_heads", ..., "num_attention_heads"),
    ],
)
def test_impossible_configs_are_refused_by_value(saved: Path, key: str, value: object, message: str) -> None:
    raw = json.loads((saved / "config.json").read_text())
    raw["dflash_config"].pop(key, None)
    (saved / "config.json").write_text(json.dumps(raw))
    edit_config(saved, **{key: value})
    with pytest.raises(KitError, match=message):
        Drafter.from_pretrained(saved)


def test_nothing_is_overwritten(saved: Path) -> None:
    before = (saved / "model.safetensors").read_bytes()
    with pytest.raises(KitError, match="not empty"):
        tiny_drafter(seed=5).save_pretrained(saved)
    assert (saved / "model.safetensors").read_bytes() == before
    assert not saved.with_name("drafter.incomplete").exists()


def test_missing_or_malformed_folder(tmp_path: Path) -> None:
    with pytest.raises(KitError, match="no config.json"):
        Drafter.from_pretrained(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(KitError, match="cannot be read"):
        Drafter.from_pretrained(tmp_path)
