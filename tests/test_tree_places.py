"""Places of paths, counted for many trees at once, equal those in the trees themselves: also where scores are equal."""

import random

import pytest
import torch
from torch import Tensor

from dflash_kit import replay_reach
from dflash_kit.replay_reach import find_reaches
from dflash_kit.target_ends import TargetEnds
from dflash_kit.tree import build_tree, chain_tree

DEPTHS, VOCABULARY = 7, 40


def likely_path(logits: Tensor, budget: int, rng: random.Random) -> list[int]:
    """Tokens that follow a path of the tree, or one a little larger, for some way; then any."""
    tree = build_tree(logits, min(2 * budget, 100))
    node, path = rng.randrange(len(tree) + 1), []
    while node > 0:
        path.append(int(tree.tokens[node - 1]))
        node = int(tree.parents[node - 1])
    tokens = path[::-1] + [rng.randrange(VOCABULARY) for _ in range(DEPTHS)]
    return tokens[: rng.randint(1, DEPTHS)]


def in_the_tree(logits: Tensor, truth: list[int], budget: int) -> list[int]:
    """Index of each leading piece of the truth, from the tree that decoding would build."""
    tree = build_tree(logits, budget)
    nodes = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    found, row = [], 0
    for token in truth:
        if (row, token) not in nodes:
            break
        found.append(nodes.index((row, token)))
        row = found[-1] + 1
    return found


@pytest.mark.parametrize("sharpness", [0.0, 0.3, 3.0, 30.0, 300.0])
@pytest.mark.parametrize("is_coarse", [False, True])
def test_reaches_are_those_of_the_trees(sharpness: float, is_coarse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Coarse logits are often equal, sharp ones leave log-probabilities of 0, and flat ones nothing but ties."""
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    heaps = []
    by_heap = replay_reach._TruePaths._by_heap
    monkeypatch.setattr(
        replay_reach._TruePaths, "_by_heap", lambda self, tree: heaps.append(tree) or by_heap(self, tree)
    )
    ends = TargetEnds(embedding=torch.eye(VOCABULARY), head=torch.eye(VOCABULARY))
    lengths = set()
    for budget in (1, 5, 16, 64):
        logits = torch.randn(24, DEPTHS, VOCABULARY, generator=generator) * sharpness
        logits = (logits * 2).round() / 2 if is_coarse else logits
        truths = [likely_path(tree, budget, rng) for tree in logits]
        padded = torch.tensor([truth + [-1] * (DEPTHS - len(truth)) for truth in truths])
        for tree, truth, reach in zip(logits, truths, find_reaches(ends, logits, padded, budget), strict=True):
            assert list(reach.indices) == in_the_tree(tree, truth, budget)
            chain = chain_tree(tree).tokens.tolist()
            assert reach.chain == next((i for i, token in enumerate(truth) if token != chain[i]), len(truth))
            lengths.add(len(reach.indices))
    assert len(lengths) >= (2 if sharpness < 1 else 4)
    if sharpness in (0.3, 3.0) and not is_coarse:
        assert not heaps  # the heap is left to equal scores
