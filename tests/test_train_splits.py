"""A step of eight packed rows is the same step however processes and micro-steps share it: 1×8 = 2×4 = 8×1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_train_loop import metrics
from train_helpers import launched_environment, make_shards, small_run

from helpers import REPO, run_command
from train.cli import main
from train.state import RunFolder

STEPS = 3
SPLITS = {2: 4, 8: 1}
"""Micro-steps by number of processes."""


def test_a_step_is_the_same_however_it_is_shared_out(tiny_target: Path, tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "shards", tiny_target, num_rows=40)
    changes = {"data__rows_per_step": 8, "optim__max_steps": STEPS, "replay__max_rows": 0, "save_every_steps": 10}
    assert main(small_run(shards, tmp_path / "1", **changes)) == 0
    commands = [(n, small_run(shards, tmp_path / str(n), **changes)) for n in SPLITS]
    environment = launched_environment() | {"PYTHONPATH": str(REPO)}
    done = run_command(
        REPO / "tests" / "fork_ranks.py", tiny_target, json.dumps(commands), timeout_s=300, **environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for n, micro_steps in SPLITS.items():
        assert f"({n} processes x {micro_steps} micro-steps)" in done.stdout
        for one, many in zip(metrics(tmp_path / "1"), metrics(tmp_path / str(n)), strict=True):
            assert many["loss"] == pytest.approx(one["loss"], rel=1e-5)
            assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        alone, shared = (load_file(weights(tmp_path / str(k))) for k in (1, n))
        for name, tensor in alone.items():
            torch.testing.assert_close(shared[name], tensor, rtol=2e-2, atol=1e-3, msg=name)


def weights(out: Path) -> Path:
    return RunFolder(out).step_folder(STEPS) / "weights.safetensors"
