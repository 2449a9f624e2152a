"""Triton kernels of the fused target: norm, rotary positions with cache write, SwiGLU, matrix-vector
product, commit.

Every kernel has a torch reference in `fused_ops`, which also decides which of the two runs. Lengths and
positions are read from device memory, so a captured CUDA graph stays valid while the context grows.

Shape legend: R rows (tree nodes, padded), D hidden size, H query heads, G key-value heads, d head dimension,
F feed-forward width, C cache slots.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(
    residual, delta, weight, out, tap, eps, width, tap_stride, HAS_DELTA: tl.constexpr, HAS_TAP: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual += delta; out = rmsnorm(residual) * weight; tap = residual. One program a row."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    states = tl.load(residual + row * width + column, mask=inside, other=0.0)
    if HAS_DELTA:
        added = states.to(tl.float32) + tl.load(delta + row * width + column, mask=inside, other=0.0).to(tl.float32)
        states = added.to(residual.dtype.element_ty)
        tl.store(residual + row * width + column, states, mask=inside)
    if HAS_TAP:
        tl.store(tap + row * tap_stride + column, states, mask=inside)
    wide = states.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    scaled = (wide * scale).to(out.dtype.element_ty).to(tl.float32)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (scaled * gain).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rope_write_kernel(
    qkv, queries, cache, q_weight, k_weight, cos, sin, depths, length, eps,
    qkv_row_stride, qkv_layer_stride, cache_layer_stride, cache_value_stride, cache_head_stride, rows_a_prompt,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Norm and rotate queries and keys; queries go to ``queries``, keys and values to slots length + row of their prompt.

    Grid: rows, blocks of HEADS heads, layers (more than one layer only for the drafter's context pass).
    """
    row, layer = tl.program_id(0), tl.program_id(2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, HALF)[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    prompt = row // rows_a_prompt
    held = tl.load(length + prompt)
    position = held + tl.load(depths + row)
    dtype = cache.dtype.element_ty
    is_query, is_value = head < NUM_Q, head >= NUM_Q + NUM_KV
    inside = head < NUM_Q + 2 * NUM_KV
    source = qkv + layer * qkv_layer_stride + row * qkv_row_stride + head * (2 * HALF) + dim
    left = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    normed_left, normed_right = left, right
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)) / (2 * HALF) + eps)[:, None]
        k_row = k_weight + layer * (2 * HALF) + dim
        k_left, k_right = tl.load(k_row).to(tl.float32), tl.load(k_row + HALF).to(tl.float32)
        if NUM_Q > 0:
            q_left, q_right = tl.load(q_weight + dim).to(tl.float32), tl.load(q_weight + HALF + dim).to(tl.float32)
            gain_left, gain_right = tl.where(is_query, q_left, k_left), tl.where(is_query, q_right, k_right)
        else:
            gain_left, gain_right = k_left, k_right
        normed_left = ((left * scale).to(dtype).to(tl.float32) * gain_left).to(dtype).to(tl.float32)
        normed_right = ((right * scale).to(dtype).to(tl.float32) * gain_right).to(dtype).to(tl.float32)
    table = position * HALF + dim
    cosine, sine = tl.load(cos + table).to(tl.float32), tl.load(sin + table).to(tl.float32)
    out_left = tl.where(is_value, left, normed_left * cosine - normed_right * sine).to(dtype)
    out_right = tl.where(is_value, right, normed_right * cosine + normed_left * sine).to(dtype)
    if NUM_Q > 0:
        to_query = queries + (row * NUM_Q + head) * (2 * HALF) + dim
        tl.store(to_query, out_left, mask=is_query)
        tl.store(to_query + HALF, out_right, mask=is_query)
    kv_head = prompt * NUM_KV + tl.where(is_value, head - NUM_Q - NUM_KV, head - NUM_Q)
    slot = cache + layer * cache_layer_stride + kv_head.to(tl.int64) * cache_head_stride
    slot += tl.where(is_value, cache_value_stride, 0) + (held + row - prompt * rows_a_prompt) * (2 * HALF) + dim
    tl.store(slot, out_left, mask=inside & ~is_query)
    tl.store(slot + HALF, out_right, mask=inside & ~is_query)


