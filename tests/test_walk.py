"""The walk follows the target's tokens through a tree and ends at EOS, at the limit, or with a bonus token."""

import math

import pytest
import torch

from decode.sampling import GREEDY, Sampling, choose_tokens
from decode.walk import walk
from dflash_kit.tree import Tree, empty_tree

EOS = 9
# root -> 5 (row 1) -> 7 (row 3) -> EOS (row 5)
#      -> 6 (row 2) -> 7 (row 4)
TREE = Tree(torch.tensor([5, 6, 7, 7, EOS]), torch.tensor([1, 1, 2, 2, 3]), torch.tensor([0, 0, 1, 2, 3]))


@pytest.mark.parametrize(
    ("chosen", "limit", "rows", "tokens", "cut"),
    [
        ([1, 0, 0, 0, 0, 0], 9, [0], [1], None),  # no child fits
        ([6, 0, 8, 0, 0, 0], 9, [0, 2], [6, 8], None),
        ([6, 0, 7, 0, 1, 0], 9, [0, 2, 4], [6, 7, 1], None),  # the right 7, under 6
        ([5, 7, 0, 8, 0, 0], 9, [0, 1, 3], [5, 7, 8], None),
        ([5, 7, 0, EOS, 0, 0], 9, [0, 1, 3, 5], [5, 7, EOS], "eos"),
        ([EOS, 0, 0, 0, 0, 0], 9, [0], [EOS], None),  # a bonus token may be an EOS: the round is whole
        ([5, 7, 0, 8, 0, 0], 2, [0, 1, 3], [5, 7], "length"),
        ([5, 7, 0, 8, 0, 0], 3, [0, 1, 3], [5, 7, 8], None),  # the bonus token is the last that fits
        ([5, 7, 0, EOS, 0, 0], 3, [0, 1, 3, 5], [5, 7, EOS], "eos"),
        ([5, 0, 0, 0, 0, 0], 1, [0, 1], [5], "length"),
    ],
)
def test_walks(chosen: list[int], limit: int, rows: list[int], tokens: list[int], cut: str | None) -> None:
    done = walk(TREE, chosen, eos_token_ids={EOS}, limit=limit)
    assert (done.rows, done.tokens, done.cut) == (rows, tokens, cut)
    assert done.num_accepted == len(rows) - 1


def test_empty_tree_gives_the_targets_token() -> None:
    done = walk(empty_tree(), [3], eos_token_ids=set(), limit=1)
    assert (done.rows, done.tokens, done.cut) == ([0], [3], None)


def test_greedy_choice_is_the_argmax() -> None:
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))
    assert choose_tokens(logits, GREEDY) == [row.index(max(row)) for row in logits.tolist()]


def test_samples_have_the_tempered_distribution_and_are_independent_by_row() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0])
    drawn = torch.tensor(choose_tokens(logits.expand(20000, 3), Sampling(0.5), torch.Generator().manual_seed(0)))
    shares = torch.bincount(drawn, minlength=3) / 20000
    torch.testing.assert_close(shares, torch.softmax(logits / 0.5, 0), atol=0.012, rtol=0)
    # Neighbouring rows agree as often as independent draws do.
    agree = (drawn[0::2] == drawn[1::2]).float().mean()
    torch.testing.assert_close(agree, (torch.softmax(logits / 0.5, 0) ** 2).sum(), atol=0.015, rtol=0)


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 3), (0.6, 0), (0.8, 4), (1.0, 0)])
def test_truncated_probabilities_equal_the_rule_spelled_out(top_p: float, top_k: int) -> None:
    logits = torch.randn(6, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2
    got = Sampling(0.7, top_p, top_k).probabilities(logits)
    for row, probabilities in zip(logits.tolist(), got.tolist(), strict=True):
        order = sorted(range(12), key=lambda i: -row[i])[: top_k or 12]
        weights = {i: math.exp(row[i] / 0.7) for i in order}
        total, kept, mass = sum(weights.values()), [], 0.0
        for i in order:
            if mass < top_p:
                kept.append(i)
                mass += weights[i] / total
        share = sum(weights[i] for i in kept)
        expected = [weights[i] / share if i in kept else 0.0 for i in range(12)]
        assert probabilities == pytest.approx(expected, abs=1e-6)
