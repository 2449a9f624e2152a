"""Triton kernels that build a draft tree, walk it and mask it on the device; `device_tree` explains and calls them.

Shape legend: M depths, K ranks kept per depth, B budget, P candidate pairs, F frontier buffer, A buffer of kept nodes,
R rows (root + nodes, padded). A *record* is a node that was kept at some level: record id = depth index * F + place.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

DEAD = tl.constexpr(0x7FF0000000000000)  # key of -inf


@triton.jit
def log_sum_kernel(logits, out, row_stride, width, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Partial (max, Σ exp) of one chunk of one row of logits: out (rows, chunks, 2)."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, CHUNK, BLOCK):
        at = chunk * CHUNK + start + tl.arange(0, BLOCK)
        value = tl.load(logits + row * row_stride + at, mask=at < width, other=float("-inf")).to(tl.float32)
        new_best = tl.maximum(tl.maximum(best, value), -1.0e30)
        total = total * tl.exp(best - new_best) + tl.exp(value - new_best)
        best = new_best
    top = tl.max(best, axis=0)
    place = out + (row * tl.num_programs(1) + chunk) * 2
    tl.store(place, top)
    tl.store(place + 1, tl.sum(total * tl.exp(best - top), axis=0))


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
    value = tl.where(value == 0.0, 0.0, value)  # -0.0 and 0.0 are one logit
    bits = value.to(tl.int32, bitcast=True)
    ordered = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64)
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


@triton.jit
def _sort_pairs(key, payload, place, COUNT: tl.constexpr):
    """Ascending bitonic sort of (key, payload); pairs are distinct because payloads are."""
    size = 2
    while size <= COUNT:
        stride = size // 2
        while stride > 0:
            partner = place ^ stride
            other_key, other_payload = tl.gather(key, partner, 0), tl.gather(payload, partner, 0)
            other_less = (other_key < key) | ((other_key == key) & (other_payload < payload))
            wants_less = ((place & stride) == 0) == ((place & size) == 0)
            swap = other_less == wants_less
            key, payload = tl.where(swap, other_key, key), tl.where(swap, other_payload, payload)
            stride = stride // 2
        size = size * 2
    return key, payload


@triton.jit
def grow_kernel(
    log_probs, pair_parents, pair_ranks, frontier_scores, frontier_records, kept_keys, kept_records, record_parents,
    record_ranks, num_kept_out, num_depths, num_ranks, budget, num_pairs,
    PAIRS: tl.constexpr, FRONTIER: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Grow the tree level by level in one program.

    Keys are the bits of |score| in float64, so a smaller key is a better path. A level's candidates are the frontier's
    paths (best first) times the ranks of the next depth; the i-th path with rank r has (i + 1)(r + 1) paths no worse
    than itself, so only pairs with (i + 1)(r + 1) <= budget are tried. The budget-th key of kept nodes and candidates
    together, found by bisection, decides who stays.
    """
    pair = tl.arange(0, PAIRS)
    place = tl.arange(0, FRONTIER)
    kept_place = tl.arange(0, KEPT)
    parent = tl.load(pair_parents + pair, mask=pair < num_pairs, other=0)
    rank = tl.load(pair_ranks + pair, mask=pair < num_pairs, other=0)
    pair_used = (pair < num_pairs) & (rank < num_ranks)
    num_frontier = tl.minimum(budget, num_ranks)
    num_kept = num_frontier
    scores = tl.load(log_probs + place, mask=place < num_frontier, other=0.0).to(tl.float64)
    tl.store(frontier_scores + place, scores)
    tl.store(frontier_records + place, place)
    tl.store(record_parents + place, -1)
    tl.store(record_ranks + place, place)
    kept_inside = kept_place < num_frontier
    first = tl.load(log_probs + kept_place, mask=kept_inside, other=0.0).to(tl.float64)
    tl.store(kept_keys + kept_place, tl.where(kept_inside, tl.abs(first).to(tl.int64, bitcast=True), DEAD))
    tl.store(kept_records + kept_place, kept_place)
    tl.debug_barrier()
    for depth in range(1, num_depths):
        used = pair_used & (parent < num_frontier)
        score = tl.load(frontier_scores + parent, mask=used, other=0.0)
        score += tl.load(log_probs + depth * num_ranks + rank, mask=used, other=0.0).to(tl.float64)
        record = tl.load(frontier_records + parent, mask=used, other=0)
        key = tl.where(used, tl.abs(score).to(tl.int64, bitcast=True), DEAD)
        kept_key = tl.load(kept_keys + kept_place)
        kept_record = tl.load(kept_records + kept_place)
        low = tl.min(kept_key, axis=0)
        high = tl.full((), DEAD - 1, tl.int64)
        within = tl.sum((kept_key <= high).to(tl.int32), axis=0)
        if within >= budget:
            high = tl.max(tl.where(kept_key < DEAD, kept_key, 0), axis=0)
        count = within + tl.sum((key <= high).to(tl.int32), axis=0)
        if count > budget:
            while low < high:
                middle = low + (high - low) // 2
                count = tl.sum((key <= middle).to(tl.int32), axis=0)
                count += tl.sum((kept_key <= middle).to(tl.int32), axis=0)
                high = tl.where(count >= budget, middle, high)
                low = tl.where(count < budget, middle + 1, tl.where(count == budget, middle, low))
        threshold = high
        # Strictly better nodes always fit; among those that tie with the last, the buffers take the first.
        better, tied = key < threshold, key == threshold
        kept_better, kept_tied = kept_key < threshold, kept_key == threshold
        packed = tl.cumsum(better.to(tl.int32) + (tied.to(tl.int32) << 16), axis=0)
        kept_packed = tl.cumsum(kept_better.to(tl.int32) + (kept_tied.to(tl.int32) << 16), axis=0)
        num_better, num_tied = tl.sum(better.to(tl.int32), axis=0), tl.sum(tied.to(tl.int32), axis=0)
        num_kept_better = tl.sum(kept_better.to(tl.int32), axis=0)
        num_kept_tied = tl.sum(kept_tied.to(tl.int32), axis=0)
        slot = tl.where(better, (packed & 0xFFFF) - 1, num_better + (packed >> 16) - 1)
        stays = (better | tied) & (slot < FRONTIER)
        new_record = depth * FRONTIER + slot
        num_new = tl.minimum(num_better + num_tied, FRONTIER)
        num_new_tied = num_new - num_better
        tl.debug_barrier()
        tl.store(frontier_scores + slot, score, mask=stays)
        tl.store(record_parents + new_record, record, mask=stays)
        tl.store(record_ranks + new_record, rank, mask=stays)
        tied_base = num_kept_better + num_better
        kept_slot = tl.where(kept_better, (kept_packed & 0xFFFF) - 1, tied_base + (kept_packed >> 16) - 1)
        kept_stays = (kept_better | kept_tied) & (kept_slot < KEPT)
        new_slot = tl.where(better, num_kept_better + slot, tied_base + num_kept_tied + slot - num_better)
        new_stays = stays & (new_slot < KEPT)
        tl.store(kept_keys + kept_slot, kept_key, mask=kept_stays)
        tl.store(kept_records + kept_slot, kept_record, mask=kept_stays)
        tl.store(kept_keys + new_slot, key, mask=new_stays)
        tl.store(kept_records + new_slot, new_record, mask=new_stays)
        num_kept = tl.minimum(tied_base + num_kept_tied + num_new_tied, KEPT)
        tl.store(kept_keys + kept_place, tl.full((KEPT,), DEAD, tl.int64), mask=kept_place >= num_kept)
        tl.debug_barrier()
        if depth + 1 < num_depths:  # nobody reads the order of the last level
            level_score = tl.load(frontier_scores + place, mask=place < num_new, other=float("-inf"))
            level_key = tl.abs(level_score).to(tl.int64, bitcast=True)
            level_key, level_place = _sort_pairs(level_key, place, place, FRONTIER)
            tl.debug_barrier()
            tl.store(frontier_scores + place, -level_key.to(tl.float64, bitcast=True))
            tl.store(frontier_records + place, depth * FRONTIER + level_place)
            tl.debug_barrier()
        num_frontier = tl.minimum(num_new, budget)
    tl.store(num_kept_out, num_kept)


