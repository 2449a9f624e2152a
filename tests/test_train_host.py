"""The host and the device: what is copied, when numbers are read, and that neither changes a run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_loop import make_trainer, metrics
from torch.utils._python_dispatch import TorchDispatchMode
from train_helpers import PowerCutError, assert_same_run, cut_power, make_shards, small_run

from dflash_kit import shard_states
from dflash_kit.errors import KitError
from dflash_kit.masks import flex_mask
from dflash_kit.shard_states import FP8, VALUES, dequantise
from train import loop
from train import step as step_module
from train.batches import PackedRow
from train.cli import main
from train.feed import reading_threads
from train.state import RunFolder
from train.step import begin_step
from train.sums import PendingStep
from train.trainer import Trainer
from train.transfer import Bundle

READS = ("_local_scalar_dense", "bincount", "nonzero", "masked_select", "equal", "repeat_interleave.Tensor", "_unique2")
"""Operations that wait for a GPU."""


@pytest.fixture(scope="module")
def shards_folder(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("host") / "shards", tiny_target)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that reads a step's numbers as late as a GPU does."""
    monkeypatch.setattr(Trainer, "reads_late", True)


# -- copies ---------------------------------------------------------------------------------------------------------


def test_codes_become_the_same_bits_on_a_device_as_in_the_reading_thread() -> None:
    """All 256 codes with many scales; on a GPU ``dequantise`` converts them with torch, here with a table."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256).expand(500, -1).contiguous().view(FP8)
    scales = torch.rand(500, 4, generator=torch.Generator().manual_seed(0)).exp() * 1e-3
    there = (codes.float().view(500, 4, 64) * scales[..., None]).to(torch.bfloat16).flatten(1)
    here = dequantise(codes, scales)
    sound = torch.from_numpy(VALUES).isfinite().expand(500, -1)
    assert sound.sum() == 500 * 254 and here.dtype == torch.bfloat16
    assert torch.equal(here.view(torch.int16)[sound], there.view(torch.int16)[sound])


@pytest.mark.parametrize("bundled", [False, True])
@pytest.mark.parametrize("chunk_bytes", [1 << 12, 4 << 20])
def test_a_row_of_codes_is_the_row_of_taps_once_it_is_on_the_device(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundled: bool, chunk_bytes: int
) -> None:
    monkeypatch.setitem(shard_states.CHUNK_BYTES, "cpu", chunk_bytes)
    shards = make_shards(tmp_path / "shards", tiny_target, dtype="fp8", num_rows=8)
    trainer = make_trainer(shards, tmp_path / "out")
    packer = trainer.job.packer
    assert packer.for_gpu().keeps_codes and not replace(packer, feature_noise=0.1).for_gpu().keeps_codes
    index = trainer.job.plan.step(0, 0, 1)[0]
    taps, codes = packer(index), replace(packer, keeps_codes=True)(index)
    assert codes.features.dtype == FP8 and codes.scales is not None and taps.scales is None and taps.features.any()
    alone = [trainer.job.shards[packer.row_indices[i]].hidden_states for i in index.members]
    torch.testing.assert_close(taps.features[: len(alone[0])], alone[0], rtol=0, atol=0)
    if bundled:
        codes = codes.bundled(pin=False)
    moved = codes.to(torch.device("cpu"), torch.bfloat16)
    assert moved.scales is None
    assert_same_tensors(moved, taps)
    assert_same_tensors(codes.trimmed().to(torch.device("cpu"), torch.bfloat16), taps.trimmed())


def assert_same_tensors(left: PackedRow, right: PackedRow) -> None:
    for a, b in zip([left.features, *left.small_tensors], [right.features, *right.small_tensors], strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_a_bundle_keeps_types_shapes_and_bits() -> None:
    tensors = [torch.arange(7), torch.tensor([True, False, True]), torch.empty(0), torch.randn(3, 5), torch.ones(1)]
    bundle = Bundle.of(tensors, pin=False)
    for got, want in zip(bundle.to(torch.device("cpu")).tensors(), tensors, strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)
        assert got.numel() == 0 or (got.data_ptr() - bundle.buffer.data_ptr()) % 256 == 0


def test_several_reading_threads_take_one_core_each_and_leave_the_trainer_its_own() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with reading_threads(3) as several, reading_threads(1) as one:
            assert several.submit(torch.get_num_threads).result() == 1
            assert one.submit(torch.get_num_threads).result() >= 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# -- waiting --------------------------------------------------------------------------------------------------------


class Reads(TorchDispatchMode):
    """Writes down the operations that would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in READS):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["decay", "dpace", "kl"])
