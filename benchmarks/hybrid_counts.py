"""What the two forms of the delta rule over a tree have to do in one layer, counted: what `decode_hybrid_kernel.py` prints beside times.

``in_a_row`` is what bounds the time where few rows keep a GPU waiting: the products of two tiles that the longest program
makes one after another (of both kernels, where there are two). Loads are what programs ask for, wherever it lies; of the
states, memory is read once.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from decode.delta_rule import DeltaConfig, DeltaShape

OneKernelConfig = tuple[int, int, int, str, int, int]


def counts(shape: DeltaShape, seen: Tensor, num_rows: int, one: OneKernelConfig, two: DeltaConfig) -> dict[str, Any]:
    """Both forms; ``seen`` (n, n) bool, who is on whose path, and ``num_rows`` with padding."""
    return {
        "state_mb": round(4 * shape.heads * shape.key * shape.value / 1e6, 3),
        "one_kernel": one_kernel_counts(shape, seen, num_rows, one),
        "two_kernels": two_kernels_counts(shape, seen, num_rows, two),
    }


def one_kernel_counts(shape: DeltaShape, seen: Tensor, num_rows: int, config: OneKernelConfig) -> dict[str, Any]:
    """Of one kernel with a program for every block of value columns."""
    size, columns, _, _, chunk, _ = config
    tiles, steps = -(-num_rows // size), steps_by_tile(seen, size)
    pairs, pieces, programs = tiles * (tiles - 1) // 2, -(-shape.key // chunk), shape.heads * -(-shape.value // columns)
    by_keys = 2 * pieces * (tiles + pairs)
    in_a_row = 2 * pieces * tiles + by_keys + 2 * pairs + sum(steps) + tiles
    with_state, square = 2 * size * shape.key * columns, 2 * size * size
    operations = tiles * with_state + (tiles + pairs) * square * shape.key
    operations += (2 * pairs + sum(steps) + tiles) * size * size * columns
    loads = tiles * (2 * size * shape.key + shape.key * columns + size * columns)
    loads += (tiles + pairs) * 3 * size * shape.key + pairs * size * columns
    return {
        "in_a_row": in_a_row, "with_keys_in_a_row": by_keys, "programs": programs,
        "gflop": round(2e-9 * programs * operations, 3), "loads_mb": round(4e-6 * programs * loads, 1),
        "written_mb": round(6e-6 * num_rows * shape.heads * shape.value, 1),
    }  # fmt: skip


def two_kernels_counts(shape: DeltaShape, seen: Tensor, num_rows: int, config: DeltaConfig) -> dict[str, Any]:
    """Of a kernel that makes everything once and one that goes down the tree."""
    size, tiles = config.rows, -(-num_rows // config.rows)
    steps = [max(0, step - 1) for step in steps_by_tile(seen, size)]
    pairs, pieces = tiles * (tiles - 1) // 2, -(-shape.key // config.chunk)
    blocks, solve_blocks = -(-shape.value // config.columns), -(-shape.value // config.solve_columns)
    own, square = shape.heads * tiles, size * size
    operations = 2 * square * shape.key * (own + shape.key_heads * pairs)
    operations += shape.heads * size * square * (sum(steps) + tiles)
    operations += 2 * own * blocks * size * shape.key * config.columns
    operations += shape.heads * solve_blocks * (2 * pairs + 2 * tiles) * square * config.solve_columns
    loads = 3 * size * shape.key * (own + shape.key_heads * pairs)
    loads += own * blocks * (2 * size * shape.key + shape.key * config.columns + size * config.columns)
    loads += shape.heads * solve_blocks * 2 * (tiles + pairs) * square
    loads += shape.heads * solve_blocks * (2 * tiles + pairs) * size * config.solve_columns
    rows = num_rows * shape.heads * shape.value
    scratch = 2 * square * (own + shape.key_heads * pairs) + rows
    down = 2 * pairs * -(-size // config.solve_chunk) + 2 * tiles
    return {
        "in_a_row": 2 * pieces + max(steps) + 1 + down, "of_the_first": 2 * pieces + max(steps) + 1,
        "of_the_second": down, "programs": own * (1 + blocks) + shape.key_heads * pairs,
        "programs_of_the_second": shape.heads * solve_blocks, "gflop": round(2e-9 * operations, 3),
        "loads_mb": round(4e-6 * loads, 1), "written_mb": round((4 * scratch + 10 * rows) / 1e6, 1),
        "scratch_mb": round(4e-6 * scratch, 1),
    }  # fmt: skip


def steps_by_tile(seen: Tensor, size: int) -> list[int]:
    """Ancestors that the deepest row of each tile of rows has in its own tile; padded rows have none."""
    tiles = range(0, len(seen), size)
    return [int(seen[at : at + size, at : at + size].sum(1).max()) - 1 for at in tiles]
