"""Replay in device operations equals replay on the host round for round, and its counts those of the trees themselves."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from drafting import tiny_drafter
from test_replay import EOS, likely_row
from test_tree_places import DEPTHS, VOCABULARY, in_the_tree, likely_path

from decode.altered_drafter import AlteredDrafter, Change
from decode.doctor_rotary import RotaryKind
from dflash_kit import replay_accepted, replay_blocks, replay_device
from dflash_kit.best_logits import best_logits
from dflash_kit.drafter import Drafter
from dflash_kit.replay import replay_row, replay_rows
from dflash_kit.replay_accepted import AcceptedCounter
from dflash_kit.shards import Row
from dflash_kit.target_ends import TargetEnds
from dflash_kit.tree import chain_tree

BUDGETS = [1, 2, 16, 64, 256, 1024]


@pytest.mark.parametrize("sharpness", [0.0, 0.3, 3.0, 30.0, 300.0])
@pytest.mark.parametrize("is_coarse", [False, True])
def test_counts_are_those_of_the_trees(sharpness: float, is_coarse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few anchors are looked at together. Coarse logits are often equal, sharp ones leave log-probabilities of 0, and flat ones
    nothing but ties."""
    rng, generator = random.Random(2), torch.Generator().manual_seed(2)
    ends = TargetEnds(embedding=torch.eye(VOCABULARY), head=torch.eye(VOCABULARY))
    lengths = set()
    for budgets, together in (([], 8), ([1], 1), ([1, 2], 3), ([2, 16], 5), ([5, 16, 64], 8), (BUDGETS, 1)):
        monkeypatch.setattr(replay_accepted, "LOGITS_AT_ONCE", together * DEPTHS * VOCABULARY)
        logits = torch.randn(8, DEPTHS, VOCABULARY, generator=generator) * sharpness
        logits = (logits * 2).round() / 2 if is_coarse else logits
        budget = max(budgets, default=0)
        truths = [likely_path(tree, max(budget, 1), rng) for tree in logits]
        padded = torch.tensor([truth + [-1] * (DEPTHS - len(truth)) for truth in truths])
        counts = replay_device.counter_for(ends, budgets).count(logits, padded).tolist()
        for tree, truth, found in zip(logits, truths, counts, strict=True):
            chain, indices = chain_tree(tree).tokens.tolist(), in_the_tree(tree, truth, budget)
            assert found[0] == next((i for i, token in enumerate(truth) if token != chain[i]), len(truth))
            assert found[1:] == [sum(index < each for index in indices) for each in budgets]
            lengths.update(found[1:])
    assert len(lengths) >= (2 if sharpness < 1 else 4)


@pytest.mark.parametrize("vocabulary", [20, 640, 1001])
def test_best_logits_are_those_of_a_selection(vocabulary: int) -> None:
    logits = torch.randn(3, 5, vocabulary, generator=torch.Generator().manual_seed(0))
    for each in (logits, logits.round()):
        values, ids = best_logits(each, 18)
        assert torch.equal(values, each.topk(18, dim=-1).values)
        assert torch.equal(each.gather(-1, ids), values)
        assert all(len(set(slot)) == 18 for slot in ids.flatten(0, 1).tolist())


def make_rows(drafter: Drafter, ends: TargetEnds) -> list[Row]:
    """Responses that end by EOS or by length, two in one row, one shorter than a block, one of a single token, and none."""
    rows = [likely_row(drafter, ends, prompt=4 + s, response=9 + 7 * s, seed=s, eos=s % 2 == 0) for s in range(4)]
    rows[3].loss_mask[18:21] = False
    rows[2].input_ids[12] = EOS
    rows += [likely_row(drafter, ends, prompt=5, response=length, seed=7, eos=False) for length in (4, 1)]
    rows.append(dataclasses.replace(rows[0], id="none", loss_mask=torch.zeros_like(rows[0].loss_mask), next_token=-1))
    return rows


