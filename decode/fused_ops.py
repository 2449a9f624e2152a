"""The operations of the fused target: Triton kernels on GPUs, and beside each the torch reference that defines it.

The reference runs on the CPU and in tests. ``TRITON_INTERPRET=1`` sends CPU tensors through the kernels, too.

Shape legend: N prompts (decoded at a time), R rows (tree nodes, padded) of all prompts, one prompt's behind another's, R / N each,
D hidden size, H query heads, G key-value heads, d head dimension, F feed-forward width, C cache slots, L layers.
A cache is (2, N * G, C, d): keys, then values; a prompt's heads lie together.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .fused_products import linear, preferred_library, swiglu
from .kernel_launch import INTERPRETED, NUM_MULTIPROCESSORS, launch_options, power_of_two, uses_kernels

__all__ = [
    "INTERPRETED",
    "NUM_MULTIPROCESSORS",
    "Heads",
    "add_norm",
    "commit_rows",
    "linear",
    "pack_mask",
    "preferred_library",
    "rope_write",
    "swiglu",
    "tree_attention",
    "unpack_mask",
    "uses_kernels",
]


def add_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor, tap: Tensor | None = None
) -> Tensor:
    """``residual += delta``; ``tap = residual``; ``out = rmsnorm(residual) * weight``; all (R, D)."""
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
    block = power_of_two(width)
    add_norm_kernel[(rows,)](
        residual, delta if delta is not None else residual, weight, out, tap if tap is not None else residual, eps,
        width,
        tap.stride(0) if tap is not None else 0, HAS_DELTA=delta is not None, HAS_TAP=tap is not None, BLOCK=block,
        num_warps=max(1, min(8, block // 512)), **launch_options(residual),
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
    """Norm and rotate queries and keys, write keys and values to cache slots ``length + row``, rows counted from their prompt's first.

    Args:
        qkv: (R, L * (H + 2 G) * d), rows of the fused projection; L is 1 wherever there are queries.
        queries: (R, H, d) output; None for keys and values only.
        caches: (L, 2, N * G, C, d).
        norms: weights of query norm (d,) and key norms (L, d); None for families without them.
        tables: cosines and sines (positions, d / 2).
        depths: (R,) int32 position of each row behind ``length``.
        length: (N,) int32 committed tokens.
    """
    rows, num_layers = qkv.shape[0], caches.shape[0]
    num_heads = heads.num_queries + 2 * heads.num_kv
    if not uses_kernels(qkv):
        for i, held in enumerate(length.tolist()):
            mine, its_heads = _of_prompt(i, rows // length.numel()), _of_prompt(i, heads.num_kv)
            _rope_write_reference(
                qkv[mine].view(-1, num_layers, num_heads, heads.dim), None if queries is None else queries[mine],
                caches[:, :, its_heads], norms, tables, depths[mine], held, heads, eps,
            )  # fmt: skip
        return
    from .kernels import rope_write_kernel

    heads_a_program = 4 if rows * num_heads * num_layers < 4096 else 16
    q_weight, k_weight = norms if norms is not None else (None, qkv)
    rope_write_kernel[(rows, -(-num_heads // heads_a_program), num_layers)](
        qkv, queries if queries is not None else qkv, caches, q_weight if q_weight is not None else k_weight, k_weight,
        tables[0], tables[1], depths, length, eps, qkv.stride(0), num_heads * heads.dim, caches.stride(0),
        caches.stride(1), caches.stride(2), rows // length.numel(), NUM_Q=heads.num_queries, NUM_KV=heads.num_kv, HALF=heads.dim // 2,
        HEADS=heads_a_program, HAS_NORM=norms is not None, num_warps=2, **launch_options(qkv),
    )  # fmt: skip


def _of_prompt(index: int, size: int) -> slice:
    """Where the ``size`` entries of a prompt lie in a dimension that holds those of all."""
    return slice(index * size, (index + 1) * size)


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


def pack_mask(seen: Tensor) -> Tensor:
    """Bits (R, ceil(R / 64)) int64 of a bool mask (R, R): bit j % 64 of word j // 64 is column j."""
    rows = seen.shape[0]
    padded = functional.pad(seen.long(), (0, -rows % 64)).view(rows, -1, 64)
    return (padded << torch.arange(64, device=seen.device)).sum(-1)


