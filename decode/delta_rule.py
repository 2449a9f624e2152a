"""The delta rule over a tree in the fused hybrid target: two Triton kernels on GPUs, and the torch reference beside them.

Shape legend: R rows, KH key heads, H value heads, Dk and Dv key and value width, C = 2 KH Dk + H Dv convolution
channels, L linear layers, T tiles of rows.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .fused_ops import INTERPRETED, unpack_mask, uses_kernels
from .gated_delta import solve_on_paths

PRECISION = "tf32x3"
"""Of the products inside the delta rule: three tf32 products each, close to float32; or "ieee"."""
TILES = (16, 32, 64)
"""Rows that a tile may have."""


class DeltaConfig(NamedTuple):
    """How the two kernels of the delta rule run; plain numbers, so that a benchmark can write them down."""

    rows: int
    """Rows a tile, for both kernels; one of ``TILES``."""
    columns: int
    """Value columns a program of the first kernel."""
    warps: int
    chunk: int
    """Key columns a step of the first kernel."""
    stages: int
    """Steps of the first kernel whose inputs are in flight at once."""
    solve_columns: int
    """Value columns a program of the second kernel."""
    solve_warps: int
    solve_chunk: int
    """Earlier rows a step of the second kernel; at most ``rows``."""
    solve_stages: int
    precision: str = PRECISION


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
class DeltaScratch:
    """What the first kernel of the delta rule leaves to the second; one layer's, float32, flat but for ``asked``."""

    inverses: Tensor
    """(H, T, rows, rows) of ``DeltaConfig.rows``; as large as any of ``TILES`` asks for, as the next three."""
    looks: Tensor
    by_keys: Tensor
    """(KH, T (T - 1) / 2, rows, rows)."""
    by_queries: Tensor
    asked: Tensor
    """(R, H, Dv)."""

    @classmethod
    def allocate(cls, num_rows: int, shape: DeltaShape, device: torch.device) -> "DeltaScratch":
        """Buffers for passes of ``num_rows`` rows; nothing is kept in them from layer to layer."""
        tiles = [(-(-num_rows // tile), tile * tile) for tile in TILES]
        own = shape.heads * max(count * square for count, square in tiles)
        pairs = shape.key_heads * max(count * (count - 1) // 2 * square for count, square in tiles)
        sizes = ((own,), (own,), (pairs,), (pairs,), (num_rows, shape.heads, shape.value))
        return cls(*(torch.zeros(size, dtype=torch.float32, device=device) for size in sizes))


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
    scratch: DeltaScratch

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
            scratch=DeltaScratch.allocate(num_rows, shape, like.device),
        )


def tree_delta(
    rows: DeltaRows, layer: int, state: Tensor, mask: Tensor, shape: DeltaShape, config: DeltaConfig | None = None
) -> None:
    """The delta rule over the tree: fills ``out``, ``updates[layer]`` and ``summed[layer]``; ``state`` is only read.

    Args:
        state: (H, Dk, Dv) float32.
        mask: (R, words) int64 ancestor bits, see ``pack_mask``.
        config: None chooses, see ``delta_config``.
    """
    chosen = config or delta_config(rows.v.shape[0])
    if chosen is not None and uses_kernels(state):
        tree_products(rows, layer, state, mask, shape, chosen)
        tree_solve(rows, layer, mask, shape, chosen)
        return
    inputs = rows.q, rows.k[layer], rows.v, rows.g, rows.beta
    outputs, updates, summed = solve_on_paths(*inputs, state, unpack_mask(mask))
    rows.out.copy_(outputs.flatten(1))
    rows.updates[layer].copy_(updates)
    rows.summed[layer].copy_(summed)


def tree_products(
    rows: DeltaRows, layer: int, state: Tensor, mask: Tensor, shape: DeltaShape, config: DeltaConfig
) -> None:
    """The first of the two kernels of ``tree_delta``: all that no row has to wait for; fills ``scratch`` and ``summed``."""
    from .delta_rule_kernels import tree_products_kernel

    count, s = rows.v.shape[0], rows.scratch
    tiles = -(-count // config.rows)
    kernel: Any = tree_products_kernel
    kernel[(shape.heads, tiles, tiles + -(-shape.value // config.columns))](
        rows.q, rows.k[layer], rows.v, rows.g, rows.beta, state, mask, s.inverses, s.looks, s.by_keys, s.by_queries,
        s.asked, rows.updates[layer], rows.summed[layer], count, mask.stride(0), KEY_HEADS=shape.key_heads,
        HEADS=shape.heads, KEY=shape.key, VALUE=shape.value, CHUNK=min(config.chunk, power_of_two(shape.key)),
        BLOCK_V=config.columns, ROWS=config.rows, PRECISION=config.precision, STAGES=config.stages,
        num_warps=config.warps, num_stages=1,
    )  # fmt: skip


def tree_solve(rows: DeltaRows, layer: int, mask: Tensor, shape: DeltaShape, config: DeltaConfig) -> None:
    """The second of the two kernels of ``tree_delta``, which goes down the tree; ``config`` as for the first."""
    from .delta_rule_kernels import tree_solve_kernel

    count, s = rows.v.shape[0], rows.scratch
    kernel: Any = tree_solve_kernel
    kernel[(shape.heads, -(-shape.value // config.solve_columns))](
        s.inverses, s.looks, s.by_keys, s.by_queries, s.asked, rows.updates[layer], rows.summed[layer], mask, rows.out,
        count, mask.stride(0), 1, KEY_HEADS=shape.key_heads, HEADS=shape.heads, VALUE=shape.value,
        BLOCK_V=config.solve_columns, ROWS=config.rows, CHUNK=config.solve_chunk, PRECISION=config.precision,
        STAGES=config.solve_stages, num_warps=config.solve_warps, num_stages=1,
    )  # fmt: skip


def delta_config(num_rows: int) -> DeltaConfig | None:
    """How the kernels run; None for torch's own solve. At widths of 128 nothing is spilled, beyond 128 rows a few bytes."""
    if INTERPRETED:
        return DeltaConfig(16 if num_rows <= 16 else 64, 16, 4, 32, 1, 16, 4, 16, 1, "ieee")
    if num_rows <= 16:
        return DeltaConfig(16, 32, 4, 32, 2, 32, 2, 16, 2)
    if num_rows <= 128:
        return DeltaConfig(16, 64, 2, 32, 2, 32, 2, 16, 2)
    return DeltaConfig(32, 64, 4, 16, 3, 32, 4, 32, 2)


def power_of_two(number: int) -> int:
    """The smallest one that is not smaller."""
    return 1 << max(0, number - 1).bit_length()
