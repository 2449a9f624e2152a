"""How many draft tokens the rounds from many anchors accept, by every method at once: on the device, with two waits.

The first depths are looked at for all anchors; deeper ones only where they can matter, which is known from ranks and the best
path's score. Where equal scores leave an index open, the heap tells (``num_by_heap`` counts).

Shape legend: N anchors, M = B - 1 depths, n anchors that go deep, D hidden.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .replay_slots import SlotFacts
from .target_ends import TargetEnds
from .tree import path_indices, top_log_probs
from .tree_levels import SLACK, TreeLevels

FIRST_DEPTHS = 6
"""Depths that every anchor's slots are given logits for."""


class AcceptedCounter:
    """Counts for the chain and DDTree at every budget.

    Args:
        ends: the target's head.
        budgets: tree budgets, each at least 1; may be empty.
    """

    def __init__(self, ends: TargetEnds, budgets: Sequence[int]) -> None:
        self.ends, self.budgets = ends, list(budgets)
        self.budget = max(self.budgets, default=0)
        self.num_by_heap = 0
        """Anchors so far that needed the heap."""

    @torch.no_grad()
    def count(self, hidden: Tensor, truths: Tensor) -> Tensor:
        """(N, 1 + budgets) int64 on the CPU: draft tokens accepted by the chain and at each budget.

        Args:
            hidden: (N, M, D) drafter's states of the masked slots.
            truths: (N, M) int64 true tokens at depths 1, 2, …; -1 behind the end of the response.
        """
        paths = _TruePaths(len(truths), self.budget, hidden.device)
        truths = truths.to(hidden.device)
        width, num_first = self.budget + SLACK, min(FIRST_DEPTHS, truths.shape[1])
        paths.extend(SlotFacts.of(self.ends, hidden[:, :num_first], truths[:, :num_first], width), None)
        deep = paths.may_go_on().nonzero()[:, 0] if num_first < truths.shape[1] else truths.new_zeros(0)
        if len(deep):
            paths.extend(SlotFacts.of(self.ends, hidden[deep, num_first:], truths[deep, num_first:], width), deep)
        accepted, is_unsure = paths.accepted(self.budgets)
        answer = torch.cat([accepted, is_unsure[:, None].long()], dim=1).cpu()
        for i in answer[:, -1].nonzero()[:, 0].tolist():
            answer[i, :-1] = self._by_heap(hidden[i], truths[i])
        return answer[:, :-1]

    def _by_heap(self, hidden: Tensor, truths: Tensor) -> Tensor:
        """(1 + budgets,) counts of one anchor as the tree builder numbers nodes, equal scores included."""
        self.num_by_heap += 1
        truths = truths[truths >= 0]
        logits = self.ends.logits(hidden).float()
        said = logits[: len(truths)]
        true_logits, ids = said.gather(-1, truths[:, None]), torch.arange(logits.shape[-1], device=logits.device)
        is_before = (said > true_logits) | ((said == true_logits) & (ids < truths[:, None]))
        is_number = said.logsumexp(-1).isfinite()
        ranks = torch.where(is_number, is_before.sum(-1), logits.shape[-1])
        indices: list[int] = []
        if self.budget and len(truths):
            log_probs, _ = top_log_probs(logits, self.budget)
            indices = path_indices(log_probs.tolist(), ranks.tolist(), self.budget)
        chain = int((ranks == 0).long().cumprod(0).sum())
        return torch.tensor([chain, *(sum(index < budget for index in indices) for budget in self.budgets)])


