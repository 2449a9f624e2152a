"""At a temperature above 0 rounds emit the target's own distribution: χ² over 100,000 samples, trees and chains.

The target is a table: float64 logits behind every prefix of a tiny vocabulary. Trees, samples and walks are the engine's own
functions; rounds that stand at the same prefix are sampled in one call, whose rows are independent anyway. What is
emitted is compared with exact enumeration, whose truncation rule is spelled out here once more.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.auto_budget import AutoBudget, CostTable
from decode.sampling import Sampling, choose_tokens
from decode.walk import walk
from dflash_kit.tree import Tree, build_tree, chain_tree, empty_tree

VOCAB, LENGTH, DEPTHS = 7, 3, 3
NUM_SAMPLES = 100_000
SEEDS = (0, 1, 2)
SAMPLINGS = [Sampling(1.0), Sampling(1.2, top_p=0.85), Sampling(0.9, top_p=0.95, top_k=4)]

Prefix = tuple[int, ...]
Choose = Callable[[Tensor, Sampling, Any], list[int]]
Draft = Callable[[Tensor], Tree]


@functools.cache
def target_logits(prefix: Prefix) -> Tensor:
    """(V,) behind a prefix of the response."""
    seed = functools.reduce(lambda code, token: code * VOCAB + token + 1, prefix, 1)
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1.5


def draft_logits(prefix: Prefix) -> Tensor:
    """(M, V) of a drafter that resembles the target along its likeliest path, and is too sure of itself."""
    rows, path = [], prefix
    for depth in range(DEPTHS):
        noise = torch.randn(VOCAB, generator=torch.Generator().manual_seed(100 + depth), dtype=torch.float64)
        rows.append(2 * target_logits(path) + noise)
        path = (*path, int(rows[-1].argmax()))
    return torch.stack(rows)


def auto_tree(logits: Tensor) -> Tree:
    budget = AutoBudget()
    budget.prepare("", 1, lambda: CostTable(1, 1.0, (0, 4, 8, 16), (1.0, 1.1, 1.4, 2.0)))
    return budget.tree(logits)


DRAFTS: dict[str, Draft] = {
    "none": lambda logits: empty_tree(),
    "chain": chain_tree,
    "tree-8": lambda logits: build_tree(logits, 8),
    "auto": auto_tree,
}


def emit(draft: Draft, sampling: Sampling, seed: int, choose: Choose = choose_tokens) -> Counter[Prefix]:
    """Count responses of LENGTH tokens: the first comes from the prefill, the others from rounds."""
    generator = torch.Generator().manual_seed(seed)
    first = choose(target_logits(()).expand(NUM_SAMPLES, -1), sampling, generator)
    standing = Counter((token,) for token in first)
    emitted: Counter[Prefix] = Counter()
    while standing:
        prefix = min(standing, key=len)  # shorter ones lead to longer ones, so each prefix is taken once
        count = standing.pop(prefix)
        if len(prefix) == LENGTH:
            emitted[prefix] = count
        else:
            standing.update(run_rounds(draft(draft_logits(prefix)), prefix, count, sampling, generator, choose))
    return emitted


def run_rounds(
    tree: Tree, prefix: Prefix, count: int, sampling: Sampling, generator: torch.Generator, choose: Choose
) -> Counter[Prefix]:
    """The same round ``count`` times, with independent samples."""
    paths = [prefix]
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*paths[parent], token))
    logits = torch.stack([target_logits(path) for path in paths])
    chosen = choose(logits.repeat(count, 1), sampling, generator)
    rows = Counter(zip(*[iter(chosen)] * len(paths), strict=True))
    after: Counter[Prefix] = Counter()
    for row, times in rows.items():
        done = walk(tree, row, eos_token_ids=(), limit=LENGTH - len(prefix))
        after[(*prefix, *done.tokens)] += times
    return after


def exact_probabilities(sampling: Sampling) -> dict[Prefix, float]:
    """Of every response, in float64."""
    found = {}
    for response in itertools.product(range(VOCAB), repeat=LENGTH):
        found[response] = 1.0
        for k, token in enumerate(response):
            scores = target_logits(response[:k]) / sampling.temperature
            order = scores.argsort(descending=True)[: sampling.top_k or VOCAB]
            shares = scores[order].softmax(0)
            kept = order[shares.cumsum(0) - shares < sampling.top_p].tolist()
            found[response] *= float(scores[kept].softmax(0)[kept.index(token)]) if token in kept else 0.0
    return found


def p_value(emitted: Counter[Prefix], exact: dict[Prefix, float]) -> float:
    """χ² of the counts; a response that the target never gives makes it 0."""
    assert sum(emitted.values()) == NUM_SAMPLES
    if any(exact[response] == 0 for response in emitted):
        return 0.0
    common = [response for response, share in exact.items() if share * NUM_SAMPLES >= 5]
    observed = [emitted[response] for response in common]
    expected = [exact[response] * NUM_SAMPLES for response in common]
    rest = NUM_SAMPLES - sum(expected)
    if rest >= 5:
        observed.append(NUM_SAMPLES - sum(observed))
        expected.append(rest)
    else:
        expected = [value * sum(observed) / sum(expected) for value in expected]
    assert len(observed) > 15
    counts, means = torch.tensor([observed, expected], dtype=torch.float64)
    chi_square = ((counts - means) ** 2 / means).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), chi_square / 2))


def test_trees_and_chains_emit_the_targets_distribution() -> None:
    found = {}
    for sampling in SAMPLINGS:
        exact = exact_probabilities(sampling)
        assert sum(exact.values()) == pytest.approx(1, abs=1e-9)
        for name, draft in DRAFTS.items():
            for seed in SEEDS if name in ("chain", "tree-8") else SEEDS[:1]:
                found[sampling, name, seed] = p_value(emit(draft, sampling, len(found)), exact)
    worst = min(found, key=lambda key: found[key])
    assert found[worst] > 1e-2 / len(found), worst
    # Not too good, either: p-values of honest samples are uniform (Kolmogorov and Smirnov, one in a thousand).
    ranked = torch.tensor(sorted(found.values()))
    steps = torch.arange(len(ranked) + 1) / len(ranked)
    distance = torch.maximum((steps[1:] - ranked).max(), (ranked - steps[:-1]).max())
    assert distance < 1.95 / len(ranked) ** 0.5


def test_trees_differ_and_are_accepted() -> None:
    """The comparison would be empty if nothing that was drafted were ever emitted."""
    sizes = {len(auto_tree(draft_logits((token,)))) for token in range(VOCAB)}
    assert len(sizes) > 1
    tree = build_tree(draft_logits((1,)), 16)
    after = run_rounds(tree, (1,), 2000, SAMPLINGS[0], torch.Generator().manual_seed(0), choose_tokens)
    assert sum(times for response, times in after.items() if len(response) == LENGTH) > 1000


def accepts_by_ratio(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> list[int]:
    """min(1, p / q) for the drafter's likeliest token of each row, and a fresh sample where that fails."""
    share = sampling.probabilities(logits)
    honest = torch.tensor(choose_tokens(logits, sampling, generator))
    drafted = (2 * logits).softmax(-1)  # q, about
    likely, token = drafted.max(-1)
    ratio = share.gather(-1, token[:, None])[:, 0] / likely
    return torch.where(torch.rand(len(logits), generator=generator) < ratio, token, honest).tolist()


def shares_a_sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> list[int]:
    """One random number for all rows of a round, instead of one for each."""
    rows = len(logits)
    if rows == NUM_SAMPLES:
        return choose_tokens(logits, sampling, generator)
    per_round = 9  # rows of a tree of 8 nodes
    noise = torch.rand(rows // per_round, generator=generator).repeat_interleave(per_round)
    return torch.searchsorted(sampling.probabilities(logits).cumsum(-1), noise[:, None])[:, 0].clamp_max(6).tolist()


def forgets_to_truncate(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> list[int]:
    return choose_tokens(logits, Sampling(sampling.temperature), generator)


@pytest.mark.parametrize("fault", [accepts_by_ratio, shares_a_sample, forgets_to_truncate])
def test_planted_faults_are_found(fault: Choose) -> None:
    sampling = SAMPLINGS[2] if fault is forgets_to_truncate else SAMPLINGS[0]
    assert p_value(emit(DRAFTS["tree-8"], sampling, 0, fault), exact_probabilities(sampling)) < 1e-9
