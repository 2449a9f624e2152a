"""The kernels of replay: what a slot's logits say, and counts that are those of the trees themselves, without a level sorted."""

import random
from pathlib import Path

import pytest
import torch
from kernel_compiling import interpret_and_compile
from test_tree_places import DEPTHS, VOCABULARY, in_the_tree, likely_path

from dflash_kit import reach_counter
from dflash_kit.replay_accepted import AcceptedCounter
from dflash_kit.replay_reach import NO_RANK
from dflash_kit.target_ends import TargetEnds
from dflash_kit.tree import chain_tree
from helpers import HAS_GPU, HAS_TRITON, INTERPRETED, runs_kernels

DEVICE = "cuda" if HAS_GPU else "cpu"
NUM_TREES = 64 if HAS_GPU else 3
BUDGETS = ([], [1, 2], [5, 16, 64], [100, 1024])


class IdentityEnds(TargetEnds):
    """Hidden states are the logits themselves; a product would make NaN of what is infinite."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def identity_ends() -> TargetEnds:
    head = torch.eye(VOCABULARY, device=DEVICE)
    return IdentityEnds(embedding=head, head=head)


@runs_kernels
@pytest.mark.parametrize("sharpness", [0.0, 3.0, 300.0])
@pytest.mark.parametrize("is_coarse", [False, True])
def test_counts_are_those_of_the_trees(sharpness: float, is_coarse: bool) -> None:
    """Coarse logits are often equal, sharp ones leave log-probabilities of 0, and flat ones nothing but ties."""
    rng, generator = random.Random(3), torch.Generator().manual_seed(3)
    lengths = set()
    for budgets in BUDGETS:
        logits = torch.randn(NUM_TREES, DEPTHS, VOCABULARY, generator=generator) * sharpness
        logits = (logits * 2).round() / 2 if is_coarse else logits
        budget = max(budgets, default=0)
        truths = [likely_path(tree, max(budget, 1), rng) for tree in logits]
        padded = torch.tensor([truth + [-1] * (DEPTHS - len(truth)) for truth in truths])
        counter = reach_counter.ReachCounter(identity_ends(), budgets)
        counts = counter.count(logits.to(DEVICE), padded).tolist()
        for tree, truth, found in zip(logits, truths, counts, strict=True):
            chain, indices = chain_tree(tree).tokens.tolist(), in_the_tree(tree, truth, budget)
            assert found[0] == next((i for i, token in enumerate(truth) if token != chain[i]), len(truth))
            assert found[1:] == [sum(index < each for index in indices) for each in budgets]
            lengths.update(found[1:])
        assert counter.num_left == 0
    assert len(lengths) >= (2 if sharpness < 1 else 4)


@runs_kernels
def test_logits_that_are_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot with NaN is in no tree; tokens that are masked are behind all others, and left to the other counter where they are true."""
    monkeypatch.setattr(reach_counter, "PROGRAMS_AT_ONCE", 5)
    logits = torch.randn(12, DEPTHS, VOCABULARY, generator=torch.Generator().manual_seed(5)) * 3
    logits[::3, 2, 7] = torch.nan
    logits[1::3, :, 10:] = -torch.inf
    logits[2, 1, 4] = torch.inf
    truths = logits.nan_to_num(-9.0).argmax(-1)
    truths[4, 2:] = 20  # masked
    truths[6:, 4:] = -1
    counters = [kind(identity_ends(), [4, 30]) for kind in (reach_counter.ReachCounter, AcceptedCounter)]
    ours, theirs = (counter.count(logits.to(DEVICE), truths) for counter in counters)
    assert ours.tolist() == theirs.tolist()
    assert set(ours[::3, 0].tolist()) <= {0, 1, 2} and counters[0].num_left == 1


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocabulary", "num_ranks"), [(1003, 18), (640, 20), (50, 64), (4099, 1)])
def test_what_a_slot_says(vocabulary: int, num_ranks: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(9, vocabulary, generator=generator) * 3).to(dtype).to(DEVICE)
    truths = torch.randint(vocabulary, (9,), generator=generator).to(DEVICE)
    truths[3] = -1
    log_probs, own, ranks = reach_counter._look(logits, truths, num_ranks)
    wide = logits.float()
    exact = wide.double().log_softmax(-1)
    order = wide.argsort(dim=-1, descending=True, stable=True)
    kept = min(num_ranks, vocabulary)
    torch.testing.assert_close(log_probs[:, :kept].double(), exact.gather(1, order)[:, :kept], rtol=0, atol=2e-6)
    assert (log_probs[:, kept:] == -torch.inf).all() and log_probs.dtype == torch.float32
    known = truths >= 0
    torch.testing.assert_close(
        own[known].double(), exact.gather(1, truths.clamp(min=0)[:, None])[known, 0], rtol=0, atol=2e-6
    )
    places = (order == truths[:, None]).int().argmax(1)
    assert torch.equal(ranks[known].long(), places[known]) and ranks[3] == NO_RANK


@pytest.mark.slow
@pytest.mark.skipif(HAS_GPU or INTERPRETED or not HAS_TRITON, reason="starts the interpreter; needs triton and no GPU")
def test_the_kernels_run_in_the_interpreter_and_compile(tmp_path: Path) -> None:
    words, kernels = interpret_and_compile(Path(__file__), "not interpreter", tmp_path)
    assert "15 passed" in words, words
    assert kernels == {"slot_kernel", "index_kernel"}
