"""How Triton kernels are launched: whether at all, when they may overlap, and the sizes that choose between them."""

import os

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SKINNY_ROWS = 16
SKINNY_FEATURES = 20_000
"""Up to so many rows, and from so many output features on, `skinny` beats cuBLAS on an H200.

With fewer features it has too few programs: started early, they crowd on the multiprocessors that happen to be free.
"""
OVERLAP = os.environ.get("DFLASH_KERNEL_OVERLAP", "1") == "1"
"""Whether launches may overlap; 0 switches it off, to compare."""
NUM_MULTIPROCESSORS = 132
"""Programs that fill a Hopper GPU once; decides only how far attention is split."""


def launch_options(tensor: Tensor) -> dict[str, bool]:
    """Programmatic dependent launch on Hopper and later: a kernel starts while the one before it ends, then waits.

    ``tensor`` has one row for every row of the pass. Beyond few rows, between cuBLAS's products, it does not pay.
    """
    overlaps = OVERLAP and tensor.is_cuda and tensor.shape[0] <= SKINNY_ROWS
    if overlaps and torch.cuda.get_device_capability(tensor.device)[0] >= 9:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def uses_kernels(tensor: Tensor) -> bool:
    """Whether operations on this tensor run as Triton kernels."""
    return tensor.is_cuda or INTERPRETED


def power_of_two(number: int) -> int:
    """The least one that is not below ``number``."""
    return 1 << max(0, number - 1).bit_length()
