"""Draft trees: the best prefixes under the drafter's per-depth distributions, in best-first order.

One draft pass gives M = B - 1 independent distributions q_1 … q_M. A node is a path of tokens (x_1 … x_d)
with score Σ log q_k(x_k). The tree of budget b holds the b best paths. A parent never scores below its child,
so the tree is closed under parents, and the tree of budget b is a prefix of the tree of any larger budget
(replay rests on this).

Numbering. Row 0 is the root (the anchor). Node i of the tree is row i + 1, and ``parents`` hold row numbers.

Shape legend: M depths, V vocabulary, n nodes, K ranks kept per depth.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tree:
    """Nodes in best-first order, on the CPU; the root (anchor) is not a node.

    Attributes:
        tokens: (n,) int64 token of each node.
        depths: (n,) int64 distance from the root, from 1.
        parents: (n,) int64 row of each node's parent: 0 is the root, i + 1 is node i. Parents come first.
    """

    tokens: Tensor
    depths: Tensor
    parents: Tensor

    def __len__(self) -> int:
        return self.tokens.numel()

    def prefix(self, budget: int) -> "Tree":
        """The tree of a smaller budget."""
        return Tree(self.tokens[:budget], self.depths[:budget], self.parents[:budget])


def empty_tree() -> Tree:
    """The tree of budget 0: verification of the anchor alone, which is autoregressive decoding."""
    none = torch.zeros(0, dtype=torch.long)
    return Tree(none, none, none)


def build_tree(logits: Tensor, budget: int) -> Tree:
    """The ``budget`` best paths by Σ log q; ties go to the smaller tuple of ranks.

    Args:
        logits: (M, V) float logits of the drafter at depths 1 … M, never tempered.
        budget: nodes at most, root excluded; fewer when there are fewer paths.

    Raises:
        ValueError: logits of another shape, or a negative budget.
    """
    if logits.ndim != 2 or budget < 0:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)}, budget is {budget}; (depth, vocab) and >= 0 are needed"
        )
    if budget == 0 or logits.numel() == 0:
        return empty_tree()
    log_probs, token_ids = top_log_probs(logits, budget)
    parents, depths, ranks = best_first(log_probs.tolist(), budget)
    depths_n, ranks_n = torch.tensor(depths), torch.tensor(ranks)
    return Tree(token_ids.cpu()[depths_n - 1, ranks_n], depths_n, torch.tensor(parents))


def chain_tree(logits: Tensor) -> Tree:
    """The drafter's most likely token at each depth, as a tree without branches: (M, V) logits to M nodes."""
    tokens = logits.argmax(dim=-1).cpu()
    return Tree(tokens, torch.arange(1, tokens.numel() + 1), torch.arange(tokens.numel()))


