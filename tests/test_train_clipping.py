"""Clipping inside the fused optimizer against ``clip_grad_norm_`` followed by a step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_loop import make_trainer
from torch import nn
from train_helpers import make_shards

from helpers import HAS_GPU
from train.clipping import can_fuse, clipped_step
from train.step import train_step

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_pair(device: str) -> list[tuple[list[nn.Parameter], torch.optim.AdamW]]:
    """Twice the same weights with a fused AdamW: a decayed matrix and a vector."""
    generator, pairs = torch.Generator().manual_seed(0), []
    start = [torch.randn(50, 33, generator=generator), torch.randn(7, generator=generator)]
    for _ in range(2):
        parameters = [nn.Parameter(p.clone().to(device)) for p in start]
        groups = [{"params": parameters[:1], "weight_decay": 0.1}, {"params": parameters[1:], "weight_decay": 0.0}]
        pairs.append((parameters, torch.optim.AdamW(groups, lr=1e-2, fused=True)))
    return pairs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("clip", [1e-3, 1.0, 1e9])
def test_it_equals_clipping_and_then_stepping(clip: float, device: str) -> None:
    (ours, fused), (plain, stepped) = make_pair(device)
    generator = torch.Generator().manual_seed(1)
    for size in (3.0, 0.01, 40.0):
        for one, two in zip(ours, plain, strict=True):
            two.grad = size * torch.randn(one.shape, generator=generator).to(device)
            one.grad = two.grad.clone()
        norm = clipped_step(fused, ours, clip)
        expected = nn.utils.clip_grad_norm_(plain, clip)
        stepped.step()
        torch.testing.assert_close(norm, expected)
        for one, two in zip(ours, plain, strict=True):
            # clip_grad_norm_ adds 1e-6 to the norm before it divides.
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
            for name in ("exp_avg", "exp_avg_sq", "step"):
                torch.testing.assert_close(fused.state[one][name], stepped.state[two][name], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float, device: str) -> None:
    parameters, optimizer = make_pair(device)[0]
    for place in range(2):
        for p in parameters:
            p.grad = torch.ones_like(p)
        if place:
            assert parameters[1].grad is not None
            parameters[1].grad[3] = bad
        before = [p.detach().clone() for p in parameters]
        state = {p: {k: v.clone() for k, v in optimizer.state[p].items()} for p in parameters}
        assert bool(clipped_step(optimizer, parameters, 1.0).isfinite()) == (place == 0)
        moved = [not torch.equal(p, b) for p, b in zip(parameters, before, strict=True)]
        assert moved == [place == 0] * 2
    assert all(torch.equal(optimizer.state[p][k], v) for p in parameters for k, v in state[p].items())


def test_only_the_fused_adamw_takes_part() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    assert can_fuse(torch.optim.AdamW([weight], fused=True))
    assert not can_fuse(torch.optim.AdamW([weight]))
    assert not can_fuse(torch.optim.SGD([weight], fused=True))
    assert not can_fuse(torch.optim.Muon([weight]))


def test_the_trainer_clips_in_the_step_and_leaves_gradients_alone_before(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW's second moment after a first step is (1 - beta2) · g², so it shows the gradient that the step took."""
    if HAS_GPU:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shards = make_shards(tmp_path / "shards", tiny_target)
    trainer = make_trainer(shards, tmp_path / "out", optim__clip=1e-2)
    optimizer: Any = trainer.optimizer
    assert can_fuse(optimizer) and trainer.parallel.holds_whole_weights
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", None)  # accelerate would call it
    result = train_step(trainer, next(iter(trainer.feed.steps(0, 1))).result(), lr=1e-3)
    assert result.grad_norm is not None and result.grad_norm > 0.1
    squares = sum(float(state["exp_avg_sq"].double().sum()) for state in optimizer.state.values())
    assert math.sqrt(squares / (1 - 0.95)) == pytest.approx(1e-2, rel=1e-4)
