"""What a block should learn from the target's whole distribution instead of the one token that it said.

The target's distribution at a slot follows from its stored last hidden state at the token before: final norm, head,
softmax. As in ``losses``, the head is frozen and large: chunks of slots are projected, drafter and target side by side,
and the gradient with respect to the drafter's hidden state is formed on the spot.

With p the target's distribution at a slot, q the drafter's and α = Σ min(p, q) the probability that a sample of q
survives rejection sampling:

    kl         KL(p ‖ q) = Σ p (log p - log q)
    tv         1 - α, the total variation ½ Σ |p - q|
    lk         -log α, the likelihood of acceptance; equal to cross-entropy where p is one token (arXiv 2602.23881)
    lk_hybrid  λ KL + (1 - λ) TV with λ = exp(-3 α), detached: KL while acceptance is low, TV when it is high

Shape legend: M slots with a weight, C slots of a chunk, D hidden size, V vocabulary.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from dflash_kit.target_ends import TargetEnds

from .losses import ChunkedLoss, chunk_rows

DISTILL_KINDS = ("kl", "tv", "lk", "lk_hybrid")
HYBRID_RATE = 3.0


def _grade(
    logits: Tensor, target_logits: Tensor, labels: Tensor, softcap: float | None, kind: str, share: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss (C,), hit (C,), and the loss's gradient with respect to the drafter's bare product with the head.

    The gradient comes as that of all columns (C, V) and what the label's column has to get on top (C,).
    """
    dtype, squash = logits.dtype, None
    logits, target_logits = logits.float(), target_logits.float()
    if softcap is not None:
        squashed = torch.tanh(logits / softcap)
        logits, squash = squashed * softcap, 1 - squashed.square()
        target_logits = torch.tanh(target_logits / softcap) * softcap
    correct = logits.gather(1, labels[:, None]).squeeze(1) == logits.amax(1)
    log_q, log_p = torch.log_softmax(logits, 1), torch.log_softmax(target_logits, 1)
    q, p = log_q.exp(), log_p.exp()
    # In the logarithm: of two peaked distributions even the sum of the minima underflows.
    lower = torch.minimum(log_p, log_q)
    log_alpha = lower.logsumexp(1)
    alpha = log_alpha.exp()
    # Weights a of KL and b of -log α in the gradient; b = α turns that of -log α into that of TV.
    if kind == "kl":
        losses, a, b = (p * (log_p - log_q)).sum(1), torch.ones_like(alpha), torch.zeros_like(alpha)
    elif kind == "tv":
        losses, a, b = 1 - alpha, torch.zeros_like(alpha), alpha
    elif kind == "lk":
        losses, a, b = -log_alpha, torch.zeros_like(alpha), torch.ones_like(alpha)
    else:
        a = torch.exp(-HYBRID_RATE * alpha)
        losses, b = a * (p * (log_p - log_q)).sum(1) + (1 - a) * (1 - alpha), (1 - a) * alpha
    # d(-log α)/dz = q Σ r - r, where r = min(p, q) / α wherever the drafter is below the target (half of it where both agree).
    below = 0.5 + 0.5 * torch.sign(log_p - log_q)
    ratio = below * torch.exp(lower - log_alpha[:, None])
    gradient = q * (a + b * ratio.sum(1))[:, None] - p * a[:, None] - ratio * b[:, None]
    label_gradient = torch.full_like(alpha, share - 1)
    if share < 1:
        label_log_q = log_q.gather(1, labels[:, None]).squeeze(1)
        losses = share * losses - (1 - share) * label_log_q
        gradient = share * gradient + (1 - share) * q
    if squash is not None:
        gradient = gradient * squash
        label_gradient = label_gradient * squash.gather(1, labels[:, None]).squeeze(1)
    return losses, correct, gradient.to(dtype), label_gradient.to(dtype)


@functools.cache
def _grade_kernel(device_type: str) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """``_grade``, compiled on GPUs, where eager it would write a dozen sets of float32 logits to memory."""
    return torch.compile(_grade, dynamic=False) if device_type == "cuda" else _grade


def slot_distillation(
    hidden: Tensor,
    target_states: Tensor,
    ends: TargetEnds,
    labels: Tensor,
    *,
    kind: str,
    share: float = 1.0,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Distance between the drafter's and the target's distribution at each slot, and hit.

    Args:
        hidden: (M, D) final-normed hidden states of the slots.
        target_states: (M, D) last hidden states of the target, before its final norm, at the token before each slot's.
        ends: the target's head and final norm.
        labels: (M,) int64 true tokens.
        kind: one of ``DISTILL_KINDS``; the formulas stand at the top of this module.
        share: of the distance in the loss, 0 to 1; the rest is cross-entropy with ``labels``.
        chunk_bytes: how large the float32 logits of a chunk may be; None takes what suits the device.

    Returns:
        losses (M,) float32, differentiable with respect to ``hidden``; correct (M,) bool.
    """
    assert kind in DISTILL_KINDS and ends.final_norm is not None
    dtype = ends.head.dtype
    with torch.no_grad():
        taught = ends.final_norm(target_states.to(dtype)).to(dtype)
    chunk = chunk_rows(hidden.device.type, 2 * ends.head.shape[0], chunk_bytes)
    kernel = _grade_kernel(hidden.device.type)

    def grade(logits: Tensor, target_logits: Tensor, labels: Tensor, needs_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
        losses, correct, gradient, label_gradient = kernel(
            logits, target_logits, labels, ends.logit_softcap, kind, share
        )
        if needs_grad and share < 1:
            gradient.scatter_add_(1, labels[:, None], label_gradient[:, None])
        return losses, correct, gradient

    losses, correct = ChunkedLoss.apply(hidden.to(dtype), (taught,), ends, labels, grade, chunk)
    return losses, correct
