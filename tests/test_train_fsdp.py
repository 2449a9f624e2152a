"""FSDP2 through `accelerate launch`: two processes equal the plain run, and a state goes on under FSDP and without."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from test_train_deepspeed import CHANGES, CONFIGS, assert_equal_runs, launch
from train_helpers import make_shards, small_run

from dflash_kit.errors import KitError
from train.cli import main
from train.optimizer import require_possible
from train.settings import OptimSettings
from train.sharding import settle
from train.state import RunFolder


@pytest.fixture(scope="module")
def shards_folder(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("fsdp") / "shards", tiny_target)


@pytest.mark.slow
def test_two_processes_equal_the_plain_run_and_their_state_goes_on_anywhere(
    shards_folder: Path, tmp_path: Path
) -> None:
    plain, out, alone = tmp_path / "plain", tmp_path / "out", tmp_path / "alone"
    assert main(small_run(shards_folder, plain, **CHANGES)) == 0
    config = CONFIGS / "cpu_fsdp2.yaml"
    done = launch(config, 2, small_run(shards_folder, out, **CHANGES))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 processes on cpu, float32, 1 threads each" in done.stdout and "FSDP2" in done.stdout
    assert_equal_runs(out, plain)
    # As after a kill at step 4 or 5: only the state of step 3 is there.
    ended = load_file(RunFolder(out).step_folder(6) / "weights.safetensors")
    for path in (out, RunFolder(out).step_folder(6)):
        shutil.rmtree(path)
    shutil.copytree(RunFolder(out).state, RunFolder(alone).state)
    done = launch(config, 2, small_run(shards_folder, out, **CHANGES))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 3/6" not in done.stdout and "step 4/6" in done.stdout
    resumed = load_file(RunFolder(out).step_folder(6) / "weights.safetensors")
    for name, tensor in ended.items():
        assert torch.equal(resumed[name], tensor), name
    assert main(small_run(shards_folder, alone, **CHANGES)) == 0
    assert_equal_runs(alone, plain)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"FSDP_VERSION": "1"}, "asks for FSDP 1; set fsdp_version to 2"),
        (
            {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"},
            "fsdp_auto_wrap_policy is TRANSFORMER_BASED_WRAP.*NO_WRAP",
        ),
    ],
)
def test_what_would_break_the_drafter_is_refused(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    plugin = SimpleNamespace(fsdp_version=int(environment.get("FSDP_VERSION", 2)))
    accelerator: Any = SimpleNamespace(
        num_processes=2,
        device=torch.device("cuda"),
        distributed_type=DistributedType.FSDP,
        state=SimpleNamespace(fsdp_plugin=plugin),
    )
    with pytest.raises(KitError, match=message):
        settle(accelerator)


def test_what_needs_whole_weights_is_refused() -> None:
    for settings, message in (
        (OptimSettings(kind="muon"), "optim.kind is muon but under FSDP"),
        (OptimSettings(ema_decay=0.9), "optim.ema_decay is 0.9 but under FSDP"),
    ):
        with pytest.raises(KitError, match=message):
            require_possible(settings, None, fsdp=True)
        require_possible(settings, None)
