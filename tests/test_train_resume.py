"""Killed anywhere, the same command goes on as if nothing had happened; another command is refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from train_helpers import (
    PowerCutError,
    assert_same_run,
    cut_power,
    lasting,
    launched_environment,
    make_shards,
    small_run,
)

from dflash_kit.errors import KitError
from helpers import REPO, until
from train import loop
from train.cli import main
from train.state import RunFolder

MAX_STEPS = 12


@pytest.fixture(scope="module")
def shards_folder(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("resume") / "shards", tiny_target)


@pytest.fixture(scope="module")
def unbroken(shards_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to, with noise so that all randomness is in play."""
    out = tmp_path_factory.mktemp("unbroken") / "out"
    assert main(arguments(shards_folder, out)) == 0
    return out


def arguments(shards: Path, out: Path, **changes: Any) -> list[str]:
    return small_run(shards, out, **({"data__feature_noise": 0.05, "optim__max_steps": MAX_STEPS} | changes))


@pytest.mark.parametrize(
    ("place", "name", "call"),
    [
        ("train.loop", "begin_step", 1),  # before anything was saved
        ("train.loop", "begin_step", 7),  # between two saved states
        ("train.loop", "begin_step", 9),  # right behind a saved state
        ("train.loop", "record_replay", 1),
        ("train.loop", "save", 2),
        ("train.outcome", "save_state", 2),  # the checkpoint is written, the state is not
        ("train.state", "_publish", 2),  # the state is written but not renamed
        ("train.loop", "finish", 1),  # all steps done, the result not written
    ],
)
def test_a_run_killed_at_any_instant_resumes_bit_for_bit(
    shards_folder: Path, unbroken: Path, tmp_path: Path, place: str, name: str, call: int
) -> None:
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        cut_power(patch, sys.modules[place], name, call)
        with pytest.raises(PowerCutError):
            main(arguments(shards_folder, out))
    assert not out.exists()
    torch.manual_seed(99)  # whatever the new process's random state is
    assert main(arguments(shards_folder, out)) == 0
    assert_same_run(out, unbroken, MAX_STEPS)


EVERY_OPTION = {
    "optim__kind": "muon",
    "optim__muon_lr": "1e-3",
    "optim__weight_decay": 0.01,
    "optim__schedule": "wsd",
    "optim__decay_fraction": 0.5,
    "optim__final_fraction": 0.1,
    "optim__ema_decay": 0.8,
}