@pytest.mark.parametrize(
    ("block_size", "causal", "sliding", "sharpness"),
    [(2, False, 1, 6.0), (8, True, 2, 6.0), (8, False, 0, 4.0), (16, False, 1, 20.0)],
)
def test_rounds_are_those_of_the_host(
    tiny_target: Path,
    block_size: int,
    causal: bool,
    sliding: int,
    sharpness: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever is drafted together, however little fits at a time."""
    drafter, ends = tiny_drafter(tiny_target, block_size=block_size, num_sliding_layers=sliding, sharpness=sharpness)
    for layer in drafter.layers:
        layer.self_attn.causal = causal
    rows = make_rows(drafter, ends)
    budgets = BUDGETS if block_size == 8 else BUDGETS[:-1]
    for limit in (None, 11):
        want = list(
            replay_rows(drafter, ends, rows, budgets, eos_token_ids=[EOS], max_new_tokens=limit, on_device=False)
        )
        for anchors, together in ((1, 2), (None, None)) if limit else ((6, 3), (None, None)):
            with monkeypatch.context() as patch:
                if together:  # less at a time in every other way, too
                    patch.setattr(replay_device, "TOKENS_AT_ONCE", 60)
                    patch.setattr(replay_blocks, "CONTEXT_TOKENS_AT_ONCE", 40)
                    patch.setattr(replay_blocks, "CONTEXT_BYTES_AT_ONCE", 50_000)
                    patch.setattr(replay_accepted, "LOGITS_AT_ONCE", 3000)
                found = replay_rows(
                    drafter,
                    ends,
                    iter(rows),
                    budgets,
                    eos_token_ids=[EOS],
                    max_new_tokens=limit,
                    anchors_per_chunk=anchors,
                    rows_at_once=together,
                    on_device=True,
                )
                assert [(row.id, logs) for row, logs in found] == [(row.id, logs) for row, logs in want]
    assert [len(logs["chain", block_size - 1]) for _, logs in want] == [1, 1, 1, 2, 1, 1, 0]
    assert max(n for _, logs in want for log in logs["ddtree", 256] for n in log.num_accepted) >= min(4, block_size - 1)


def test_drafts_that_are_no_numbers_are_not_accepted(tiny_target: Path) -> None:
    drafter, ends = tiny_drafter(tiny_target)
    row = likely_row(drafter, ends, prompt=6, response=25, seed=9, eos=False)
    with torch.no_grad():
        drafter.norm.weight[0] = float("nan")
    for logs in replay_row(drafter, ends, row, [1, 64], on_device=True).values():
        assert set(logs[0].num_accepted) == {0}


def test_an_altered_drafter_drafts_as_it_does_on_the_host(tiny_target: Path) -> None:
    """The diagnosis replays drafters whose slots, positions and rotary embedding are not as the checkpoint says."""
    drafter, ends = tiny_drafter(tiny_target)
    row = likely_row(drafter, ends, prompt=6, response=25, seed=9, eos=False)
    plain = replay_row(drafter, ends, row, [1, 64], on_device=True)
    rotary = RotaryKind.partial(drafter.config, 0.5)
    for change in ({"slot_zero_is_mask": True}, {"slots_behind": 1}, {"context_offset": 30}, {"rotary": rotary}):
        altered = AlteredDrafter.of(drafter, Change(config=drafter.config, **change))
        found = replay_row(altered, ends, row, [1, 64], on_device=True)
        assert found == replay_row(altered, ends, row, [1, 64], on_device=False) != plain


@pytest.mark.gpu
@pytest.mark.parametrize("by_kernels", [True, False])
def test_rounds_on_a_gpu_are_those_of_the_host(
    tiny_target: Path, by_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32; the path on the GPU is taken by itself."""
    if not by_kernels:
        monkeypatch.setattr(replay_device, "ReachCounter", AcceptedCounter)
    drafter, ends = tiny_drafter(tiny_target)
    rows = make_rows(drafter, ends)
    want = [logs for _, logs in replay_rows(drafter, ends, rows, BUDGETS, eos_token_ids=[EOS], on_device=False)]
    on_gpu = TargetEnds(embedding=ends.embedding.cuda(), head=ends.head.cuda())
    for on_device in (None, False):
        found = replay_rows(drafter.cuda(), on_gpu, rows, BUDGETS, eos_token_ids=[EOS], on_device=on_device)
        assert [logs for _, logs in found] == want


def test_as_many_anchors_as_memory_has_room_for(tiny_target: Path) -> None:
    drafter, _ = tiny_drafter(tiny_target)
    fewest, most = replay_device.ANCHORS_PER_CHUNK
    assert replay_device.anchors_that_fit(drafter, 64, 0) == fewest
    assert replay_device.anchors_that_fit(drafter, 64, 1 << 40) == most
    some = [replay_device.anchors_that_fit(drafter, budget, 1 << 30) for budget in (64, 1024, 4096)]
    assert some == sorted(some, reverse=True) and most > some[1] > some[2] >= fewest
    for budget, anchors in zip((1024, 4096), some[1:], strict=True):
        taken_bytes = (
            anchors * budget * (4 * drafter.config.num_draft_tokens + 16)
        )  # scores of each depth, and those of the walk
        assert anchors == fewest or 0.5 * (1 << 27) < taken_bytes < 1 << 27
