"""TensorBoard and W&B get the numbers of metrics.jsonl; accelerate's trackers are real, the two packages stand-ins."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_train_cli import refusal
from test_train_loop import metrics
from train_helpers import PowerCutError, cut_power, make_shards, small_run

from dflash_kit.errors import KitError
from train import loop
from train.cli import main
from train.state import RunFolder
from train.tracking import Tracker

WANDB = """
import json, os
class Run:
    def __init__(self, file): self.file = file
    def log(self, values, step, **_): self.write({"step": step, **values})
    def finish(self): self.write({"finished": True})
    def write(self, line): print(json.dumps(line), file=open(self.file, "a"))
def init(project, **kwargs):
    if os.environ.get("WANDB_STANDIN") == "broken": raise RuntimeError("api_key not configured (no-tty)")
    run = Run(kwargs["dir"] + "/calls.jsonl")
    run.write({"project": project, **kwargs})
    return run
"""
SUMMARY_WRITER = """
import json, os
class SummaryWriter:
    def __init__(self, folder, **kwargs):
        os.makedirs(folder, exist_ok=True)
        self.file = folder + "/calls.jsonl"
        self.write(kwargs)
    def add_scalar(self, name, value, global_step): self.write({"step": global_step, name: value})
    def flush(self): pass
    def close(self): self.write({"finished": True})
    def write(self, line): print(json.dumps(line), file=open(self.file, "a"))
"""


@pytest.fixture(scope="module")
def shards_folder(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("tracking") / "shards", tiny_target)


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of both names that write down what they are told."""
    folder = tmp_path / "packages"
    for name, source in {"wandb": WANDB, "tensorboard": ""}.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(source)
        (folder / f"{name}-1.0.dist-info").mkdir()
        (folder / f"{name}-1.0.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        )
        monkeypatch.delitem(sys.modules, name, raising=False)
    (folder / "writer_standin.py").write_text(SUMMARY_WRITER)
    monkeypatch.syspath_prepend(str(folder))
    import writer_standin  # type: ignore[import-not-found]

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", writer_standin)
    monkeypatch.setattr(torch.utils, "tensorboard", writer_standin, raising=False)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)


def calls(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def told(lines: list[dict[str, Any]]) -> dict[tuple[int, str], float]:
    """Last value of each (step, name)."""
    return {(line["step"], name): value for line in lines if "step" in line for name, value in line.items()}


def assert_complete(found: dict[tuple[int, str], float], out: Path) -> None:
    for line in metrics(out):
        for name in ("loss", "lr", "tokens_per_s", "grad_norm"):
            assert found[line["step"], f"train/{name}"] == line[name]
        for slot, rate in enumerate(line["slot_accuracy"], 1):
            assert found[line["step"], f"train/slot_accuracy/{slot}"] == rate
    replays = metrics(out, "replay")
    assert [line["step"] for line in replays] == [6, 12]
    for line in replays:
        for method in ("chain", "DDTree-4"):
            name = f"replay/methods/{method}/acceptance_length_pooled"
            assert found[line["step"], name] == line["methods"][method]["acceptance_length_pooled"]


@pytest.mark.usefixtures("stand_ins")
def test_tensorboard_gets_every_number_and_goes_on_after_a_kill(
    shards_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    arguments = small_run(shards_folder, out, report_to="tensorboard")
    with monkeypatch.context() as patch:
        cut_power(patch, loop, "begin_step", 7)
        with pytest.raises(PowerCutError):
            main(arguments)
    assert main(arguments) == 0
    lines = calls(RunFolder(out).state / "tensorboard" / "calls.jsonl")
    starts = [line["purge_step"] for line in lines if "purge_step" in line]
    assert starts == [None, 5]  # the state of step 4 was saved; what was said of 5 and 6 counts no more
    assert_complete(told(lines), out)
    assert lines[-1] == {"finished": True}


@pytest.mark.usefixtures("stand_ins")
def test_wandb_gets_every_number_and_an_interrupted_run_keeps_its_id(
    shards_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    arguments = small_run(shards_folder, out, report_to="wandb")
    with monkeypatch.context() as patch:
        cut_power(patch, loop, "begin_step", 7)
        with pytest.raises(PowerCutError):
            main(arguments)
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    assert main(arguments) == 0
    lines = calls(RunFolder(out).state / "calls.jsonl")
    first, second = (line for line in lines if "project" in line)
    assert (first["project"], second["project"]) == ("dflash-kit", "ours")
    assert first["id"] == second["id"] and first["resume"] == "allow" and first["name"] == "out"
    assert first["config"]["drafter"]["block_size"] == 4
    assert_complete(told(lines), out)
    assert lines[-1] == {"finished": True}


@pytest.mark.usefixtures("stand_ins")
def test_a_tracker_that_cannot_start_is_one_line(
    shards_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_STANDIN", "broken")
    said = refusal(capsys, small_run(shards_folder, tmp_path / "out", report_to="wandb"))
    assert "report_to is wandb but it cannot start (api_key not configured (no-tty)); log in with `wandb login`" in said


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_before_anything_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import accelerate.utils

    monkeypatch.setattr(accelerate.utils, f"is_{name}_available", lambda: False)
    said = refusal(capsys, small_run(tmp_path / "absent", tmp_path / "out", report_to=name))
    assert f"report_to is {name} but that package is not installed; run `pip install {name}`" in said
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_that_fails_in_the_middle_is_one_line(tmp_path: Path) -> None:
    config: Any = SimpleNamespace(report_to="tensorboard")
    tracker = Tracker(config, RunFolder(tmp_path / "out"))
    tracker._inner = SimpleNamespace(log=lambda values, step: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(KitError, match=r"takes no more numbers \(.*No space left\); run again with --report_to none"):
        tracker.log("train", 3, {"loss": 1.0})