@pytest.fixture(scope="module")
def unbroken_with_options(shards_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("options") / "out"
    assert main(arguments(shards_folder, out, **EVERY_OPTION)) == 0
    return out


@pytest.mark.parametrize(("place", "name", "call"), [("train.loop", "begin_step", 7), ("train.state", "_publish", 2)])
def test_muon_average_and_schedule_resume_bit_for_bit(
    shards_folder: Path, unbroken_with_options: Path, tmp_path: Path, place: str, name: str, call: int
) -> None:
    """Killed between two saved states, and before the end of the stable part of the schedule."""
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        cut_power(patch, sys.modules[place], name, call)
        with pytest.raises(PowerCutError):
            main(arguments(shards_folder, out, **EVERY_OPTION))
    torch.manual_seed(99)
    assert main(arguments(shards_folder, out, **EVERY_OPTION)) == 0
    assert_same_run(out, unbroken_with_options, MAX_STEPS)
    rates = [line["lr"] for line in lasting(out) if line["kind"] == "train"]
    assert rates[:7] == [2e-3] * 7
    assert rates[7:] == pytest.approx([2e-3 * (0.1 + 0.9 * left / 6) for left in (5, 4, 3, 2, 1)])
    state = torch.load(RunFolder(out).step_folder(MAX_STEPS) / "optimizer.pt", weights_only=True)["optimizer"]
    assert len(state["muon"]["state"]) == 14 and len(state["adamw"]["state"]) == 11
    assert (RunFolder(out).step_folder(MAX_STEPS) / "average.safetensors").is_file()


def test_sigkill_of_a_real_process(shards_folder: Path, tmp_path: Path) -> None:
    """A long run is killed twice from outside and equals the same run left alone."""
    steps = 40
    changes = {"optim__max_steps": steps, "save_every_steps": 10, "replay__every_steps": 20}
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    assert main(arguments(shards_folder, alone, **changes)) == 0
    for least in (3, 14):
        with running(arguments(shards_folder, killed, **changes)) as process:
            wait_for_step(killed, least, process)
            process.send_signal(signal.SIGKILL)
    assert main(arguments(shards_folder, killed, **changes)) == 0
    assert_same_run(killed, alone, steps)


def test_sigterm_saves_and_exits_with_status_0(shards_folder: Path, tmp_path: Path) -> None:
    steps = 10**6  # far more than happen
    out = tmp_path / "out"
    changes = {"optim__max_steps": steps, "save_every_steps": steps, "replay__every_steps": 0}
    with running(arguments(shards_folder, out, **changes)) as process:
        wait_for_step(out, 3, process)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    (saved,) = RunFolder(out).steps()
    assert 3 <= saved < steps
    assert f"stopped at step {saved} as asked" in output
    assert not out.exists()


@contextmanager
def running(args: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A trainer in a process of its own, which does not outlive the block."""
    with subprocess.Popen(
        [sys.executable, str(REPO / "train" / "run.py"), *args],
        env=launched_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    metrics = RunFolder(out).metrics

    def is_there() -> bool:
        lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
        return any(json.loads(line)["step"] >= step for line in lines)

    until(is_there, process)


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafter__block_size": 5}, r"block_size = 4 but this command says 5"),
        ({"drafter__mask_token_id": 7}, r"mask_token_id = 261 but this command says 7"),
        (
            {"drafter__num_hidden_layers": 3},
            r"layer_causal = \[true, false\] but this command says \[true, false, false\]",
        ),
        ({"optim__lr": "1e-3"}, r"settings\.optim\.lr = 0\.002 but this command says 0\.001"),
        ({"optim__max_steps": 20}, r"max_steps = 12 but this command says 20"),
        ({"optim__schedule": "linear"}, r'settings\.optim\.schedule = "cosine" but this command says "linear"'),
        ({"optim__ema_decay": 0.9}, r"settings\.optim\.ema_decay = 0\.0 but this command says 0\.9"),
        ({"seed": 1}, r"settings\.seed = 0 but this command says 1"),
        ({"data__seq_len": 80}, r"seq_len = 64 but this command says 80"),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_changed_settings_are_refused_with_both_values(
    shards_folder: Path, unbroken: Path, tmp_path: Path, changes: dict[str, Any], message: str, finished: bool
) -> None:
    out = unbroken if finished else begun_run(shards_folder, tmp_path / "out")
    with pytest.raises(KitError, match=message):
        main(arguments(shards_folder, out, **changes))


def begun_run(shards: Path, out: Path) -> Path:
    """A run that died before its first step."""
    with pytest.MonkeyPatch.context() as patch:
        cut_power(patch, loop, "begin_step", 1)
        with pytest.raises(PowerCutError):
            main(arguments(shards, out))
    return out


def test_other_taps_and_other_rows_are_refused(shards_folder: Path, tiny_target: Path, tmp_path: Path) -> None:
    out = begun_run(shards_folder, tmp_path / "out")
    taps = make_shards(tmp_path / "taps", tiny_target, num_taps=3)
    with pytest.raises(KitError, match=r"target_layer_ids = \[1, 2\] but this command says \[1, 2, 3\]"):
        main(arguments(taps, out))
    rows = make_shards(tmp_path / "rows", tiny_target, num_rows=30)
    with pytest.raises(KitError, match=r"eval_rows|train_rows"):
        main(arguments(rows, out))
    sampled = make_shards(tmp_path / "float", tiny_target, dtype="float32")
    with pytest.raises(KitError, match=r'shards_header\.dtype = "bfloat16" but this command says "float32"'):
        main(arguments(sampled, out))


def test_printing_and_saving_may_change_between_runs(shards_folder: Path, unbroken: Path, tmp_path: Path) -> None:
    out = begun_run(shards_folder, tmp_path / "out")
    assert main(arguments(shards_folder, out, save_every_steps=5, keep_last=1)) == 0
    assert (out / "model.safetensors").read_bytes() == (unbroken / "model.safetensors").read_bytes()


def test_old_states_and_checkpoints_go_but_the_best_stays(shards_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(arguments(shards_folder, out, save_every_steps=2, replay__every_steps=3, keep_last=2)) == 0
    folder = RunFolder(out)
    assert folder.steps() == [10, 12]
    kept = sorted(int(place.name.removeprefix("step-")) for place in folder.checkpoints.iterdir())
    best = json.loads((folder.step_folder(12) / "counters.json").read_text())["best_step"]
    assert kept == sorted({10, 12, best})


def test_a_finished_run_is_left_alone(shards_folder: Path, unbroken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (unbroken / "provenance.json").stat().st_mtime_ns
    capsys.readouterr()
    assert main(arguments(shards_folder, unbroken)) == 0
    assert "is finished already; nothing to do" in capsys.readouterr().out
    assert (unbroken / "provenance.json").stat().st_mtime_ns == before


def test_a_damaged_state_is_named(shards_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        cut_power(patch, loop, "begin_step", 7)
        with pytest.raises(PowerCutError):
            main(arguments(shards_folder, out))
    place = RunFolder(out).step_folder(4) / "optimizer.pt"
    place.write_bytes(place.read_bytes()[:100])
    with pytest.raises(
        KitError, match=r"step-00000004/optimizer\.pt cannot be loaded .*delete the folder .*step-00000004 to"
    ):
        main(arguments(shards_folder, out))
