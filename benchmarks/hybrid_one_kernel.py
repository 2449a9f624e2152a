"""The delta rule over a tree in one kernel, as it was before its products were made once: what `decode_hybrid_kernel.py`
compares against. Its programs, one for every block of value columns, each make all products of keys and queries.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from decode.delta_rule import PRECISION, DeltaRows, DeltaShape, power_of_two
from decode.fused_ops import INTERPRETED


@triton.jit
def _seen(mask, row, used, mask_stride, first, column):
    """Whether each row may look at each of a tile of columns that begins with ``first``."""
    word = tl.load(mask + row * mask_stride + first // 64, mask=used, other=0)
    return ((word[:, None] >> (column % 64).to(tl.int64)[None, :]) & 1) != 0


@triton.jit
def _products(
    q, k, row, column, num_rows, key_head, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Keys and queries of a tile of rows times the keys of a tile of columns, both (ROWS, ROWS)."""
    by_key, by_query = tl.zeros((ROWS, ROWS), tl.float32), tl.zeros((ROWS, ROWS), tl.float32)
    for begin in tl.range(0, KEY, CHUNK, num_stages=STAGES):
        key = begin + tl.arange(0, CHUNK)
        at = (row * KEY_HEADS + key_head)[:, None] * KEY + key[None, :]
        inside = (row < num_rows)[:, None] & (key < KEY)[None, :]
        other = tl.load(
            k + (column * KEY_HEADS + key_head)[None, :] * KEY + key[:, None],
            mask=(column < num_rows)[None, :] & (key < KEY)[:, None], other=0.0,
        )  # fmt: skip
        by_key = tl.dot(tl.load(k + at, mask=inside, other=0.0), other, by_key, input_precision=PRECISION)
        by_query = tl.dot(tl.load(q + at, mask=inside, other=0.0), other, by_query, input_precision=PRECISION)
    return by_key, by_query


