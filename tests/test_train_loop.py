"""One step against a hand-made one, accumulation and ranks, the schedule, bad steps, and that training teaches."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from train_helpers import make_shards, run_in_two_processes, small_run

from dflash_kit.checkpoint import read_provenance
from dflash_kit.config import parse_config
from dflash_kit.drafter import Drafter
from dflash_kit.errors import KitError
from dflash_kit.target_ends import TargetEnds
from train import step as step_module
from train.assemble import assemble
from train.cli import TrainConfig, main
from train.job import prepare
from train.parallel import Parallel
from train.schedule import learning_rate
from train.state import RunFolder
from train.step import noise_embeddings, train_step
from train.trainer import Trainer


@pytest.fixture(scope="module")
def shards_folder(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("loop") / "shards", tiny_target)


def make_trainer(shards: Path, out: Path, **changes: Any) -> Trainer:
    config = parse_config("train", TrainConfig, small_run(shards, out, **changes), description="")
    job = prepare(config)
    parallel = Parallel(rows_per_step=config.data.rows_per_step, clip=config.optim.clip, compute_dtype="auto")
    return assemble(job, parallel, RunFolder(out))


def metrics(out: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = (out.with_name(out.name + ".state") / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == kind]


# -- one step -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_a_step_equals_one_sum_over_all_rows_with_the_plain_loss(
    shards_folder: Path, tmp_path: Path, kind: str
) -> None:
    """Three accumulated packed rows of different weight: the gradient is that of Σ w·CE / Σ w over all of them."""
    trainer = make_trainer(shards_folder, tmp_path / "out", data__rows_per_step=3, loss__kind=kind, optim__clip=1e9)
    rows = next(iter(trainer.feed.steps(0, 1))).result()
    assert len({len(row.slots) for row in rows}) > 1
    before = {name: p.detach().clone() for name, p in trainer.drafter.named_parameters()}
    exact = Drafter(trainer.job.drafter).double()
    exact.load_state_dict({name: p.double() for name, p in before.items()})
    ends = trainer.ends
    wide = TargetEnds(embedding=ends.embedding.double(), head=ends.head.double())
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    for row in rows:
        layout = row.layout
        hidden = exact(
            noise_embeddings(row, wide, trainer.job.drafter.mask_token_id),
            row.features[None].double(),
            torch.cat([layout.positions, layout.slot_positions])[None],
            exact.layer_masks(layout, flex=False),
        )
        losses = torch.nn.functional.cross_entropy(wide.logits(hidden[0, row.slots]), row.labels, reduction="none")
        total = total + trainer.job.objective.numerator(losses, row.weights.double(), row.slots, layout.block_size)
        weight += float(trainer.job.objective.denominator(row.weights))
    (total / weight).backward()
    captured: dict[str, torch.Tensor] = {}
    optimizer_step = trainer.optimizer.step

    def capture() -> None:
        captured.update({n: p.grad.clone() for n, p in trainer.drafter.named_parameters() if p.grad is not None})
        optimizer_step()

    trainer.optimizer.step = capture  # type: ignore[method-assign,assignment]
    result = train_step(trainer, rows, lr=1e-3)
    assert result.applied
    assert result.loss_sum / result.weight_sum == pytest.approx(float(total.detach()) / weight, rel=1e-5)
    assert sum(result.counted) == sum(len(row.slots) for row in rows)
    for name, parameter in exact.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(captured[name].double(), parameter.grad, rtol=2e-3, atol=2e-6, msg=name)
        assert not torch.equal(before[name], trainer.drafter.state_dict()[name]), f"{name} did not move"


def test_the_first_step_moves_every_weight_by_the_learning_rate(shards_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(shards_folder, tmp_path / "out")
    before = {name: p.detach().clone() for name, p in trainer.drafter.named_parameters()}
    train_step(trainer, next(iter(trainer.feed.steps(0, 1))).result(), lr=1e-3)
    moved = torch.cat([(p.detach() - before[n]).abs().flatten() for n, p in trainer.drafter.named_parameters()])
    # AdamW's first step is lr · sign(gradient), whatever the gradient's size.
    assert moved.quantile(0.5) == pytest.approx(1e-3, rel=0.02)
    assert moved.max() <= 1.001e-3


# -- schedule -------------------------------------------------------------------------------------------------------


def test_warm_up_then_cosine_down_to_nothing_exactly_at_max_steps() -> None:
    def rate(step: int) -> float:
        return learning_rate(step, max_steps=100, peak=6e-4, warmup_fraction=0.04, final_fraction=0.0)

    assert [rate(s) / 6e-4 for s in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rate(52) == pytest.approx(3e-4)
    assert 0 < rate(99) < 1e-6
    assert rate(100) == 0.0
    assert all(rate(s) > rate(s + 1) for s in range(4, 100))


def test_schedule_edges() -> None:
    flat = learning_rate(0, max_steps=1, peak=1.0, warmup_fraction=0.04, final_fraction=0.0)
    assert flat == 1.0
    end = learning_rate(10, max_steps=10, peak=1.0, warmup_fraction=0.0, final_fraction=0.1)
    assert end == pytest.approx(0.1)


@pytest.mark.parametrize("max_steps", [1, 3, 10, 100])
def test_every_schedule_ends_at_max_steps_and_never_rises_behind_the_warm_up(max_steps: int) -> None:
    for kind in ("cosine", "linear", "wsd"):
        rates = [
            learning_rate(s, max_steps=max_steps, peak=2.0, warmup_fraction=0.1, final_fraction=0.25, kind=kind)
            for s in range(max_steps + 1)
        ]
        warmup = round(max_steps * 0.1)
        assert rates[-1] == pytest.approx(0.5)
        assert rates[warmup] == 2.0
        assert rates[:warmup] == pytest.approx([2.0 * (s + 1) / (warmup + 1) for s in range(warmup)])
        assert all(a >= b for a, b in zip(rates[warmup:], rates[warmup + 1 :], strict=False))
        assert all(a > b for a, b in zip(rates[-2:], rates[-1:], strict=False))


def test_linear_and_stable_then_decay_by_hand() -> None:
    def rates(kind: Any, decay_fraction: float = 0.2) -> list[float]:
        settings = {"max_steps": 10, "peak": 1.0, "warmup_fraction": 0.2, "final_fraction": 0.0}
        return [learning_rate(s, kind=kind, decay_fraction=decay_fraction, **settings) for s in range(11)]

    rising = [1 / 3, 2 / 3]
    assert rates("linear") == pytest.approx([*rising, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0])
    assert rates("wsd", 0.4) == pytest.approx([*rising, 1, 1, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4, 0])
    assert rates("wsd", 0.8) == pytest.approx(rates("linear"))
    assert rates("wsd", 0.01) == pytest.approx([*rising, *[1.0] * 8, 0])  # one step of decay at least


@pytest.mark.parametrize("schedule", ["linear", "wsd"])
def test_a_run_follows_its_schedule(shards_folder: Path, tmp_path: Path, schedule: str) -> None:
    out = tmp_path / "out"
    changes = {"optim__schedule": schedule, "optim__warmup_fraction": 0.25, "optim__lr": "1e-3"}
    assert main(small_run(shards_folder, out, optim__max_steps=8, replay__max_rows=0, **changes)) == 0
    falling = [1, 1, 1, 1, 1, 1 / 2] if schedule == "wsd" else [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    assert [line["lr"] for line in metrics(out)] == pytest.approx([1e-3 * r for r in (1 / 3, 2 / 3, *falling)])


# -- bad steps ------------------------------------------------------------------------------------------------------


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Make the loss of some steps NaN."""
    real = step_module.forward_loss

    def forward_loss(trainer: Trainer, row: Any, sums: Any) -> torch.Tensor:
        loss = real(trainer, row, sums)
        return loss * math.nan if trainer.counters.step in steps else loss

    monkeypatch.setattr(step_module, "forward_loss", forward_loss)


