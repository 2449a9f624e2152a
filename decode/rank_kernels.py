"""Triton kernels that find and rank the best tokens of each depth by the drafter's logits; `device_tree` calls them.

One row of logits is one depth of one prompt; a prompt's rows lie behind another's. A *group* is some tokens with neighbouring ids.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def _ordered(value):
    """int32 in the order of float32 numbers."""
    value = tl.where(value == 0.0, 0.0, value)  # -0.0 and 0.0 are one logit
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _logits_of(logits, row, prompt_stride, row_stride, num_depths):
    """Where the logits of a row begin; those of two prompts may lie apart."""
    return logits + (row // num_depths).to(tl.int64) * prompt_stride + row % num_depths * row_stride


@triton.jit
def log_sum_kernel(
    logits, out, tops, prompt_stride, row_stride, num_depths, width, num_groups,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Partial (max, Σ exp) of one chunk of one row of logits: out (rows, chunks, 2). With GROUP > 0 the greatest logit
    of every so many neighbours, too, as ``_ordered`` gives it: tops (rows, groups).
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    source = _logits_of(logits, row, prompt_stride, row_stride, num_depths)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, CHUNK, BLOCK):
        at = chunk * CHUNK + start + tl.arange(0, BLOCK)
        value = tl.load(source + at, mask=at < width, other=float("-inf")).to(tl.float32)
        if GROUP > 0:
            group = (chunk * CHUNK + start) // GROUP + tl.arange(0, BLOCK // GROUP)
            top = tl.max(tl.reshape(_ordered(value), (BLOCK // GROUP, GROUP)), axis=1)
            tl.store(tops + row * num_groups + group, top, mask=group < num_groups)
        new_best = tl.maximum(tl.maximum(best, value), -1.0e30)
        total = total * tl.exp(best - new_best) + tl.exp(value - new_best)
        best = new_best
    top = tl.max(best, axis=0)
    place = out + (row * tl.num_programs(1) + chunk) * 2
    tl.store(place, top)
    tl.store(place + 1, tl.sum(total * tl.exp(best - top), axis=0))


@triton.jit
def _greatest_reached(keys, inside, num_wanted):
    """The greatest int32 that at least ``num_wanted`` of the keys ``inside`` reach."""
    low = tl.min(tl.where(inside, keys, 0x7FFFFFFF), axis=0).to(tl.int64)
    high = tl.max(tl.where(inside, keys, -0x7FFFFFFF), axis=0).to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        reached = tl.sum((inside & (keys >= middle.to(tl.int32))).to(tl.int32), axis=0)
        low = tl.where(reached >= num_wanted, middle, low)
        high = tl.where(reached >= num_wanted, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def top_kernel(
    logits, tops, chosen_groups, values, token_ids, prompt_stride, row_stride, num_depths, width, num_groups, num_ranks,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """The ``num_ranks`` best tokens of a row (greater logit first, then smaller id), in no order. One program a row.

    They lie in the ``num_ranks`` groups with the greatest ``tops`` (of equal ones the first): each of those holds a
    token no worse than any outside.
    """
    row = tl.program_id(0)
    at = tl.arange(0, GROUPS)
    inside = at < num_groups
    top = tl.load(tops + row * num_groups + at, mask=inside, other=-0x7FFFFFFF)
    edge = _greatest_reached(top, inside, num_ranks)
    better, tied = inside & (top > edge), inside & (top == edge)
    num_better = tl.sum(better.to(tl.int32), axis=0)
    packed = tl.cumsum(better.to(tl.int32) + (tied.to(tl.int32) << 16), axis=0)
    slot = tl.where(better, packed & 0xFFFF, num_better + (packed >> 16)) - 1
    tl.store(chosen_groups + row * num_ranks + slot, at, mask=(better | tied) & (slot < num_ranks))
    tl.debug_barrier()
    place = tl.arange(0, RANKS * GROUP)
    used = place // GROUP < num_ranks
    token = tl.load(chosen_groups + row * num_ranks + place // GROUP, mask=used, other=0) * GROUP + place % GROUP
    used = used & (token < width)
    source = _logits_of(logits, row, prompt_stride, row_stride, num_depths)
    value = tl.load(source + token, mask=used, other=float("-inf")).to(tl.float32)
    key = _ordered(value)
    edge = _greatest_reached(key, used, num_ranks)
    better, tied = used & (key > edge), used & (key == edge)
    num_better = tl.sum(better.to(tl.int32), axis=0)
    last = -_greatest_reached(-token, tied, num_ranks - num_better)  # of the tied ones, the smaller ids
    stays = better | (tied & (token <= last))
    slot = tl.cumsum(stays.to(tl.int32), axis=0) - 1
    tl.store(values + row * num_ranks + slot, value, mask=stays)
    tl.store(token_ids + row * num_ranks + slot, token, mask=stays)


@triton.jit
def rank_kernel(
    values, token_ids, partial, log_probs, ranked_ids, num_ranks, num_chunks, RANKS: tl.constexpr, CHUNKS: tl.constexpr
):
    """Order the best tokens of a row (greater logit first, then smaller id) and turn logits into log-probabilities."""
    row = tl.program_id(0)
    at = tl.arange(0, RANKS)
    inside = at < num_ranks
    value = tl.load(values + row * num_ranks + at, mask=inside, other=float("-inf")).to(tl.float32)
    token = tl.load(token_ids + row * num_ranks + at, mask=inside, other=0)
    ordered = _ordered(value).to(tl.int64)
    packed = tl.sort((ordered << 32) | (0x7FFFFFFF - token), descending=True)
    ordered = (packed >> 32).to(tl.int32)
    value = tl.where(ordered >= 0, ordered, ordered ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)
    chunk = tl.arange(0, CHUNKS)
    held = chunk < num_chunks
    tops = tl.load(partial + (row * num_chunks + chunk) * 2, mask=held, other=float("-inf"))
    sums = tl.load(partial + (row * num_chunks + chunk) * 2 + 1, mask=held, other=0.0)
    top = tl.max(tops, axis=0)
    log_sum = top + tl.log(tl.sum(sums * tl.exp(tops - top), axis=0))
    tl.store(log_probs + row * num_ranks + at, tl.minimum(value - log_sum, 0.0), mask=inside)
    tl.store(ranked_ids + row * num_ranks + at, 0x7FFFFFFF - (packed & 0x7FFFFFFF), mask=inside)
