"""What a block should learn: cross-entropy at every slot, weighted by how much the slot matters.

The target's head is frozen and large, so the logits of all slots never exist at once: chunks of slots are projected,
and the gradient with respect to the slot's hidden state is formed on the spot. One pass over the head for the loss
and one for its gradient; no weight gradient, no recomputation.

Shape legend: M slots with a weight, C slots of a chunk, D hidden size, V vocabulary, N blocks, B block size.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dflash_kit.target_ends import TargetEnds

GAMMA_BY_BLOCK_SIZE = {16: 7.0, 10: 5.0, 8: 4.0}
CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 640 << 20}
"""Size of the float32 logits of a chunk: caches like it small, a GPU needs a thousand slots to be busy."""


def default_gamma(block_size: int) -> float:
    """Decay of the published drafters (7, 5, 4 for blocks of 16, 10, 8), and half a block for other sizes."""
    return GAMMA_BY_BLOCK_SIZE.get(block_size, block_size / 2)


def decay_weights(block_size: int, gamma: float) -> Tensor:
    """(B - 1,) float32 weights exp(-(k - 1) / gamma) of slots k = 1 … B - 1; infinite gamma weighs all alike."""
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32) / gamma)


Grade = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""From the logits (C, V) of each kind of states, the labels (C,) and whether a gradient is wanted: losses (C,), hits (C,)
and, where it is, the losses' gradient with respect to the first logits (C, V)."""


class ChunkedLoss(torch.autograd.Function):
    """Loss and hit of each slot, a chunk of slots after the other; keeps the gradient (M, D) instead of logits (M, V).

    Args of ``apply``:
        hidden: (M, D) states of the drafter, in the head's dtype.
        others: further states (M, D) that are projected beside them.
        ends: the target's head.
        labels: (M,) int64.
        grade: what to make of a chunk's logits.
        chunk: C.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, others: tuple[Tensor, ...], ends: TargetEnds, labels: Tensor, grade: Grade, chunk: int
    ) -> tuple[Tensor, Tensor]:
        needs_grad, count, states = hidden.requires_grad, len(labels), (hidden, *others)
        if hidden.is_cuda:  # a last chunk of another length would be compiled anew at every step
            missing = -count % chunk
            states = tuple(functional.pad(rows, (0, 0, 0, missing)) for rows in states)
            labels = functional.pad(labels, (0, missing))
        losses = hidden.new_empty(len(labels), dtype=torch.float32)
        correct = torch.empty(len(labels), dtype=torch.bool, device=hidden.device)
        gradient = torch.empty_like(states[0]) if needs_grad else None
        for start in range(0, len(labels), chunk):
            part = slice(start, start + chunk)
            logits = [functional.linear(rows[part], ends.head) for rows in states]
            losses[part], correct[part], logits_gradient = grade(*logits, labels[part], needs_grad)
            if gradient is not None:
                torch.mm(logits_gradient, ends.head, out=gradient[part])
        if gradient is not None:
            ctx.save_for_backward(gradient[:count])
        losses, correct = losses[:count].clone(), correct[:count].clone()
        ctx.mark_non_differentiable(correct)
        return losses, correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0][:, None].to(gradient.dtype), None, None, None, None, None


def _grade(
    logits: Tensor, labels: Tensor, softcap: float | None, needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss (C,), hit (C,), and the loss's gradient with respect to the bare product with the head.

    The gradient comes as that of all columns as if none were the label (C, V), and that of the label itself (C,).
    """
    dtype, squash = logits.dtype, None
    logits = logits.float()
    if softcap is not None:
        squashed = torch.tanh(logits / softcap)
        logits = squashed * softcap
        squash = 1 - squashed.square()
    picked = logits.gather(1, labels[:, None]).squeeze(1)
    best = logits.amax(1)
    # The maximum is at hand, so logsumexp is formed in place instead of in a second copy of the logits.
    logits.sub_(best[:, None]).exp_()
    total = logits.sum(1)
    losses = best + total.log() - picked
    label_gradient = torch.expm1(-losses)
    if needs_grad:
        logits.div_(total[:, None])
        if squash is not None:
            logits.mul_(squash)
    if softcap is not None:
        label_gradient = label_gradient * (1 - (picked / softcap).square())
    return losses, picked == best, logits.to(dtype), label_gradient.to(dtype)


