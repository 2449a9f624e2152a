"""Triton kernels that grow a draft tree out of ranked tokens (`rank_kernels`), walk it and mask it on the device; `device_tree`
explains and calls them.

Each works on the trees of several prompts; a prompt's buffers lie behind another's.

Shape legend: M depths, K ranks kept per depth, F buffer of kept nodes, R rows (root + nodes, padded) of a prompt.
A *record* is a node that was kept at some level: record id = depth index * F + place.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

DEAD = tl.constexpr(0x7FF0000000000000)  # key of -inf


@triton.jit
def _count_up_to(keys, num_alive, edge, CHUNK: tl.constexpr):
    """How many of the first ``num_alive`` keys are at most ``edge``."""
    total = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, num_alive, CHUNK):
        at = start + tl.arange(0, CHUNK)
        total += (tl.load(keys + at, mask=at < num_alive, other=DEAD) <= edge).to(tl.int32)
    return tl.sum(total, axis=0)


@triton.jit
def _count_quarters(keys, num_alive, first, second, third, CHUNK: tl.constexpr):
    """How many of the first ``num_alive`` keys are at most each of three edges, the keys read once."""
    up_to_first = tl.zeros((CHUNK,), tl.int32)
    up_to_second, up_to_third = up_to_first, up_to_first
    for start in range(0, num_alive, CHUNK):
        at = start + tl.arange(0, CHUNK)
        key = tl.load(keys + at, mask=at < num_alive, other=DEAD)
        up_to_first += (key <= first).to(tl.int32)
        up_to_second += (key <= second).to(tl.int32)
        up_to_third += (key <= third).to(tl.int32)
    return tl.sum(up_to_first, axis=0), tl.sum(up_to_second, axis=0), tl.sum(up_to_third, axis=0)


@triton.jit
def _snap(keys, num_alive, low, high, CHUNK: tl.constexpr):
    """Narrow a bracket to the keys inside it: the smallest from ``low`` on, the greatest up to ``high``."""
    least = tl.full((CHUNK,), DEAD, tl.int64)
    most = tl.zeros((CHUNK,), tl.int64)
    for start in range(0, num_alive, CHUNK):
        at = start + tl.arange(0, CHUNK)
        key = tl.load(keys + at, mask=at < num_alive, other=DEAD)
        least = tl.minimum(least, tl.where(key >= low, key, DEAD))
        most = tl.maximum(most, tl.where(key <= high, key, 0))
    return tl.min(least, axis=0), tl.max(most, axis=0)


@triton.jit
def grow_kernel(
    log_probs, pairs, pair_ends, frontier_scores, frontier_records, level_keys, keys, items, record_parents,
    record_ranks,
    num_kept_out, num_depths, num_ranks, budget, capacity,
    FRONTIER: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grow a tree level by level; one program a prompt.

    Keys are the bits of |score| in float64, so a smaller key is a better path. A level's candidates are the frontier's
    paths (best first) times the ranks of the next depth. The i-th path (from 0) with rank r has (i + 1)(r + 1)
    candidates and i + 1 frontier paths no worse than itself, so only pairs with (i + 1)(r + 2) <= budget are tried,
    and of these only the ones inside the present edge. The edge is the budget-th key of kept nodes and candidates
    together; it is searched by quarters of a bracket. ``keys`` and ``items`` are two buffers of ``capacity``, used in turn. An item is a
    record's id, or for a candidate the negative code of its parent's record and its rank.
    """
    prompt = tl.program_id(0)
    log_probs += prompt * num_depths * num_ranks
    frontier_scores += prompt * FRONTIER
    frontier_records += prompt * FRONTIER
    level_keys += prompt * FRONTIER
    keys += prompt * 2 * capacity
    items += prompt * 2 * capacity
    record_parents += prompt * num_depths * FRONTIER
    record_ranks += prompt * num_depths * FRONTIER
    place = tl.arange(0, FRONTIER)
    num_frontier = tl.minimum(budget, num_ranks)
    num_kept = num_frontier
    scores = tl.load(log_probs + place, mask=place < num_frontier, other=0.0).to(tl.float64)
    tl.store(frontier_scores + place, scores)
    tl.store(frontier_records + place, place)
    tl.store(record_parents + place, -1)
    tl.store(record_ranks + place, place)
    tl.store(keys + place, tl.abs(scores).to(tl.int64, bitcast=True), mask=place < num_frontier)
    tl.store(items + place, place, mask=place < num_frontier)
    best_key = tl.min(tl.where(place < num_frontier, tl.abs(scores).to(tl.int64, bitcast=True), DEAD), axis=0)
    edge = tl.full((), DEAD - 1, tl.int64)
    tl.debug_barrier()
    for depth in range(1, num_depths):
        keys_in, items_in = keys + (depth - 1) % 2 * capacity, items + (depth - 1) % 2 * capacity
        keys_out, items_out = keys + depth % 2 * capacity, items + depth % 2 * capacity
        num_alive = num_kept
        num_pairs = tl.load(pair_ends + num_frontier)
        for start in range(0, num_pairs, CHUNK):
            at = start + tl.arange(0, CHUNK)
            pair = tl.load(pairs + at, mask=at < num_pairs, other=0)
            parent, rank = pair >> 16, pair & 0xFFFF
            used = (at < num_pairs) & (rank < num_ranks)
            score = tl.load(frontier_scores + parent, mask=used, other=0.0)
            score += tl.load(log_probs + depth * num_ranks + rank, mask=used, other=0.0).to(tl.float64)
            record = tl.load(frontier_records + parent, mask=used, other=0)
            key = tl.abs(score).to(tl.int64, bitcast=True)
            alive = used & (key <= edge)
            counted = tl.cumsum(alive.to(tl.int32), axis=0)
            slot = num_alive + counted - 1
            tl.store(keys_in + slot, key, mask=alive)
            tl.store(items_in + slot, -1 - (record * 1024 + rank), mask=alive)
            num_alive += tl.max(counted, axis=0)
        tl.debug_barrier()
        if (num_alive > num_kept) & (num_alive > budget):
            low, high, step = best_key, edge, 0
            while low < high:
                if step % 4 == 0:  # a group of ties alone in the bracket would cost a step for every two bits
                    low, high = _snap(keys_in, num_alive, low, high, CHUNK)
                quarter = (high - low) // 4
                first, second, third = low + quarter, low + 2 * quarter, low + 3 * quarter
                in_first, in_second, in_third = _count_quarters(keys_in, num_alive, first, second, third, CHUNK)
                if in_first >= budget:
                    high, low = first, tl.where(in_first == budget, first, low)
                elif in_second >= budget:
                    high, low = second, tl.where(in_second == budget, second, first + 1)
                elif in_third >= budget:
                    high, low = third, tl.where(in_third == budget, third, second + 1)
                else:
                    low = third + 1
                step += 1
            edge = high
        # Strictly better nodes always fit; of those that tie with the edge, the buffers take the first.
        num_better, num_tied = 0, _count_up_to(keys_in, num_alive, edge - 1, CHUNK)
        num_new = 0
        for start in range(0, num_alive, CHUNK):
            at = start + tl.arange(0, CHUNK)
            key = tl.load(keys_in + at, mask=at < num_alive, other=DEAD)
            item = tl.load(items_in + at, mask=at < num_alive, other=0)
            better, tied = key < edge, key == edge
            packed = tl.cumsum(better.to(tl.int32) + (tied.to(tl.int32) << 16), axis=0)
            slot = tl.where(better, num_better + (packed & 0xFFFF), num_tied + (packed >> 16)) - 1
            stays = (better | tied) & (slot < FRONTIER)
            is_new = stays & (item < 0)
            counted = tl.cumsum(is_new.to(tl.int32), axis=0)
            new_place = num_new + counted - 1
            code = -1 - item
            tl.store(level_keys + new_place, key, mask=is_new)
            tl.store(record_parents + depth * FRONTIER + new_place, code >> 10, mask=is_new)
            tl.store(record_ranks + depth * FRONTIER + new_place, code & 1023, mask=is_new)
            tl.store(keys_out + slot, key, mask=stays)
            tl.store(items_out + slot, tl.where(is_new, depth * FRONTIER + new_place, item), mask=stays)
            last = tl.max(packed & 0xFFFF, axis=0)
            num_better += last
            num_tied += tl.max(packed >> 16, axis=0)
            num_new += tl.max(counted, axis=0)
        num_kept = tl.minimum(num_tied, FRONTIER)
        tl.debug_barrier()
        if depth + 1 < num_depths:  # nobody reads the order of the last level
            # A path's place among the level's is the number of better ones; of equal ones the earlier is better.
            key = tl.load(level_keys + place, mask=place < num_new, other=DEAD)
            order = tl.zeros((FRONTIER,), tl.int32)
            for other in range(num_new):
                other_key = tl.load(level_keys + other)
                order += (other_key < key + (other < place).to(tl.int64)).to(tl.int32)
            tl.store(frontier_scores + order, -key.to(tl.float64, bitcast=True), mask=place < num_new)
            tl.store(frontier_records + order, depth * FRONTIER + place, mask=place < num_new)
            tl.debug_barrier()
        num_frontier = tl.minimum(num_new, budget)
    tl.store(num_kept_out + prompt, num_kept)


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
    depths, path_log_probs, num_nodes, words, num_depths, num_ranks, budget, num_rows, keys_stride,
    FRONTIER: tl.constexpr, MINE: tl.constexpr, CHUNK: tl.constexpr, KEEP_WORDS: tl.constexpr,
):  # fmt: skip
    """Number the kept nodes best-first by counting, for each, the nodes before it; write tokens, depths and scores.

    KEEP_WORDS writes the rank tuples (3, R), too. Grid: runs of MINE nodes, prompts; ``keys_stride`` lies between prompts' keys.
    """
    prompt = tl.program_id(1)
    kept_keys += prompt * keys_stride
    kept_records += prompt * keys_stride
    record_parents += prompt * num_depths * FRONTIER
    record_ranks += prompt * num_depths * FRONTIER
    record_rows += prompt * num_depths * FRONTIER
    ranked_ids += prompt * num_depths * num_ranks
    row_records += prompt * num_rows
    tokens += prompt * num_rows
    depths += prompt * num_rows
    path_log_probs += prompt * num_rows
    words += prompt * 3 * num_rows
    num_kept = tl.load(num_kept_in + prompt)
    mine = tl.program_id(0) * MINE + tl.arange(0, MINE)
    used = mine < num_kept
    key = tl.load(kept_keys + mine, mask=used, other=0)
    record = tl.load(kept_records + mine, mask=used, other=-1)
    first, second, third = _path_words(record, used, record_parents, record_ranks, num_depths, FRONTIER)
    before = tl.zeros((MINE,), tl.int32)
    for start in range(0, FRONTIER, CHUNK):
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
    tl.store(path_log_probs + row, -key.to(tl.float64, bitcast=True), mask=stays)
    tl.store(row_records + row, record, mask=stays)
    tl.store(record_rows + record, row, mask=stays)
    if KEEP_WORDS:
        tl.store(words + row, first, mask=stays)
        tl.store(words + num_rows + row, second, mask=stays)
        tl.store(words + 2 * num_rows + row, third, mask=stays)
    if tl.program_id(0) == 0:
        tl.store(num_nodes + prompt, tl.minimum(num_kept, budget))


