"""Where given paths stand in their trees, for many trees at once and without building one.

A node stands before a path when its score is greater, so the index of a path is the number of nodes that score more. Only
nodes that score no less than the path are listed, depth by depth, for all trees together: as many as the index says, and
each costs a few tensor operations. Equal scores, where ranks decide, are left to the heap (``path_indices``).

Shape legend: A trees, m depths, V vocabulary, C candidates, F nodes of a depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CROWD = 256
"""Nodes beyond the budget that near-equal scores may add to a listing before it is given up to the heap."""
TOLERANCE = 1e-9
"""Far above the rounding of sums of double precision, far below differences that matter to its speed."""


@dataclass(frozen=True, slots=True)
class Look:
    """Logits of some depths of some trees.

    Attributes:
        first_depth: 0 for the depth behind the anchor.
        logits: (n, m, V) float32.
        log_sums: (n, m) float32 log of the sum of exponentials.
        row_of: (N,) int64 row of each tree, for those that it holds.
    """

    first_depth: int
    logits: Tensor
    log_sums: Tensor
    row_of: Tensor

    def of(self, trees: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (A, m, V) and log sums (A, m) of some trees."""
        rows = self.row_of[trees]
        if len(rows) == len(self.logits):  # rows ascend, so these are all of them
            return self.logits, self.log_sums
        return self.logits[rows], self.log_sums[rows]


@dataclass(frozen=True, slots=True)
class Places:
    """What one listing found out about one path a tree.

    Attributes:
        is_out: (A,) bool, the path is not in the tree of the budget.
        is_unsure: (A,) bool, equal scores: the heap has to tell.
        indices: (A, m) int64 index of each leading piece of the path, where it is neither out nor unsure.
    """

    is_out: Tensor
    is_unsure: Tensor
    indices: Tensor


def path_places(
    looks: Sequence[Look], trees: Tensor, own: Tensor, best: Tensor, lengths: Tensor, budget: int
) -> Places:
    """Indices of the leading pieces of one path a tree.

    Args:
        looks: consecutive depths from 0 on; all hold the trees in question.
        trees: (A,) int64 ascending, the trees in question.
        own: (A, m) float64 score of each piece of the path, added from the root down.
        best: (A, m) float64 score of the best path of each depth, added likewise.
        lengths: (A,) int64 length of the path, at least 1.
        budget: nodes of the tree.
    """
    threshold = own.gather(1, lengths[:, None] - 1)[:, 0]
    listing = _Candidates.of(looks, trees, threshold, best, budget)
    node_trees, node_scores = listing.list_nodes(budget)
    num_trees, num_depths = own.shape
    indices, equal = torch.zeros_like(own, dtype=torch.long), torch.zeros_like(own, dtype=torch.long)
    for depth in range(num_depths):
        piece = own[node_trees, depth]
        indices[:, depth] = torch.bincount(node_trees[node_scores > piece], minlength=num_trees)
        equal[:, depth] = torch.bincount(node_trees[node_scores == piece], minlength=num_trees)
    is_piece = torch.arange(num_depths, device=own.device) < lengths[:, None]
    is_tied = ((equal != 1) & is_piece).any(1)
    return Places(listing.is_out, (listing.is_crowded | is_tied) & ~listing.is_out, indices)


