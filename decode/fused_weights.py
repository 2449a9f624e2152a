"""Weights of several projections of the same input as one matrix, taken from existing modules.

Fusing is in place: the modules' own weights become views of the fused ones, so the untransformed model keeps working
and no memory is spent twice.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_plain(part: Any) -> bool:
    """Whether a module is a projection that is nothing but a matrix of numbers: not quantised, say."""
    return isinstance(part, nn.Linear) and part.weight.dtype in PLAIN_DTYPES


@torch.no_grad()
def fuse_weights(linears: Sequence[nn.Linear]) -> Tensor:
    """Stack the weights of several projections of the same input; each becomes a view of the stack."""
    fused = _already_fused([part.weight for part in linears])
    if fused is not None:
        return fused
    fused = torch.cat([part.weight.detach() for part in linears])
    start = 0
    for part in linears:
        part.weight.data = fused[start : start + part.out_features]
        start += part.out_features
    return fused


def _already_fused(weights: Sequence[Tensor]) -> Tensor | None:
    """The stack that these weights are consecutive views of, if they are."""
    rows = sum(weight.shape[0] for weight in weights)
    storage, offset = weights[0].untyped_storage().data_ptr(), weights[0].storage_offset()
    for weight in weights:
        if weight.untyped_storage().data_ptr() != storage or weight.storage_offset() != offset:
            return None
        offset += weight.numel()
    return weights[0].detach().as_strided((rows, weights[0].shape[1]), weights[0].stride())


def fuse_biases(linears: Sequence[nn.Linear]) -> Tensor | None:
    """The biases of several projections behind one another, zeros where one has none; None if none has."""
    if all(part.bias is None for part in linears):
        return None
    parts = [part.weight.new_zeros(part.out_features) if part.bias is None else part.bias.detach() for part in linears]
    return torch.cat(parts)
