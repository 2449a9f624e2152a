"""The whole job on a tiny hybrid target: prompts → shards → drafter → DDTree report, as users run it."""

import json
from pathlib import Path

import pytest
from test_hybrid import LINEAR  # the padding token has a zero embedding, which the first linear layers keep
from train_helpers import launched_environment, small_run

from dflash_kit.shards import open_shards
from helpers import REPO, make_tiny_target, run_command


@pytest.mark.slow
def test_extract_train_and_evaluate_a_hybrid(tmp_path: Path) -> None:
    target, shards, drafter = tmp_path / "target", tmp_path / "shards", tmp_path / "drafter"
    make_tiny_target(target, model_type="qwen3_5_text", **LINEAR)
    extract = [
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
    done = run_command("extract/dump.py", *extract, *options)
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
