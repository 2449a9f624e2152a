"""8-bit storage: the error bound, massive activations, and zeros."""

import torch

from dflash_kit.fp8 import LARGEST, dequantise, quantise


def test_relative_error_is_bounded_where_values_are_normal():
    taps = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bits, scales = quantise(taps)
    assert bits.dtype == torch.uint8 and scales.dtype == torch.float32
    back = dequantise(bits, scales).double()
    least = taps.abs().amax(-1, keepdim=True) / LARGEST * 2**-6  # the smallest normal number
    normal = taps.abs() >= least
    assert normal.float().mean() > 0.99
    assert float(((back - taps).abs() / taps.abs())[normal].max()) <= 2**-4 + 2**-8
    assert float((back - taps).abs()[~normal].max()) <= float(least.max()) * 2**-4 + 1e-9


def test_a_massive_activation_does_not_wipe_out_the_others():
    taps = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(1))
    taps[0, 0, 7] = 3000.0
    back = dequantise(*quantise(taps)).float()
    others = torch.arange(64) != 7
    assert float((back - taps)[0, 0, others].norm() / taps[0, 0, others].norm()) < 0.05
    assert abs(float(back[0, 0, 7]) - 3000) < 3000 / 2**8


def test_each_token_and_tap_has_its_own_scale_and_zeros_stay_zero():
    taps = torch.stack([torch.ones(2, 8), 1000 * torch.ones(2, 8), torch.zeros(2, 8)])
    bits, scales = quantise(taps)
    assert scales.shape == (3, 2)
    assert torch.equal(dequantise(bits, scales).float(), taps)