def test_a_bad_step_is_skipped_and_counted(
    shards_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {3, 5})
    out = tmp_path / "out"
    assert main(small_run(shards_folder, out, optim__max_steps=8)) == 0
    assert [line["skipped_steps"] for line in metrics(out)] == [0, 0, 0, 1, 1, 2, 2, 2]
    assert read_provenance(out)["metrics"]["skipped_steps"] == 2
    weights = Drafter.from_pretrained(out).state_dict()
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_too_many_bad_steps_in_a_row_stop_the_run_and_name_its_rows(
    shards_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {4, 5, 6})
    out = tmp_path / "out"
    with pytest.raises(KitError, match=r"3 steps in a row \(up to step 7\).*row-\d+.*lower optim\.lr"):
        main(small_run(shards_folder, out, optim__max_bad_steps=3))
    assert not out.exists()
    assert RunFolder(out).steps() == [4]  # the state before the bad steps is whole


def test_rows_without_supervision_stop_the_run(tiny_target: Path, tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "shards", tiny_target, response_tokens=0)
    with pytest.raises(KitError, match="no supervised token"):
        main(small_run(shards, tmp_path / "out"))


def test_a_damaged_shard_in_mid_run_is_named_and_keeps_the_last_state(tiny_target: Path, tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "shards", tiny_target)
    file = next(shards.glob("*.arrow"))
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64)
    file.write_bytes(content)
    with pytest.raises(KitError, match="damaged"):
        main(small_run(shards, tmp_path / "out", save_every_steps=1, data__rows_per_step=1))
    assert not (tmp_path / "out").exists()


