"""Whether numbers are numbers: a NaN makes target and drafter agree on the same nonsense, which looks like acceptance."""

import torch
from torch import Tensor


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor of any shape holds neither NaN nor infinity.

    The two extremes tell it, because NaN passes through both; unlike ``isfinite`` this makes no tensor of the same size.
    """
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    if tensor.element_size() == 1:  # 8-bit floats have no reductions
        tensor = tensor.float()
    return bool(torch.stack(tensor.aminmax()).isfinite().all())
