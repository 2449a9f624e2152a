"""The forms in which a shard holds hidden states, and the way there and back.

bfloat16 and float32 are rounded to once and read as they lie there. fp8 takes half the space of bfloat16: each tap of each
token is divided by a scale of its own, its largest magnitude / 448, and rounded to float8_e4m3 (448 is that type's largest
value; three bits of mantissa, so an error of 1/16 at most, 1/40 typically). Readers hand out the product as bfloat16.

Shape legend: T tokens with states, K taps, D hidden size, F = K * D.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .shard_format import Row, ShardsHeader

FP8 = torch.float8_e4m3fn
STORED_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "fp8": FP8}
"""Type of the stored hidden states by the header's ``dtype``."""
LAST_HIDDEN_DTYPE = torch.bfloat16
LARGEST_CODE = torch.finfo(FP8).max
VALUES = torch.arange(256, dtype=torch.uint8).view(FP8).float().numpy()
CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
"""Size of the float32 numbers that codes are turned into at a time."""
# All-zero states need some scale; below the smallest normal number devices differ in what they compute.
LEAST_SCALE = torch.finfo(torch.float32).tiny


def quantise(taps_TF: Tensor, num_taps: int) -> tuple[Tensor, Tensor]:
    """Round taps to float8 with one scale a token and tap, on the device they are on.

    Returns:
        codes (T, F) float8_e4m3 and scales (T, K) float32; the taps are about codes * scales.
    """
    taps_TKD = taps_TF.float().unflatten(-1, (num_taps, -1))
    lowest_TK, highest_TK = torch.aminmax(taps_TKD, dim=-1)  # unlike abs().amax() this makes no tensor of the same size
    scales_TK = (torch.maximum(-lowest_TK, highest_TK) / LARGEST_CODE).clamp(min=LEAST_SCALE)
    return (taps_TKD / scales_TK[..., None]).to(FP8).flatten(-2), scales_TK


def dequantise(codes_TF: Tensor, scales_TK: Tensor) -> Tensor:
    """The taps (T, F) bfloat16 that codes and scales stand for, computed in float32 where they are; the same bits everywhere."""
    num_taps = scales_TK.shape[-1]
    taps_TF = codes_TF.new_empty(codes_TF.shape, dtype=torch.bfloat16)
    chunk = max(1, CHUNK_BYTES[codes_TF.device.type] // (4 * max(codes_TF.shape[-1], 1)))
    for taps, codes, scales in zip(*(whole.split(chunk) for whole in (taps_TF, codes_TF, scales_TK)), strict=True):
        if codes.is_cpu:  # torch's own conversion takes twice the time
            values = torch.from_numpy(VALUES.take(codes.view(torch.uint8).numpy()))
        else:
            values = codes.float()
        taps.copy_(values.unflatten(-1, (num_taps, -1)).mul_(scales[..., None]).flatten(-2))
    return taps_TF


def split_captured(states_TF: Tensor, header: "ShardsHeader") -> tuple[Tensor, Tensor | None]:
    """Take captured states (T, L * D), the layers of ``captured_layer_ids`` side by side, apart.

    Returns:
        taps (T, F) and last hidden state (T, D) or None; views of the same memory.
    """
    last_TD = states_TF[:, -header.hidden_size :] if header.has_last_hidden else None
    return states_TF[:, : header.row_width], last_TD


def stored_parts(taps_TF: Tensor, last_TD: Tensor | None, header: "ShardsHeader") -> dict[str, Tensor]:
    """States in their stored types on the device they are on, by field of ``Row``; no copy of what is so already."""
    if header.dtype == "fp8":
        codes_TF, scales_TK = quantise(taps_TF, header.num_taps)
        parts = {"hidden_states": codes_TF, "scales": scales_TK}
    else:
        parts = {"hidden_states": taps_TF.to(STORED_DTYPES[header.dtype]).contiguous()}
    if last_TD is not None:
        parts["last_hidden"] = last_TD.to(LAST_HIDDEN_DTYPE).contiguous()
    return parts


def with_stored_states(row: "Row", header: "ShardsHeader") -> "Row":
    """The row with its states as they are stored, on the CPU."""
    if row.scales is not None:  # quantised on the device
        return row
    last = None if row.last_hidden is None else row.last_hidden.cpu()
    return replace(row, **stored_parts(row.hidden_states.cpu(), last, header))


def with_readable_states(row: "Row") -> "Row":
    """The row as readers hand it out: without scales."""
    if row.scales is None:
        return row
    return replace(row, hidden_states=dequantise(row.hidden_states, row.scales), scales=None)
