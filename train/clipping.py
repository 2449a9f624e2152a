"""Clip and step: inside the optimizer's own kernel where it can, in two passes where not.

torch's fused AdamW divides gradients by a tensor ``grad_scale`` and leaves everything as it is where a tensor ``found_inf``
is 1: made for loss scaling, both serve clipping as well. So gradients are read once for their norm and once by the step,
and the device never waits for the host between the two.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def can_fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer takes ``grad_scale`` and ``found_inf``: torch's fused AdamW alone, bare or in accelerate's hands."""
    inner = _unwrapped(optimizer)
    return type(inner) is torch.optim.AdamW and all(group["fused"] for group in inner.param_groups)


def clipped_step(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], clip: float) -> Tensor:
    """``clip_grad_norm_`` and ``step`` without a pass over the gradients of its own; no step where they are not finite.

    Args:
        optimizer: one that ``can_fuse``.
        parameters: whose gradients count for the norm.
        clip: largest norm.

    Returns:
        () the norm before clipping, on the device; reading it waits for the step.
    """
    norm = nn.utils.get_total_norm(p.grad for p in parameters if p.grad is not None)
    inner = _unwrapped(optimizer)
    inner.grad_scale = (norm / clip).clamp(min=1.0)
    inner.found_inf = (~norm.isfinite()).to(norm.dtype)
    try:
        optimizer.step()
    finally:
        del inner.grad_scale, inner.found_inf
    return norm


def _unwrapped(optimizer: torch.optim.Optimizer) -> Any:
    return getattr(optimizer, "optimizer", optimizer)
