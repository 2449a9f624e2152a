"""The operations of the fused hybrid target: Triton kernels on GPUs, and beside each the torch reference that defines it.

Shape legend: R rows, KH key heads, H value heads, Dk and Dv key and value width, C = 2 KH Dk + H Dv convolution
channels, W convolution kernel, L linear layers.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .fused_ops import INTERPRETED, unpack_mask, uses_kernels
from .gated_delta import solve_on_paths

NORM_EPS = 1e-6
"""Of the query and key norms, as in the models' kernels."""
PRECISION = "tf32x3"
"""Of the products inside the delta rule: three tf32 products each, close to float32."""
Config = tuple[int, int, int, str, int, int]
"""Of the delta rule's kernel: rows a tile, value columns a program, warps, precision, key columns a step, stages."""


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Heads and widths of a Gated DeltaNet layer."""

    key_heads: int
    heads: int
    key: int
    value: int
    kernel: int

    @property
    def channels(self) -> int:
        """Convolution channels C."""
        return 2 * self.key_heads * self.key + self.heads * self.value

    @property
    def width(self) -> int:
        """Width of the fused input projection: C, gates H Dv, b H, a H."""
        return self.channels + self.heads * self.value + 2 * self.heads


@dataclass(slots=True)
class DeltaRows:
    """What the linear layers keep of a pass until a path of it is committed, for all L layers."""

    mixed: Tensor
    """(L, R, width) the fused projections; the first C columns are convolution inputs."""
    k: Tensor
    """(L, R, KH, Dk) float32 unit keys."""
    updates: Tensor
    """(L, R, H, Dv) float32."""
    summed: Tensor
    """(L, R, H) float32 log-decay summed from the root."""
    q: Tensor
    """(R, KH, Dk) float32, one layer's."""
    v: Tensor
    g: Tensor
    beta: Tensor
    out: Tensor
    """(R, H * Dv) in the model's dtype."""

    @classmethod
    def allocate(cls, num_layers: int, num_rows: int, shape: DeltaShape, like: Tensor) -> "DeltaRows":
        def wide(*size: int) -> Tensor:
            return torch.zeros(*size, dtype=torch.float32, device=like.device)

        return cls(
            mixed=like.new_zeros(num_layers, num_rows, shape.width),
            k=wide(num_layers, num_rows, shape.key_heads, shape.key),
            updates=wide(num_layers, num_rows, shape.heads, shape.value),
            summed=wide(num_layers, num_rows, shape.heads),
            q=wide(num_rows, shape.key_heads, shape.key),
            v=wide(num_rows, shape.heads, shape.value),
            g=wide(num_rows, shape.heads),
            beta=wide(num_rows, shape.heads),
            out=like.new_zeros(num_rows, shape.heads * shape.value),
        )


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
        VALUE=shape.value, TAPS=shape.kernel, BLOCK=_power_of_two(max(shape.key, shape.value)), num_warps=1,
    )  # fmt: skip


def tree_delta(
    rows: DeltaRows, layer: int, state: Tensor, mask: Tensor, shape: DeltaShape,
    config: Config | None = None,
) -> None:  # fmt: skip
    """The delta rule over the tree: fills ``out``, ``updates[layer]`` and ``summed[layer]``; ``state`` is only read.

    Args:
        state: (H, Dk, Dv) float32.
        mask: (R, words) int64 ancestor bits, see ``pack_mask``.
        config: None chooses, see ``delta_config``.
    """
    count = rows.v.shape[0]
    chosen = config or delta_config(count, shape)
    if chosen is None or not uses_kernels(state):
        repeats = shape.heads // shape.key_heads
        q, k = (x.repeat_interleave(repeats, dim=1) for x in (rows.q, rows.k[layer]))
        on_path = unpack_mask(mask)
        outputs, updates, summed = solve_on_paths(q, k, rows.v, rows.g, rows.beta, state, on_path)
        rows.out.copy_(outputs.flatten(1))
        rows.updates[layer].copy_(updates)
        rows.summed[layer].copy_(summed)
        return
    from .delta_kernels import tree_delta_kernel

    tile, block, warps, precision, chunk, stages = chosen
    kernel: Any = tree_delta_kernel
    kernel[(shape.heads, -(-shape.value // block))](
        rows.q, rows.k[layer], rows.v, rows.g, rows.beta, state, mask, rows.out, rows.updates[layer],
        rows.summed[layer], count, mask.stride(0), KEY_HEADS=shape.key_heads, HEADS=shape.heads, KEY=shape.key,
        VALUE=shape.value, CHUNK=min(chunk, _power_of_two(shape.key)), BLOCK_V=block, ROWS=tile, PRECISION=precision,
        STAGES=stages, num_warps=warps, num_stages=1,
    )  # fmt: skip


def delta_config(num_rows: int, shape: DeltaShape) -> Config | None:
    """How the kernel runs; None for torch's own solve.

    Programs run at once, without spilled registers up to 128 rows: 48 heads of 128 columns are 192 programs of 32 columns,
    two on a multiprocessor, or 96 of 64.
    """
    if INTERPRETED:
        return 16 if num_rows <= 16 else 64, 16, 4, "ieee", 32, 1
    if num_rows <= 16:
        return 16, 32, 4, PRECISION, 32, 2
    return (32, 32, 4, PRECISION, 16, 3) if num_rows <= 128 else (64, 64, 8, PRECISION, 32, 2)


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
        x, gate, weight, out, gate.stride(0), eps, HEADS=heads, WIDTH=width, BLOCK=_power_of_two(width), num_warps=1
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

    block = min(32, _power_of_two(value))
    kernel: Any = commit_state_kernel
    kernel[(layers, heads, -(-value // block))](
        states, rows.k, rows.updates, rows.summed, path, num_accepted, states.stride(0), rows.k.stride(0),
        rows.updates.stride(0), rows.summed.stride(0), KEY_HEADS=shape.key_heads, HEADS=heads, KEY=key, VALUE=value,
        BLOCK_K=_power_of_two(key), BLOCK_V=block, num_warps=4,
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


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
