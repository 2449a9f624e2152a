"""The loss against float64 references, and that it is computed the cheap way."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from dflash_kit.target_ends import TargetEnds
from train.losses import Objective, decay_weights, default_gamma, dpace_weights, slot_cross_entropy

M, D, V = 23, 16, 101


def make_case(softcap: float | None = None) -> tuple[torch.Tensor, TargetEnds, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(V, D, generator=generator)
    hidden = torch.randn(M, D, generator=generator)
    labels = torch.randint(0, V, (M,), generator=generator)
    return hidden, TargetEnds(embedding=head, head=head, logit_softcap=softcap), labels


def reference(hidden: torch.Tensor, ends: TargetEnds, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropies the plain way in float64."""
    logits = hidden @ ends.head.double().T
    if ends.logit_softcap is not None:
        logits = torch.tanh(logits / ends.logit_softcap) * ends.logit_softcap
    return functional.cross_entropy(logits, labels, reduction="none")


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("chunk_rows", [1, 7, 1000])
def test_loss_and_gradient_equal_the_float64_reference(chunk_rows: int, softcap: float | None) -> None:
    hidden, ends, labels = make_case(softcap)
    weights = torch.rand(M, generator=torch.Generator().manual_seed(1))
    ours = hidden.clone().requires_grad_()
    losses, correct = slot_cross_entropy(ours, ends, labels, chunk_bytes=chunk_rows * 4 * V)
    (losses * weights).sum().backward()
    exact = hidden.double().requires_grad_()
    expected = reference(exact, ends, labels)
    (expected * weights.double()).sum().backward()
    assert ours.grad is not None and exact.grad is not None
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)
    best = reference_argmax(hidden, ends)
    assert torch.equal(correct, best == labels)


def reference_argmax(hidden: torch.Tensor, ends: TargetEnds) -> torch.Tensor:
    return (hidden.double() @ ends.head.double().T).argmax(1)


def test_large_logits_stay_finite() -> None:
    hidden, ends, labels = make_case()
    ours = (hidden * 1e3).requires_grad_()
    losses, _ = slot_cross_entropy(ours, ends, labels)
    losses.sum().backward()
    assert ours.grad is not None
    assert losses.isfinite().all() and ours.grad.isfinite().all()
    torch.testing.assert_close(losses.double(), reference((hidden * 1e3).double(), ends, labels), rtol=1e-4, atol=1e-2)


def test_no_slots_give_a_zero_that_still_has_a_gradient() -> None:
    hidden, ends, _ = make_case()
    hidden.requires_grad_()
    losses, correct = slot_cross_entropy(hidden[:0], ends, torch.empty(0, dtype=torch.long))
    (losses.sum() * 3).backward()
    assert correct.shape == (0,)
    assert hidden.grad is not None and not hidden.grad.any()


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any operation returned, views of the head left out."""

    def __init__(self, head: torch.Tensor) -> None:
        super().__init__()
        self.numel = 0
        self.head = head.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() != self.head:
                self.numel = max(self.numel, value.numel())
        return result


def test_logits_of_all_slots_never_exist_at_once_and_the_head_gets_no_gradient() -> None:
    hidden, ends, labels = make_case()
    ours = hidden.clone().requires_grad_()
    with LargestTensor(ends.head) as largest, FlopCounterMode(display=False) as flops:
        losses, _ = slot_cross_entropy(ours, ends, labels, chunk_bytes=4 * 4 * V)
        losses.sum().backward()
    assert largest.numel <= 4 * V < M * V
    # One product for the logits, one for the hidden state's gradient: nothing for the head, nothing twice.
    assert flops.get_total_flops() == 2 * 2 * M * D * V


def test_an_oracle_drafter_scores_one_only_unshifted() -> None:
    """Hidden states that point at the token of anchor + k are right exactly where no shift is taken."""
    head = torch.linalg.qr(torch.randn(D, D, generator=torch.Generator().manual_seed(0)))[0]
    ends = TargetEnds(embedding=head, head=head)
    text = torch.randperm(D, generator=torch.Generator().manual_seed(1))
    anchors, block_size = [0, 3, 7], 4
    places = torch.tensor([a + k for a in anchors for k in range(1, block_size)])
    oracle = 20.0 * head[text[places]]  # what a drafter that knows token anchor + k puts into slot k
    accuracy = {}
    for shift in (-1, 0, 1):
        losses, correct = slot_cross_entropy(oracle, ends, text[places + shift])
        accuracy[shift] = float(correct.float().mean())
        assert (losses.mean() < 0.01) == (shift == 0)
    assert accuracy == {-1: 0.0, 0: 1.0, 1: 0.0}


# -- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (6, 3.0)])
def test_default_gamma_follows_the_block_size(block_size: int, gamma: float) -> None:
    assert default_gamma(block_size) == gamma


def test_decay_is_one_at_the_first_slot() -> None:
    weights = decay_weights(8, 4.0)
    assert weights.tolist() == pytest.approx([math.exp(-(k - 1) / 4) for k in range(1, 8)])
    assert decay_weights(8, math.inf).tolist() == [1.0] * 7


def test_decayed_objective_is_weighted_mean() -> None:
    losses, weights = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 0.5, 0.25])
    objective = Objective()
    mean = objective.numerator(losses, weights, torch.tensor([1, 2, 3]), 4) / objective.denominator(weights)
    assert float(mean) == pytest.approx((1 + 1 + 1) / 1.75)


def brute_force_dpace(losses: list[list[float]], alpha: float) -> list[float]:
    """w_j = Σ_{m ≥ j} Π_{i ≤ m} q̃_i, block by block, in Python floats."""
    weights = []
    for block in losses:
        smoothed = [(1 - alpha) * math.exp(-loss) + alpha for loss in block]
        for j in range(len(block)):
            weights.append(sum(math.prod(smoothed[: m + 1]) for m in range(j, len(block))))
    return weights


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dpace_weights_equal_brute_force_with_cut_and_unused_blocks(alpha: float) -> None:
    block_size = 5
    per_block = [[0.1, 2.0, 0.3, 1.0], [0.7, 0.2], [], [3.0, 0.1, 0.1]]  # cut, without a slot, cut
    slots = torch.tensor([b * block_size + k for b, part in enumerate(per_block) for k in range(1, len(part) + 1)])
    losses = torch.tensor([loss for part in per_block for loss in part])
    found = dpace_weights(losses, slots, block_size, alpha)
    assert found.tolist() == pytest.approx(brute_force_dpace(per_block, alpha), rel=1e-5)


def test_dpace_objective_is_detached_and_normalised_by_slots() -> None:
    slots = torch.tensor([1, 2, 3])
    losses = torch.tensor([0.5, 1.0, 2.0], requires_grad=True)
    objective = Objective(kind="dpace", alpha=0.5)
    weights = torch.tensor(brute_force_dpace([[0.5, 1.0, 2.0]], 0.5))
    objective.numerator(losses, torch.ones(3), slots, 4).backward()
    assert losses.grad is not None
    torch.testing.assert_close(losses.grad, weights)
    assert float(objective.denominator(torch.rand(3))) == 3.0
    assert objective.numerator(losses[:0], torch.ones(0), slots[:0], 4) == 0
