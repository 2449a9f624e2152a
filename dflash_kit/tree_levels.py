"""Where the true paths of many anchors stand in their trees, grown level by level in operations of fixed shapes.

The index of a path is the number of nodes before it: those that score more, and of those that score the same the ones with
smaller ranks. Each depth keeps the ``width`` best of its nodes, a few more than the budget, so that whatever is left out has a
whole tree before it. The exception, known and reported as unsure: a level whose last kept node scores just what the path
scores, where it is left open which of the equal ones were kept.

Nothing here waits for the device. ``path_places`` of `tree_places` lists only the nodes in question, with many waits; that is
better on a CPU.

Shape legend: N anchors, m depths, K ranks kept per depth, W width, P pairs, F nodes of all levels together.
"""

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor

SLACK = 16
"""Nodes that a level keeps beyond the budget: a path at its edge is not mistaken for one that was left out."""
COMPARISONS_AT_ONCE = 1 << 26
"""Of nodes with pieces of paths; each takes some bytes for a moment."""


@functools.lru_cache(maxsize=64)
def _pairs(width: int, num_parents: int, num_ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(P,) parents and (P,) ranks that can be among the best ``width`` children, when both are sorted best first."""
    counts = torch.tensor([min(num_ranks, width // (i + 1)) for i in range(num_parents)])
    parents = torch.arange(num_parents).repeat_interleave(counts)
    ranks = torch.arange(len(parents)) - (counts.cumsum(0) - counts)[parents]
    return parents.to(device), ranks.to(device)


@dataclass(slots=True)
class TreeLevels:
    """Levels of N trees, from the root down.

    Attributes:
        width: W, nodes that a level keeps.
        scores: (N, W') float64 of the last level, best first; W' < W where a level has no more nodes.
        splits: (N, W') int16 depth at which a node leaves the true path, negative where to the side of smaller ranks; 0 on it.
        depth: of the last level.
    """

    width: int
    scores: Tensor
    splits: Tensor
    depth: int = 0
    _scores: list[Tensor] = field(default_factory=list)
    _splits: list[Tensor] = field(default_factory=list)

    @classmethod
    def roots(cls, num_trees: int, width: int, device: torch.device) -> "TreeLevels":
        """Trees without nodes."""
        scores = torch.zeros(num_trees, 1, dtype=torch.float64, device=device)
        return cls(width, scores, torch.zeros(num_trees, 1, dtype=torch.int16, device=device))

    def of(self, trees: Tensor) -> "TreeLevels":
        """Some of the trees, to be grown further by themselves; only levels that are still to come are counted there."""
        return TreeLevels(self.width, self.scores[trees], self.splits[trees], self.depth)

    def grow(self, log_probs: Tensor, ranks: Tensor) -> None:
        """Add a level: (N, K) log-probabilities, best first, and (N,) rank of the true token."""
        num_parents, num_ranks = self.scores.shape[1], log_probs.shape[1]
        parents, siblings = _pairs(self.width, num_parents, num_ranks, log_probs.device)
        candidates = self.scores[:, parents] + log_probs.double()[:, siblings]
        self.scores, kept = candidates.topk(min(self.width, num_parents * num_ranks), dim=1)
        splits = self.splits.gather(1, parents[kept])
        self.depth += 1
        side = (siblings[kept] - ranks[:, None]).sign().to(torch.int16) * self.depth
        self.splits = torch.where(splits == 0, side, splits)
        self._scores.append(self.scores)
        self._splits.append(self.splits)

    def count(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Nodes of the grown levels before each piece of the true path.

        Args:
            own: (N, m) float64 score of each piece.

        Returns:
            (N, m) int64 counts, and (N, m) bool whether equal scores leave the count open.
        """
        scores, splits = torch.cat(self._scores, dim=1), torch.cat(self._splits, dim=1)
        first = self.depth - len(self._scores) + 1
        depths = torch.arange(first, self.depth + 1, dtype=torch.int16, device=own.device).repeat_interleave(
            torch.tensor([level.shape[1] for level in self._scores], device=own.device), output_size=scores.shape[1]
        )
        step = max(1, COMPARISONS_AT_ONCE // (scores.shape[1] * own.shape[1]))
        counts = [
            _count_before(scores[start : start + step], splits[start : start + step], depths, own[start : start + step])
            for start in range(0, len(own), step)
        ]
        # Of a full level nodes may have been left out, none of which scores more than its last.
        edges = [level[:, -1] for level in self._scores if level.shape[1] == self.width]
        is_open = torch.stack([*edges, torch.full_like(own[:, 0], torch.inf)], dim=1)[:, None] == own[:, :, None]
        return torch.cat(counts), is_open.any(-1)


def _count_before(scores: Tensor, splits: Tensor, depths: Tensor, own: Tensor) -> Tensor:
    """(N, m) nodes (N, F) of depths (F,) that come before the pieces (N, m)."""
    pieces = torch.arange(1, own.shape[1] + 1, dtype=torch.int16, device=own.device)[None, :, None]
    scores, splits, own = scores[:, None], splits[:, None], own[:, :, None]
    # A node that has not left the path above the piece's end is part of the piece, or has it as its own beginning.
    is_apart = (splits != 0) & (splits.abs() <= pieces)
    has_smaller_ranks = torch.where(is_apart, splits < 0, depths < pieces)
    return ((scores > own) | ((scores == own) & has_smaller_ranks)).sum(-1)
