"""How far the true continuation of an anchor stays inside the drafter's chain and inside its trees.

Deep slots are only given logits where they can matter. Once the best path of m depths scores below the last piece of
the true path that is in the tree, no deeper node comes before that piece, and its index is final.

Shape legend: N anchors, M = B - 1 depths, m depths looked at together, n anchors still open, V vocabulary, D hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .acceptance import CHAIN
from .target_ends import TargetEnds
from .tree import path_indices, top_log_probs
from .tree_places import Look, path_places

NO_RANK = 2**31 - 1
"""Of a true token where the drafter's logits are NaN or infinite: in no tree."""

Method = tuple[str, int]
"""Name and budget: ("chain", B - 1) or ("ddtree", budget)."""


@dataclass(frozen=True, slots=True)
class Reach:
    """What the rounds from one anchor accept."""

    chain: int
    """Leading depths at which the drafter's likeliest token is the true one."""
    indices: tuple[int, ...]
    """Index of the true path's node at each depth, as far as it is in the largest tree."""

    def num_accepted(self, method: Method) -> int:
        """Draft tokens that a round from this anchor accepts."""
        name, budget = method
        return self.chain if name == CHAIN else sum(index < budget for index in self.indices)


def find_reaches(ends: TargetEnds, hidden: Tensor, truths: Tensor, budget: int) -> list[Reach]:
    """Follow the true continuation of N anchors through the tree of ``budget``, as few depths down as will do.

    Args:
        ends: the target's head.
        hidden: (N, M, D) drafter's states of the masked slots.
        truths: (N, M) int64 true tokens at depths 1, 2, …; -1 behind the end of the response.
        budget: nodes of the largest tree; 0 for the chain alone.
    """
    paths = _TruePaths(truths.to(hidden.device), budget)
    open_ = torch.arange(len(truths), device=hidden.device)
    while len(open_) and paths.num_looked < truths.shape[1]:
        upto = min(truths.shape[1], paths.num_looked + 1 + paths.num_looked // 2)
        paths.look(ends.logits(hidden[open_, paths.num_looked : upto]).float(), open_)
        paths.place(open_)
        open_ = open_[~paths.is_final(open_)]
    return paths.reaches()


class _TruePaths:
    """The true paths of N anchors, as deep as was looked."""

    def __init__(self, truths: Tensor, budget: int) -> None:
        self.truths, self.budget, self.num_looked = truths, budget, 0
        self.lengths = (truths >= 0).sum(1)
        self.ranks = torch.full_like(truths, -1)
        """(N, M) rank of the true token, -1 where it was not looked at or there is none."""
        self.own = torch.zeros(truths.shape, dtype=torch.float64, device=truths.device)
        """(N, M) score of each piece of the true path."""
        self.best = torch.zeros_like(self.own)
        """(N, M) score of the best path of each depth."""
        self.num_alive = torch.zeros_like(self.lengths)
        """(N,) pieces that are in the tree of the depths looked at so far."""
        self.indices = torch.zeros_like(truths)
        self._looks: list[Look] = []
        self._num_placed = 0

    def look(self, logits: Tensor, open_: Tensor) -> None:
        """Take in logits (n, m, V) of the next depths of the open anchors."""
        log_sums = logits.logsumexp(-1)
        upto = self.num_looked + logits.shape[1]
        truths = self.truths[open_, self.num_looked : upto]
        true_logits = logits.gather(-1, truths.clamp(min=0)[..., None])
        ranks = (logits > true_logits).sum(-1)
        tied = (logits == true_logits).sum(-1) > 1
        if bool(tied.any()):  # equal logits stand in the order of their ids
            ids = torch.arange(logits.shape[-1], device=logits.device)
            same = (logits[tied] == true_logits[tied]) & (ids < truths[tied][:, None])
            ranks[tied] += same.sum(-1)
        ranks[~log_sums.isfinite()] = NO_RANK  # nothing compares with NaN, so the true token would come first
        self.ranks[open_, self.num_looked : upto] = torch.where(truths >= 0, ranks, -1)
        # Sums from the root down in double precision, as the tree builder adds them; a library's scan adds otherwise.
        for step, (own, best) in enumerate(
            zip((true_logits[..., 0] - log_sums).unbind(1), (logits.amax(-1) - log_sums).unbind(1), strict=True)
        ):
            depth = self.num_looked + step
            for sums, values in ((self.own, own), (self.best, best)):
                sums[open_, depth] = values.double() + (sums[open_, depth - 1] if depth else 0.0)
        row_of = torch.zeros_like(self.lengths)
        row_of[open_] = torch.arange(len(open_), device=row_of.device)
        self._looks.append(Look(self.num_looked, logits, log_sums, row_of))
        self.num_looked = upto

    @property
    def chains(self) -> Tensor:
        """(N,) leading depths at which the true token is the likeliest."""
        return (self.ranks[:, : self.num_looked] == 0).cumprod(1).sum(1)

    def place(self, open_: Tensor) -> None:
        """Find the indices of the true paths' pieces in the trees of the depths looked at so far."""
        out = self._certainly_out(open_)
        alive, trying = torch.zeros_like(open_), out - 1
        while len(todo := (out - alive > 1).nonzero()[:, 0]):
            trees, lengths = open_[todo], trying[todo]
            own, best = self.own[trees, : self.num_looked], self.best[trees, : self.num_looked]
            places = path_places(self._looks, trees, own, best, lengths, self.budget)
            inside = ~places.is_out
            self.indices[trees[inside], : self.num_looked] = places.indices[inside]
            alive[todo] = torch.where(inside, lengths, alive[todo])
            out[todo] = torch.where(inside, out[todo], lengths)
            for i in todo[places.is_unsure].tolist():
                indices = self._by_heap(int(open_[i]))
                self.indices[open_[i], : len(indices)] = torch.tensor(indices, dtype=torch.long, device=open_.device)
                alive[i], out[i] = len(indices), len(indices) + 1
            trying = (alive + out) // 2
        self.num_alive[open_], self._num_placed = alive, self.num_looked

    def _certainly_out(self, open_: Tensor) -> Tensor:
        """(n,) a length at which the true path is not in the tree: too many paths of no greater ranks come before it."""
        ranks = self.ranks[open_, : self.num_looked]
        num_before = (ranks + 1).double().cumprod(1).cumsum(1)
        possible = ((ranks >= 0) & (num_before <= self.budget)).cumprod(1).sum(1)
        alive = self.num_alive[open_]
        return torch.where(alive < self._num_placed, possible.minimum(alive), possible) + 1

    def _by_heap(self, tree: int) -> list[int]:
        """Indices as the tree builder numbers nodes, equal scores included."""
        logits = torch.cat([look.logits[look.row_of[tree]] for look in self._looks])
        log_probs, _ = top_log_probs(logits, self.budget)
        ranks = self.ranks[tree, : self.num_looked].tolist()
        length = ranks.index(-1) if -1 in ranks else len(ranks)
        return path_indices(log_probs.tolist(), ranks[:length], self.budget)

    def is_final(self, open_: Tensor) -> Tensor:
        """(n,) whether deeper slots can neither extend the true path nor put a node before one of its own."""
        looked, alive = self.num_looked, self.num_alive[open_]
        may_grow = (self.lengths[open_] > looked) & ((self.chains[open_] == looked) | (alive == looked))
        last_own = self.own[open_].gather(1, (alive - 1).clamp(min=0)[:, None])[:, 0]
        return ~may_grow & ((alive == 0) | (self.best[open_, looked - 1] < last_own))

    def reaches(self) -> list[Reach]:
        """What was found."""
        found = zip(self.chains.tolist(), self.num_alive.tolist(), self.indices.tolist(), strict=True)
        return [Reach(chain, tuple(indices[:alive])) for chain, alive, indices in found]
