"""A training is watched: none of its checkpoints is lost to pruning, kills and restarts, and the report says what was missed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from train_helpers import launched_environment, make_shards, small_run

from decode.catcher import step_name, take
from decode.cli import main
from decode.settings import EvalConfig
from decode.training_run import TrainingRun
from decode.watch import watch_run
from dflash_kit.checkpoint import write_checkpoint
from dflash_kit.errors import KitError, run_cli
from helpers import REPO, until

FAST = {"watch_poll_s": 0.02, "watch_timeout_s": 0.5, "replay": "shards"}


class Training:
    """Writes what the trainer writes: checkpoints whose weights say their step, its record, and pruning."""

    def __init__(self, out: Path, *, every: int = 10, keep_last: int = 2) -> None:
        self.out, self.keep_last = out, keep_last
        self.state = out.with_name(out.name + ".state")
        self.checkpoints = self.state / "checkpoints"
        self.checkpoints.mkdir(parents=True)
        (self.state / "train.yaml").write_text(yaml.safe_dump({"save_every_steps": every}))
        (self.state / "run.json").write_text('{"seed": 0}')

    def save(self, step: int) -> None:
        self.write(self.checkpoints / step_name(step), step)
        with (self.state / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"kind": "train", "step": step}) + "\n")
        for old in sorted(self.checkpoints.iterdir())[: -self.keep_last]:
            shutil.rmtree(old)

    def write(self, place: Path, step: int) -> None:
        provenance = {"metrics": {"step": step}}
        write_checkpoint(place, {"step": step}, {"weight": torch.full((8,), float(step))}, provenance)

    def finish(self, step: int) -> None:
        self.write(self.out, step)


class Evaluation:
    """Stands for the evaluation of one checkpoint: reads its weights and reports a τ that tells the step."""

    def __init__(self, during: Callable[[int], None] = lambda step: None) -> None:
        self.steps: list[int] = []
        self.during = during

    def __call__(self, config: EvalConfig, shown: str) -> int:
        step = int(load_file(Path(config.ckpt) / "model.safetensors")["weight"][0])
        self.steps.append(step)
        self.during(step)
        load_file(Path(config.ckpt) / "model.safetensors")  # still there
        config.out_folder.mkdir(parents=True, exist_ok=True)
        lengths = {"acceptance_length_pooled": 1 + step / 100, "acceptance_length_pooled_ci95": None}
        entry = {"benchmark": "b", "method": "chain", "budget": 3, **lengths}
        report = {"target": "t", "checkpoint": shown, "results": [entry]}
        (config.out_folder / "report.json").write_text(json.dumps(report))
        return 0


def config_of(training: Training, out: Path, **more: Any) -> EvalConfig:
    return EvalConfig(**({"watch": str(training.out), "out": str(out)} | FAST | more))


def record(out: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((out / "watch.json").read_text())
    return values


def test_all_checkpoints_of_a_run_and_its_finished_drafter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training, out = Training(tmp_path / "run", keep_last=9), tmp_path / "out"
    for step in (10, 20, 30):
        training.save(step)
    training.finish(20)
    evaluation = Evaluation()
    assert watch_run(config_of(training, out), evaluation) == 0
    assert evaluation.steps == [10, 20, 30]
    values = record(out)
    assert [entry["step"] for entry in values["checkpoints"]] == [10, 20, 30]
    assert [entry["results"][0]["acceptance_length_pooled"] for entry in values["checkpoints"]] == [1.1, 1.2, 1.3]
    assert values["checkpoints"][0]["checkpoint"] == str(training.checkpoints / step_name(10))
    assert (values["missed"], values["finished"]["same_as"]) == ([], step_name(20))
    assert "training has ended: 3 checkpoints evaluated, none missed; the finished drafter is that of step 20" in (
        capsys.readouterr().out
    )
    assert not (out / "queue").exists()
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 1
    assert "20 (finished drafter)" in page
    assert watch_run(config_of(training, out), evaluation) == 0, "a rerun has nothing to do"
    assert evaluation.steps == [10, 20, 30]


def test_checkpoints_pruned_during_an_evaluation_are_kept(tmp_path: Path) -> None:
    """While the first is evaluated, the trainer writes and deletes five more; the last is the finished one's."""
    training, out = Training(tmp_path / "run", keep_last=1), tmp_path / "out"
    training.save(10)

    def train_on(step: int) -> None:
        if step == 10:
            for later in range(20, 70, 10):
                training.save(later)
                until(lambda later=later: (out / "queue" / step_name(later)).is_dir())
            training.finish(60)

    evaluation = Evaluation(train_on)
    assert watch_run(config_of(training, out), evaluation) == 0
    assert evaluation.steps == [10, 20, 30, 40, 50, 60]
    assert [entry.name for entry in training.checkpoints.iterdir()] == [step_name(60)]
    assert record(out)["missed"] == []