def unpack_mask(mask: Tensor) -> Tensor:
    """The bool mask (R, R) of ``pack_mask``."""
    rows = mask.shape[0]
    return ((mask[:, :, None] >> torch.arange(64, device=mask.device)) & 1).bool().flatten(1)[:, :rows]


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
    long_context: bool = False,
    ancestors: Tensor | None = None,
    config: tuple[int, int, int, int, int] | None = None,
) -> Tensor:
    """Attention of R rows over ``length`` committed slots of their prompt and, under ``mask``, over its rows behind them.

    Args:
        queries: (R, H, d) rotated.
        cache: (2, N * G, C, d); the rows' own keys and values are already in slots length … length + R / N - 1.
        mask: (R, W) int64 bits, see ``pack_mask``; columns are rows of the same prompt, and so are ancestors.
        depths: (R,) int32, only read with a window: visible iff query position - key position < window.
        length: (N,) int32.
        out: (R, H * d).
        triangular: no row looks at a row of a greater number (trees and chains; not bidirectional blocks).
        long_context: whether the prefix is worth more splits.
        ancestors: (R, P) int32 of rows in preorder, see `TreeBuffers`: far keys are gathered instead of looked for. Needs ``triangular``.
        config: tile rows, tile keys, splits, warps, stages; None chooses.
    """
    total_rows, num_heads, dim = queries.shape
    rows, num_kv = total_rows // length.numel(), cache.shape[1] // length.numel()
    group = num_heads // num_kv
    if not uses_kernels(queries):
        for i, held in enumerate(length.tolist()):
            mine, its_cache = _of_prompt(i, rows), cache[:, _of_prompt(i, num_kv)]
            _tree_attention_reference(
                queries[mine], its_cache, mask[mine], depths[mine], held, out[mine], scale, window
            )
        return out
    from .tree_attention import merge_kernel, tree_attention_kernel

    assert ancestors is None or triangular, "rows in preorder see no row of a greater number"
    block_m, block_n, splits, warps, stages = config or attention_shape(rows * group, cache.shape[1], long_context, dim)
    partial, sums = queries, queries
    if splits > 1:
        partial = queries.new_empty(splits * total_rows * num_heads * dim, dtype=torch.float32)
        sums = queries.new_empty(splits * total_rows * num_heads, dtype=torch.float32)
    tree_attention_kernel[(-(-rows * group // block_m), cache.shape[1], splits)](
        queries, cache, mask, depths, depths if ancestors is None else ancestors, length, out, partial, sums, rows,
        mask.stride(0), cache.stride(0), cache.stride(1),
        scale * 1.4426950408889634, HEADS=num_heads, GROUP=group, DIM=dim, BLOCK_M=block_m, BLOCK_N=block_n,
        SPLITS=splits, WINDOW=window or 0, TRIANGULAR=triangular, PREORDER=ancestors is not None,
        PATH=1 if ancestors is None else ancestors.shape[1], num_warps=warps, num_stages=stages,
        **launch_options(out),
    )  # fmt: skip
    if splits > 1:
        total = total_rows * num_heads
        heads_a_program = 1 if total <= 2048 else 4
        merge_kernel[(-(-total // heads_a_program),)](
            partial, sums, out, total, DIM=dim, SPLITS=splits, HEADS=heads_a_program, num_warps=heads_a_program,
            **launch_options(out),
        )  # fmt: skip
    return out


def attention_shape(
    packed_rows: int, num_kv: int, long_context: bool, dim: int = 128
) -> tuple[int, int, int, int, int]:
    """Tile rows, tile keys, splits, warps, stages: programs fill the GPU once, twice where the prefix is long.

    ``packed_rows`` are rows of one prompt times the query heads of a group, ``num_kv`` the key-value heads of all prompts. Heads of 256 dimensions take two stages, since three tiles of them hardly fit in shared memory.
    """
    if INTERPRETED:
        return 16, 64, 3, 4, 1
    if dim >= 256:
        tile = 16 if packed_rows <= 16 else 64
        programs = -(-packed_rows // tile) * num_kv
        return tile, 64, max(1, min(16, round(NUM_MULTIPROCESSORS / programs))), 4 if tile == 16 else 8, 2
    if (
        long_context and 512 < packed_rows <= 2048
    ):  # 264 rows of four heads at 8192: 108 us, with tiles of 64 rows 129 and more
        return 128, 64, max(1, round(2.7 * NUM_MULTIPROCESSORS / (-(-packed_rows // 128) * num_kv))), 8, 3
    block_m, stages = (16, 3) if packed_rows <= 16 else (64, 3)
    programs = -(-packed_rows // block_m) * num_kv
    splits = round(NUM_MULTIPROCESSORS / programs)
    if long_context:  # two programs fit on a multiprocessor
        splits = max(2 * NUM_MULTIPROCESSORS // programs, 2 if programs < 2 * NUM_MULTIPROCESSORS else 1)
    splits = max(1, min(16, splits))
    if splits == 1 and not long_context:
        stages = 2  # 264 rows at 512: 20.7 us, with three 22.2
    return block_m, 64, splits, 4, stages


def _tree_attention_reference(queries, cache, mask, depths, held, out, scale, window):  # type: ignore[no-untyped-def]
    rows, num_heads, _ = queries.shape
    slots = held + rows
    group = num_heads // cache.shape[1]
    keys, values = (part[:, :slots].repeat_interleave(group, dim=0) for part in cache)
    positions = held + depths.long()
    seen = torch.cat([torch.ones(rows, held, dtype=torch.bool), unpack_mask(mask)], dim=1)
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
        caches: (L, 2, N * G, C, d).
        path: (N * P,) int32: each prompt's ascending rows, the root's (0) first; entries behind ``num_accepted`` are ignored.
        num_accepted: (N,) int32.
        length: (N,) int32; not advanced here.
    """
    layers, two, num_heads, _, dim = caches.shape
    num_kv, num_slots = num_heads // length.numel(), path.numel() // length.numel()
    if not uses_kernels(caches):
        for i, (held, accepted) in enumerate(zip(length.tolist(), num_accepted.tolist(), strict=True)):
            its_cache, rows = caches[:, :, _of_prompt(i, num_kv)], path[_of_prompt(i, num_slots)][: accepted + 1].long()
            its_cache[:, :, :, held : held + accepted + 1] = its_cache[:, :, :, held + rows]
        return
    from .kernels import commit_kernel

    commit_kernel[(num_heads, two, layers)](
        caches, path, num_accepted, length, caches.stride(0), caches.stride(1), caches.stride(2), NUM_KV=num_kv, DIM=dim,
        SLOTS=num_slots, num_warps=4,
    )  # fmt: skip
