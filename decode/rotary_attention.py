"""Attention that takes rows as the projection leaves them: norms, rotary positions and the cache's new slots in the same kernel.

The sums are those of ``rope_write`` and ``tree_attention``; a launch a layer is saved. Each program norms and rotates its own queries and the
tree's keys; those of the last rows, which see all the others, also write keys and values to the cache.

Shape legend: as of ``tree_attention``; h = d / 2.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from .tree_attention import _absorb


@triton.jit
def _scaled(left, right, gain_left, gain_right, eps, HALF: tl.constexpr, AXIS: tl.constexpr, dtype: tl.constexpr):
    """RMS norm along AXIS of two halves in float32, rounded where the models round."""
    mean = (tl.sum(left * left, axis=AXIS) + tl.sum(right * right, axis=AXIS)) / (2 * HALF)
    scale = tl.expand_dims(tl.rsqrt(mean + eps), AXIS)
    left = ((left * scale).to(dtype).to(tl.float32) * gain_left).to(dtype).to(tl.float32)
    right = ((right * scale).to(dtype).to(tl.float32) * gain_right).to(dtype).to(tl.float32)
    return left, right


@triton.jit
def rotary_attention_kernel(
    qkv, cache, q_weight, k_weight, cos, sin, mask, depths, length, out, partial, log_sums, num_rows, qkv_stride,
    mask_stride, value_stride, head_stride, eps, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, TRIANGULAR: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of BLOCK_M packed query rows, key-value heads, splits."""
    DIM: tl.constexpr = 2 * HALF
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    writes = tile == 0  # turned round below: the tile of the last rows
    tile = tl.num_programs(0) - 1 - tile
    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row, head = packed // GROUP, kv_head * GROUP + packed % GROUP
    half, dim, column = tl.arange(0, HALF), tl.arange(0, DIM), tl.arange(0, BLOCK_N)
    used = row < num_rows
    dtype = cache.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    held = tl.load(length)
    row_depth = tl.load(depths + row, mask=used, other=0)
    at = qkv + row[:, None] * qkv_stride + head[:, None] * DIM + half[None, :]
    left = tl.load(at, mask=used[:, None], other=0.0).to(tl.float32)
    right = tl.load(at + HALF, mask=used[:, None], other=0.0).to(tl.float32)
    if HAS_NORM:
        gain_left = tl.load(q_weight + half).to(tl.float32)[None, :]
        gain_right = tl.load(q_weight + HALF + half).to(tl.float32)[None, :]
        left, right = _scaled(left, right, gain_left, gain_right, eps, HALF, 1, dtype)
    table = (held + row_depth)[:, None] * HALF + half[None, :]
    cosine = tl.load(cos + table, mask=used[:, None], other=0.0).to(tl.float32)
    sine = tl.load(sin + table, mask=used[:, None], other=0.0).to(tl.float32)
    query_left = (left * cosine - right * sine).to(dtype)
    query_right = (right * cosine + left * sine).to(dtype)
    if HAS_NORM:
        key_gain_left = tl.load(k_weight + half).to(tl.float32)[:, None]
        key_gain_right = tl.load(k_weight + HALF + half).to(tl.float32)[:, None]

    keys = cache + kv_head.to(tl.int64) * head_stride
    values = keys + value_stride
    best = tl.full((BLOCK_M,), -1.0e30, tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, DIM), tl.float32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(held - WINDOW + 1, 0) // BLOCK_N
    whole, prefix = held // BLOCK_N, tl.cdiv(held, BLOCK_N)
    last_row = num_rows - 1
    if TRIANGULAR:  # a row's ancestors have smaller numbers than the row
        last_row = tl.minimum(last_row, (tile * BLOCK_M + BLOCK_M - 1) // GROUP)
    num_tiles = prefix - first + last_row // BLOCK_N + 1
    share = tl.cdiv(num_tiles, SPLITS)
    begin = first + split * share
    end = tl.minimum(begin + share, first + num_tiles)
    unmasked_end = tl.minimum(end, whole)
    if WINDOW > 0:
        unmasked_end = begin
    for block in range(begin, unmasked_end):
        slot = block * BLOCK_N + column
        key_at = keys + slot[None, :] * DIM + half[:, None]
        key_left, key_right = tl.load(key_at), tl.load(key_at + HALF)
        value = tl.load(values + slot[:, None] * DIM + dim[None, :])
        scores = tl.dot(
            query_right, key_right, tl.dot(query_left, key_left, input_precision="ieee"), input_precision="ieee"
        )
        best, weight, total = _absorb(scores * scale, value, best, weight, total)
    for block in range(tl.maximum(begin, unmasked_end), tl.minimum(end, prefix)):
        slot = block * BLOCK_N + column
        inside = slot < held  # behind it the tree's own slots are written meanwhile
        key_at = keys + slot[None, :] * DIM + half[:, None]
        key_left = tl.load(key_at, mask=inside[None, :], other=0.0)
        key_right = tl.load(key_at + HALF, mask=inside[None, :], other=0.0)
        value = tl.load(values + slot[:, None] * DIM + dim[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(
            query_right, key_right, tl.dot(query_left, key_left, input_precision="ieee"), input_precision="ieee"
        )
        seen = inside[None, :] & used[:, None]
        if WINDOW > 0:
            seen = seen & (held + row_depth[:, None] - slot[None, :] < WINDOW)
        best, weight, total = _absorb(tl.where(seen, scores * scale, float("-inf")), value, best, weight, total)
    for block in tl.range(tl.maximum(begin, prefix), end, num_stages=1):
        node = (block - prefix) * BLOCK_N + column
        inside = node < num_rows
        source = qkv + node * qkv_stride + (HEADS + kv_head) * DIM
        key_left = tl.load(source[None, :] + half[:, None], mask=inside[None, :], other=0.0)
        key_right = tl.load(source[None, :] + HALF + half[:, None], mask=inside[None, :], other=0.0)
        key_left, key_right = key_left.to(tl.float32), key_right.to(tl.float32)
        if HAS_NORM:
            key_left, key_right = _scaled(key_left, key_right, key_gain_left, key_gain_right, eps, HALF, 0, dtype)
        node_depth = tl.load(depths + node, mask=inside, other=0)
        key_table = (held + node_depth)[None, :] * HALF + half[:, None]
        key_cosine = tl.load(cos + key_table, mask=inside[None, :], other=0.0).to(tl.float32)
        key_sine = tl.load(sin + key_table, mask=inside[None, :], other=0.0).to(tl.float32)
        turned_left = (key_left * key_cosine - key_right * key_sine).to(dtype)
        turned_right = (key_right * key_cosine + key_left * key_sine).to(dtype)
        group_width = (HEADS // GROUP) * DIM
        value = tl.load(source[:, None] + group_width + dim[None, :], mask=inside[:, None], other=0.0)
        if writes:
            key_at = keys + (held + node)[None, :] * DIM + half[:, None]
            tl.store(key_at, turned_left, mask=inside[None, :])
            tl.store(key_at + HALF, turned_right, mask=inside[None, :])
            tl.store(values + (held + node)[:, None] * DIM + dim[None, :], value, mask=inside[:, None])
        scores = tl.dot(
            query_right, turned_right, tl.dot(query_left, turned_left, input_precision="ieee"), input_precision="ieee"
        )
        visible = used[:, None] & inside[None, :]
        # One or two words of 64 bits say which nodes of this tile a row may look at.
        at_word = mask + row * mask_stride + (block - prefix) * (BLOCK_N // 64)
        word = tl.load(at_word, mask=used, other=0)[:, None]
        if BLOCK_N == 128:
            more = row * 0 + (block - prefix) * 2 + 1 < mask_stride
            word = tl.where(column[None, :] < 64, word, tl.load(at_word + 1, mask=used & more, other=0)[:, None])
        seen = ((word >> (column % 64).to(tl.int64)[None, :]) & 1) != 0
        seen = seen & visible
        if WINDOW > 0:
            seen = seen & (row_depth[:, None] - node_depth[None, :] < WINDOW)
        best, weight, total = _absorb(tl.where(seen, scores * scale, float("-inf")), value, best, weight, total)
    at = row * HEADS + head
    safe = tl.maximum(weight, 1.0e-30)
    result = total / safe[:, None]
    if SPLITS == 1:
        tl.store(out + at[:, None] * DIM + dim[None, :], result.to(out.dtype.element_ty), mask=used[:, None])
    else:
        at = split * num_rows * HEADS + at
        tl.store(partial + at[:, None] * DIM + dim[None, :], result, mask=used[:, None])
        log_sum = tl.where(weight > 0, best + tl.math.log2(safe), float("-inf"))
        tl.store(log_sums + at, log_sum, mask=used)
