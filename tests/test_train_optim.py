"""Muon and the average of weights, each against arithmetic of its own, and what DeepSpeed cannot do with them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_train_loop import make_trainer, metrics, poison
from train_helpers import make_shards, run_in_two_processes, small_run

from dflash_kit.drafter import Drafter
from dflash_kit.errors import KitError
from dflash_kit.replay import replay
from dflash_kit.shards import open_shards
from train.average import WeightAverage
from train.cli import main
from train.optimizer import make_optimizer, require_possible
from train.parallel import Parallel
from train.settings import OptimSettings
from train.state import RunFolder
from train.step import train_step


@pytest.fixture(scope="module")
def shards_folder(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("optim") / "shards", tiny_target)


# -- Muon -----------------------------------------------------------------------------------------------------------


def test_muon_gets_the_matrices_of_the_layers_and_nothing_else(shards_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(shards_folder, tmp_path / "out", optim__kind="muon")
    names = {id(p): name for name, p in trainer.drafter.named_parameters()}
    muon, matrices, norms = ({names[id(p)] for p in group["params"]} for group in trainer.optimizer.param_groups)
    assert matrices == {"fc.weight"}
    assert muon == {name for name in names.values() if name.startswith("layers.") and "_proj." in name}
    assert norms == set(names.values()) - muon - matrices
    assert all("norm" in name for name in norms)


def test_a_muon_step_makes_the_gradient_orthogonal_and_as_large_as_adamws(shards_folder: Path, tmp_path: Path) -> None:
    """The first update is -lr · 0.2 · sqrt(max(rows, columns)) · U S Vᵀ, with U, V of the gradient and S around 1."""
    trainer = make_trainer(shards_folder, tmp_path / "out", optim__kind="muon", optim__muon_lr="4e-3")
    before = {name: p.detach().clone() for name, p in trainer.drafter.named_parameters()}
    gradients: dict[str, torch.Tensor] = {}
    optimizer_step = trainer.optimizer.step

    def capture() -> None:
        gradients.update({n: p.grad.clone() for n, p in trainer.drafter.named_parameters() if p.grad is not None})
        optimizer_step()

    trainer.optimizer.step = capture  # type: ignore[method-assign,assignment]
    # The schedule says half of optim.lr (2e-3), so Muon takes half of its own rate.
    train_step(trainer, next(iter(trainer.feed.steps(0, 1))).result(), lr=1e-3)
    matrices = [name for name in before if "_proj." in name]
    assert len(matrices) == 14
    for name in matrices:
        moved = (trainer.drafter.state_dict()[name] - before[name]).double()
        update = moved / (-2e-3 * 0.2 * max(moved.shape) ** 0.5)
        left, sizes, right = torch.linalg.svd(gradients[name].double(), full_matrices=False)
        strong = sizes > 1e-2 * sizes[0]  # five iterations leave the weakest directions behind
        turned = left.T @ update @ right.T
        assert turned.diagonal()[strong].min() > 0.4, name
        assert turned.diagonal().max() < 1.5, name
        off = turned - torch.diag(turned.diagonal())
        assert off[strong][:, strong].abs().max() < 0.15, name
    for name in ("fc.weight", "norm.weight", "layers.0.self_attn.q_norm.weight"):
        moved = (trainer.drafter.state_dict()[name] - before[name]).abs()
        assert moved.quantile(0.5) == pytest.approx(1e-3, rel=0.02), name  # AdamW's first step


def test_muons_rate_is_optim_lr_where_nothing_else_is_said(shards_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(shards_folder, tmp_path / "out", optim__kind="muon")
    train_step(trainer, next(iter(trainer.feed.steps(0, 1))).result(), lr=1e-3)
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [1e-3] * 3


def test_the_pair_puts_its_state_back_bit_for_bit_and_keeps_its_rates(shards_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(shards_folder, tmp_path / "out", optim__kind="muon")
    feed = list(trainer.feed.steps(0, 3))
    for step in range(2):
        train_step(trainer, feed[step].result(), lr=1e-3)
    twin = make_trainer(shards_folder, tmp_path / "twin", optim__kind="muon")
    twin.drafter.load_state_dict(trainer.drafter.state_dict())
    torch.save(trainer.optimizer.state_dict(), tmp_path / "state.pt")
    twin.optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for one in (trainer, twin):
        train_step(one, feed[2].result(), lr=5e-4)
        assert [group["lr"] for group in one.optimizer.param_groups] == [5e-4] * 3
    for name, tensor in trainer.drafter.state_dict().items():
        assert torch.equal(tensor, twin.drafter.state_dict()[name]), name


def test_muon_learns(tiny_target: Path, tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "shards", tiny_target, num_rows=48)
    changes = {"optim__kind": "muon", "optim__max_steps": 60, "optim__lr": "5e-3", "optim__muon_lr": "1e-2"}
    out = tmp_path / "out"
    assert main(small_run(shards, out, **changes, replay__every_steps=0, log_every_steps=20)) == 0
    losses = [line["loss"] for line in metrics(out)]
    assert losses[-1] < 0.7 * losses[0]


# -- average --------------------------------------------------------------------------------------------------------


def test_the_average_is_the_recursion_over_the_weights_of_every_step(shards_folder: Path, tmp_path: Path) -> None:
    out, decay = tmp_path / "out", 0.7
    changes: dict[str, Any] = {"optim__ema_decay": decay, "optim__max_steps": 8, "save_every_steps": 1, "keep_last": 9}
    first = make_trainer(shards_folder, tmp_path / "first", **changes)
    wanted = {name: tensor.double() for name, tensor in first.drafter.state_dict().items()}
    assert main(small_run(shards_folder, out, replay__every_steps=4, **changes)) == 0
    folder = RunFolder(out)
    for step in range(1, 9):
        weights = load_file(folder.step_folder(step) / "weights.safetensors")
        keep = min(decay, (1 + step) / (10 + step))
        wanted = {name: keep * mean + (1 - keep) * weights[name].double() for name, mean in wanted.items()}
        kept = load_file(folder.step_folder(step) / "average.safetensors")
        assert kept.keys() == wanted.keys()
        exported = Drafter.from_pretrained(folder.checkpoint(step)).state_dict()
        for name, tensor in kept.items():
            assert tensor.dtype == torch.float32
            torch.testing.assert_close(tensor.double(), wanted[name], rtol=1e-5, atol=1e-7)
            assert torch.equal(exported[name], tensor.bfloat16()), f"the checkpoint's {name} is not the average"
            if step > 2:
                assert not torch.equal(tensor, weights[name])


def test_replay_measures_the_average(shards_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    changes = {"optim__ema_decay": 0.9, "optim__max_steps": 10, "optim__lr": "1e-2", "replay__every_steps": 0}
    trainer = make_trainer(shards_folder, tmp_path / "job", **changes)
    assert main(small_run(shards_folder, out, **changes)) == 0
    place = RunFolder(out).step_folder(10)

    def rates(file: str) -> list[float]:
        drafter = Drafter(trainer.job.drafter).eval()
        drafter.load_state_dict(load_file(place / file))
        rows = [open_shards(shards_folder)[i] for i in trainer.job.eval_rows]
        found = replay(drafter, trainer.ends, rows, [4], eos_token_ids=trainer.job.spec.eos_token_ids)
        return [value.acceptance_length_pooled for value in found.values()]  # type: ignore[misc]

    (line,) = metrics(out, "replay")
    assert [value["acceptance_length_pooled"] for value in line["methods"].values()] == rates("average.safetensors")


def test_a_skipped_step_leaves_the_average_alone(
    shards_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {2})
    out = tmp_path / "out"
    changes: dict[str, Any] = {"optim__ema_decay": 0.7, "optim__max_steps": 4, "save_every_steps": 1, "keep_last": 9}
    assert main(small_run(shards_folder, out, **changes)) == 0
    averages = [load_file(RunFolder(out).step_folder(step) / "average.safetensors") for step in (1, 2, 3, 4)]
    same = [
        all(torch.equal(tensor, after[name]) for name, tensor in before.items())
        for before, after in itertools.pairwise(averages)
    ]
    assert same == [False, True, False]


def test_the_average_of_bfloat16_weights_is_float32() -> None:
    """As under DeepSpeed, where the weights of each process are bfloat16."""
    module = torch.nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
    average = WeightAverage(module, 0.5)
    begin = module.weight.detach().float()
    with torch.no_grad():
        module.weight += 1
    average.update(module, 100)
    kept = average.copies()["weight"]
    assert kept.dtype == torch.float32 and torch.equal(kept, begin.lerp(module.weight.detach().float(), 0.5))


# -- processes ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_with_muon_and_average_equal_one(shards_folder: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"optim__kind": "muon", "optim__ema_decay": 0.6, "optim__max_steps": 4}
    single, double = tmp_path / "single", tmp_path / "double"
    assert main(small_run(shards_folder, single, **changes)) == 0
    done = run_in_two_processes(small_run(shards_folder, double, **changes))
    assert done.returncode == 0, done.stderr[-2000:]
    for one, two in zip(metrics(single), metrics(double), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-3)  # Muon works in bfloat16
    for name, tensor in load_file(RunFolder(single).step_folder(4) / "average.safetensors").items():
        other = load_file(RunFolder(double).step_folder(4) / "average.safetensors")[name]
        torch.testing.assert_close(other, tensor, rtol=2e-2, atol=1e-3, msg=name)


@pytest.mark.parametrize(
    ("changes", "stage", "message"),
    [
        ({"optim__kind": "muon"}, 1, r"optim\.kind is muon .*DeepSpeed \(ZeRO 1\).*adamw"),
        ({"optim__kind": "muon"}, 0, r"optim\.kind is muon .*DeepSpeed \(ZeRO 0\).*adamw"),
        ({"optim__ema_decay": 0.9}, 3, r"optim\.ema_decay is 0\.9 .*ZeRO 3 .*ZeRO 1 or 2"),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_what_deepspeed_cannot_do_is_refused_before_anything_is_written(
    shards_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    stage: int,
    message: str,
    dry_run: bool,
) -> None:
    monkeypatch.setattr(Parallel, "zero_stage", property(lambda _: stage))
    with pytest.raises(KitError, match=message):
        main(small_run(shards_folder, tmp_path / "out", dry_run=json.dumps(dry_run), **changes))
    assert list(tmp_path.iterdir()) == []


def test_the_rest_is_allowed() -> None:
    require_possible(OptimSettings(kind="muon", ema_decay=0.9), None)
    for stage in (0, 1, 2):
        require_possible(OptimSettings(ema_decay=0.9), stage)
    require_possible(OptimSettings(), 3)
    assert isinstance(make_optimizer(torch.nn.Linear(2, 2), OptimSettings()), torch.optim.AdamW)  # type: ignore[arg-type]
