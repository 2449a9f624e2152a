"""Trees of many responses, made from one batch of draft logits and padded to one number of rows.

Shape legend: A responses, n rows of the largest tree (its root included), M depths, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_kit.acceptance import CHAIN
from dflash_kit.tree import Tree, best_first, empty_tree, top_log_probs

from .engine import Method


def build_trees(draft_logits: Tensor | None, method: Method, count: int) -> list[Tree]:
    """The tree of each response: the one that it would get alone.

    Args:
        draft_logits: (A, M, V), None in autoregressive decoding.
        method: how to draft.
        count: A.
    """
    if draft_logits is None:
        return [empty_tree()] * count
    if method.name == CHAIN:
        tokens = draft_logits.argmax(dim=-1).cpu()
        depths = torch.arange(tokens.shape[1])
        return [Tree(row, depths + 1, depths) for row in tokens]
    log_probs, token_ids = top_log_probs(draft_logits, method.budget)
    ids, trees = token_ids.cpu(), []
    for row, by_depth in enumerate(log_probs.tolist()):
        parents, depths_n, ranks_n = map(torch.tensor, best_first(by_depth, method.budget))
        trees.append(Tree(ids[row, depths_n - 1, ranks_n], depths_n, parents))
    return trees


@dataclass(frozen=True, slots=True)
class Forest:
    """Trees side by side. A padding row holds token 0 at its root's position and sees itself alone."""

    tokens: Tensor
    """(A, n) int64; row 0 is the anchor."""
    depths: Tensor
    """(A, n) int64; 0 for the root and for padding."""
    parents: Tensor
    """(A, n) int64 rows; -1 for the root and for padding."""
    visible: Tensor
    """(A, n, n) bool: the second row is the first one or an ancestor of it."""

    @classmethod
    def of(cls, anchors: Sequence[int], trees: Sequence[Tree], device: torch.device) -> "Forest":
        """Put trees with their anchors on a device."""
        shape = len(trees), 1 + max(map(len, trees))
        tokens, depths = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        parents = torch.full(shape, -1)
        tokens[:, 0] = torch.tensor(anchors)
        for i, tree in enumerate(trees):
            end = 1 + len(tree)
            tokens[i, 1:end], depths[i, 1:end], parents[i, 1:end] = tree.tokens, tree.depths, tree.parents
        visible = ancestors(parents.to(device), int(depths.max()))
        return cls(tokens.to(device), depths.to(device), parents.to(device), visible)


def ancestors(parents: Tensor, max_depth: int) -> Tensor:
    """(A, n, n) bool: whether the second row is the first one or an ancestor of it; nothing waits for the device.

    Args:
        parents: (A, n) rows, -1 for a root.
        max_depth: of the deepest row.
    """
    count, num_rows = parents.shape
    rows = torch.arange(num_rows, device=parents.device).expand(count, -1)
    seen = torch.zeros(count, num_rows, num_rows, dtype=torch.bool, device=parents.device)
    above = rows
    for _ in range(max_depth + 1):
        seen.scatter_(2, above[..., None], True)
        parent = parents.gather(1, above)
        above = torch.where(parent < 0, above, parent)  # a root stays where it is, and is seen once more
    return seen
