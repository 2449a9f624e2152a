"""The operations of the fused target: Triton kernels on GPUs, and beside each the torch reference that defines it.

The reference runs on the CPU and in tests. ``TRITON_INTERPRET=1`` sends CPU tensors through the kernels, too.

Shape legend: R rows (tree nodes, padded), D hidden size, H query heads, G key-value heads, d head dimension,
F feed-forward width, C cache slots, L layers. A cache is (2, G, C, d): keys, then values.
"""

import os
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NUM_MULTIPROCESSORS = 132
"""Programs that fill a Hopper GPU once; decides only how far attention is split."""


def uses_kernels(tensor: Tensor) -> bool:
    """Whether operations on this tensor run as Triton kernels."""
    return tensor.is_cuda or INTERPRETED


def add_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor, tap: Tensor | None = None
) -> Tensor:
    """``residual += delta``; ``tap = residual``; ``out = rmsnorm(residual) * weight``; all (R, D), tap may be strided."""
    if not uses_kernels(residual):
        if delta is not None:
            residual += delta
        if tap is not None:
            tap.copy_(residual)
        wide = residual.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return out.copy_(weight * scaled.to(residual.dtype))
    from .kernels import add_norm_kernel

    rows, width = residual.shape
    block = _power_of_two(width)
    add_norm_kernel[(rows,)](
        residual, delta if delta is not None else residual, weight, out, tap if tap is not None else residual, eps, width,
        tap.stride(0) if tap is not None else 0, HAS_DELTA=delta is not None, HAS_TAP=tap is not None, BLOCK=block,
        num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class Heads:
    """How a fused query-key-value row is laid out: H queries, then G keys, then G values, each of d numbers."""

    num_queries: int
    num_kv: int
    dim: int


def rope_write(
    qkv: Tensor,
    queries: Tensor | None,
    caches: Tensor,
    norms: tuple[Tensor | None, Tensor] | None,
    tables: tuple[Tensor, Tensor],
    depths: Tensor,
    length: Tensor,
    heads: Heads,
    eps: float,
) -> None:
    """Norm and rotate queries and keys, write keys and values to cache slots ``length + row``.

    Args:
        qkv: (R, L * (H + 2 G) * d), rows of the fused projection; L is 1 wherever there are queries.
        queries: (R, H, d) output; None for keys and values only.
        caches: (L, 2, G, C, d).
        norms: weights of query norm (d,) and key norms (L, d); None for families without them.
        tables: cosines and sines (positions, d / 2).
        depths: (R,) int32 position of each row behind ``length``.
        length: (1,) int32 committed tokens.
    """
    rows, num_layers = qkv.shape[0], caches.shape[0]
    num_heads = heads.num_queries + 2 * heads.num_kv
    if not uses_kernels(qkv):
        _rope_write_reference(qkv.view(rows, num_layers, num_heads, heads.dim), queries, caches, norms, tables, depths,
                              int(length), heads, eps)  # fmt: skip
        return
    from .kernels import rope_write_kernel

    heads_a_program = 4 if rows * num_heads * num_layers < 4096 else 16
    q_weight, k_weight = norms if norms is not None else (None, qkv)
    rope_write_kernel[(rows, -(-num_heads // heads_a_program), num_layers)](
        qkv, queries if queries is not None else qkv, caches, q_weight if q_weight is not None else k_weight, k_weight,
        tables[0], tables[1], depths, length, eps, qkv.stride(0), num_heads * heads.dim, caches.stride(0),
        caches.stride(1), caches.stride(2), NUM_Q=heads.num_queries, NUM_KV=heads.num_kv, HALF=heads.dim // 2,
        HEADS=heads_a_program, HAS_NORM=norms is not None, num_warps=2,
    )  # fmt: skip


def _rope_write_reference(qkv, queries, caches, norms, tables, depths, held, heads, eps):  # type: ignore[no-untyped-def]
    positions = held + depths.long()
    cos = torch.cat([tables[0][positions]] * 2, dim=-1)[:, None]
    sin = torch.cat([tables[1][positions]] * 2, dim=-1)[:, None]

    def turn(states: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None:
            wide = states.float()
            scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
            states = scaled.to(states.dtype) * weight
        left, right = states.chunk(2, dim=-1)
        return states * cos + torch.cat([-right, left], dim=-1) * sin

    rows, split = qkv.shape[0], (heads.num_queries, heads.num_kv, heads.num_kv)
    for layer in range(caches.shape[0]):
        q, k, v = qkv[:, layer].split(split, dim=1)
        if queries is not None:
            queries.copy_(turn(q, norms[0] if norms is not None else None))
        caches[layer, 0, :, held : held + rows] = turn(k, norms[1][layer] if norms is not None else None).transpose(
            0, 1
        )
        caches[layer, 1, :, held : held + rows] = v.transpose(0, 1)


def silu_mul(gate_up: Tensor, out: Tensor) -> Tensor:
    """``out`` (R, F) = silu(gate) * up of ``gate_up`` (R, 2 F)."""
    if not uses_kernels(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return out.copy_(functional.silu(gate) * up)
    from .kernels import silu_mul_kernel

    rows, width = out.shape
    block = min(1024, _power_of_two(width))
    silu_mul_kernel[(rows, -(-width // block))](gate_up, out, width, BLOCK=block, num_warps=4)
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """``out`` (R, N) = x (R, D) @ weight.T + bias; one row goes through a kernel that reads the weights once."""
    if x.shape[0] == 1 and uses_kernels(x):
        return gemv(x, weight, bias, out)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, swiglu: bool = False) -> Tensor:
    """One row times a weight matrix; ``swiglu`` reads [gate; up] and writes silu(gate) * up. Kernel only."""
    from .kernels import gemv_kernel

    width_in, width_out = x.shape[-1], out.shape[-1]
    rows, block, warps = gemv_shape(width_in, width_out, swiglu)
    gemv_kernel[(-(-width_out // rows),)](
        x, weight, bias if bias is not None else weight, out, width_in, width_out, SWIGLU=swiglu,
        HAS_BIAS=bias is not None, ROWS=rows, BLOCK=block, EVEN=width_in % block == 0, num_warps=warps,
    )  # fmt: skip
    return out


def gemv_shape(width_in: int, width_out: int, swiglu: bool) -> tuple[int, int, int]:
    """Rows a program, columns a step, warps: enough programs to fill the GPU several times, 16 bytes a thread."""
    block = _power_of_two(width_in)
    if block > 1024:
        block = 1024
        while block > 128 and width_in % block:
            block //= 2
    rows = 4
    while rows > 1 and width_out // rows < 4 * NUM_MULTIPROCESSORS:
        rows //= 2
    return (max(1, rows // 2) if swiglu else rows), block, 4


def tree_attention(
    queries: Tensor,
    cache: Tensor,
    mask: Tensor,
    depths: Tensor,
    length: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int | None = None,
    triangular: bool = True,
    config: tuple[int, int, int, int, int] | None = None,
) -> Tensor:
    """Attention of R rows over ``length`` committed slots and, under ``mask``, over the R rows behind them.

    Args:
        queries: (R, H, d) rotated.
        cache: (2, G, C, d); the rows' own keys and values are already in slots length … length + R - 1.
        mask: (R, R) uint8, not 0 where row i may look at row j.
        depths: (R,) int32, only read with a window: visible iff query position - key position < window.
        length: (1,) int32.
        out: (R, H * d).
        triangular: no row looks at a row of a greater number (trees and chains; not bidirectional blocks).
        config: tile rows, tile keys, splits, warps, stages; None chooses.
    """
    rows, num_heads, dim = queries.shape
    group = num_heads // cache.shape[1]
    if not uses_kernels(queries):
        return _tree_attention_reference(queries, cache, mask, depths, int(length), out, scale, window)
    from .tree_attention import merge_kernel, tree_attention_kernel

    block_m, block_n, splits, warps, stages = config or attention_shape(rows * group, cache.shape[1], dim)
    partial, sums = queries, queries
    if splits > 1:
        partial = queries.new_empty(splits * rows * num_heads * dim, dtype=torch.float32)
        sums = queries.new_empty(splits * rows * num_heads, dtype=torch.float32)
    tree_attention_kernel[(-(-rows * group // block_m), cache.shape[1], splits)](
        queries, cache, mask, depths, length, out, partial, sums, rows, mask.stride(0), cache.stride(0), cache.stride(1),
        scale * 1.4426950408889634, HEADS=num_heads, GROUP=group, DIM=dim, BLOCK_M=block_m, BLOCK_N=block_n,
        SPLITS=splits, WINDOW=window or 0, TRIANGULAR=triangular, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        total = rows * num_heads
        heads_a_program = 1 if total <= 2048 else 4
        merge_kernel[(-(-total // heads_a_program),)](
            partial,
            sums,
            out,
            total,
            DIM=dim,
            SPLITS=splits,
            HEADS=heads_a_program,
            num_warps=1 if heads_a_program == 1 else 4,
        )
    return out


def attention_shape(packed_rows: int, num_kv: int, dim: int) -> tuple[int, int, int, int, int]:
    """Tile rows, tile keys, splits, warps and stages, so that one wave of programs fills the GPU."""
    if INTERPRETED:
        return 16, 16, 3, 4, 1
    if packed_rows <= 16:
        block_m, block_n, warps, stages = 16, 64, 4, 3
    elif packed_rows <= 640:
        block_m, block_n, warps, stages = 64, 64, 4, 3
    else:
        block_m, block_n, warps, stages = 128, 64, 8, 3
    programs = -(-packed_rows // block_m) * num_kv
    splits = 1 if programs >= 200 else max(1, min(32, round(2 * NUM_MULTIPROCESSORS / programs)))
    return block_m, block_n, splits, warps, stages


def _tree_attention_reference(queries, cache, mask, depths, held, out, scale, window):  # type: ignore[no-untyped-def]
    rows, num_heads, _ = queries.shape
    slots = held + rows
    group = num_heads // cache.shape[1]
    keys, values = (part[:, :slots].repeat_interleave(group, dim=0) for part in cache)
    positions = held + depths.long()
    seen = torch.cat([torch.ones(rows, held, dtype=torch.bool), mask[:rows, :rows].bool()], dim=1)
    if window is not None:
        key_positions = torch.cat([torch.arange(held), positions])[None, :]
        seen &= positions[:, None] - key_positions < window
    result = functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None], keys[None], values[None], attn_mask=seen[None, None], scale=scale
    )
    return out.copy_(result[0].transpose(0, 1).flatten(1))


def commit_rows(caches: Tensor, path: Tensor, num_accepted: Tensor, length: Tensor) -> None:
    """Move accepted rows of all layers to the front: slots ``length + path[j]`` to ``length + j`` for j <= accepted.

    Args:
        caches: (L, 2, G, C, d).
        path: (P,) int32 ascending rows, the root's (0) first; entries behind ``num_accepted`` are ignored.
        num_accepted: (1,) int32.
        length: (1,) int32; not advanced here.
    """
    if not uses_kernels(caches):
        held, count = int(length), int(num_accepted) + 1
        caches[:, :, :, held : held + count] = caches[:, :, :, held + path[:count].long()]
        return
    from .kernels import commit_kernel

    layers, two, groups, _, dim = caches.shape
    commit_kernel[(layers * two * groups,)](
        caches, path, num_accepted, length, caches.stride(2), DIM=dim, SLOTS=path.numel(), num_warps=4
    )


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
