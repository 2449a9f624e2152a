"""The tree equals published cases and brute force, and prefixes larger trees; masks follow the parents."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from decode.tree import build_tree as build_tree_under_stage_name
from dflash_kit.tree import Tree, ancestor_mask, build_tree, chain_tree, empty_tree, positions, top_log_probs

CASES = Path(__file__).resolve().parent.parent.parent / "shared" / "vectors" / "ddtree_cases.json"


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    """Token path of every node, found by climbing the parents."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def brute_force(logits: torch.Tensor, budget: int) -> list[tuple[int, ...]]:
    """Enumerate all paths, sort by Σ log q (then by rank tuple), take the best: no heap in sight."""
    log_probs = torch.log_softmax(logits.double(), dim=-1).tolist()
    ranked = [sorted(range(len(row)), key=lambda t, row=row: (-row[t], t)) for row in log_probs]
    scored = []
    for depth in range(1, len(log_probs) + 1):
        for ranks in itertools.product(range(logits.shape[1]), repeat=depth):
            path = tuple(ranked[k][r] for k, r in enumerate(ranks))
            scored.append((-math.fsum(log_probs[k][t] for k, t in enumerate(path)), ranks, path))
    return [path for _, _, path in sorted(scored)[:budget]]


@pytest.mark.skipif(not CASES.exists(), reason="the reference cases lie beside the repository")
def test_published_cases() -> None:
    cases = json.loads(CASES.read_text())
    assert len(cases) >= 12
    for case in cases:
        tree = build_tree(torch.tensor(case["logits"]), case["budget"])
        assert tree.tokens.tolist() == case["tokens"]
        assert tree.depths.tolist() == case["depths"]
        assert tree.parents.tolist() == case["parents"][1:]  # the cases list the root first


@pytest.mark.parametrize(("depth", "vocab"), [(1, 7), (2, 5), (3, 4), (4, 4), (5, 3)])
def test_equals_brute_force(depth: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(depth * 10 + vocab)
    num_paths = sum(vocab**d for d in range(1, depth + 1))
    for scale in (0.3, 1.0, 4.0):
        logits = torch.randn(depth, vocab, generator=generator) * scale
        for budget in (0, 1, 2, 7, 20, num_paths, num_paths + 5):
            assert paths_of(build_tree(logits, budget)) == brute_force(logits, budget)


def test_ties_follow_ranks_and_do_not_depend_on_the_budget() -> None:
    logits = torch.zeros(3, 6)
    assert paths_of(build_tree(logits, 4)) == [(0,), (1,), (2,), (3,)]
    coarse = torch.randint(0, 3, (4, 40), generator=torch.Generator().manual_seed(1)).float()  # many equal logits
    largest = build_tree(coarse, 200)
    for budget in range(1, 60):
        assert paths_of(build_tree(coarse, budget)) == paths_of(largest)[:budget]


def test_smaller_budget_is_a_prefix() -> None:
    logits = torch.randn(15, 200, generator=torch.Generator().manual_seed(2)) * 3
    largest = build_tree(logits, 256)
    assert len(largest) == 256
    for budget in (0, 1, 16, 64, 255):
        small, prefix = build_tree(logits, budget), largest.prefix(budget)
        for name in ("tokens", "depths", "parents"):
            assert torch.equal(getattr(small, name), getattr(prefix, name))


def test_tree_is_well_formed() -> None:
    tree = build_tree(torch.randn(7, 50, generator=torch.Generator().manual_seed(3)), 64)
    depth_of_row = [0, *tree.depths.tolist()]
    for row, parent in enumerate(tree.parents.tolist(), start=1):
        assert parent < row
        assert depth_of_row[row] == depth_of_row[parent] + 1
    assert len(set(paths_of(tree))) == 64
    assert tree.tokens.dtype == tree.depths.dtype == tree.parents.dtype == torch.int64


def test_low_precision_logits_are_read_as_float32() -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(4)).bfloat16()
    assert paths_of(build_tree(logits, 20)) == paths_of(build_tree(logits.float(), 20))
    log_probs, _ = top_log_probs(logits, 5)
    assert log_probs.dtype == torch.float32


def test_chain_is_the_likeliest_path() -> None:
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(5))
    chain = chain_tree(logits)
    assert paths_of(chain)[-1] == tuple(logits.argmax(-1).tolist())
    assert chain.depths.tolist() == [1, 2, 3, 4, 5, 6]
    assert len(empty_tree()) == 0


def test_ancestor_mask_and_positions() -> None:
    tree = build_tree(torch.randn(5, 8, generator=torch.Generator().manual_seed(6)), 40)
    mask = ancestor_mask(tree.parents)
    for row in range(41):
        climbed, at = {row, 0}, row
        while at > 0:
            at = int(tree.parents[at - 1])
            climbed.add(at)
        assert set(mask[row].nonzero().flatten().tolist()) == climbed
    assert torch.equal(ancestor_mask(torch.zeros(0, dtype=torch.long)), torch.ones(1, 1, dtype=torch.bool))
    assert positions(tree, 10).tolist() == [10, *(10 + d for d in tree.depths.tolist())]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="depth, vocab"):
        build_tree(torch.zeros(4), 3)
    with pytest.raises(ValueError, match="budget is -1"):
        build_tree(torch.zeros(2, 4), -1)


def test_outside_name() -> None:
    assert build_tree_under_stage_name is build_tree
