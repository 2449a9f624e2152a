"""Attention of tree nodes over the committed prefix (no mask) and over the tree itself (ancestor mask), in
one pass.

Where rows are numbered in preorder (a subtree is a run of rows), what a tile of rows sees of the tree are its own rows and the ancestors
of its first one: an ancestor of any row that comes before the tile has a subtree that reaches into it, and so holds the first row, too. Few
keys are left of many, and the far ones are gathered.

The keys of both parts lie in one cache: prefix in slots 0 … length - 1, tree row r in slot length + r. The
tiles of both parts are dealt evenly to ``num_splits`` programs, whose partial results are merged by
log-sum-exp. The query heads that share a key-value head are packed into one tile: query row r of head g is
tile row r * GROUP + g. Of several prompts each has its rows, its length and its heads of the cache, one prompt's behind another's.

Shape legend: R rows of a prompt, H query heads, G key-value heads, GROUP = H / G, d head dimension, C cache slots, S
splits.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def _absorb(scores, values, best, weight, total):
    """One step of the streaming softmax (base 2)."""
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    shrink = tl.math.exp2(best - new_best)
    weights = tl.math.exp2(scores - new_best[:, None])
    weight = weight * shrink + tl.sum(weights, axis=1)
    total = tl.dot(weights.to(values.dtype), values, total * shrink[:, None], input_precision="ieee")
    return new_best, weight, total


@triton.jit
def tree_attention_kernel(
    queries, cache, mask, depths, ancestors, length, out, partial, log_sums, num_rows, mask_stride, value_stride,
    head_stride, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, TRIANGULAR: tl.constexpr, PREORDER: tl.constexpr, PATH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of BLOCK_M packed query rows, key-value heads of all prompts, splits. ``num_rows`` are those of a prompt."""
    NUM_KV: tl.constexpr = HEADS // GROUP
    tile, cache_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    prompt, kv_head = cache_head // NUM_KV, cache_head % NUM_KV
    before = prompt * num_rows  # rows of the prompts before
    mask += before * mask_stride
    depths += before
    ancestors += before * PATH
    tile = tl.num_programs(0) - 1 - tile  # the last rows have the most keys: those programs begin first
    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row, head = packed // GROUP, kv_head * GROUP + packed % GROUP
    dim = tl.arange(0, DIM)
    column = tl.arange(0, BLOCK_N)
    used = row < num_rows
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    own = (before + row) * HEADS + head
    query = tl.load(queries + own[:, None] * DIM + dim[None, :], mask=used[:, None], other=0.0)
    held = tl.load(length + prompt)
    keys = cache + cache_head.to(tl.int64) * head_stride
    values = keys + value_stride
    best = tl.full((BLOCK_M,), -1.0e30, tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, DIM), tl.float32)
    row_depth = tl.zeros((BLOCK_M,), tl.int32)
    first = 0
    if WINDOW > 0:
        row_depth = tl.load(depths + row, mask=used, other=0)
        first = tl.maximum(held - WINDOW + 1, 0) // BLOCK_N
    whole, prefix = held // BLOCK_N, tl.cdiv(held, BLOCK_N)
    last_row = num_rows - 1
    if TRIANGULAR:  # a row's ancestors have smaller numbers than the row
        last_row = tl.minimum(last_row, (tile * BLOCK_M + BLOCK_M - 1) // GROUP)
    first_row = tile * BLOCK_M // GROUP
    skipped = 0  # tiles of nodes before the rows' own
    if PREORDER:
        skipped = first_row // BLOCK_N
    num_tiles = prefix - first + last_row // BLOCK_N + 1 - skipped
    share = tl.cdiv(num_tiles, SPLITS)
    begin = first + split * share
    end = tl.minimum(begin + share, first + num_tiles)
    unmasked_end = tl.minimum(end, whole)
    if WINDOW > 0:
        unmasked_end = begin
    for block in range(begin, unmasked_end):
        at = (block * BLOCK_N + column) * DIM
        key = tl.load(keys + at[None, :] + dim[:, None])
        value = tl.load(values + at[:, None] + dim[None, :])
        scores = tl.dot(query, key, input_precision="ieee") * scale
        best, weight, total = _absorb(scores, value, best, weight, total)
    for block in range(tl.maximum(begin, unmasked_end), tl.minimum(end, prefix)):
        slot = block * BLOCK_N + column
        key = tl.load(keys + slot[None, :] * DIM + dim[:, None])
        value = tl.load(values + slot[:, None] * DIM + dim[None, :])
        scores = tl.dot(query, key, input_precision="ieee") * scale
        seen = (slot < held)[None, :] & used[:, None]
        if WINDOW > 0:
            seen = seen & (held + row_depth[:, None] - slot[None, :] < WINDOW)
        best, weight, total = _absorb(tl.where(seen, scores, float("-inf")), value, best, weight, total)
    for block in range(tl.maximum(begin, prefix), end):
        node_block = block - prefix + skipped
        node = node_block * BLOCK_N + column
        slot = held + node
        inside = node < num_rows
        key = tl.load(keys + slot[None, :] * DIM + dim[:, None], mask=inside[None, :], other=0.0)
        value = tl.load(values + slot[:, None] * DIM + dim[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(query, key, input_precision="ieee") * scale
        visible = used[:, None] & inside[None, :]
        # One or two words of 64 bits say which nodes of this tile a row may look at.
        at_word = mask + row * mask_stride + node_block * (BLOCK_N // 64)
        word = tl.load(at_word, mask=used, other=0)[:, None]
        if BLOCK_N == 128:
            more = row * 0 + node_block * 2 + 1 < mask_stride
            word = tl.where(column[None, :] < 64, word, tl.load(at_word + 1, mask=used & more, other=0)[:, None])
        seen = ((word >> (column % 64).to(tl.int64)[None, :]) & 1) != 0
        seen = seen & visible
        if WINDOW > 0:
            node_depth = tl.load(depths + node, mask=inside, other=0)
            seen = seen & (row_depth[:, None] - node_depth[None, :] < WINDOW)
        best, weight, total = _absorb(tl.where(seen, scores, float("-inf")), value, best, weight, total)
    if PREORDER:  # noqa: SIM102 - a constant: the rest is compiled, or is not
        if (skipped > 0) & (split == SPLITS - 1):
            node = tl.load(ancestors + first_row * PATH + tl.arange(0, PATH))
            far = (node >= 0) & (node < skipped * BLOCK_N)
            node = tl.maximum(node, 0)
            slot = held + node
            key = tl.load(keys + slot[None, :] * DIM + dim[:, None], mask=far[None, :], other=0.0)
            value = tl.load(values + slot[:, None] * DIM + dim[None, :], mask=far[:, None], other=0.0)
            scores = tl.dot(query, key, input_precision="ieee") * scale
            seen = used[:, None] & far[None, :]
            word = tl.load(mask + row[:, None] * mask_stride + node[None, :] // 64, mask=seen, other=0)
            seen = seen & (((word >> (node % 64).to(tl.int64)[None, :]) & 1) != 0)
            if WINDOW > 0:
                node_depth = tl.load(depths + node, mask=far, other=0)
                seen = seen & (row_depth[:, None] - node_depth[None, :] < WINDOW)
            best, weight, total = _absorb(tl.where(seen, scores, float("-inf")), value, best, weight, total)
    safe = tl.maximum(weight, 1.0e-30)
    result = total / safe[:, None]
    if SPLITS == 1:
        tl.store(out + own[:, None] * DIM + dim[None, :], result.to(out.dtype.element_ty), mask=used[:, None])
    else:
        at = split * (tl.num_programs(1) // NUM_KV) * num_rows * HEADS + own
        tl.store(partial + at[:, None] * DIM + dim[None, :], result, mask=used[:, None])
        log_sum = tl.where(weight > 0, best + tl.math.log2(safe), float("-inf"))
        tl.store(log_sums + at, log_sum, mask=used)


@triton.jit
def merge_kernel(
    partial,
    log_sums,
    out,
    num_heads_total,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the splits of HEADS (row, head) pairs; ``num_heads_total`` = R * H."""
    at = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, DIM)
    inside = at < num_heads_total
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    best = tl.full((HEADS,), float("-inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        best = tl.maximum(best, tl.load(log_sums + split * num_heads_total + at, mask=inside, other=0.0))
    total = tl.zeros((HEADS, DIM), tl.float32)
    weight = tl.zeros((HEADS,), tl.float32)
    for split in tl.static_range(SPLITS):
        share = tl.math.exp2(tl.load(log_sums + split * num_heads_total + at, mask=inside, other=0.0) - best)
        source = partial + (split * num_heads_total + at).to(tl.int64)[:, None] * DIM + dim[None, :]
        total += share[:, None] * tl.load(source, mask=inside[:, None], other=0.0)
        weight += share
    result = (total / weight[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * DIM + dim[None, :], result, mask=inside[:, None])