# -- processes ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_equal_one(shards_folder: Path, tmp_path: Path) -> None:
    """Three rows a step: the second process runs out of them and must not hang; for even shares see test_train_splits."""
    changes = {"data__rows_per_step": 3, "optim__max_steps": 4, "replay__every_steps": 2}
    single, double = tmp_path / "single", tmp_path / "double"
    assert main(small_run(shards_folder, single, **changes)) == 0
    done = run_in_two_processes(small_run(shards_folder, double, **changes))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 processes on cpu" in done.stdout
    for one, two in zip(metrics(single), metrics(double), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        assert two["slot_accuracy"] == pytest.approx(one["slot_accuracy"])
    assert [m["methods"] for m in metrics(double, "replay")] == [m["methods"] for m in metrics(single, "replay")]
    left, right = Drafter.from_pretrained(single).state_dict(), Drafter.from_pretrained(double).state_dict()
    for name, tensor in left.items():
        torch.testing.assert_close(right[name], tensor, rtol=2e-2, atol=1e-3, msg=name)


# -- learning -------------------------------------------------------------------------------------------------------


def test_training_raises_replayed_acceptance(tiny_target: Path, tmp_path: Path) -> None:
    """Every token has one successor and the taps tell the token: the drafter can learn the text by heart."""
    shards = make_shards(tmp_path / "shards", tiny_target, num_rows=48)
    out = tmp_path / "out"
    arguments = small_run(
        shards, out, optim__max_steps=120, optim__lr="5e-3", replay__every_steps=20, log_every_steps=20
    )
    assert main(arguments) == 0
    replays = [line["methods"]["chain"]["acceptance_length_pooled"] for line in metrics(out, "replay")]
    trees = [line["methods"]["DDTree-4"]["acceptance_length_pooled"] for line in metrics(out, "replay")]
    assert replays[0] < 1.7 < 2.5 < replays[-1]  # 4 is the most that a block of 4 can reach
    assert trees[0] < trees[-1]
    losses = [line["loss"] for line in metrics(out)]
    assert losses[-1] < 0.6 * losses[0]
    assert Drafter.from_pretrained(out).config.block_size == 4
    kept = read_provenance(out)["metrics"]["replay_acceptance_length"]
    assert kept["chain"] == max(replays)
