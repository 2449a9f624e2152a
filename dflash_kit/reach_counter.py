"""How many draft tokens the rounds from many anchors accept, by every method at once, by kernels of our own on NVIDIA GPUs.

The same counts as ``replay_accepted.AcceptedCounter``, in some ten launches for each piece of slots looked at, and without building trees.

Shape legend: N anchors, M = B - 1 depths, n anchors still open, m depths looked at together, K ranks kept per depth, D hidden.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .best_logits import GROUP, best_logits
from .replay_accepted import AcceptedCounter
from .replay_reach import NO_RANK
from .target_ends import TargetEnds

STAGES = (3, 5, 7, 10)
"""Depths looked at before anchors are dropped; each costs a wait and some forty launches."""
LOGITS_AT_ONCE = 1 << 27
GROUPS_AT_ONCE = 256
PROGRAMS_AT_ONCE = 1 << 13
"""Anchors that are given memory to walk in together."""


class ReachCounter(AcceptedCounter):
    """``AcceptedCounter`` by kernels; what it leaves to that are true paths with a score that is no number."""

    def __init__(self, ends: TargetEnds, budgets: Sequence[int]) -> None:
        super().__init__(ends, budgets)
        self.num_left = 0
        """Anchors so far that it left to it."""

    @torch.no_grad()
    def count(self, hidden: Tensor, truths: Tensor) -> Tensor:
        """As of ``AcceptedCounter.count``."""
        truths, num_depths = truths.to(hidden.device), truths.shape[1]
        num_anchors, num_ranks = len(truths), max(self.budget, 1)
        log_probs = hidden.new_empty(num_anchors, num_depths, num_ranks, dtype=torch.float32)
        said = hidden.new_zeros(num_anchors, num_depths, dtype=torch.float32)
        ranks = torch.full((num_anchors, num_depths), NO_RANK, dtype=torch.int32, device=hidden.device)
        indices = torch.full_like(ranks, num_ranks)
        own = torch.zeros_like(said, dtype=torch.float64)
        some = torch.arange(num_anchors, device=hidden.device)
        for start, end in itertools.pairwise([0, *(depth for depth in STAGES if depth < num_depths), num_depths]):
            step = max(1, LOGITS_AT_ONCE // ((end - start) * self.ends.head.shape[0]))
            for piece in some.split(step):
                logits = self.ends.logits(hidden[piece, start:end]).contiguous()
                found = _look(logits.flatten(0, 1), truths[piece, start:end].flatten(), num_ranks)
                for held, new in zip((log_probs, said, ranks), found, strict=True):
                    held[piece, start:end] = new.unflatten(0, (len(piece), -1))
            for depth in range(
                start, end
            ):  # from the root down, as the tree builder adds; a library's scan adds otherwise
                own[:, depth] = own[:, depth - 1] + said[:, depth].double() if depth else said[:, depth].double()
            is_open = (ranks[some, :end] == 0).all(1)  # the chain may go on
            if self.budget:
                is_open |= _walk(log_probs, own, ranks, some, indices, end)
            if end < num_depths:
                some = some[is_open]
                if not len(some):
                    break
        chains = (ranks == 0).long().cumprod(1).sum(1)
        inside = [(indices < budget).long().cumprod(1).sum(1) for budget in self.budgets]
        is_unsure = ((ranks < self.budget) & ~said.isfinite()).any(1)
        answer = torch.stack([chains, *inside, is_unsure.long()], dim=1).cpu()
        left = answer[:, -1].nonzero()[:, 0]
        if len(left):
            self.num_left += len(left)
            places = left.to(hidden.device)
            answer[left, :-1] = super().count(hidden[places], truths[places])
        return answer[:, :-1]


def _look(logits: Tensor, truths: Tensor, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of logits (R, V): the best log-probabilities (R, K) float32, best first, those of the true tokens (R,), and the latter's ranks (R,)."""
    from .reach_kernels import slot_kernel

    rows, vocabulary = logits.shape
    num_groups = -(-vocabulary // GROUP)
    log_sums, true_logits = logits.new_empty(2, rows, dtype=torch.float32)
    before = torch.empty(rows, dtype=torch.int32, device=logits.device)
    tops = logits.new_empty(rows, num_groups, dtype=torch.float32)
    slot_kernel[(rows,)](
        logits, truths, log_sums, true_logits, before, tops, vocabulary, num_groups, GROUP=GROUP, BLOCK=GROUPS_AT_ONCE
    )  # fmt: skip
    is_number = log_sums.isfinite()
    values = best_logits(logits, num_ranks, tops)[0].float()
    values = functional.pad(values, (0, num_ranks - values.shape[1]), value=-torch.inf)  # of a small vocabulary
    log_probs = torch.where(is_number[:, None], values - log_sums[:, None], -torch.inf)
    ranks = torch.where((truths >= 0) & is_number, before, NO_RANK)
    return log_probs, true_logits - log_sums, ranks


def _walk(log_probs: Tensor, own: Tensor, ranks: Tensor, anchors: Tensor, indices: Tensor, num_looked: int) -> Tensor:
    """Fill ``indices`` (N, M) of some anchors (n,); returns (n,) bool, where deeper slots matter."""
    from .reach_kernels import index_kernel

    num_depths, budget = log_probs.shape[1:]
    width = max(2, 1 << (budget - 1).bit_length())
    is_open = torch.empty(len(anchors), dtype=torch.int32, device=anchors.device)
    most = min(PROGRAMS_AT_ONCE, len(anchors))
    ends, splits = torch.empty(2, most, width, dtype=torch.int32, device=anchors.device)
    scores = own.new_empty(most, width)
    for start in range(0, len(anchors), most):
        piece = anchors[start : start + most]
        index_kernel[(len(piece),)](
            log_probs, own, ranks, piece, indices, is_open[start:], ends, scores, splits, num_looked, num_depths, BUDGET=budget, WIDTH=width,
            RANK_STEPS=budget.bit_length(), PARENT_STEPS=width.bit_length() - 1, num_warps=max(1, min(8, width // 128)),
        )  # fmt: skip
    return is_open.bool()