@triton.jit
def preorder_kernel(
    best_tokens, best_depths, best_log_probs, best_records, words, num_nodes, tokens, depths, path_log_probs, row_records,
    record_rows, num_rows, num_records,
    MINE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Number nodes that are numbered best-first (from 1) in preorder, which is the order of their rank tuples, by counting likewise.

    Grid: runs of MINE nodes, prompts.
    """
    prompt = tl.program_id(1)
    best_tokens += prompt * num_rows
    best_depths += prompt * num_rows
    best_log_probs += prompt * num_rows
    best_records += prompt * num_rows
    words += prompt * 3 * num_rows
    tokens += prompt * num_rows
    depths += prompt * num_rows
    path_log_probs += prompt * num_rows
    row_records += prompt * num_rows
    record_rows += prompt * num_records
    count = tl.load(num_nodes + prompt)
    mine = 1 + tl.program_id(0) * MINE + tl.arange(0, MINE)
    used = mine <= count
    first = tl.load(words + mine, mask=used, other=0)
    second = tl.load(words + num_rows + mine, mask=used, other=0)
    third = tl.load(words + 2 * num_rows + mine, mask=used, other=0)
    before = tl.zeros((MINE,), tl.int32)
    for start in range(1, count + 1, CHUNK):
        theirs = start + tl.arange(0, CHUNK)
        there = theirs <= count
        o_first = tl.load(words + theirs, mask=there, other=0)[None, :]
        o_second = tl.load(words + num_rows + theirs, mask=there, other=0)[None, :]
        o_third = tl.load(words + 2 * num_rows + theirs, mask=there, other=0)[None, :]
        same_first = o_first == first[:, None]
        same_second = same_first & (o_second == second[:, None])
        smaller = (o_first < first[:, None]) | (same_first & (o_second < second[:, None]))
        smaller = smaller | (same_second & (o_third < third[:, None]))
        before += tl.sum((smaller & there[None, :]).to(tl.int32), axis=1)
    row = before + 1
    record = tl.load(best_records + mine, mask=used, other=0)
    tl.store(tokens + row, tl.load(best_tokens + mine, mask=used, other=0), mask=used)
    tl.store(depths + row, tl.load(best_depths + mine, mask=used, other=0), mask=used)
    tl.store(path_log_probs + row, tl.load(best_log_probs + mine, mask=used, other=0.0), mask=used)
    tl.store(row_records + row, record, mask=used)
    tl.store(record_rows + record, row, mask=used)


@triton.jit
def mask_kernel(
    row_records, record_rows, record_parents, num_nodes, parents, mask, ancestors, num_rows, num_records, num_words,
    num_depths,
    ROWS: tl.constexpr, WORDS: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    """Parent rows and the ancestor bits (R, words); rows behind the last node see the root and themselves.

    With PATH above 0, the rows of all ancestors (R, PATH), too, -1 behind them. Grid: runs of ROWS rows, prompts.
    """
    prompt = tl.program_id(1)
    row_records += prompt * num_rows
    record_rows += prompt * num_records
    record_parents += prompt * num_records
    parents += prompt * num_rows
    mask += prompt * num_rows * num_words
    ancestors += prompt * num_rows * PATH
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.arange(0, WORDS)[None, :]
    is_node = (row >= 1) & (row <= tl.load(num_nodes + prompt))
    one = tl.full((ROWS, WORDS), 1, tl.int64)
    bits = tl.where(word == 0, one, 0) | tl.where(
        word == row[:, None] // 64, one << (row[:, None] % 64).to(tl.int64), 0
    )
    record = tl.load(row_records + row, mask=is_node, other=-1)
    parent = tl.where(is_node, 0, -1)
    for step in range(num_depths):
        is_below = (record >= 0) | (step == 0)  # else the root was the last one
        record = tl.load(record_parents + record, mask=record >= 0, other=-1)
        ancestor = tl.load(record_rows + record, mask=record >= 0, other=0)
        if PATH > 0:
            tl.store(ancestors + row * PATH + step, tl.where(is_below, ancestor, -1), mask=row < num_rows)
        bits = bits | tl.where(word == ancestor[:, None] // 64, one << (ancestor[:, None] % 64).to(tl.int64), 0)
        if step == 0:
            parent = tl.where(is_node, ancestor, -1)
    tl.store(parents + row, parent, mask=row < num_rows)
    inside = (row[:, None] < num_rows) & (word < num_words)
    tl.store(mask + row[:, None] * num_words + word, bits, mask=inside)


@triton.jit
def walk_kernel(
    tokens, parents, num_nodes, choices, path, num_accepted, told, next_anchor, max_steps, num_rows, ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Follow the target's choices from the root; one program a prompt, of which SLOTS rows are told at most.

    Writes the rows walked (``path``, root first), how many nodes were accepted, and, behind that number once more, the tokens said: the
    accepted ones, then the bonus token, which is also the next anchor.
    """
    prompt = tl.program_id(0)
    tokens += prompt * num_rows
    parents += prompt * num_rows
    choices += prompt * num_rows
    path += prompt * SLOTS
    told += prompt * (SLOTS + 1)
    row = tl.arange(0, ROWS)
    is_node = (row >= 1) & (row <= tl.load(num_nodes + prompt))
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
            tl.store(told + 1 + accepted, choice)
            accepted += 1
            at = child
            tl.store(path + accepted, child)
    bonus = tl.load(choices + at)
    tl.store(told + 1 + accepted, bonus)
    tl.store(next_anchor + prompt, bonus)
    tl.store(num_accepted + prompt, accepted)
    tl.store(told, accepted.to(tl.int64))