def test_nothing_is_read_back_before_the_step_is_begun(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """From the copy of a row to the optimizer: on a GPU each read in between would let it run dry."""
    shards = make_shards(tmp_path / "shards", tiny_target, last_hidden=True, num_rows=8)
    trainer = make_trainer(shards, tmp_path / "out", loss__kind=kind)
    rows = next(iter(trainer.feed.steps(0, 1))).result()
    reads = Reads()

    def watched(function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with reads:
                return function(*args, **kwargs)

        return run

    for name in ("forward_loss", "_apply"):
        monkeypatch.setattr(step_module, name, watched(getattr(step_module, name)))
    monkeypatch.setattr(trainer.parallel.accelerator, "backward", watched(trainer.parallel.accelerator.backward))
    pending = begin_step(trainer, rows, 1e-3)
    with reads:
        flex_mask(rows[0].layout, causal=True, window=16)
    assert reads.found == []
    with reads:
        float(torch.ones(()))
    assert reads.found  # it would have been seen
    assert pending.result().applied


@pytest.mark.gpu
def test_a_gpu_is_not_waited_for_before_the_step_is_begun(tiny_target: Path, tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "shards", tiny_target, dtype="fp8")
    trainer = make_trainer(shards, tmp_path / "out")
    steps = trainer.feed.steps(0, 4)
    for _ in range(2):  # compiles
        begin_step(trainer, next(steps).result(), 1e-3).result()
    rows = next(steps).result()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = begin_step(trainer, rows, 1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pending.result().applied
    steps.close()


# -- late numbers ---------------------------------------------------------------------------------------------------


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Make the loss of some steps NaN: they have two packed rows each, an epoch has 11."""
    real, bad = step_module.forward_loss, {divmod(2 * step, 11) for step in steps}

    def forward_loss(trainer: Trainer, row: PackedRow, sums: Any) -> torch.Tensor:
        loss = real(trainer, row, sums)
        return loss * math.nan if (row.index.epoch, row.index.row) in bad else loss

    monkeypatch.setattr(step_module, "forward_loss", forward_loss)


def arguments(shards: Path, out: Path, **changes: Any) -> list[str]:
    return small_run(
        shards, out, save_every_steps=8, log_every_steps=4, replay__max_rows=0, replay__every_steps=0, **changes
    )


def test_numbers_read_late_change_nothing(shards_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad steps before a line of the log, behind one, and last but one; the late run is killed and resumed besides."""
    poison(monkeypatch, {3, 4, 10})
    prompt, late = tmp_path / "prompt", tmp_path / "late"
    order = note_order(monkeypatch)
    assert main(arguments(shards_folder, prompt)) == 0
    assert order == list("br" * 12)
    order.clear()
    monkeypatch.setattr(Trainer, "reads_late", True)
    with pytest.MonkeyPatch.context() as patch:
        cut_power(patch, loop, "begin_step", 11)
        with pytest.raises(PowerCutError):
            main(arguments(shards_folder, late))
    # A line behind step 4, a state behind step 8: there numbers are read at once.
    assert "".join(order) == "bbrbrbrr" + "bbrbrbrr" + "bbr"
    assert main(arguments(shards_folder, late)) == 0
    assert_same_run(prompt, late, 12)
    assert [line["skipped_steps"] for line in metrics(late)] == [1, 2, 3]
    assert bad_lines(prompt) == bad_lines(late) and [line["step"] for line in bad_lines(late)] == [4, 5, 11]


def bad_lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in RunFolder(out).bad_steps.read_text().splitlines()]


def note_order(patch: pytest.MonkeyPatch) -> list[str]:
    """b where a step is begun, r where its numbers are read."""
    order: list[str] = []
    begin, result = loop.begin_step, PendingStep.result

    def begun(*args: Any, **kwargs: Any) -> PendingStep:
        order.append("b")
        return begin(*args, **kwargs)

    def read(step: PendingStep) -> Any:
        order.append("r")
        return result(step)

    patch.setattr(loop, "begin_step", begun)
    patch.setattr(PendingStep, "result", read)
    return order


def test_bad_steps_that_are_read_late_stop_the_run(
    shards_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: None
) -> None:
    poison(monkeypatch, {4, 5, 6})
    out = tmp_path / "out"
    with pytest.raises(KitError, match=r"3 steps in a row \(up to step 7\)"):
        main(arguments(shards_folder, out, optim__max_bad_steps=3))
    assert not out.exists() and [line["step"] for line in bad_lines(out)] == [5, 6, 7]


def test_the_step_before_a_damaged_row_is_not_lost(
    shards_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: None
) -> None:
    poison(monkeypatch, {1})
    real, calls = loop._take, [0]

    def take(future: Any) -> Any:
        calls[0] += 1
        return ([], KitError("row 7 is damaged")) if calls[0] == 3 else real(future)

    monkeypatch.setattr(loop, "_take", take)
    with pytest.raises(KitError, match="row 7 is damaged"):
        main(arguments(shards_folder, tmp_path / "out"))
    assert [line["step"] for line in bad_lines(tmp_path / "out")] == [2]
