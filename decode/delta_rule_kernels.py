"""Triton kernels of the delta rule over a tree: first all that waits for nothing, then what goes down the paths; see ``gated_delta``.

With the rows in tiles of ROWS, the system of a value head is a lower triangle of (ROWS, ROWS) tiles. Keys and queries are
per key head, so their products are; decays, write strengths and the inverse of a diagonal tile are per value head; only
what a state answers has value columns. Each is made once, side by side, by ``tree_products_kernel``. ``tree_solve_kernel``
is left with a few products a tile.

Shape legend: as in ``delta_kernels``; T tiles of ROWS rows.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def _coarse(x):
    """The nearest tf32 number of a finite one; tensor cores drop the lower bits of what they are given."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def _dot(a, b, total, PRECISION: tl.constexpr):
    """total + a b; "tf32x3": of three tf32 products, without the tests for infinities that Triton's own makes."""
    if PRECISION == "tf32x3":
        high_a, high_b = _coarse(a), _coarse(b)
        low_a, low_b = a - high_a, b - high_b
        rest = tl.dot(high_a, low_b, input_precision="tf32")
        rest = tl.dot(low_a, high_b, rest, input_precision="tf32")
        total = tl.dot(high_a, high_b, total + rest, input_precision="tf32")
    else:
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit
def _seen(mask, row, used, mask_stride, first, COLUMNS: tl.constexpr):
    """Whether each row may look at each of COLUMNS columns from ``first`` on, a multiple of COLUMNS; at most 64."""
    word = tl.load(mask + row * mask_stride + first // 64, mask=used, other=0) >> (first % 64)
    local = tl.arange(0, COLUMNS)
    bits = word.to(tl.int32)[:, None]  # tiles of 64-bit words would cost twice the registers
    if COLUMNS > 32:
        bits = tl.where((local < 32)[None, :], bits, (word >> 32).to(tl.int32)[:, None])
    return ((bits >> (local % 32)[None, :]) & 1) != 0


@triton.jit
def _summed(g, mask, row, used, tile, head, num_rows, mask_stride, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """(ROWS,) log-decays summed from the root to each row of a tile."""
    total = tl.zeros((ROWS,), tl.float32)
    for other in range(tile + 1):
        column = other * ROWS + tl.arange(0, ROWS)
        decay = tl.load(g + column * HEADS + head, mask=column < num_rows, other=0.0)
        total += tl.sum(tl.where(_seen(mask, row, used, mask_stride, other * ROWS, ROWS), decay[None, :], 0.0), axis=1)
    return total


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
        by_key = _dot(tl.load(k + at, mask=inside, other=0.0), other, by_key, PRECISION)
        by_query = _dot(tl.load(q + at, mask=inside, other=0.0), other, by_query, PRECISION)
    return by_key, by_query


@triton.jit(do_not_specialize=["num_rows", "mask_stride"])
def tree_products_kernel(
    q, k, v, g, beta, state, mask, inverses, looks, by_keys, by_queries, asked, updates, summed,
    num_rows, mask_stride,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What the rows are to one another, and what the state answers them.

    Grid: value heads, tiles of rows, then T tiles of columns followed by blocks of BLOCK_V value columns. A program with
    its own tile of columns makes ``inverses`` = (I - system)^-1 diag(beta), ``looks`` = (products of queries) inverses,
    both (H, T, ROWS, ROWS), and ``summed`` (R, H). One with an earlier tile makes ``by_keys`` and ``by_queries`` (KH, T (T - 1) / 2, ROWS, ROWS), once
    for all value heads of a key head. One with value columns makes ``asked`` = e^G S q and, in the place of ``updates``,
    v - e^G S k, both (R, H, Dv).
    """
    head, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_tiles = tl.num_programs(1)
    group = HEADS // KEY_HEADS
    key_head = head // group
    local = tl.arange(0, ROWS)
    row = tile * ROWS + local
    used = row < num_rows
    square = local[:, None] * ROWS + local[None, :]
    if part == tile:
        total = _summed(g, mask, row, used, tile, head, num_rows, mask_stride, HEADS, ROWS)
        tl.store(summed + row * HEADS + head, total, mask=used)
        write = tl.load(beta + row * HEADS + head, mask=used, other=0.0)
        seen = _seen(mask, row, used, mask_stride, tile * ROWS, ROWS)
        num_steps = tl.max(tl.sum(seen.to(tl.int32), axis=1), axis=0) - 1
        decay = tl.where(seen, tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0)), 0.0)
        by_key, by_query = _products(q, k, row, row, num_rows, key_head, KEY_HEADS, KEY, CHUNK, ROWS, PRECISION, STAGES)
        own = local[:, None] == local[None, :]
        system = tl.where(own, 0.0, -write[:, None] * decay * by_key)
        unit = tl.where(own, 1.0, 0.0)
        # Level by level: a row is final one step after its ancestors, so this repeats forward substitution exactly. Two
        # steps at a time: used once in a loop, ``system`` would be brought into the products' layout at every step.
        inverse = unit + system
        for _ in tl.range(0, num_steps - 1, loop_unroll_factor=2):
            inverse = _dot(system, inverse, unit, PRECISION)
        inverse *= write[None, :]
        at = (head * num_tiles + tile) * ROWS * ROWS + square
        tl.store(inverses + at, inverse)
        tl.store(looks + at, _dot(decay * by_query, inverse, tl.zeros((ROWS, ROWS), tl.float32), PRECISION))
    elif part < tile:
        if head % group == 0:
            column = part * ROWS + local
            by_key, by_query = _products(
                q, k, row, column, num_rows, key_head, KEY_HEADS, KEY, CHUNK, ROWS, PRECISION, STAGES
            )
            at = (key_head * (num_tiles * (num_tiles - 1) // 2) + tile * (tile - 1) // 2 + part) * ROWS * ROWS + square
            tl.store(by_keys + at, by_key)
            tl.store(by_queries + at, by_query)
    elif part >= num_tiles:
        value = (part - num_tiles) * BLOCK_V + tl.arange(0, BLOCK_V)
        in_value = (value < VALUE)[None, :]
        right = tl.zeros((ROWS, BLOCK_V), tl.float32)
        result = tl.zeros((ROWS, BLOCK_V), tl.float32)
        for begin in tl.range(0, KEY, CHUNK, num_stages=STAGES):
            key = begin + tl.arange(0, CHUNK)
            at_key = (row * KEY_HEADS + key_head)[:, None] * KEY + key[None, :]
            inside = used[:, None] & (key < KEY)[None, :]
            start = tl.load(
                state + (head * KEY + key)[:, None] * VALUE + value[None, :],
                mask=(key < KEY)[:, None] & in_value, other=0.0,
            )  # fmt: skip
            right = _dot(tl.load(k + at_key, mask=inside, other=0.0), start, right, PRECISION)
            result = _dot(tl.load(q + at_key, mask=inside, other=0.0), start, result, PRECISION)
        shrink = tl.exp(_summed(g, mask, row, used, tile, head, num_rows, mask_stride, HEADS, ROWS))[:, None]
        at_value = (row * HEADS + head)[:, None] * VALUE + value[None, :]
        inside_value = used[:, None] & in_value
        given = tl.load(v + at_value, mask=inside_value, other=0.0)
        tl.store(updates + at_value, given - shrink * right, mask=inside_value)
        tl.store(asked + at_value, shrink * result, mask=inside_value)


@triton.jit(do_not_specialize=["num_rows", "mask_stride", "once"])
def tree_solve_kernel(
    inverses, looks, by_keys, by_queries, asked, updates, summed, mask, out,
    num_rows, mask_stride, once,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_V: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Updates in place of what ``tree_products_kernel`` left there, and outputs; tiles of rows after one another.

    Grid: value heads, blocks of BLOCK_V value columns. ``once`` is 1.
    """
    head, part = tl.program_id(0), tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    value, local = part * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, ROWS)
    in_value = (value < VALUE)[None, :]
    square = local[:, None] * ROWS + local[None, :]
    num_tiles = tl.cdiv(num_rows, ROWS)
    first_pair = key_head * (num_tiles * (num_tiles - 1) // 2)
    for tile in range(num_tiles):
        row = tile * ROWS + local
        used = row < num_rows
        at_value = (row * HEADS + head)[:, None] * VALUE + value[None, :]
        inside = used[:, None] & in_value
        total = tl.load(summed + row * HEADS + head, mask=used, other=0.0)
        right = tl.zeros((ROWS, BLOCK_V), tl.float32)
        result = tl.zeros((ROWS, BLOCK_V), tl.float32)
        for first in tl.range(0, tile * ROWS, CHUNK, num_stages=STAGES):
            column = first + tl.arange(0, CHUNK)
            seen = _seen(mask, row, used, mask_stride, first, CHUNK)
            behind = tl.load(summed + column * HEADS + head)
            decay = tl.where(seen, tl.exp(tl.minimum(total[:, None] - behind[None, :], 0.0)), 0.0)
            known = tl.load(
                updates + (column * HEADS + head)[:, None] * VALUE + value[None, :], mask=in_value, other=0.0
            )
            pair = (first_pair + tile * (tile - 1) // 2 + first // ROWS) * ROWS * ROWS
            at = pair + local[:, None] * ROWS + (column % ROWS)[None, :]
            right = _dot(-decay * tl.load(by_keys + at), known, right, PRECISION)
            result = _dot(decay * tl.load(by_queries + at), known, result, PRECISION)
        own = (head * num_tiles + tile) * ROWS * ROWS + square
        # A loop of one round: only in loops are several loads in flight, elsewhere each waits for the one before.
        for _ in tl.range(0, once, num_stages=STAGES):
            given = right + tl.load(updates + at_value, mask=inside, other=0.0)
            seen_before = result + tl.load(asked + at_value, mask=inside, other=0.0)
            solved = _dot(tl.load(inverses + own), given, tl.zeros((ROWS, BLOCK_V), tl.float32), PRECISION)
            whole = _dot(tl.load(looks + own), given, seen_before, PRECISION)
            tl.store(updates + at_value, solved, mask=inside)
            tl.store(out + at_value, whole.to(out.dtype.element_ty), mask=inside)
        tl.debug_barrier()  # later tiles read these updates along the other axis