@triton.jit(do_not_specialize=["num_rows", "mask_stride"])
def one_kernel(
    q, k, v, g, beta, state, mask, out, updates, summed,
    num_rows, mask_stride,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The delta rule of one head over a tree, tiles of ROWS rows after one another; see ``gated_delta``.

    Grid: value heads, blocks of BLOCK_V value columns. Within a tile the system is solved level by level: a row is final
    one step after its ancestors, so as many steps as a row has ancestors in its tile repeat forward substitution exactly.
    ``updates`` (R, H, Dv) and ``summed`` (R, H) are results and what later tiles read of earlier ones. Keys are read in
    pieces of CHUNK, since whole ones do not fit in registers.
    """
    head, part = tl.program_id(0), tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    value, local = part * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, ROWS)
    in_value = (value < VALUE)[None, :]
    for tile in range(tl.cdiv(num_rows, ROWS)):
        row = tile * ROWS + local
        used = row < num_rows
        at_value = (row * HEADS + head)[:, None] * VALUE + value[None, :]
        write = tl.load(beta + row * HEADS + head, mask=used, other=0.0)
        total = tl.zeros((ROWS,), tl.float32)
        for other in range(tile + 1):
            column = other * ROWS + local
            decay = tl.load(g + column * HEADS + head, mask=column < num_rows, other=0.0)
            total += tl.sum(
                tl.where(_seen(mask, row, used, mask_stride, other * ROWS, column), decay[None, :], 0.0), axis=1
            )
        tl.store(summed + row * HEADS + head, total, mask=used)
        right = tl.zeros((ROWS, BLOCK_V), tl.float32)
        result = tl.zeros((ROWS, BLOCK_V), tl.float32)
        for begin in tl.range(0, KEY, CHUNK, num_stages=STAGES):
            key = begin + tl.arange(0, CHUNK)
            at = (row * KEY_HEADS + key_head)[:, None] * KEY + key[None, :]
            inside = used[:, None] & (key < KEY)[None, :]
            start = tl.load(
                state + (head * KEY + key)[:, None] * VALUE + value[None, :],
                mask=(key < KEY)[:, None] & in_value,
                other=0.0,
            )
            right = tl.dot(tl.load(k + at, mask=inside, other=0.0), start, right, input_precision=PRECISION)
            result = tl.dot(tl.load(q + at, mask=inside, other=0.0), start, result, input_precision=PRECISION)
        shrink = tl.exp(total)[:, None]
        given = tl.load(v + at_value, mask=used[:, None] & in_value, other=0.0)
        right = write[:, None] * (given - shrink * right)
        result *= shrink
        for other in range(tile):
            column = other * ROWS + local
            by_key, by_query = _products(
                q, k, row, column, num_rows, key_head, KEY_HEADS, KEY, CHUNK, ROWS, PRECISION, STAGES
            )
            behind = tl.load(summed + column * HEADS + head)
            seen = _seen(mask, row, used, mask_stride, other * ROWS, column)
            decay = tl.where(seen, tl.exp(tl.minimum(total[:, None] - behind[None, :], 0.0)), 0.0)
            known = tl.load(
                updates + (column * HEADS + head)[:, None] * VALUE + value[None, :], mask=in_value, other=0.0
            )
            right -= tl.dot(write[:, None] * decay * by_key, known, input_precision=PRECISION)
            result += tl.dot(decay * by_query, known, input_precision=PRECISION)
        by_key, by_query = _products(q, k, row, row, num_rows, key_head, KEY_HEADS, KEY, CHUNK, ROWS, PRECISION, STAGES)
        tl.debug_barrier()  # what was summed, read along the other axis
        behind = tl.load(summed + row * HEADS + head, mask=used, other=0.0)
        seen = _seen(mask, row, used, mask_stride, tile * ROWS, row)
        num_steps = tl.max(tl.sum(seen.to(tl.int32), axis=1), axis=0) - 1
        decay = tl.where(seen, tl.exp(tl.minimum(total[:, None] - behind[None, :], 0.0)), 0.0)
        system = tl.where(local[:, None] == local[None, :], 0.0, write[:, None] * decay * by_key)
        looked = decay * by_query
        solved = right
        for _ in range(num_steps):
            solved = right - tl.dot(system, solved, input_precision=PRECISION)
        result += tl.dot(looked, solved, input_precision=PRECISION)
        tl.store(updates + at_value, solved, mask=used[:, None] & in_value)
        tl.store(out + at_value, result.to(out.dtype.element_ty), mask=used[:, None] & in_value)
        tl.debug_barrier()


def one_kernel_config(num_rows):
    """Rows a tile, value columns a program, warps, precision, key columns a step, stages: what was measured on an H200."""
    if INTERPRETED:
        return 16 if num_rows <= 16 else 32, 16, 4, "ieee", 32, 1
    if num_rows <= 16:
        return 16, 32, 4, PRECISION, 32, 2
    return (32, 32, 4, PRECISION, 16, 3) if num_rows <= 128 else (64, 64, 8, PRECISION, 32, 2)


def one_kernel_delta(rows: DeltaRows, layer: int, state, mask, shape: DeltaShape) -> None:
    """As ``tree_delta``."""
    count = rows.v.shape[0]
    tile, block, warps, precision, chunk, stages = one_kernel_config(count)
    one_kernel[(shape.heads, -(-shape.value // block))](
        rows.q, rows.k[layer], rows.v, rows.g, rows.beta, state, mask, rows.out, rows.updates[layer],
        rows.summed[layer], count, mask.stride(0), KEY_HEADS=shape.key_heads, HEADS=shape.heads, KEY=shape.key,
        VALUE=shape.value, CHUNK=min(chunk, power_of_two(shape.key)), BLOCK_V=block, ROWS=tile, PRECISION=precision,
        STAGES=stages, num_warps=warps, num_stages=1,
    )  # fmt: skip