def test_nothing_is_lost_when_the_watch_is_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Interrupted in the second checkpoint; until it goes on, the trainer prunes all that had been seen, and more."""
    training, out = Training(tmp_path / "run", every=10, keep_last=3), tmp_path / "out"
    for step in (10, 20, 30):
        training.save(step)

    def interrupt(step: int) -> None:
        if step == 20:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        watch_run(config_of(training, out), Evaluation(interrupt))
    assert "stopped as asked: 1 checkpoints evaluated, none missed; 2 in the queue" in capsys.readouterr().out
    for step in range(40, 90, 10):
        training.save(step)  # 40 and 50 come and go unseen
    training.finish(80)
    evaluation = Evaluation()
    assert watch_run(config_of(training, out), evaluation) == 0
    assert evaluation.steps == [20, 30, 60, 70, 80]
    values = record(out)
    assert [entry["step"] for entry in values["checkpoints"]] == [10, 20, 30, 60, 70, 80]
    assert values["missed"] == [40, 50]
    printed = capsys.readouterr().out
    assert "missed       steps 40, 50" in printed
    assert "6 checkpoints evaluated, 2 missed" in printed
    assert "40 (missed)" in (out / "report.html").read_text()


def test_a_kill_between_report_and_record_evaluates_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training, out = Training(tmp_path / "run"), tmp_path / "out"
    training.save(10)
    with monkeypatch.context() as patched:
        patched.setattr("decode.watch.Record.add", lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            watch_run(config_of(training, out), Evaluation())
    assert [entry.name for entry in (out / "queue").iterdir()] == [step_name(10)]
    training.finish(10)
    evaluation = Evaluation()
    assert watch_run(config_of(training, out), evaluation) == 0
    assert evaluation.steps == [10]


def test_best_checkpoints_between_the_regular_ones_count(tmp_path: Path) -> None:
    training = Training(tmp_path / "run", every=10)
    lines = [{"kind": "replay", "step": 5, "best": True}, {"kind": "replay", "step": 15, "best": False}, {"step": 27}]
    (training.state / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4')
    assert TrainingRun(training.out).written_steps() == {5, 10, 20}
    for place in (training.state, training.checkpoints):
        assert TrainingRun(place).out == training.out


def test_a_finished_drafter_that_was_no_checkpoint_is_evaluated(tmp_path: Path) -> None:
    training, out = Training(tmp_path / "run", keep_last=1), tmp_path / "out"
    training.save(10)
    training.save(20)
    training.finish(10)
    evaluation = Evaluation()
    assert watch_run(config_of(training, out), evaluation) == 0
    assert evaluation.steps == [20, 10]
    values = record(out)
    assert values["missed"] == [10]
    assert values["finished"]["results"][0]["acceptance_length_pooled"] == 1.1
    assert (out / "finished" / "report.json").exists()


def test_a_checkpoint_with_a_fault_does_not_end_the_watch(tmp_path: Path) -> None:
    training, out = Training(tmp_path / "run", keep_last=9), tmp_path / "out"
    for step in (10, 20, 30):
        training.save(step)
    training.finish(30)

    def fail(step: int) -> None:
        if step == 20:
            raise KitError("fc.weight holds NaN")

    assert watch_run(config_of(training, out), Evaluation(fail)) == 1
    assert "Step 20 was not evaluated: fc.weight holds NaN" in (out / "report.html").read_text()
    assert watch_run(config_of(training, out), Evaluation()) == 0, "it is tried again"
    assert [entry["status"] for entry in record(out)["checkpoints"]] == ["evaluated"] * 3
    with pytest.raises(KitError, match="NaN"):  # a fault of the first may be one of all
        watch_run(config_of(training, tmp_path / "new"), Evaluation(lambda step: fail(20)))


def test_what_a_watch_refuses(tmp_path: Path) -> None:
    training, out = Training(tmp_path / "run"), tmp_path / "out"
    training.save(10)
    training.finish(10)
    assert watch_run(config_of(training, out), Evaluation()) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(KitError, match=r"budgets = \[16, 64\], but this run has budgets = \[4\]"):
        watch_run(config_of(training, out, budgets="4"), Evaluation())
    (training.state / "run.json").write_text('{"seed": 1}')
    with pytest.raises(KitError, match="belongs to another run"):
        watch_run(config_of(training, out), Evaluation())
    with pytest.raises(KitError, match="belongs to another run"):
        watch_run(config_of(Training(tmp_path / "second"), out), Evaluation())
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    with pytest.raises(KitError, match="is not empty"):
        watch_run(config_of(training, tmp_path / "mine"), Evaluation())
    with pytest.raises(KitError, match="nothing has happened in .*0 checkpoints evaluated"):
        watch_run(config_of(Training(tmp_path / "idle"), tmp_path / "waited"), Evaluation())
    for values, words in (
        ({"ckpt": "a", "watch": "b"}, "leave one out"),
        ({}, "--ckpt is needed"),
        ({"ckpt": "a", "watch_poll_s": 1.0}, "without watch"),
        ({"watch": "b", "watch_timeout_s": 0.0}, "seconds above 0"),
        ({"watch": "s3://b/c"}, "no folder"),
    ):
        with pytest.raises((ValueError, KitError), match=words):
            EvalConfig(**values)


def test_a_watch_stays_out_of_the_folders_of_its_trainer(tmp_path: Path) -> None:
    """The trainer, at its end, would find OUT taken."""
    training = Training(tmp_path / "run")
    for place in (training.out, training.out / "report", training.state, training.checkpoints):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(KitError, match="which the trainer writes; name another with --out"):
            watch_run(config_of(training, place), Evaluation())
        assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(KitError, match="a file; name the folder"):
        watch_run(EvalConfig(watch=str(tmp_path / "file"), out=str(tmp_path / "out"), replay="shards"), Evaluation())
    out = tmp_path / "out"
    out.mkdir()
    (out / "watch.json").write_text(json.dumps({"checkpoints": [{"step": 1}], "settings": [[]], "watched": ""}))
    with pytest.raises(KitError, match="is no record of a watch"):
        watch_run(config_of(training, out), Evaluation())


def test_taking_is_all_or_nothing(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "step-1", {"a": 1}, {"weight": torch.zeros(64)}, {})
    (source / "optimizer.pt").write_bytes(b"not this")
    assert take(source, tmp_path / "taken")
    assert sorted(path.name for path in (tmp_path / "taken").iterdir()) == [
        "config.json",
        "model.safetensors",
        "provenance.json",
    ]
    assert os.path.samefile(source / "model.safetensors", tmp_path / "taken" / "model.safetensors"), "no room is taken"
    whole = (source / "model.safetensors").read_bytes()
    shutil.rmtree(source)
    assert (tmp_path / "taken" / "model.safetensors").read_bytes() == whole
    assert not take(source, tmp_path / "gone")
    for name, content in (("model.safetensors", whole[:-1]), ("model.safetensors", b""), ("config.json", None)):
        broken = shutil.copytree(tmp_path / "taken", tmp_path / "broken")
        (broken / name).unlink()  # the copy may share it
        if content is not None:
            (broken / name).write_bytes(content)
        assert not take(broken, tmp_path / "gone")
        shutil.rmtree(broken)
    assert not list(tmp_path.glob("gone*"))
    taken = tmp_path / "taken"
    (taken / "model.safetensors").rename(taken / "model-00001-of-00002.safetensors")
    assert not take(taken, tmp_path / "gone"), "the second part is still to come"
    shutil.copy(taken / "model-00001-of-00002.safetensors", taken / "model-00002-of-00002.safetensors")
    assert not take(taken, tmp_path / "gone"), "as is their index"
    (taken / "model.safetensors.index.json").write_text("{}")
    assert take(taken, tmp_path / "both")


def test_what_a_link_points_to_is_taken(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "step-1", {"a": 1}, {"weight": torch.zeros(64)}, {})
    theirs = (source / "model.safetensors").rename(tmp_path / "blob")
    (source / "model.safetensors").symlink_to(theirs)
    assert take(source, tmp_path / "taken")
    theirs.unlink()
    assert load_file(tmp_path / "taken" / "model.safetensors")["weight"].shape == (64,)


def test_a_queue_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training, out = Training(tmp_path / "run"), tmp_path / "out"
    training.save(10)

    def full(*_: Any) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("decode.catcher.take", full)
    with pytest.raises(KitError, match="cannot be kept in .*No space left on device.*mend that and run again"):
        watch_run(config_of(training, out), Evaluation())


def test_taking_copies_where_links_are_not_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer deletes the folder at the worst moment, when its files have just been opened."""
    source = write_checkpoint(tmp_path / "step-1", {"a": 1}, {"weight": torch.arange(64.0)}, {})
    whole = (source / "model.safetensors").read_bytes()

    def no_link(*_: Any) -> None:
        shutil.rmtree(source, ignore_errors=True)
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", no_link)
    assert take(source, tmp_path / "taken")
    assert (tmp_path / "taken" / "model.safetensors").read_bytes() == whole


