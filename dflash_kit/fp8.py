"""Hidden states in 8 bits: float8 e4m3 values with one float32 scale per token and tap.

The scale maps a tap's largest magnitude to 448, the largest e4m3 value, so that massive activations fit. Values down to
1/28,672 of it keep three mantissa bits (a relative error of 1/16 at most); smaller ones lose bits gradually.

Shape legend: T tokens, K taps, D hidden size.
"""

import torch
from torch import Tensor

LARGEST = 448.0


def quantise(taps_TKD: Tensor) -> tuple[Tensor, Tensor]:
    """Round to 8 bits.

    Args:
        taps_TKD: (T, K, D) finite values.

    Returns:
        The values (T, K, D) as the bits of float8 e4m3 (uint8), and the scales (T, K) float32: a value is bits × scale.
    """
    scales_TK = taps_TKD.abs().amax(-1).float() / LARGEST
    scales_TK = scales_TK.clamp(min=torch.finfo(torch.float32).tiny)
    values = (taps_TKD.float() / scales_TK[..., None]).clamp(-LARGEST, LARGEST)
    return values.to(torch.float8_e4m3fn).view(torch.uint8), scales_TK


def dequantise(bits_TKD: Tensor, scales_TK: Tensor) -> Tensor:
    """(T, K, D) bfloat16 values of what ``quantise`` returned."""
    values = bits_TKD.view(torch.float8_e4m3fn).float() * scales_TK[..., None]
    return values.to(torch.bfloat16)
