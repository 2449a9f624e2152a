"""Real DeepSpeed through `accelerate launch`: ZeRO 1, 2 (offloading, too) and 3 in two processes equal the plain run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_helpers import free_port, launched_environment, make_shards, small_run

from dflash_kit.drafter import Drafter
from dflash_kit.errors import KitError
from helpers import REPO, requires_deepspeed
from train.cli import main
from train.parallel import choose_dtype, own_deepspeed_settings
from train.state import RunFolder

CONFIGS = REPO / "configs" / "accelerate"
CHANGES: dict[str, Any] = {
    "data__rows_per_step": 3,  # two processes: the second one's last micro-step is empty
    "optim__max_steps": 6,
    "replay__every_steps": 3,
    "save_every_steps": 3,
}


@pytest.fixture(scope="module")
def shards_folder(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("deepspeed") / "shards", tiny_target)


@pytest.fixture(scope="module")
def plain(shards_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in one process without DeepSpeed."""
    out = tmp_path_factory.mktemp("plain") / "out"
    assert main(small_run(shards_folder, out, **CHANGES)) == 0
    return out


def launch(config: Path, num_processes: int, args: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", f"--config_file={config}"]
    return subprocess.run(
        [
            *command,
            f"--num_processes={num_processes}",
            f"--main_process_port={free_port()}",
            str(REPO / "train" / "run.py"),
            *args,
        ],
        cwd=REPO,
        env=launched_environment(),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def metrics(out: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = map(json.loads, RunFolder(out).metrics.read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def assert_equal_runs(out: Path, plain: Path) -> None:
    for ours, theirs in zip(metrics(out), metrics(plain), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["lr"] == theirs["lr"]
    # Replay needs whole weights: under ZeRO 3 they have to be gathered first.
    for ours, theirs in zip(metrics(out, "replay"), metrics(plain, "replay"), strict=True):
        assert ours["methods"].keys() == theirs["methods"].keys()
        for method, values in ours["methods"].items():
            wanted = theirs["methods"][method]
            # Means over prompts add up in the order of the processes.
            assert values.pop("acceptance_length_per_prompt") == pytest.approx(
                wanted.pop("acceptance_length_per_prompt")
            )
            assert values == wanted
    left, right = Drafter.from_pretrained(out).state_dict(), Drafter.from_pretrained(plain).state_dict()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=2e-2, atol=1e-3, msg=name)


@requires_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize(("stage", "more"), [(1, ""), (2, "\n  offload_optimizer_device: cpu"), (3, "")])
def test_zero_in_two_processes_equals_the_plain_run(
    shards_folder: Path, plain: Path, tmp_path: Path, stage: int, more: str
) -> None:
    config, out = tmp_path / "accelerate.yaml", tmp_path / "out"
    text = (CONFIGS / "cpu_zero1.yaml").read_text()
    config.write_text(text.replace("zero_stage: 1", f"zero_stage: {stage}{more}"))
    done = launch(config, 2, small_run(shards_folder, out, **CHANGES))
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        f"2 processes on cpu, float32, 1 threads each (of {os.cpu_count()} cores), DeepSpeed ZeRO {stage}"
        in done.stdout
    )
    assert_equal_runs(out, plain)
    if stage != 1:
        return
    # It resumes, too: as after a kill at step 4 or 5, only the state of step 3 is there.
    folder = RunFolder(out)
    for path in (out, folder.step_folder(6)):
        for file in sorted(path.rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
        path.rmdir()
    done = launch(config, 2, small_run(shards_folder, out, **CHANGES))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 3/6" not in done.stdout and "step 4/6" in done.stdout
    assert_equal_runs(out, plain)


@requires_deepspeed
@pytest.mark.slow
def test_fine_tuning_with_an_average_under_zero_2_equals_the_plain_run_and_resumes(
    shards_folder: Path, plain: Path, tmp_path: Path
) -> None:
    changes = CHANGES | {"init": plain, "optim__ema_decay": 0.6, "keep_last": 3}
    alone, out, config = tmp_path / "alone", tmp_path / "out", tmp_path / "accelerate.yaml"
    assert main(small_run(shards_folder, alone, **changes)) == 0
    config.write_text((CONFIGS / "cpu_zero1.yaml").read_text().replace("zero_stage: 1", "zero_stage: 2"))
    done = launch(config, 2, small_run(shards_folder, out, **changes))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "DeepSpeed ZeRO 2" in done.stdout
    assert_equal_runs(out, alone)
    assert [m["step"] for m in metrics(out, "replay")] == [0, 3, 6]
    file = RunFolder(out).step_folder(6) / "average.safetensors"
    average = load_file(file)
    for name, tensor in load_file(RunFolder(alone).step_folder(6) / "average.safetensors").items():
        torch.testing.assert_close(average[name], tensor, rtol=2e-2, atol=1e-3, msg=name)
    for path in (out, RunFolder(out).step_folder(6)):
        shutil.rmtree(path)
    done = launch(config, 2, small_run(shards_folder, out, **changes))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 3/6" not in done.stdout and "step 4/6" in done.stdout
    for name, tensor in load_file(file).items():
        assert torch.equal(tensor, average[name]), name


@requires_deepspeed
@pytest.mark.slow
def test_the_demos_launcher_config_runs_in_one_process(shards_folder: Path, plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = launch(CONFIGS / "cpu_zero1.yaml", 1, small_run(shards_folder, out, **CHANGES))
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"1 process on cpu, float32, 1 threads each (of {os.cpu_count()} cores), DeepSpeed ZeRO 1" in done.stdout
    assert_equal_runs(out, plain)


# -- one owner each -------------------------------------------------------------------------------------------------


def own(config: dict[str, Any]) -> dict[str, Any]:
    own_deepspeed_settings(config, num_micro_steps=4, world_size=2, clip=1.0)
    return config


def test_an_offloaded_optimizer_is_ours_and_needs_no_compiler() -> None:
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert own(offload)["zero_force_ds_cpu_optimizer"] is False
    assert own(offload | {"zero_force_ds_cpu_optimizer": True})["zero_force_ds_cpu_optimizer"] is True
    none = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}
    assert "zero_force_ds_cpu_optimizer" not in own(none)


def test_our_values_fill_what_the_deepspeed_configuration_leaves_open() -> None:
    filled = own({"gradient_clipping": "auto", "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 2}})
    assert filled == {
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": 4,
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": 8,
        "zero_optimization": {"stage": 2},
    }
    assert own({"gradient_clipping": 1.0})["gradient_clipping"] == 1.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"optimizer": {"type": "AdamW"}}, "section 'optimizer'"),
        ({"scheduler": {"type": "WarmupLR"}}, "section 'scheduler'"),
        ({"gradient_clipping": 0.5}, r"gradient_clipping to 0.5 but this trainer to 1.0 \(optim.clip\)"),
        ({"gradient_accumulation_steps": 8}, "gradient_accumulation_steps to 8 but this trainer to 4"),
        ({"train_micro_batch_size_per_gpu": 2}, "train_micro_batch_size_per_gpu to 2"),
        ({"train_batch_size": 64}, "train_batch_size to 64 but this trainer to 8"),
    ],
)
def test_a_second_owner_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(KitError, match=message):
        own(config)


def test_precision_has_one_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_dtype("auto", True, "no") == torch.bfloat16
    assert choose_dtype("float32", True, "no") == torch.float32
    assert choose_dtype("auto", False, "no") == torch.float32
    for launcher in ("fp16", "fp8"):
        with pytest.raises(KitError, match=f"mixed_precision is '{launcher}'"):
            choose_dtype("auto", True, launcher)
    with pytest.raises(KitError, match="float32 but accelerate's mixed_precision is 'bf16'"):
        choose_dtype("float32", True, "bf16")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    for wanted, launcher in (("bfloat16", "no"), ("auto", "bf16")):
        with pytest.raises(KitError, match="60 times slower"):
            choose_dtype(wanted, False, launcher)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_accelerate_config_is_read_by_accelerate_and_leaves_our_settings_to_us(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    ours = {"gradient_clipping", "gradient_accumulation_steps", "deepspeed_config_file"}
    assert not ours & set(getattr(config, "deepspeed_config", None) or {})
    assert config.mixed_precision == ("no" if path.stem.startswith("cpu") else "bf16")
