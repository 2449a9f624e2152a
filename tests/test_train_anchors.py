"""Anchors of packed rows: who may be one, how documents share them, and that nothing but the key decides."""

from __future__ import annotations

import pytest
import torch

from train.anchors import document_quotas, draw_anchors, eligible_anchors


def make_row(*documents: tuple[int, str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Documents and supervision from (document, "..xx" with x = supervised) pairs."""
    owners = [document for document, flags in documents for _ in flags]
    said = [flag == "x" for _, flags in documents for flag in flags]
    return torch.tensor(owners), torch.tensor(said)


def test_anchor_and_successor_are_supervised_tokens_of_one_document() -> None:
    documents, supervised = make_row((0, "..xxx"), (1, "xx.x"), (2, "x"), (-1, "xx"))
    found = eligible_anchors(documents, supervised).nonzero().flatten().tolist()
    # 4 → 5 crosses into document 1, 8 is alone, 9 has only another document after it, 10 and 11 are the tail.
    assert found == [2, 3, 5]


def test_eligibility_equals_brute_force_on_random_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        documents = torch.randint(0, 2, (40,), generator=generator).cumsum(0) // 4
        documents[33:] = -1
        supervised = torch.rand(40, generator=generator) < 0.6
        expected = [
            i
            for i in range(39)
            if supervised[i] and supervised[i + 1] and documents[i] == documents[i + 1] and documents[i] >= 0
        ]
        assert eligible_anchors(documents, supervised).nonzero().flatten().tolist() == expected


@pytest.mark.parametrize(("offered", "blocks"), [([5, 1, 94], 10), ([3, 3, 3], 4), ([7], 3), ([1, 1, 1, 1], 2)])
def test_quotas_are_proportional_and_spend_every_block(offered: list[int], blocks: int) -> None:
    quotas = document_quotas(offered, blocks)
    assert sum(quotas) == blocks
    for quota, count in zip(quotas, offered, strict=True):
        assert abs(quota - blocks * count / sum(offered)) < 1
        assert quota <= count


def test_quotas_take_everything_that_fits() -> None:
    assert document_quotas([2, 0, 3], 9) == [2, 0, 3]
    assert document_quotas([], 9) == []


def test_drawn_anchors_are_distinct_ascending_eligible_and_flagged() -> None:
    documents, supervised = make_row((0, "..xxxxxxxx"), (1, "...xxxx"), (-1, "....."))
    anchors, used = draw_anchors(documents, supervised, 16, seed=1, epoch=0, row=0)
    assert anchors.shape == used.shape == (16,)
    assert used.tolist() == [True] * 10 + [False] * 6  # 7 + 3 eligible, 6 blocks left over
    assert anchors[used].tolist() == eligible_anchors(documents, supervised).nonzero().flatten().tolist()
    few, used = draw_anchors(documents, supervised, 5, seed=1, epoch=0, row=0)
    assert used.all()
    assert few.tolist() == sorted(set(few.tolist()))
    assert eligible_anchors(documents, supervised)[few].all()
    per_document = documents[few].bincount().tolist()
    assert per_document == document_quotas([7, 3], 5)


def test_a_row_without_supervision_has_only_unused_blocks() -> None:
    documents, supervised = make_row((0, "....."))
    anchors, used = draw_anchors(documents, supervised, 4, seed=0, epoch=0, row=0)
    assert not used.any()
    assert anchors.tolist() == [0, 0, 0, 0]


def test_the_key_alone_decides_and_every_part_of_it_matters() -> None:
    documents, supervised = make_row((0, "x" * 200))

    def draw(**key: int) -> list[int]:
        return draw_anchors(documents, supervised, 8, **({"seed": 3, "epoch": 1, "row": 5} | key))[0].tolist()

    torch.manual_seed(123)  # global random state has no say
    assert draw() == draw()
    for other in ({"seed": 4}, {"epoch": 2}, {"row": 6}):
        assert draw(**other) != draw()


def test_resampling_reaches_every_anchor_evenly() -> None:
    documents, supervised = make_row((0, "x" * 41))
    hits = torch.zeros(41)
    for epoch in range(400):
        hits[draw_anchors(documents, supervised, 10, seed=0, epoch=epoch, row=0)[0]] += 1
    assert hits[40] == 0  # the last token has no successor
    # 400 × 10 / 40 = 100 expected; five standard deviations of the binomial are 43.
    assert (hits[:40] - 100).abs().max() < 43