@triton.jit
def _path_words(record, used, record_parents, record_ranks, num_depths, FRONTIER: tl.constexpr):
    """Three int64 whose order is that of the rank tuples (rank + 1 in 11 bits, 0 where the path has ended)."""
    first = tl.zeros_like(record).to(tl.int64)
    second, third = first, first
    for _ in range(num_depths):
        alive = used & (record >= 0)
        depth = record // FRONTIER
        rank = tl.load(record_ranks + record, mask=alive, other=0).to(tl.int64) + 1
        shifted = rank << ((4 - depth % 5) * 11).to(tl.int64)
        word = depth // 5  # five ranks a word
        first = tl.where(alive & (word == 0), first | shifted, first)
        second = tl.where(alive & (word == 1), second | shifted, second)
        third = tl.where(alive & (word == 2), third | shifted, third)
        record = tl.where(alive, tl.load(record_parents + record, mask=alive, other=-1), -1)
    return first, second, third


@triton.jit
def order_kernel(
    kept_keys, kept_records, num_kept_in, record_parents, record_ranks, record_rows, row_records, ranked_ids, tokens,
    depths, num_nodes, num_depths, num_ranks, budget,
    FRONTIER: tl.constexpr, KEPT: tl.constexpr, MINE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Number the kept nodes best-first by counting, for each, the nodes before it; write tokens and depths."""
    num_kept = tl.load(num_kept_in)
    mine = tl.program_id(0) * MINE + tl.arange(0, MINE)
    used = mine < num_kept
    key = tl.load(kept_keys + mine, mask=used, other=0)
    record = tl.load(kept_records + mine, mask=used, other=-1)
    first, second, third = _path_words(record, used, record_parents, record_ranks, num_depths, FRONTIER)
    before = tl.zeros((MINE,), tl.int32)
    for start in range(0, KEPT, CHUNK):
        theirs = start + tl.arange(0, CHUNK)
        there = theirs < num_kept
        other_key = tl.load(kept_keys + theirs, mask=there, other=DEAD)
        tied = (other_key[None, :] == key[:, None]) & there[None, :]
        less = (other_key[None, :] < key[:, None]) & there[None, :]
        other = tl.load(kept_records + theirs, mask=there, other=-1)
        strangers = tied & (other[None, :] != record[:, None]) & used[:, None]
        if tl.max(tl.sum(strangers.to(tl.int32), axis=1), axis=0) > 0:
            o_first, o_second, o_third = _path_words(other, there, record_parents, record_ranks, num_depths, FRONTIER)
            same_first = o_first[None, :] == first[:, None]
            same_second = same_first & (o_second[None, :] == second[:, None])
            smaller = o_first[None, :] < first[:, None]
            smaller = smaller | (same_first & (o_second[None, :] < second[:, None]))
            smaller = smaller | (same_second & (o_third[None, :] < third[:, None]))
            less = less | (strangers & smaller)
        before += tl.sum(less.to(tl.int32), axis=1)
    stays = used & (before < budget)
    row = before + 1
    depth = record // FRONTIER
    rank = tl.load(record_ranks + record, mask=stays, other=0)
    token = tl.load(ranked_ids + depth * num_ranks + rank, mask=stays, other=0)
    tl.store(tokens + row, token, mask=stays)
    tl.store(depths + row, depth + 1, mask=stays)
    tl.store(row_records + row, record, mask=stays)
    tl.store(record_rows + record, row, mask=stays)
    if tl.program_id(0) == 0:
        tl.store(num_nodes, tl.minimum(num_kept, budget))


@triton.jit
def mask_kernel(
    row_records, record_rows, record_parents, num_nodes, parents, mask, num_rows, num_depths,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Parent rows and the ancestor mask (R, R); rows behind the last node see the root and themselves."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_node = (row >= 1) & (row <= tl.load(num_nodes))
    seen = (column[None, :] == 0) | (column[None, :] == row[:, None])
    record = tl.load(row_records + row, mask=is_node, other=-1)
    parent = tl.where(is_node, 0, -1)
    for step in range(num_depths):
        record = tl.load(record_parents + record, mask=record >= 0, other=-1)
        ancestor = tl.load(record_rows + record, mask=record >= 0, other=0)
        seen = seen | (column[None, :] == ancestor[:, None])
        if step == 0:
            parent = tl.where(is_node, ancestor, -1)
    if tl.program_id(1) == 0:
        tl.store(parents + row, parent, mask=row < num_rows)
    inside = (row[:, None] < num_rows) & (column[None, :] < num_rows)
    tl.store(mask + row[:, None] * num_rows + column[None, :], seen.to(tl.uint8), mask=inside)


@triton.jit
def walk_kernel(
    tokens, parents, num_nodes, choices, path, num_accepted, emitted, next_anchor, max_steps, ROWS: tl.constexpr
):
    """Follow the target's choices from the root; one program.

    Writes the rows walked (``path``, root first), how many nodes were accepted, and the tokens said: the accepted
    ones, then the bonus token, which is also the next anchor.
    """
    row = tl.arange(0, ROWS)
    is_node = (row >= 1) & (row <= tl.load(num_nodes))
    token = tl.load(tokens + row, mask=is_node, other=-1)
    parent = tl.load(parents + row, mask=is_node, other=-1)
    at, accepted = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    going = tl.full((), 1, tl.int32)
    tl.store(path, 0)
    for _ in range(max_steps):
        choice = tl.load(choices + at)
        child = tl.max(tl.where((parent == at) & (token == choice), row, 0), axis=0)
        going = tl.where(child > 0, going, 0)
        if going > 0:
            tl.store(emitted + accepted, choice)
            accepted += 1
            at = child
            tl.store(path + accepted, child)
    bonus = tl.load(choices + at)
    tl.store(emitted + accepted, bonus)
    tl.store(next_anchor, bonus)
    tl.store(num_accepted, accepted)
