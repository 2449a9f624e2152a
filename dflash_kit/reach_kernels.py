"""Triton kernels of replay: what a slot's logits say, and where the pieces of many true paths stand in their trees.

A *piece* is the beginning of a true path, as long as its depth; its index is the number of nodes before it: those that score more,
and of those that score the same the ones with smaller ranks.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def slot_kernel(
    logits, truths, log_sums, true_logits, num_before, group_bests, vocabulary, num_groups,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of logits a program: log Σ exp, the true token's logit, how many tokens come before it, the best of each group.

    Token g + j * num_groups is the j-th of group g. Without a true token (-1) nothing is counted.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    truth = tl.load(truths + row)
    true_logit = tl.load(logits + tl.maximum(truth, 0)).to(tl.float32)
    member = tl.arange(0, GROUP)[:, None]
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    before = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_groups, BLOCK):
        group = start + tl.arange(0, BLOCK)
        token = group[None, :] + member * num_groups
        inside = (group < num_groups)[None, :] & (token < vocabulary)
        value = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
        tops = tl.max(value, axis=0)
        tl.store(group_bests + row * num_groups + group, tops, mask=group < num_groups)
        best = tl.maximum(best, tops)
        is_before = inside & ((value > true_logit) | ((value == true_logit) & (token < truth)))
        before += tl.sum(is_before.to(tl.int32), axis=0)
    top = tl.max(best, axis=0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(
        0, num_groups, BLOCK
    ):  # again from the L2 cache; the largest is known now, as for logsumexp of torch
        group = start + tl.arange(0, BLOCK)
        token = group[None, :] + member * num_groups
        inside = (group < num_groups)[None, :] & (token < vocabulary)
        value = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
        total += tl.sum(tl.where(inside, tl.exp(value - top), 0.0), axis=0)
    tl.store(log_sums + row, top + tl.log(tl.sum(total, axis=0)))
    tl.store(true_logits + row, true_logit)
    tl.store(num_before + row, tl.sum(before, axis=0))


@triton.jit
def _split_of(parent_split, rank, true_rank, depth):
    """Where children of ``rank`` at ``depth`` have left the true path: at which depth, negative to the side of smaller ranks; 0 on it."""
    side = tl.where(rank < true_rank, -depth, tl.where(rank == true_rank, 0, depth))
    return tl.where(parent_split != 0, parent_split, side)


@triton.jit
def _is_before(value, own, split, depth, piece):
    """Whether nodes at ``depth`` that left the true path at ``split`` come before a piece."""
    # A node that has not left the path above the piece's end is part of the piece, or has it as its own beginning.
    is_apart = (split != 0) & (tl.abs(split) <= piece)
    has_smaller_ranks = tl.where(is_apart, split < 0, depth < piece)
    return (value > own) | ((value == own) & has_smaller_ranks)


@triton.jit
def index_kernel(
    log_probs, own, true_ranks, anchors, indices, is_open, ends_at, scores_at, splits_at, num_looked, most_depths,
    BUDGET: tl.constexpr, WIDTH: tl.constexpr, RANK_STEPS: tl.constexpr, PARENT_STEPS: tl.constexpr,
):  # fmt: skip
    """One anchor a program: the index of each piece, deeper and deeper until one is outside the tree of BUDGET nodes.

    For each piece the nodes before it are walked level by level. They are closed under parents, and among the children of one node they are
    the best few, found by bisection. ``is_open`` becomes 1 where deeper slots than the ``num_looked`` known ones matter.
    """
    program = tl.program_id(0)
    anchor = tl.load(anchors + program).to(tl.int64)
    log_probs += anchor * most_depths * BUDGET
    own += anchor * most_depths
    true_ranks += anchor * most_depths
    indices += anchor * most_depths
    ends_at += program.to(tl.int64) * WIDTH
    scores_at += program.to(tl.int64) * WIDTH
    splits_at += program.to(tl.int64) * WIDTH
    lane = tl.arange(0, WIDTH)
    piece = 1
    goes_on = 1
    opens = 0
    while (piece <= num_looked) & (goes_on == 1):
        mine = tl.load(own + piece - 1)
        total = tl.where(tl.load(true_ranks + piece - 1) < BUDGET, 0, BUDGET)
        score = tl.where(lane == 0, 0.0, float("-inf")).to(tl.float64)
        split = tl.zeros((WIDTH,), tl.int32)
        count = 1
        depth = 1
        while (depth <= num_looked) & (count > 0) & (total < BUDGET):
            true_rank = tl.load(true_ranks + depth - 1)
            level = log_probs + (depth - 1) * BUDGET
            low = tl.zeros((WIDTH,), tl.int32)
            high = tl.where(lane < count, BUDGET, 0)
            for _ in range(RANK_STEPS):
                middle = (low + high) // 2
                value = score + tl.load(level + middle, mask=low < high, other=float("-inf")).to(tl.float64)
                is_before = (low < high) & _is_before(
                    value, mine, _split_of(split, middle, true_rank, depth), depth, piece
                )
                high = tl.where(is_before, high, middle)
                low = tl.where(is_before, middle + 1, low)
            ends = tl.cumsum(low, axis=0)
            count = tl.sum(low, axis=0)
            total += count
            if (count > 0) & (total < BUDGET):
                tl.store(ends_at + lane, ends)
                tl.store(scores_at + lane, score)
                tl.store(splits_at + lane, split)
                tl.debug_barrier()
                first = tl.zeros((WIDTH,), tl.int32)  # child `lane` is of the first parent whose children end behind it
                last = tl.full((WIDTH,), WIDTH - 1, tl.int32)
                for _ in range(PARENT_STEPS):
                    middle = (first + last) // 2
                    is_behind = tl.load(ends_at + middle) <= lane
                    first = tl.where(is_behind & (first < last), middle + 1, first)
                    last = tl.where(is_behind, last, tl.minimum(middle, last))
                rank = lane - tl.where(first > 0, tl.load(ends_at + tl.maximum(first - 1, 0)), 0)
                is_child = lane < count
                said = tl.load(level + rank, mask=is_child, other=float("-inf")).to(tl.float64)
                score = tl.load(scores_at + first) + said
                split = _split_of(tl.load(splits_at + first), rank, true_rank, depth)
                tl.debug_barrier()
            depth += 1
        has_more = num_looked < most_depths
        if total >= BUDGET:
            goes_on = 0
        elif has_more & (count > 0):
            goes_on = 0
            opens = 1
        else:
            tl.store(indices + piece - 1, total)
            opens = tl.where(has_more & (piece == num_looked), 1, 0)
            piece += 1
    tl.store(is_open + program, opens)
