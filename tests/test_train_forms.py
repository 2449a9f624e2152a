"""Training and replay on every form of shards: to them, a row is a row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from train_helpers import lasting, make_shards, small_run

from dflash_kit.shards import ShardWriter, open_shards
from train.cli import main


def rewritten(shards: Path, folder: Path, **form: Any) -> Path:
    """The rows of a folder in another form."""
    source = open_shards(shards)
    header = replace(source.header, **form)
    with ShardWriter(folder, header) as writer:
        for row in source:
            last = row.hidden_states[:, : header.hidden_size] if header.has_last_hidden else None
            writer.add(replace(row, last_hidden=last))
    return folder


def test_a_run_on_fp8_shards_is_the_run_on_the_values_that_they_stand_for(tiny_target: Path, tmp_path: Path) -> None:
    """Losses, replayed acceptance and weights are equal bit for bit, and differ from those of the exact values."""
    exact = make_shards(tmp_path / "exact", tiny_target)
    fp8 = rewritten(exact, tmp_path / "fp8", dtype="fp8", compression="zstd", has_last_hidden=True)
    rounded = rewritten(fp8, tmp_path / "rounded", dtype="bfloat16", compression="none", has_last_hidden=False)
    for shards in (exact, fp8, rounded):
        assert main(small_run(shards, tmp_path / f"{shards.name}-out")) == 0
    outs = [tmp_path / f"{name}-out" for name in ("fp8", "rounded", "exact")]
    weights = [(out / "model.safetensors").read_bytes() for out in outs]
    assert weights[0] == weights[1] != weights[2]
    assert lasting(outs[0]) == lasting(outs[1])
    for one, other in zip(open_shards(fp8), open_shards(exact), strict=True):
        error = (one.hidden_states.float() - other.hidden_states.float()).norm() / other.hidden_states.float().norm()
        assert 0.01 < error < 0.04
        assert torch.equal(one.token_ids(), other.token_ids())