def top_log_probs(logits: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    """The best tokens of each distribution, best first; equal logits in the order of their ids.

    Args:
        logits: (..., V) in any float dtype.
        num_ranks: K, clipped to V.

    Returns:
        float32 log-probabilities (..., K) and int64 token ids (..., K).
    """
    logits = logits.float()
    num_ranks = min(num_ranks, logits.shape[-1])
    values, token_ids = logits.topk(num_ranks, dim=-1)
    # topk orders equal values arbitrarily, and chooses arbitrarily among those that tie with the last one.
    # Both would make a tree depend on its budget, so put ids in order first and sort stably.
    token_ids, order = token_ids.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    token_ids = token_ids.gather(-1, order)
    spilled = (logits >= values[..., -1:]).sum(dim=-1) > num_ranks
    if spilled.any():
        exact, exact_ids = logits[spilled].sort(dim=-1, descending=True, stable=True)
        values[spilled], token_ids[spilled] = exact[..., :num_ranks], exact_ids[..., :num_ranks]
    return values - logits.logsumexp(dim=-1, keepdim=True), token_ids


def best_first(log_probs: Sequence[Sequence[float]], budget: int) -> tuple[list[int], list[int], list[int]]:
    """Expand the best path again and again: row of the parent, depth and rank of each node, in order.

    A path's first child and next sibling score no more than it does and have a greater rank tuple, so a heap
    that holds these two of every expanded path always has the next best path on top. Scores are added from
    the root down, in double precision: the same path has the same score in every tree.

    Args:
        log_probs: M rows of K log-probabilities, each row in descending order.
        budget: nodes at most, at least 1.
    """
    num_depths, num_ranks = len(log_probs), len(log_probs[0])
    parents: list[int] = []
    depths: list[int] = []
    ranks: list[int] = []
    # (-score, ranks of the path, row of the parent, score of the parent)
    heap: list[tuple[float, tuple[int, ...], int, float]] = [(-log_probs[0][0], (0,), 0, 0.0)]
    while heap and len(parents) < budget:
        negative_score, path, parent, parent_score = heapq.heappop(heap)
        depth, rank = len(path), path[-1]
        parents.append(parent)
        depths.append(depth)
        ranks.append(rank)
        if rank + 1 < num_ranks:
            score = parent_score + log_probs[depth - 1][rank + 1]
            heapq.heappush(heap, (-score, (*path[:-1], rank + 1), parent, parent_score))
        if depth < num_depths:
            score = log_probs[depth][0] - negative_score
            heapq.heappush(heap, (-score, (*path, 0), len(parents), -negative_score))
    return parents, depths, ranks


def path_indices(log_probs: Sequence[Sequence[float]], path: Sequence[int], budget: int) -> list[int]:
    """Index that each leading piece of a path has in the tree, as far as the path stays inside the tree.

    The tree of budget b contains exactly the pieces with an index below b, for every b up to ``budget``.

    Args:
        log_probs: as for ``best_first``.
        path: ranks from the root down; a rank outside the rows leaves the tree.
        budget: nodes of the largest tree.
    """
    parents, depths, ranks = best_first(log_probs, budget)
    indices: list[int] = []
    row = 0
    for i, (parent, depth, rank) in enumerate(zip(parents, depths, ranks, strict=True)):
        # Parents come before their children, so one pass down the list follows the path.
        if parent == row and depth == len(indices) + 1 and rank == path[depth - 1]:
            indices.append(i)
            row = i + 1
            if len(indices) == len(path):
                break
    return indices


def path_log_probs(tree: Tree, logits: Tensor) -> Tensor:
    """(n,) float64 log-probability of each node's path under the drafter, on the CPU.

    Args:
        tree: built of the logits.
        logits: (M, V).
    """
    scores = logits.float()
    of_token = scores[tree.depths - 1, tree.tokens.to(scores.device)].cpu()
    log_probs = (of_token - scores.logsumexp(dim=-1).cpu()[tree.depths - 1]).tolist()
    sums = [0.0]
    for parent, log_prob in zip(tree.parents.tolist(), log_probs, strict=True):
        sums.append(sums[parent] + log_prob)
    return torch.tensor(sums[1:], dtype=torch.float64)


def ancestor_mask(parents: Tensor) -> Tensor:
    """(n + 1, n + 1) bool: row i may look at itself, its ancestors and the root.

    Args:
        parents: (n,) parent rows of a tree.
    """
    up = torch.cat([parents.new_zeros(1), parents])
    rows = torch.arange(up.numel(), device=up.device)
    mask = torch.zeros(up.numel(), up.numel(), dtype=torch.bool, device=up.device)
    mask[:, 0] = True
    ancestors = rows
    while bool((ancestors > 0).any()):
        mask[rows, ancestors] = True
        ancestors = up[ancestors]
    return mask


def positions(tree: Tree, start: int) -> Tensor:
    """(n + 1,) positions of the root at ``start`` and of the nodes at ``start`` + depth."""
    return torch.cat([tree.depths.new_zeros(1), tree.depths]) + start