def test_folders_of_other_trainers(tmp_path: Path) -> None:
    for name in ("checkpoint-400", "step_8", "12", "best", "epoch-3.incomplete"):
        write_checkpoint(tmp_path / "theirs" / name, {}, {"weight": torch.zeros(1)}, {})
    assert list(TrainingRun(tmp_path / "theirs").checkpoints()) == [8, 12, 400]


def test_two_watchers_of_one_folder(tmp_path: Path) -> None:
    training, out = Training(tmp_path / "run"), tmp_path / "out"
    training.save(10)
    refused: list[str] = []

    def second(step: int) -> None:
        def watch() -> None:
            try:
                watch_run(config_of(training, out), Evaluation())
            except KitError as error:
                refused.append(str(error))

        thread = threading.Thread(target=watch)
        thread.start()
        thread.join()
        training.finish(10)

    assert watch_run(config_of(training, out), Evaluation(second)) == 0
    assert len(refused) == 1
    assert "another process is watching" in refused[0]


def test_a_real_training_is_watched(tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The trainer keeps one checkpoint and writes one every two steps; the watch replays each from the shards."""
    shards = make_shards(tmp_path / "shards", tiny_target)
    out, report = tmp_path / "drafter", tmp_path / "report"
    arguments = small_run(shards, out, save_every_steps=2, keep_last=1, optim__max_steps=10, replay__every_steps=4)
    trainer = subprocess.Popen(
        [sys.executable, str(REPO / "train" / "run.py"), *arguments],
        env=launched_environment(),
        stdout=subprocess.DEVNULL,
    )
    watch = ["--watch", str(out), "--replay", str(shards), "--limit=3", "--budgets=4", "--watch_poll_s=0.05"]
    try:
        assert run_cli(main, [*watch, "--watch_timeout_s=240", "--device=cpu", f"--out={report}"]) == 0
    finally:
        assert trainer.wait(timeout=240) == 0
    values = record(report)
    steps = [entry["step"] for entry in values["checkpoints"]]
    assert sorted({*steps, *values["missed"]}) == [2, 4, 6, 8, 10]
    assert not set(steps) & set(values["missed"])
    assert steps[-1] == 10
    for entry in values["checkpoints"]:
        assert [(r["method"], r["budget"]) for r in entry["results"]] == [("chain", 3), ("ddtree", 4)]
        told = json.loads((report / entry["name"] / "report.json").read_text())
        assert told["checkpoint"] == str(out.with_name("drafter.state") / "checkpoints" / entry["name"])
    finished = values["finished"]
    best = json.loads((out / "provenance.json").read_text())["metrics"]["step"]
    assert finished["step"] == best
    assert "training has ended" in capsys.readouterr().out


def test_names_of_the_report_folder(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    assert EvalConfig(ckpt=run, watch=run + ".state").watch == run + ".state", "a recipe names the run's drafter"

    def place(**values: Any) -> Path:
        return EvalConfig(**values).out_folder

    (tmp_path / "drafter").mkdir()
    assert place(watch=str(tmp_path / "run")) == tmp_path / "run-watch-report"
    assert place(watch=str(tmp_path / "run.state" / "checkpoints"), replay="s") == tmp_path / "run-watch-replay"
    assert place(ckpt=str(tmp_path / "drafter")) == tmp_path / "drafter-report"
    assert place(ckpt=f"{tmp_path / 'drafter'},other/hub") == tmp_path / "drafter-compared-report"
    assert place(ckpt="some/hub-name", replay="s") == Path("hub-name-replay")