@functools.cache
def _grade_kernel(device_type: str) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """``_grade``, compiled on GPUs: eager, it would write the float32 logits to memory five times."""
    return torch.compile(_grade, dynamic=False) if device_type == "cuda" else _grade


def chunk_rows(device_type: str, num_columns: int, chunk_bytes: int | None = None) -> int:
    """Slots of a chunk whose float32 logits, ``num_columns`` each, take at most ``chunk_bytes`` (None: as suits the device)."""
    chunk_bytes = CHUNK_BYTES[device_type] if chunk_bytes is None else chunk_bytes
    chunk = max(1, chunk_bytes // (4 * num_columns))
    return chunk - chunk % 64 if chunk > 64 else chunk  # whole tiles


def slot_cross_entropy(
    hidden: Tensor, ends: TargetEnds, labels: Tensor, *, chunk_bytes: int | None = None
) -> tuple[Tensor, Tensor]:
    """Cross-entropy and hit of each slot.

    Args:
        hidden: (M, D) final-normed hidden states of the slots.
        ends: the target's head.
        labels: (M,) int64 true tokens.
        chunk_bytes: how large the float32 logits of a chunk may be; None takes what suits the device.

    Returns:
        losses (M,) float32, differentiable with respect to ``hidden``; correct (M,) bool.
    """
    chunk = chunk_rows(hidden.device.type, ends.head.shape[0], chunk_bytes)
    kernel = _grade_kernel(hidden.device.type)

    def grade(logits: Tensor, labels: Tensor, needs_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
        losses, correct, gradient, label_gradient = kernel(logits, labels, ends.logit_softcap, needs_grad)
        if needs_grad:
            gradient.scatter_(1, labels[:, None], label_gradient[:, None])
        return losses, correct, gradient

    losses, correct = ChunkedLoss.apply(hidden.to(ends.head.dtype), (), ends, labels, grade, chunk)
    return losses, correct


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """How the losses of slots become one number.

    ``decay``: Σ w_k · CE over Σ w_k, w_k = exp(-(k - 1) / gamma).
    ``dpace``: w_k = Σ_{m ≥ k} Π_{i ≤ m} q̃_i with q̃ = (1 - alpha) · q + alpha and q the slot's own probability of the
    truth, detached; over the number of slots.
    Others: as ``decay``, with the distance to the target's distribution (see ``distill``) in place of CE.
    """

    kind: str = "decay"
    """decay, dpace, or one of ``distill.DISTILL_KINDS``."""
    alpha: float = 0.5
    """Smoothing of D-PACE."""
    distill_weight: float = 1.0
    """Share of the distance in a slot's loss, the rest is CE; of the kinds that distil."""

    @property
    def needs_target(self) -> bool:
        """Whether it reads the target's last hidden states."""
        return self.kind not in ("decay", "dpace")

    def denominator(self, weights: Tensor) -> Tensor:
        """What this row adds to the global denominator: known before the forward pass."""
        return weights.new_tensor(float(len(weights))) if self.kind == "dpace" else weights.sum()

    def numerator(
        self, losses: Tensor, weights: Tensor, slots: Tensor, block_size: int, *, num_blocks: int | None = None
    ) -> Tensor:
        """Weighted sum of the slots' losses.

        Args:
            losses: (M,) cross-entropies or distances.
            weights: (M,) decayed weights.
            slots: (M,) flat indices block * B + slot; each block's are 1 … some depth without a gap.
            block_size: B.
            num_blocks: N; None: up to the last slot's, which the host waits for.
        """
        if self.kind == "dpace":
            weights = dpace_weights(losses.detach(), slots, block_size, self.alpha, num_blocks=num_blocks)
        return (losses * weights).sum()


def dpace_weights(
    losses: Tensor, slots: Tensor, block_size: int, alpha: float, *, num_blocks: int | None = None
) -> Tensor:
    """(M,) float32 weights of D-PACE (arXiv 2605.18810): how much of the block is still accepted through each slot."""
    if len(losses) == 0:
        return losses
    if num_blocks is None:
        num_blocks = int(slots[-1]) // block_size + 1
    smoothed = losses.new_zeros(num_blocks * block_size)  # slots that do not count end the product
    smoothed[slots] = (1 - alpha) * torch.exp(-losses) + alpha
    survival = smoothed.view(num_blocks, block_size)[:, 1:].cumprod(1)
    weights = survival.flip(1).cumsum(1).flip(1)
    full = torch.cat([weights.new_zeros(num_blocks, 1), weights], dim=1)
    return full.flatten()[slots]
