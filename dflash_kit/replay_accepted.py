"""How many draft tokens the rounds from many anchors accept, by every method at once.

Shape legend: N anchors, M = B - 1 depths, V vocabulary, D hidden.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .acceptance import CHAIN, DDTREE
from .replay_reach import find_reaches
from .target_ends import TargetEnds

LOGITS_AT_ONCE = 1 << 27
"""Half a gigabyte in float32."""


class AcceptedCounter:
    """Counts for the chain and DDTree at every budget, with a wait for each few anchors; ``ReachCounter`` has kernels for it.

    Args:
        ends: the target's head.
        budgets: tree budgets, each at least 1; may be empty.
    """

    def __init__(self, ends: TargetEnds, budgets: Sequence[int]) -> None:
        self.ends, self.budgets = ends, list(budgets)
        self.budget = max(self.budgets, default=0)

    @torch.no_grad()
    def count(self, hidden: Tensor, truths: Tensor) -> Tensor:
        """(N, 1 + budgets) int64 on the CPU: draft tokens accepted by the chain and at each budget.

        Args:
            hidden: (N, M, D) drafter's states of the masked slots.
            truths: (N, M) int64 true tokens at depths 1, 2, …; -1 behind the end of the response.
        """
        num_depths = truths.shape[1]
        step = max(1, LOGITS_AT_ONCE // (num_depths * self.ends.head.shape[0]))
        methods = [(CHAIN, num_depths), *((DDTREE, budget) for budget in self.budgets)]
        reaches = [
            reach
            for pieces in zip(hidden.split(step), truths.split(step), strict=True)
            for reach in find_reaches(self.ends, *pieces, self.budget)
        ]
        return torch.tensor([[reach.num_accepted(method) for method in methods] for reach in reaches])
