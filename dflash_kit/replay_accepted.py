"""How many draft tokens the rounds from many anchors accept, by every method at once: on the device, with a wait a stage.

The first depths are looked at for all anchors, deeper ones only where they can matter. Once the best path of the depths looked
at scores below the last piece of the true path that is in the tree, no deeper node comes before that piece. Where equal scores
leave an index open, the heap tells (``num_by_heap`` counts).

Shape legend: N anchors, M = B - 1 depths, n anchors that go deep, D hidden.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from .replay_reach import NO_RANK
from .replay_slots import SlotFacts
from .target_ends import TargetEnds
from .tree import path_indices, top_log_probs
from .tree_levels import SLACK, TreeLevels

STAGES = (4, 8)
"""Depths looked at before anchors are dropped: with fewer stages more slots are given logits in vain, each costs a wait."""


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
        truths, num_depths = truths.to(hidden.device), truths.shape[1]
        paths = _TruePaths(len(truths), self.budget, hidden.device)
        for start, end in itertools.pairwise([0, *(depth for depth in STAGES if depth < num_depths), num_depths]):
            depths = slice(start, end)
            some = paths.open
            if not len(some):
                break
            paths.extend(SlotFacts.of(self.ends, hidden[some, depths], truths[some, depths], self.budget + SLACK))
            if end < num_depths:
                paths.close()
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
    """The true paths of N anchors, as deep as was looked."""

    def __init__(self, num_anchors: int, budget: int, device: torch.device) -> None:
        self.budget = budget
        self.open = torch.arange(num_anchors, device=device)
        """(n,) anchors for which deeper slots matter."""
        self.ranks = torch.zeros(num_anchors, 0, dtype=torch.long, device=device)
        """(N, m) of the true tokens; NO_RANK where it was not looked"""
        self.own = torch.zeros(num_anchors, 0, dtype=torch.float64, device=device)
        """(N, m) score of each piece of the true path"""
        self.is_unsure = torch.zeros(num_anchors, 0, dtype=torch.bool, device=device)
        self._stages: list[tuple[Tensor, TreeLevels]] = []
        """Anchors and the levels that were added for them."""
        self._roots = TreeLevels.roots(num_anchors, budget + SLACK, device)

    def extend(self, facts: SlotFacts) -> None:
        """Take in the next depths of the open anchors."""
        levels = self._roots
        own = self.own[self.open, -1] if self.own.shape[1] else self.own.new_zeros(len(self.open))
        pieces = []
        # Sums from the root down in double precision, as the tree builder adds them; a library's scan adds otherwise.
        for depth in range(facts.own.shape[1]):
            own = own + facts.own[:, depth].double()
            pieces.append(own)
            if self.budget:
                levels.grow(facts.log_probs[:, depth], facts.ranks[:, depth])
        self._stages.append((self.open, levels))
        self.ranks = self._with(self.ranks, facts.ranks, NO_RANK)
        self.own = self._with(self.own, torch.stack(pieces, dim=1), torch.nan)
        self.is_unsure = self._with(self.is_unsure, facts.is_unsure, False)

    def _with(self, known: Tensor, new: Tensor, missing: float) -> Tensor:
        """Columns of the open anchors behind those that are known."""
        wide = torch.full((len(known), new.shape[1]), missing, dtype=known.dtype, device=known.device)
        return torch.cat([known, wide.index_copy(0, self.open, new)], dim=1)

    def close(self) -> None:
        """Leave out anchors for which deeper slots can neither extend a true path nor put a node before its pieces."""
        places = torch.arange(len(self.open), device=self.open.device)[self._may_go_on()[self.open]]
        self._roots = self._stages[-1][1].of(places)
        self.open = self.open[places]

    def _may_go_on(self) -> Tensor:
        """(N,)"""
        looked, alive = self.ranks.shape[1], torch.zeros_like(self.chains)
        if not self.budget:
            return self.chains == looked
        indices, is_tied = self._indices()
        is_inside = ((indices < self.budget) | is_tied) & self._is_possible()
        alive = is_inside.long().cumprod(1).sum(1)
        last_own = self.own.gather(1, (alive - 1).clamp(min=0)[:, None])[:, 0]
        trees, levels = self._stages[-1]
        best = torch.full_like(last_own, -torch.inf).index_copy(0, trees, levels.scores[:, 0])
        return (self.chains == looked) | (alive == looked) | ((alive > 0) & ~(best < last_own))

    @property
    def chains(self) -> Tensor:
        """(N,) leading depths at which the true token is the likeliest."""
        return (self.ranks == 0).long().cumprod(1).sum(1)

    def _is_possible(self) -> Tensor:
        """(N, m) whether a piece may be in the tree: not too many paths of no greater ranks come before it."""
        return (self.ranks + 1).double().cumprod(1).cumsum(1) <= self.budget

    def _indices(self) -> tuple[Tensor, Tensor]:
        """(N, m) int64 nodes before each piece, and (N, m) bool whether equal scores leave that open."""
        indices, is_tied = torch.zeros_like(self.ranks), torch.zeros_like(self.is_unsure)
        for trees, levels in self._stages:
            more, also_tied = levels.count(self.own[trees])
            indices = indices.index_add(0, trees, more)
            is_tied = is_tied.index_copy(0, trees, is_tied[trees] | also_tied)
        return indices, is_tied

    def accepted(self, budgets: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(N, 1 + budgets) int64 counts, and (N,) bool whether they are left to the heap."""
        chains, is_possible = self.chains, self._is_possible()
        depths = torch.arange(1, self.ranks.shape[1] + 1, device=self.ranks.device)
        is_unsure = self.is_unsure & ((depths <= chains[:, None]) | is_possible)
        if not budgets:
            return chains[:, None], is_unsure.any(1)
        indices, is_tied = self._indices()
        is_unsure |= is_possible & (indices < self.budget) & (is_tied | ~self.own.isfinite())
        inside = [((indices < budget) & is_possible).long().cumprod(1).sum(1) for budget in budgets]
        return torch.stack([chains, *inside], dim=1), is_unsure.any(1)
