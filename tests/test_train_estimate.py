"""What a dry run says: bytes by part against the real tensors, ways of sharing out by hand, times by counted operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_loop import make_trainer
from train_helpers import make_shards, small_run

from dflash_kit.config import parse_config
from train.cli import TrainConfig
from train.duration import USUAL_SHARE, exchanged_bytes, full_row, step_seconds
from train.estimate import SHARDINGS, Machine, activation_bytes, memory_bytes, num_parameters
from train.flops import seen_pairs
from train.job import Job, prepare
from train.losses import CHUNK_BYTES
from train.plan import estimate_lines
from train.rates import Rates
from train.step import forward_loss, train_step
from train.sums import StepSums

CPU = Machine(num_processes=1, on_gpu=False, bf16=False)
BY_NAME = {sharding.name: sharding for sharding in SHARDINGS}
RATES = Rates(matrix_flop_per_s=1e12, memory_bytes_per_s=1e10, link_bytes_per_s=2e10, exchange_bytes_per_s=1e9)


@pytest.fixture(scope="module")
def shards_folder(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("estimate") / "shards", tiny_target, response_tokens=150, num_rows=8)


def job_of(shards: Path, tmp_path: Path, **changes: Any) -> Job:
    return prepare(parse_config("train", TrainConfig, small_run(shards, tmp_path / "out", **changes), description=""))


@pytest.mark.parametrize(
    "changes",
    [
        {"data__anchors": 64, "drafter__block_size": 8},
        {"data__anchors": 32, "drafter__block_size": 16, "drafter__num_hidden_layers": 5},
    ],
)
def test_bytes_by_part_are_those_of_the_real_tensors(shards_folder: Path, tmp_path: Path, changes: Any) -> None:
    trainer = make_trainer(shards_folder, tmp_path / "out", data__seq_len=256, **changes)
    rows = next(iter(trainer.feed.steps(0, 1))).result()
    frozen = [*trainer.drafter.parameters(), trainer.ends.head, trainer.ends.embedding]
    known = {tensor.untyped_storage().data_ptr() for tensor in frozen}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward_loss(trainer, rows[0], StepSums(trainer.job.drafter.num_draft_tokens)).backward()
    estimate = activation_bytes(trainer.job, CPU) - 2 * CHUNK_BYTES["cpu"]
    assert 0.85 * estimate < sum(kept.values()) < 1.15 * estimate
    found = memory_bytes(trainer.job, BY_NAME["no ZeRO, DDP"], CPU)
    assert found.gradients == sum(p.grad.nbytes for p in trainer.drafter.parameters() if p.grad is not None)
    train_step(trainer, rows, lr=1e-3)
    moments = (tensor for state in trainer.optimizer.state.values() for tensor in state.values())
    assert found.moments == sum(tensor.nbytes for tensor in moments if tensor.numel() > 1)
    assert found.weights == sum(p.nbytes for p in trainer.drafter.parameters())
    assert found.ends == trainer.ends.head.nbytes + trainer.ends.embedding.nbytes


def test_ways_of_sharing_out_by_hand(shards_folder: Path, tmp_path: Path) -> None:
    """Four processes in bfloat16: 2 bytes of weights and of gradients, 4 of master weights, 8 of moments a value."""
    job = job_of(shards_folder, tmp_path, optim__ema_decay=0.9)
    machine, count = Machine(num_processes=4, on_gpu=True, bf16=True), num_parameters(job.drafter)
    per_value = {
        "no ZeRO, DDP": (4, 4, 8, 0),
        "ZeRO 1": (2 + 1, 2, 2, 0),
        "ZeRO 2": (2 + 1, 0.5, 2, 0),
        "ZeRO 3, FSDP2": (0.5 + 1, 0.5, 2, 0),
        "ZeRO 2 offload": (2, 2, 0, 4),
    }
    for name, wanted in per_value.items():
        found = memory_bytes(job, BY_NAME[name], machine)
        assert (found.weights, found.gradients, found.moments, found.host) == tuple(count * n for n in wanted), name
        assert found.average == 4 * count
        assert found.device == sum(getattr(found, part) for part in found.__slots__ if part != "host")


def test_times_follow_from_counted_operations_and_what_is_sent(shards_folder: Path, tmp_path: Path) -> None:
    job = job_of(shards_folder, tmp_path, data__rows_per_step=8)
    machine, count = Machine(num_processes=4, on_gpu=True, bf16=True), num_parameters(job.drafter)
    arithmetic = 2 * sum(job.flop_counter.by_part(full_row(job)).values()) / 1e12  # two micro-steps
    sent = {"no ZeRO, DDP": 8, "ZeRO 1": 4, "ZeRO 2": 6, "ZeRO 3, FSDP2": 12}
    for name, bytes_per_value in sent.items():
        assert exchanged_bytes(job, BY_NAME[name], machine) == bytes_per_value * count * 3 // 4
        step = step_seconds(job, BY_NAME[name], machine, RATES)
        added = bytes_per_value * count * 3 // 4 / 1e9
        assert step.least == pytest.approx(arithmetic + added)
        assert step.usual == pytest.approx(arithmetic / USUAL_SHARE + added)
    plain, offload = (step_seconds(job, BY_NAME[name], machine, RATES) for name in ("ZeRO 2", "ZeRO 2 offload"))
    assert offload.least - plain.least == pytest.approx(28 * count / 4 / 1e10 + 3 * 2 * count / 4 / 2e10)


def test_the_size_of_an_average_row_is_near_that_of_real_ones(shards_folder: Path, tmp_path: Path) -> None:
    job = job_of(shards_folder, tmp_path, data__seq_len=256, data__anchors=32)
    rows = [job.packer(index) for index in job.plan.rows(0, 8)]
    pairs = [sum(seen_pairs(row.layout, job.drafter)) for row in rows if row.layout.used.all()]
    assert sum(full_row(job).pairs) == pytest.approx(sum(pairs) / len(pairs), rel=0.15)
    real = [job.flop_counter(row) for row in rows if row.layout.used.all()]
    assert sum(job.flop_counter.by_part(full_row(job)).values()) == pytest.approx(sum(real) / len(real), rel=0.1)


def test_every_way_has_a_line_with_its_sizes(shards_folder: Path, tmp_path: Path) -> None:
    job = job_of(shards_folder, tmp_path, optim__max_steps=3000)
    lines = estimate_lines(job, Machine(num_processes=2, on_gpu=True, bf16=True), RATES)
    heading = next(line for line in lines if line.startswith("GiB a process"))
    columns = heading.replace("GiB a process", "").replace("s a step", "s_a_step").split()
    assert columns[:8] == ["weights", "gradients", "moments", "activations", "ends", "average", "device", "host"]
    for name in BY_NAME:
        row = next(line for line in lines if line.startswith(name))
        assert len(row.removeprefix(name).split()) == len(columns) + 1  # "least – usual" is three words under one title
    assert "to the GPU 20.0 GB/s" in "\n".join(lines) and "for 3,000 steps" in lines[-1]
