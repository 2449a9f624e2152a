"""The operations of the fused hybrid target around the delta rule: Triton kernels on GPUs, and beside each the torch reference
that defines it.

Shape legend: R rows, KH key heads, H value heads, Dk and Dv key and value width, C = 2 KH Dk + H Dv convolution
channels, W convolution kernel, L linear layers.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .delta_rule import DeltaRows, DeltaShape, power_of_two
from .fused_ops import uses_kernels

NORM_EPS = 1e-6
"""Of the query and key norms, as in the models' kernels."""


def delta_inputs(
    rows: DeltaRows, layer: int, window: Tensor, columns: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor,
    shape: DeltaShape,
) -> None:  # fmt: skip
    """Convolve ``rows.mixed[layer]`` along each row's path; fill ``q``, ``k[layer]``, ``v``, ``g`` and ``beta``.

    Args:
        window: (W - 1, C) committed convolution inputs, oldest first.
        columns: (R, W) int32, where each row's inputs lie: W - 1 committed ones, then the rows.
        conv: (C, W) weights.
        a_log, dt_bias: (H,).
    """
    mixed = rows.mixed[layer]
    count = mixed.shape[0]
    if not uses_kernels(mixed):
        known = torch.cat([window, mixed[:, : shape.channels]])
        convolved = functional.silu((known[columns.long()].float() * conv.float().T).sum(1)).to(mixed.dtype).float()
        split = (shape.key_heads * shape.key, shape.key_heads * shape.key, shape.heads * shape.value)
        q, k, v = convolved.split(split, dim=-1)
        q, k = (x.view(count, shape.key_heads, shape.key) for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
        rows.q.copy_(q * shape.key**-0.5)
        rows.k[layer].copy_(k)
        rows.v.copy_(v.view(count, shape.heads, shape.value))
        b, a = mixed[:, -2 * shape.heads :].split(shape.heads, dim=-1)
        rows.beta.copy_(b.sigmoid())
        rows.g.copy_(-a_log.float().exp() * functional.softplus(a.float() + dt_bias))
        return
    from .delta_kernels import delta_inputs_kernel

    kernel: Any = delta_inputs_kernel
    kernel[(count, 2 * shape.key_heads + shape.heads)](
        mixed, window, columns, conv, a_log, dt_bias, rows.q, rows.k[layer], rows.v, rows.g, rows.beta,
        mixed.stride(0), shape.key**-0.5, NORM_EPS, KEY_HEADS=shape.key_heads, HEADS=shape.heads, KEY=shape.key,
        VALUE=shape.value, TAPS=shape.kernel, BLOCK=power_of_two(max(shape.key, shape.value)), num_warps=1,
    )  # fmt: skip


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """``out`` (R, H * Dv) = rmsnorm of each head of x, times ``weight`` (Dv,) and silu(``gate`` (R, H * Dv))."""
    width, count = weight.numel(), x.shape[0]
    if not uses_kernels(x):
        wide = x.view(count, -1, width).float()
        scaled = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
        normed = (weight * scaled) * functional.silu(gate.reshape(count, -1, width).float())
        return out.copy_(normed.flatten(1))
    from .delta_kernels import gated_norm_kernel

    kernel: Any = gated_norm_kernel
    heads = x.shape[1] // width
    kernel[(count, heads)](
        x, gate, weight, out, gate.stride(0), eps, HEADS=heads, WIDTH=width, BLOCK=power_of_two(width), num_warps=1
    )
    return out


def commit_states(
    states: Tensor, windows: Tensor, rows: DeltaRows, path: Tensor, num_accepted: Tensor, shape: DeltaShape
) -> None:
    """Bring recurrent states (L, H, Dk, Dv) and windows (L, W - 1, C) to the end of a path of the last pass.

    Args:
        path: (P,) int32 rows from the root's down; entries behind ``num_accepted`` are ignored.
        num_accepted: (1,) int32, nodes behind the root.
    """
    _commit_windows(windows, rows.mixed, path, num_accepted, shape)
    layers, heads, key, value = states.shape
    if not uses_kernels(states):
        index = path[: int(num_accepted) + 1].long()
        summed = rows.summed[:, index]
        weight = (summed[:, -1:] - summed).exp()  # (L, p, H)
        repeats = shape.heads // shape.key_heads
        k = rows.k[:, index].repeat_interleave(repeats, dim=2)
        written = torch.einsum("lph,lphk,lphv->lhkv", weight, k, rows.updates[:, index])
        states.copy_(states * summed[:, -1].exp()[..., None, None] + written)
        return
    from .delta_kernels import commit_state_kernel

    block = min(32, power_of_two(value))
    kernel: Any = commit_state_kernel
    kernel[(layers, heads, -(-value // block))](
        states, rows.k, rows.updates, rows.summed, path, num_accepted, states.stride(0), rows.k.stride(0),
        rows.updates.stride(0), rows.summed.stride(0), KEY_HEADS=shape.key_heads, HEADS=heads, KEY=key, VALUE=value,
        BLOCK_K=power_of_two(key), BLOCK_V=block, num_warps=4,
    )  # fmt: skip


def _commit_windows(windows: Tensor, mixed: Tensor, path: Tensor, num_accepted: Tensor, shape: DeltaShape) -> None:
    """The last W - 1 of the committed inputs and the path's; nothing waits for the device."""
    kept = shape.kernel - 1
    wanted = torch.arange(kept, device=path.device) + num_accepted + 1  # in (committed inputs, path)
    on_path = path.long().gather(0, (wanted - kept).clamp(0, path.numel() - 1))
    new = mixed[:, :, : shape.channels].index_select(1, on_path)
    old = windows.index_select(1, wanted.clamp(max=kept - 1))
    windows.copy_(torch.where((wanted < kept)[None, :, None], old, new))


def gated_rope(
    qkv: Tensor, queries: Tensor, cache: Tensor, gains: tuple[Tensor, Tensor], tables: tuple[Tensor, Tensor],
    depths: Tensor, length: Tensor, eps: float,
) -> None:  # fmt: skip
    """Norm and partly rotate queries and keys, write keys and values to cache slots ``length + row``.

    Args:
        qkv: (R, (2 H + 2 G) * d): H times [query, gate], then keys, then values.
        queries: (R, H, d) output.
        cache: (2, G, C, d).
        gains: float32 (d,) of query and key norm, the 1 that the model adds to its weights included.
        tables: cosines and sines (positions, r / 2) of the rotated dimensions r.
        depths: (R,) int32; length: (1,) int32.
    """
    count, num_q, dim = queries.shape
    num_kv, half = cache.shape[1], tables[0].shape[1]
    if not uses_kernels(qkv):
        held = int(length)
        heads = qkv.view(count, -1, dim)
        at = held + depths.long()
        cos, sin = (torch.cat([table[at]] * 2, dim=-1)[:, None] for table in tables)

        def turn(x: Tensor, gain: Tensor) -> Tensor:
            wide = x.float()
            x = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gain).to(x.dtype)
            turned, rest = x[..., : 2 * half], x[..., 2 * half :]
            left, right = turned.chunk(2, dim=-1)
            return torch.cat([turned * cos + torch.cat([-right, left], dim=-1) * sin, rest], dim=-1)

        queries.copy_(turn(heads[:, : 2 * num_q : 2], gains[0]))
        cache[0, :, held : held + count] = turn(heads[:, 2 * num_q : 2 * num_q + num_kv], gains[1]).transpose(0, 1)
        cache[1, :, held : held + count] = heads[:, 2 * num_q + num_kv :].transpose(0, 1)
        return
    from .delta_kernels import gated_rope_kernel

    kernel: Any = gated_rope_kernel
    kernel[(count, num_q + 2 * num_kv)](
        qkv, queries, cache, gains[0], gains[1], tables[0], tables[1], depths, length, eps, qkv.stride(0),
        cache.stride(0), cache.stride(1), NUM_Q=num_q, NUM_KV=num_kv, DIM=dim, HALF=half, num_warps=2,
    )  # fmt: skip
