"""Slot 0 of every block is the anchor's embedding, the others are the mask's: in training, replay and live decoding."""

from types import SimpleNamespace

import pytest
import torch
from test_drafter import tiny_drafter

from dflash_kit import replay
from dflash_kit.drafter import Drafter
from dflash_kit.masks import BlockLayout
from dflash_kit.shards import Row
from dflash_kit.target_ends import TargetEnds
from train.step import noise_embeddings

MASK = 49


@pytest.fixture
def ends() -> TargetEnds:
    torch.manual_seed(3)
    embedding = torch.randn(50, 32)
    return TargetEnds(embedding=embedding, head=embedding)


def test_in_training(ends: TargetEnds) -> None:
    anchors = torch.tensor([2, 5])
    layout = BlockLayout(torch.arange(8), torch.zeros(8, dtype=torch.long), anchors, torch.tensor([True, True]), 4)
    row = SimpleNamespace(layout=layout, token_ids=torch.arange(10, 18))
    blocks = noise_embeddings(row, ends, MASK)[0].unflatten(0, (2, 4))  # type: ignore[arg-type]
    assert torch.equal(blocks[:, 0], ends.embedding[[12, 15]])
    assert torch.equal(blocks[:, 1:], ends.embedding[MASK].expand(2, 3, -1))


def test_in_replay(ends: TargetEnds, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = tiny_drafter()
    seen: list[torch.Tensor] = []
    original = Drafter.blocks
    monkeypatch.setattr(
        Drafter, "blocks", lambda self, noise, *rest: seen.append(noise) or original(self, noise, *rest)
    )
    tokens = torch.arange(10, 20).int()
    row = Row(id="a", input_ids=tokens, loss_mask=tokens >= 15, hidden_states=torch.randn(10, 64), next_token=20)
    replay.replay_row(drafter, ends, row, [4])
    blocks = torch.cat([noise[0].unflatten(0, (-1, 4)) for noise in seen])
    assert torch.equal(blocks[:, 0], ends.embedding[[15, 16, 17, 18, 19]])
    assert torch.equal(blocks[:, 1:], ends.embedding[MASK].expand(5, 3, -1))


def test_in_live_decoding(ends: TargetEnds) -> None:
    from decode.engine import Engine

    drafter = tiny_drafter()
    seen: list[torch.Tensor] = []

    def draft(cache: object, noise: torch.Tensor) -> torch.Tensor:
        seen.append(noise)
        return torch.zeros(1, 4, 32)

    engine = SimpleNamespace(
        ends=ends,
        drafter=SimpleNamespace(config=drafter.config, fc=drafter.fc, draft=draft),
        target=SimpleNamespace(num_committed=7, device="cpu"),
        _draft_cache=SimpleNamespace(length=7),
    )
    Engine._draft(engine, 12)  # type: ignore[arg-type]
    assert torch.equal(seen[0][0, 0], ends.embedding[12])
    assert torch.equal(seen[0][0, 1:], ends.embedding[MASK].expand(3, -1))