@triton.jit
def silu_mul_kernel(gate_up, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out = silu(gate) * up for rows of [gate, up]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    activated = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    tl.store(out + row * width + column, (activated * up).to(dtype), mask=inside)


@triton.jit
def gemv_kernel(
    x, weight, bias, out, width_in, width_out, SWIGLU: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = weight @ x for one vector x; with SWIGLU, ``weight`` is [gate; up] and out = silu(gate x) * (up x).

    The first weights are asked for before the kernel waits for the one that makes x.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < width_out)[:, None]
    tiles = weight + row.to(tl.int64)[:, None] * width_in + column[None, :]
    tiles_up = tiles + width_out.to(tl.int64) * width_in
    mask = inside & (column < width_in)[None, :]
    tile = tl.load(tiles, mask=mask, other=0.0)
    if SWIGLU:
        tile_up = tl.load(tiles_up, mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    vector = tl.load(x + column, mask=column < width_in, other=0.0).to(tl.float32)[None, :]
    total = tile.to(tl.float32) * vector
    if SWIGLU:
        total_up = tile_up.to(tl.float32) * vector
    for start in range(BLOCK, width_in, BLOCK):
        mask = inside & (start + column < width_in)[None, :]
        vector = tl.load(x + start + column, mask=start + column < width_in, other=0.0).to(tl.float32)[None, :]
        total += tl.load(tiles + start, mask=mask, other=0.0).to(tl.float32) * vector
        if SWIGLU:
            total_up += tl.load(tiles_up + start, mask=mask, other=0.0).to(tl.float32) * vector
    dtype = out.dtype.element_ty
    result = tl.sum(total, axis=1)
    if SWIGLU:
        gate = result.to(dtype).to(tl.float32)
        up = tl.sum(total_up, axis=1).to(dtype).to(tl.float32)
        result = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up
    if HAS_BIAS:
        result += tl.load(bias + row, mask=row < width_out, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(dtype), mask=row < width_out)


@triton.jit
def skinny_kernel(
    x, weight, bias, out, num_rows, width_in, width_out, SWIGLU: tl.constexpr, HAS_BIAS: tl.constexpr,
    FEATURES: tl.constexpr, STEP: tl.constexpr, MAIN: tl.constexpr, EXTRA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out (R, N) = x (R, D) @ weight.T for few rows: each program reads FEATURES weight rows once, for all x.

    MAIN + EXTRA rows of x are computed (two powers of two, EXTRA may be 0). SWIGLU as in ``gemv_kernel``.
    """
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    column = tl.arange(0, STEP)
    row, row_extra = tl.arange(0, MAIN), MAIN + tl.arange(0, 16)
    inside = (feature < width_out)[:, None]
    tiles = weight + feature.to(tl.int64)[:, None] * width_in + column[None, :]
    tiles_up = tiles + width_out.to(tl.int64) * width_in
    rows_at = x + row[None, :] * width_in + column[:, None]
    extra_at = x + row_extra[None, :] * width_in + column[:, None]
    held, held_extra = (row < num_rows)[None, :], (row_extra < num_rows)[None, :]
    total = tl.zeros((FEATURES, MAIN), tl.float32)
    total_up = tl.zeros((FEATURES, MAIN), tl.float32)
    extra = tl.zeros((FEATURES, 16), tl.float32)
    extra_up = tl.zeros((FEATURES, 16), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for start in range(0, width_in, STEP):
        left = width_in - start
        states = tl.load(rows_at + start, mask=held & (column < left)[:, None], other=0.0)
        tile = tl.load(tiles + start, mask=inside & (column < left)[None, :], other=0.0)
        total = tl.dot(tile, states, total, input_precision="ieee")
        if EXTRA > 0:
            states_extra = tl.load(extra_at + start, mask=held_extra & (column < left)[:, None], other=0.0)
            extra = tl.dot(tile, states_extra, extra, input_precision="ieee")
        if SWIGLU:
            tile_up = tl.load(tiles_up + start, mask=inside & (column < left)[None, :], other=0.0)
            total_up = tl.dot(tile_up, states, total_up, input_precision="ieee")
            if EXTRA > 0:
                extra_up = tl.dot(tile_up, states_extra, extra_up, input_precision="ieee")
    dtype = out.dtype.element_ty
    if SWIGLU:
        total = _swiglu(total, total_up, dtype)
        extra = _swiglu(extra, extra_up, dtype)
    if HAS_BIAS:
        offset = tl.load(bias + feature, mask=feature < width_out, other=0.0).to(tl.float32)[:, None]
        total += offset
        extra += offset
    to = out + feature[:, None]
    tl.store(to + row[None, :] * width_out, total.to(dtype), mask=inside & held)
    if EXTRA > 0:
        tl.store(to + row_extra[None, :] * width_out, extra.to(dtype), mask=inside & held_extra)


@triton.jit
def _swiglu(gate, up, dtype: tl.constexpr):
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    return (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up


@triton.jit
def commit_kernel(
    cache, path, num_accepted, length, layer_stride, value_stride, head_stride, NUM_KV: tl.constexpr, DIM: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Move the accepted rows (cache slots length + path[j]) to slots length + j.

    Grid: heads of all prompts, K and V, layers. All rows are read before any is written, so the move may overlap itself.
    """
    head, prompt = tl.program_id(0), tl.program_id(0) // NUM_KV
    base = cache + tl.program_id(2).to(tl.int64) * layer_stride + tl.program_id(1).to(tl.int64) * value_stride
    base += head.to(tl.int64) * head_stride
    path += prompt * SLOTS
    index = tl.arange(0, SLOTS)
    dim = tl.arange(0, DIM)[None, :]
    held, accepted = tl.load(length + prompt), tl.load(num_accepted + prompt)
    moved = (index <= accepted)[:, None]
    source = tl.load(path + index, mask=index <= accepted, other=0)
    rows = tl.load(base + (held + source)[:, None] * DIM + dim, mask=moved, other=0.0)
    tl.debug_barrier()
    tl.store(base + (held + index)[:, None] * DIM + dim, rows, mask=moved)
