"""MFU: operations counted from packed rows equal what torch counts, and attention's pairs equal the masks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_train_loop import make_trainer
from torch.utils.flop_counter import FlopCounterMode
from train_helpers import make_shards

from dflash_kit.masks import dense_mask
from train.flops import RowSizes, seen_pairs
from train.progress import Meter, speed_words
from train.step import forward_loss
from train.sums import StepSums


@pytest.fixture(scope="module")
def shards_folder(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("flops") / "shards", tiny_target, last_hidden=True)


@pytest.mark.parametrize("kind", ["decay", "kl"])
def test_operations_equal_those_that_torch_counts(shards_folder: Path, tmp_path: Path, kind: str) -> None:
    trainer = make_trainer(shards_folder, tmp_path / "out", loss__kind=kind)
    counter = trainer.job.flop_counter
    (row, *_) = next(iter(trainer.feed.steps(0, 1))).result()
    pairs = tuple(seen_pairs(row.layout, trainer.job.drafter))
    sizes = RowSizes(
        tokens=row.num_tokens,
        slots=row.layout.used.sum().item() * row.layout.block_size,
        weighted_slots=len(row.slots),
        pairs=pairs,
    )
    with FlopCounterMode(display=False) as flops:
        forward_loss(trainer, row, StepSums(3)).backward()
    by_operation = {str(op): count for op, count in flops.get_flop_counts()["Global"].items()}
    attention = sum(count for name, count in by_operation.items() if "attention" in name or "bmm" in name)
    parts = counter.by_part(sizes)
    assert sum(by_operation.values()) - attention == sum(parts.values()) - parts["attention"]
    assert counter(row) == sum(parts.values())
    for layer, attend in enumerate(trainer.drafter.layers):
        attention_layer = attend.self_attn
        mask = dense_mask(row.layout, causal=attention_layer.causal, window=attention_layer.window)
        assert pairs[layer] == mask.sum()
    # One pair and head is two products of head_dim multiply-adds, forward and twice backward.
    assert parts["attention"] == 3 * 2 * 2 * sum(pairs) * 4 * 32


def test_mfu_is_the_share_of_the_matrix_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("train.progress.time.perf_counter", lambda: now[0])
    meter = Meter(3, peak_flop_per_s=4e12)
    with meter.paused():
        now[0] += 50
    meter.steps, meter.tokens, meter.flops = 2, 100, 6e12
    now[0] += 2
    values = meter.values()
    assert (values["flop_per_s"], values["mfu"], values["tokens_per_s"]) == (3e12, 0.75, 50)
    assert speed_words(values) == "50 tok/s  MFU 75% (3.0 TFLOP/s)"
    assert "MFU – (0.5 GFLOP/s)" in speed_words(values | {"mfu": None, "flop_per_s": 5e8})


def test_unused_blocks_and_tails_count_nothing(shards_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(shards_folder, tmp_path / "out", data__anchors=200)
    row = trainer.job.packer(next(trainer.job.plan.rows(0, 1)))
    assert not row.layout.used.all() and (row.layout.documents < 0).any()
    assert trainer.job.flop_counter(row) == trainer.job.flop_counter(row.trimmed())


def test_the_measured_rate_is_one_of_this_machine() -> None:
    from train import rates as module
    from train.rates import measure_rates

    module._matrix_rate.cache_clear()
    before = torch.get_rng_state()
    rates = measure_rates(torch.device("cpu"), torch.float32)
    assert 1e8 < rates.matrix_flop_per_s < 1e14 and 1e7 < rates.memory_bytes_per_s < 1e13
    assert rates.link_bytes_per_s is None and rates.exchange_bytes_per_s is None
    assert torch.equal(torch.get_rng_state(), before)  # a resumed run measures once more, and must not differ for it
