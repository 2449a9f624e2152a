"""Triton kernels of the fused hybrid target: what its layers do between their projections, over a tree; all but the delta
rule itself, which is in ``delta_rule_kernels``.

Every kernel has a torch reference in ``delta_ops``, which also decides which of the two runs.

Shape legend: R rows, KH key heads, H value heads, Dk and Dv key and value width, C = 2 KH Dk + H Dv convolution
channels, W convolution kernel, P width of the fused input projection (C, then H Dv gates, H b, H a).
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def delta_inputs_kernel(
    mixed, window, columns, weight, a_log, dt_bias, q, k, v, g, beta,
    row_stride, scale, eps,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Convolution along each row's own path, activation, unit queries and keys, decay and write strength.

    Grid: rows, 2 KH + H heads. ``window`` (W - 1, C) holds the committed inputs, oldest first; ``columns`` (R, W) says
    where a row's inputs lie: below W - 1 in the window, else in row ``column - W + 1`` of ``mixed``.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    channels = 2 * KEY_HEADS * KEY + HEADS * VALUE
    at = tl.arange(0, BLOCK)
    is_value = head >= 2 * KEY_HEADS
    width = tl.where(is_value, VALUE, KEY)
    start = tl.where(is_value, 2 * KEY_HEADS * KEY + (head - 2 * KEY_HEADS) * VALUE, head * KEY)
    inside = at < width
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(TAPS):
        column = tl.load(columns + row * TAPS + tap).to(tl.int32)
        is_old = at < tl.where(column < TAPS - 1, width, 0)
        is_new = at < tl.where(column < TAPS - 1, 0, width)
        old = tl.load(window + column * channels + start + at, mask=is_old, other=0.0).to(tl.float32)
        new = tl.load(mixed + (column - TAPS + 1) * row_stride + start + at, mask=is_new, other=0.0).to(tl.float32)
        total += (old + new) * tl.load(weight + (start + at) * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
    dtype = mixed.dtype.element_ty
    active = (total * tl.sigmoid(total)).to(dtype).to(tl.float32)
    if is_value:
        value_head = head - 2 * KEY_HEADS
        tl.store(v + (row * HEADS + value_head) * VALUE + at, active, mask=inside)
        gates = mixed + row * row_stride + channels + HEADS * VALUE + value_head
        written = tl.sigmoid(tl.load(gates).to(tl.float32)).to(dtype).to(tl.float32)
        raw = tl.load(gates + HEADS).to(tl.float32) + tl.load(dt_bias + value_head).to(tl.float32)
        soft = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
        tl.store(beta + row * HEADS + value_head, written)
        tl.store(g + row * HEADS + value_head, -tl.exp(tl.load(a_log + value_head).to(tl.float32)) * soft)
    else:
        unit = active * tl.rsqrt(tl.sum(active * active, axis=0) + eps)
        if head < KEY_HEADS:
            tl.store(q + (row * KEY_HEADS + head) * KEY + at, unit * scale, mask=inside)
        else:
            tl.store(k + (row * KEY_HEADS + head - KEY_HEADS) * KEY + at, unit, mask=inside)


@triton.jit
def gated_norm_kernel(x, gate, weight, out, gate_stride, eps, HEADS: tl.constexpr, WIDTH: tl.constexpr,
                      BLOCK: tl.constexpr):  # fmt: skip
    """out = rmsnorm(x) * weight * silu(gate) of every row and head; ``gate`` rows lie ``gate_stride`` apart."""
    row, head = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    dtype = out.dtype.element_ty
    states = tl.load(x + (row * HEADS + head) * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    scaled = (states * tl.rsqrt(tl.sum(states * states, axis=0) / WIDTH + eps)).to(dtype).to(tl.float32)
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    opened = tl.load(gate + row * gate_stride + head * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    normed = (scaled * gain).to(dtype).to(tl.float32) * (opened * tl.sigmoid(opened))
    tl.store(out + (row * HEADS + head) * WIDTH + at, normed.to(dtype), mask=inside)


@triton.jit
def commit_state_kernel(
    states, keys, updates, summed, path, num_accepted,
    state_stride, key_stride, update_stride, sum_stride,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """state = e^G_p state + sum over the path of e^(G_p - G_j) k_j u_j^T, in place. Grid: layers, heads, value blocks."""
    layer, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    key, value = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (key < KEY)[:, None] & (value < VALUE)[None, :]
    to = states + layer * state_stride + (head * KEY + key)[:, None] * VALUE + value[None, :]
    accepted = tl.load(num_accepted)
    leaf = tl.load(path + accepted)
    decay = tl.load(summed + layer * sum_stride + leaf * HEADS + head)
    total = tl.load(to, mask=inside, other=0.0) * tl.exp(decay)
    for step in range(accepted + 1):
        row = tl.load(path + step)
        behind = tl.load(summed + layer * sum_stride + row * HEADS + head)
        wrote = tl.load(keys + layer * key_stride + (row * KEY_HEADS + key_head) * KEY + key, mask=key < KEY, other=0.0)
        update = tl.load(
            updates + layer * update_stride + (row * HEADS + head) * VALUE + value, mask=value < VALUE, other=0.0
        )
        total += (tl.exp(decay - behind) * wrote)[:, None] * update[None, :]
    tl.store(to, total, mask=inside)


@triton.jit
def gated_rope_kernel(
    qkv, queries, cache, q_gain, k_gain, cos, sin, depths, length, eps,
    row_stride, value_stride, head_stride,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Norm, rotate the first 2 HALF dimensions, store: queries to ``queries``, keys and values to slot length + row.

    Grid: rows, H + 2 G heads. A row of ``qkv`` holds H times [query, gate], then G keys, then G values.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    dim = tl.arange(0, DIM)
    is_query, is_value = head < NUM_Q, head >= NUM_Q + NUM_KV
    first = tl.where(is_query, head * 2 * DIM, 2 * NUM_Q * DIM + (head - NUM_Q) * DIM)
    source = qkv + row * row_stride + first
    dtype = cache.dtype.element_ty
    states = tl.load(source + dim)
    held = tl.load(length)
    if is_value:
        slot = (held + row).to(tl.int64)
        tl.store(cache + value_stride + (head - NUM_Q - NUM_KV) * head_stride + slot * DIM + dim, states)
    else:
        wide = states.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / DIM + eps)
        turned = dim < 2 * HALF
        partner = tl.where(dim < HALF, dim + HALF, tl.where(turned, dim - HALF, dim))
        gains = k_gain
        if is_query:
            gains = q_gain
        normed = (wide * scale * tl.load(gains + dim)).to(dtype).to(tl.float32)
        other = (tl.load(source + partner).to(tl.float32) * scale * tl.load(gains + partner)).to(dtype).to(tl.float32)
        table = (held + tl.load(depths + row)) * HALF + dim % HALF
        cosine = tl.load(cos + table, mask=turned, other=1.0).to(tl.float32)
        sine = tl.load(sin + table, mask=turned, other=0.0).to(tl.float32)
        result = (normed * cosine + tl.where(dim < HALF, -other, other) * sine).to(dtype)
        if is_query:
            tl.store(queries + (row * NUM_Q + head) * DIM + dim, result)
        else:
            slot = (held + row).to(tl.int64)
            tl.store(cache + (head - NUM_Q) * head_stride + slot * DIM + dim, result)