@dataclass(slots=True)
class _Candidates:
    """Tokens that can be part of a node that scores no less than the threshold, by tree and depth, best first."""

    threshold: Tensor
    """(A,) float64"""
    num_depths: int
    log_probs: Tensor
    """(C,) float64"""
    starts: Tensor
    """(A * m,) int64 first candidate of each tree and depth"""
    counts: Tensor
    """(A * m,) int64"""
    is_out: Tensor
    is_crowded: Tensor

    @classmethod
    def of(cls, looks: Sequence[Look], trees: Tensor, threshold: Tensor, best: Tensor, budget: int) -> "_Candidates":
        """Collect them; the best path of the depths above tells how much a token must have."""
        num_depths = best.shape[1]
        above = torch.cat([best.new_zeros(len(best), 1), best[:, :-1]], dim=1)
        is_out, is_crowded = torch.zeros_like(trees, dtype=torch.bool), torch.zeros_like(trees, dtype=torch.bool)
        found = []
        for look in looks:
            logits, log_sums = look.of(trees)
            depths = slice(look.first_depth, look.first_depth + logits.shape[1])
            least = threshold[:, None] - above[:, depths] + log_sums
            margin = 1e-6 * (
                1 + least.abs() + log_sums.abs()
            )  # float32's rounding: what it lets in is sorted out below
            is_candidate = logits >= (least - margin).float()[..., None]
            if bool((crowded := is_candidate.sum(-1) > budget + CROWD).any()):
                sure = (logits >= (least + margin).float()[..., None]).sum(-1) > budget
                is_out |= sure.any(1)
                is_crowded |= crowded.any(1)
                is_candidate &= ~(is_out | is_crowded)[:, None, None]
            tree, depth, token = is_candidate.nonzero().unbind(1)
            log_probs = (logits[tree, depth, token] - log_sums[tree, depth]).double()
            found.append((tree, depth + look.first_depth, log_probs))
        tree, depth, log_probs = (torch.cat(parts) for parts in zip(*found, strict=True))
        keep = (above[tree, depth] + log_probs >= threshold[tree]) & ~(is_out | is_crowded)[tree]
        segment, log_probs = (tree * num_depths + depth)[keep], log_probs[keep]
        order = log_probs.argsort(descending=True)
        order = order[segment[order].argsort(stable=True)]
        counts = torch.bincount(segment, minlength=len(trees) * num_depths)
        return cls(threshold, num_depths, log_probs[order], counts.cumsum(0) - counts, counts, is_out, is_crowded)

    def list_nodes(self, budget: int) -> tuple[Tensor, Tensor]:
        """Tree and score of every node that scores no less than the threshold; notes trees where there are too many."""
        num_trees, device = len(self.threshold), self.threshold.device
        # One ascending array for all: tree and depth in front of the negated log-probability.
        width = float(-self.log_probs.min()) + 1.0 if len(self.log_probs) else 1.0
        segments = torch.arange(len(self.counts), device=device).repeat_interleave(self.counts)
        keys = segments * width - self.log_probs
        trees, scores = torch.arange(num_trees, device=device), self.threshold.new_zeros(num_trees)
        listed: list[tuple[Tensor, Tensor]] = []
        num_before = torch.zeros(num_trees, dtype=torch.long, device=device)
        num_listed = torch.zeros_like(num_before)
        for depth in range(self.num_depths):
            segment = trees * self.num_depths + depth
            room = segment * width + (scores - self.threshold[trees])
            some, all_ = (
                (torch.searchsorted(keys, room + slack, right=True) - self.starts[segment])
                .clamp(min=0)
                .minimum(self.counts[segment])
                for slack in (-TOLERANCE, TOLERANCE)
            )
            self.is_out |= num_before + _sums(trees, some, num_trees) >= budget
            self.is_crowded |= num_listed + _sums(trees, all_, num_trees) > budget + CROWD
            all_ = all_ * ~(self.is_out | self.is_crowded)[trees]
            parent = torch.arange(len(trees), device=device).repeat_interleave(all_)
            sibling = torch.arange(len(parent), device=device) - (all_.cumsum(0) - all_)[parent]
            scores = scores[parent] + self.log_probs[self.starts[segment[parent]] + sibling]
            trees = trees[parent]
            keep = scores >= self.threshold[trees]
            trees, scores = trees[keep], scores[keep]
            listed.append((trees, scores))
            num_listed += torch.bincount(trees, minlength=num_trees)
            num_before += torch.bincount(trees[scores > self.threshold[trees]], minlength=num_trees)
        self.is_out |= num_before >= budget
        return torch.cat([part[0] for part in listed]), torch.cat([part[1] for part in listed])


def _sums(groups: Tensor, values: Tensor, num_groups: int) -> Tensor:
    """Sum of integer values (F,) over each group."""
    return torch.zeros(num_groups, dtype=torch.long, device=groups.device).index_add_(0, groups, values)
