"""The whole job on a tiny hybrid target: prompts → shards → drafter → DDTree report, as users run it."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_hybrid import LINEAR  # the padding token has a zero embedding, which the first linear layers keep
from train_helpers import launched_environment, small_run

from dflash_kit.config import parse_config
from dflash_kit.drafter_config import DrafterConfig
from dflash_kit.errors import KitError
from dflash_kit.shards import open_shards
from dflash_kit.target import TargetSpec
from extract import hf_capture
from extract.cli import main as extract
from helpers import REPO, make_tiny_target, run_command
from train.settings import TrainConfig


@pytest.mark.parametrize("layer", [1, 2])
def test_a_layer_that_hands_out_zeros_is_refused_by_its_id(
    layer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As engines have done for hybrids, for a layer of either kind; training on such states "converges"."""
    load = hf_capture.load_target

    def load_broken(*args: Any, **settings: Any) -> Any:
        target = load(*args, **settings)
        target.get_decoder().layers[layer].register_forward_hook(lambda _module, _inputs, output: output * 0)
        return target

    monkeypatch.setattr(hf_capture, "load_target", load_broken)
    target = make_tiny_target(tmp_path / "target", model_type="qwen3_5_text", **LINEAR)
    (tmp_path / "p.jsonl").write_text('{"prompt": "What?"}\n')
    arguments = [
        "--model",
        target,
        "--prompts",
        tmp_path / "p.jsonl",
        "--out",
        tmp_path / "s",
        "--engine",
        "transformers",
    ]
    with pytest.raises(KitError, match=rf"layer {layer} is all zero at token 0"):
        extract([str(part) for part in (*arguments, "--target_layer_ids", "[0, 1, 2]")])


@pytest.mark.parametrize(("recipe", "num_sliding", "window"), [("qwen3.6-27b", 4, 2048), ("qwen3.6-35b-a3b", 7, 4096)])
def test_recipes_have_the_published_drafters_layers(recipe: str, num_sliding: int, window: int, tmp_path: Path) -> None:
    """Several sliding layers and a full one, over a target with partial rotary embeddings, which the drafter has not."""
    config = parse_config("train", TrainConfig, ["--config", str(REPO / "configs" / f"{recipe}.yaml")], description="")
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    make_tiny_target(tmp_path / "target", model_type="qwen3_5_text", **LINEAR, rope_parameters=rope)
    spec = TargetSpec.from_pretrained(tmp_path / "target")
    found = DrafterConfig.from_target(spec, mask_token_id=259, num_taps=2, **config.drafter.given())
    assert found.layer_types == ("sliding_attention",) * num_sliding + ("full_attention",)
    assert found.sliding_window == window
    exported = found.to_dict()
    assert exported["use_sliding_window"] is True and exported["sliding_window"] == window
    assert exported["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e7}


@pytest.mark.slow
def test_extract_train_and_evaluate_a_hybrid(tmp_path: Path) -> None:
    target, shards, drafter = tmp_path / "target", tmp_path / "shards", tmp_path / "drafter"
    make_tiny_target(target, model_type="qwen3_5_text", **LINEAR)
    arguments = [
        "--model",
        target,
        "--prompts",
        REPO / "data" / "gsm8k_train.jsonl",
        "--out",
        shards,
        "--limit",
        "24",
        "--skip_long",
    ]
    options = ["--engine", "transformers", "--target_layer_ids", "[2, 3, 4]", "--sampling.max_new_tokens", "24"]
    done = run_command("extract/dump.py", *arguments, *options)
    assert done.returncode == 0, done.stderr
    assert "parity   2 rows" in done.stdout
    assert open_shards(shards).header.target_layer_ids == (2, 3, 4)  # full and linear layers
    settings = small_run(shards, drafter, optim__max_steps=30, data__seq_len=512, drafter__block_size=8)
    done = run_command("train/run.py", *settings, **launched_environment())
    assert done.returncode == 0, done.stderr
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in ("Two and two?", "Why is the sky blue?"))
    )
    report = ["--ckpt", drafter, "--out", tmp_path / "report", "--benchmarks", prompts, "--max_new_tokens", "40"]
    done = run_command("decode/eval.py", *report, "--budgets", "15,64")
    assert done.returncode == 0, done.stderr
    assert "lossless" in done.stdout
    results = json.loads((tmp_path / "report" / "report.json").read_text())["results"]
    tau = {(entry["method"], entry["budget"]): entry["acceptance_length_pooled"] for entry in results}
    assert tau[("ddtree", 64)] > 1.0
    assert tau[("ddtree", 64)] >= tau[("chain", 7)]