class _TruePaths:
    """The true paths of N anchors: all at the first depths, some at the deeper ones."""

    def __init__(self, num_anchors: int, budget: int, device: torch.device) -> None:
        self.budget = budget
        self.levels = [TreeLevels.roots(num_anchors, budget + SLACK, device)] if budget else []
        self.deep: Tensor | None = None
        self.ranks = torch.zeros(num_anchors, 0, dtype=torch.long, device=device)
        """(N, m)"""
        self.own = torch.zeros(num_anchors, 0, dtype=torch.float64, device=device)
        """(N, m) score of each piece of the true path"""
        self.is_unsure = torch.zeros(num_anchors, 0, dtype=torch.bool, device=device)
        self.best = torch.zeros(num_anchors, dtype=torch.float64, device=device)
        """(N,) score of the best path as deep as was looked."""

    def extend(self, facts: SlotFacts, trees: Tensor | None) -> None:
        """Take in the next depths: of all anchors, or of some (n,), which are then the only ones to have them."""
        if trees is not None and self.levels:
            self.levels.append(self.levels[0].of(trees))
        own, best = (x if trees is None else x[trees] for x in (self._last_own(), self.best))
        pieces = []
        # Sums from the root down in double precision, as the tree builder adds them; a library's scan adds otherwise.
        for depth in range(facts.own.shape[1]):
            own, best = own + facts.own[:, depth].double(), best + facts.log_probs[:, depth, 0].double()
            pieces.append(own)
            if self.levels:
                self.levels[-1].grow(facts.log_probs[:, depth], facts.ranks[:, depth])
        self.deep, self.best = trees, best
        self.ranks = self._with(self.ranks, facts.ranks, torch.iinfo(torch.int32).max)
        self.own = self._with(self.own, torch.stack(pieces, dim=1), torch.nan)
        self.is_unsure = self._with(self.is_unsure, facts.is_unsure, False)

    def _last_own(self) -> Tensor:
        return self.own[:, -1] if self.own.shape[1] else torch.zeros_like(self.best)

    def _with(self, known: Tensor, new: Tensor, missing: float) -> Tensor:
        """Columns behind those that are known."""
        if self.deep is not None:
            new = torch.full((len(known), new.shape[1]), missing, dtype=known.dtype, device=known.device).index_copy(
                0, self.deep, new.to(known.dtype)
            )
        return torch.cat([known, new], dim=1)

    @property
    def chains(self) -> Tensor:
        """(N,) leading depths at which the true token is the likeliest."""
        return (self.ranks == 0).long().cumprod(1).sum(1)

    @property
    def possible(self) -> Tensor:
        """(N,) pieces that may be in the tree: not too many paths of no greater ranks come before them."""
        num_before = (self.ranks + 1).double().cumprod(1).cumsum(1)
        return (num_before <= self.budget).sum(1)

    def may_go_on(self) -> Tensor:
        """(N,) whether deeper slots can extend the true path or put a node before one of its pieces."""
        looked, possible = self.ranks.shape[1], self.possible
        last_own = self.own.gather(1, (possible - 1).clamp(min=0)[:, None])[:, 0]
        may_grow = (self.chains == looked) | (possible == looked)
        return may_grow | ((possible > 0) & ~(self.best < last_own))

    def accepted(self, budgets: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(N, 1 + budgets) int64 counts, and (N,) bool whether they are left to the heap."""
        num_anchors, num_depths = self.ranks.shape
        depths = torch.arange(1, num_depths + 1, device=self.ranks.device)
        chains, possible = self.chains, self.possible
        is_open = self.is_unsure & (depths <= torch.maximum(chains, possible)[:, None])
        if not self.levels:
            return chains[:, None], is_open.any(1)
        indices, is_tied = self.levels[0].count(self.own)
        if self.deep is not None:
            more, also_tied = self.levels[1].count(self.own[self.deep])
            indices, is_tied = indices.index_add(0, self.deep, more), is_tied.index_put((self.deep,), also_tied, accumulate=True)
        is_possible = depths <= possible[:, None]
        is_open |= is_possible & (indices < self.budget) & (is_tied | ~self.own.isfinite())
        inside = [((indices < budget) & is_possible).long().cumprod(1).sum(1) for budget in budgets]
        return torch.stack([chains, *inside], dim=1), is_open.any(1)
