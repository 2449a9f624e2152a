"""Checkpoints of other trainers: the same drafter in speculators' layout decodes alike; what is no plain DFlash is named."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_eval_cli import evaluate, made, read_report  # noqa: F401  (made is a fixture)

from dflash_kit.checkpoint import borrowed_tensors
from dflash_kit.drafter import Drafter
from dflash_kit.drafter_config import DrafterConfig
from dflash_kit.errors import KitError
from dflash_kit.foreign_config import published_layout

PUBLISHED: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "block_size": 8,
    "dflash_config": {"mask_token_id": 259, "target_layer_ids": [1, 3]},
    "num_target_layers": 6,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 12,
    "use_sliding_window": True,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 300,
}


def nested(raw: dict[str, Any], target: str = "org/target", **changes: Any) -> dict[str, Any]:
    """A configuration as speculators writes it: taps by boundary, values that equal Qwen3's defaults left out."""
    dflash = raw["dflash_config"]
    layers = {k: raw[k] for k in raw if k not in ("architectures", "block_size", "dflash_config", "num_target_layers")}
    for default in ("rms_norm_eps", "rope_theta"):
        layers.pop(default)
    layers.pop("rope_parameters", None)
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "block_size": raw["block_size"],
        "draft_vocab_size": raw["vocab_size"],
        "mask_token_id": dflash["mask_token_id"],
        "aux_hidden_state_layer_ids": [i + 1 for i in dflash["target_layer_ids"]],
        "sliding_window_non_causal": False,
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": target, "architectures": []}},
        "transformer_layer_config": {"model_type": "qwen3", **layers},
        **changes,
    }


def test_the_nested_layout_says_the_same() -> None:
    ours = DrafterConfig.from_dict(PUBLISHED)
    theirs = DrafterConfig.from_dict(nested(PUBLISHED))
    assert theirs.differences(ours) == ["num_target_layers: 4 against 6"]  # which it does not say: the least that fits
    assert DrafterConfig.from_dict(nested(PUBLISHED, num_target_layers=6)) == ours
    assert theirs.layer_causal == (True, False)
    assert theirs.target_layer_ids == (1, 3), "boundary k is the output of layer k - 1"


def test_sliding_layers_are_causal_only_where_the_flag_says_so() -> None:
    """As vLLM reads it: a checkpoint without the flag is of a version in which no layer was causal."""
    assert DrafterConfig.from_dict(nested(PUBLISHED, sliding_window_non_causal=True)).layer_causal == (False, False)
    older = nested(PUBLISHED)
    del older["sliding_window_non_causal"]
    assert DrafterConfig.from_dict(older).layer_causal == (False, False)


def test_boundaries_of_a_flat_configuration() -> None:
    """What vLLM makes of a checkpoint of speculators: both keys, or only the boundaries."""
    flat = {**PUBLISHED, "dflash_config": {"mask_token_id": 259}, "eagle_aux_hidden_state_layer_ids": [2, 4]}
    assert DrafterConfig.from_dict(flat) == DrafterConfig.from_dict(PUBLISHED)
    both = {**PUBLISHED, "eagle_aux_hidden_state_layer_ids": [5, 6]}
    assert DrafterConfig.from_dict(both) == DrafterConfig.from_dict(PUBLISHED), "the layers' own ids count"
    assert published_layout(PUBLISHED) == PUBLISHED


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speculators_model_type": "eagle3"}, "is a eagle3 model of speculators"),
        ({"speculators_model_type": "dspark"}, "DSpark"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2 .convolutions"),
        ({"projector_type": "domino"}, "Domino"),
        ({"shift_label": True}, "labels shifted by one"),
        ({"sample_from_anchor": True}, "slot 0"),
        ({"draft_vocab_size": 200}, "over 200 of the target's 300 tokens"),
        ({"target_hidden_size": 96}, "64 wide for a target of 96"),
        ({"mask_token_id": None}, "no 'mask_token_id'"),
        ({"aux_hidden_state_layer_ids": None}, "no 'aux_hidden_state_layer_ids'"),
        ({"aux_hidden_state_layer_ids": [0, 3]}, "boundary 0 is no layer's output"),
        ({"transformer_layer_config": 5}, "must be a JSON object"),
        ({"transformer_layer_config": {"model_type": "no-such"}}, "of family 'no-such' cannot be read"),
    ],
)
def test_what_is_no_plain_dflash_drafter_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(KitError, match=words):
        DrafterConfig.from_dict(nested(PUBLISHED, **changes))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_nested_checkpoint_replays_as_the_published_one(
    made: Path,  # noqa: F811
    tmp_path: Path,
    prefix: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Target found by the verifier's name; copies of the target's embedding are left out, and said to be."""
    theirs = shutil.copytree(made / "drafter", tmp_path / "theirs")
    (theirs / "provenance.json").unlink()
    raw = json.loads((theirs / "config.json").read_text())
    kept = {k: v for k, v in raw.items() if k in PUBLISHED or k == "rope_parameters"}
    (theirs / "config.json").write_text(json.dumps(nested(kept, str(made / "target"))))
    tensors = {prefix + name: tensor for name, tensor in load_file(theirs / "model.safetensors").items()}
    copies = {f"{prefix}embed_tokens.weight": torch.zeros(300, 64), "verifier_norm.weight": torch.ones(64)}
    save_file(tensors | copies, theirs / "model.safetensors", {"format": "pt"})
    assert borrowed_tensors(theirs) == sorted(copies)
    ours, loaded = Drafter.from_pretrained(made / "drafter"), Drafter.from_pretrained(theirs)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])

    replay = f"--replay={made / 'shards'}"
    assert evaluate(made, tmp_path / "ours", replay) == 0
    capsys.readouterr()
    assert evaluate(made, tmp_path / "out", replay, ckpt=theirs) == 0
    assert "holds its own" in capsys.readouterr().err
    assert read_report(tmp_path / "out")["target"] == str(made / "target")
    assert read_report(tmp_path / "out")["results"] == read_report(tmp_path / "ours")["results"]

    save_file(tensors | {"lm_bias.weight": torch.zeros(1)}, theirs / "model.safetensors", {"format": "pt"})
    assert evaluate(made, tmp_path / "odd", replay, ckpt=theirs) == 2
    assert "1 unknown ['lm_bias.weight']" in capsys.readouterr().err
