"""What a trainer refuses to begin or to go on with: one line that says what to do, status 2, nothing overwritten."""

from __future__ import annotations

import fcntl
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_train_cli import refusal
from test_train_resume import arguments, running, wait_for_step
from train_helpers import PowerCutError, cut_power, launched_environment, make_shards, run_in_two_processes

from dflash_kit.checkpoint import write_checkpoint
from helpers import REPO, run_command
from train import loop
from train import step as step_module
from train.cli import main
from train.state import RunFolder


@pytest.fixture(scope="module")
def shards_folder(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("refusals") / "shards", tiny_target)


# -- two trainers ----------------------------------------------------------------------------------------------------


def test_a_second_trainer_is_refused_at_once_and_the_first_goes_on(shards_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    args = arguments(shards_folder, out, optim__max_steps=10**6, save_every_steps=10**6, replay__every_steps=0)
    with running(args) as first:
        wait_for_step(out, 3, first)
        second = run_command(REPO / "train" / "run.py", *args, **launched_environment())
        assert second.returncode == 2
        assert second.stderr.splitlines() == [
            f"error: another trainer is writing {out}.state; wait for its end, stop it, or choose another --out"
        ]
        assert first.poll() is None
        first.send_signal(signal.SIGTERM)
        _, errors = first.communicate(timeout=240)
    assert first.returncode == 0, errors


def test_all_processes_of_a_second_trainer_end(shards_folder: Path, tmp_path: Path) -> None:
    """Only the main process asks for the lock; the other one waits for its verdict."""
    folder = RunFolder(tmp_path / "out")
    folder.lock()
    second = run_in_two_processes(arguments(shards_folder, folder.out))
    folder.release()
    assert second.returncode != 0
    assert second.stderr.count(f"error: another trainer is writing {folder.state}") == 2, second.stderr[-2000:]
    assert list(tmp_path.iterdir()) == []


def test_the_lock_goes_with_the_run_and_a_refused_run_leaves_nothing(
    shards_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "out.state"
    state.mkdir()
    with (state / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        line = refusal(capsys, arguments(shards_folder, tmp_path / "out"))
        assert f"another trainer is writing {state}" in line
        assert [entry.name for entry in state.iterdir()] == ["lock"]
    folder = RunFolder(tmp_path / "out")
    folder.lock()
    folder.release()
    assert list(tmp_path.iterdir()) == []


# -- nothing learnt --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_target_with_nan_in_its_ends_is_refused_before_anything_is_written(
    shards_folder: Path, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    target, runs = tmp_path / "target", tmp_path / "runs"
    shutil.copytree(tiny_target, target)
    runs.mkdir()
    tensors = load_file(target / "model.safetensors")
    tensors[name][3, 5] = float("nan")
    tensors[name][4, 0] = float("inf")
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    line = refusal(capsys, arguments(shards_folder, runs / "out", target=target))
    assert f"{name} holds NaN or infinity" in line or "weights_hash" in line  # whichever is met first
    assert list(runs.iterdir()) == []


def test_a_run_without_an_applied_step_is_not_finished(
    shards_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    real = step_module.noise_embeddings
    monkeypatch.setattr(step_module, "noise_embeddings", lambda *args: real(*args) * float("nan"))
    line = refusal(capsys, arguments(shards_folder, out, optim__max_steps=3))
    assert "none of the run's 3 steps was applied" in line and "lower optim.lr" in line
    assert not out.exists()


# -- output folders --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_as_output_folder_is_written_through(shards_folder: Path, tmp_path: Path, dangling: bool) -> None:
    real, link = tmp_path / "disk" / "real", tmp_path / "link"
    if not dangling:
        real.mkdir(parents=True)
    link.symlink_to(real)
    args = arguments(shards_folder, link, optim__max_steps=1, replay__max_rows=0)
    assert main(args) == 0
    assert link.is_symlink() and (real / "model.safetensors").is_file()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["disk", "link"]
    assert sorted(entry.name for entry in real.parent.iterdir()) == ["real", "real.state"]
    assert main(args) == 0  # finished already


def test_a_checkpoint_goes_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write_checkpoint(tmp_path / "link", {}, {"x": torch.zeros(1)}, {})
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "out", [".", "/", "", "..", "x" * 246, "file/out", "file/deeper/out", "/proc/nowhere/out", "loop", "s3://b/out"]
)
def test_output_folders_that_cannot_be_are_one_line(
    shards_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("years of work")
    Path("loop").symlink_to("loop")
    line = refusal(capsys, [*arguments(shards_folder, tmp_path), f"--out={out}"])
    assert "name a" in line and out in line
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "loop"]
    assert Path("file").read_text() == "years of work"


# -- damaged state ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(shards_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an average, that died behind its state of step 8."""
    out = tmp_path_factory.mktemp("stopped") / "out"
    with pytest.MonkeyPatch.context() as patch:
        cut_power(patch, loop, "begin_step", 10)
        with pytest.raises(PowerCutError):
            main(arguments(shards_folder, out, **AVERAGED))
    return out


AVERAGED = {"optim__ema_decay": 0.8, "replay__max_rows": 0}
STEP = "step-00000008"


class Evil:
    """Writes a file when it is unpickled by a reader that trusts it."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("unpickled"),)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (f"{STEP}/weights.safetensors", None),  # cut
        (f"{STEP}/weights.safetensors", b""),
        (f"{STEP}/average.safetensors", None),
        (f"{STEP}/optimizer.pt", None),
        (f"{STEP}/optimizer.pt", b"garbage, but long enough to look like something"),
        (f"{STEP}/optimizer.pt", b""),
        (f"{STEP}/optimizer.pt", Evil()),
        (f"{STEP}/optimizer.pt", {"optimizer": {}}),
        (f"{STEP}/counters.json", b"{}"),
        (f"{STEP}/counters.json", b"[]"),
        (f"{STEP}/counters.json", b'{"step": 8'),
        (f"{STEP}/counters.json", b"\xff\xfe"),
        ("run.json", b"{"),
        ("run.json", b"[]"),
        ("metrics.jsonl", b"garbage\n"),
        ("metrics.jsonl", b"[1]\n"),
        ("metrics.jsonl", b"{}\n"),
        ("metrics.jsonl", b"\xff\xfe\n"),
    ],
)
def test_damaged_state_is_refused_by_name_and_the_remedy_works(
    shards_folder: Path,
    stopped: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: Any,
) -> None:
    out, state = tmp_path / "out", tmp_path / "out.state"
    shutil.copytree(RunFolder(stopped).state, state)
    monkeypatch.chdir(tmp_path)
    file = state / name
    if content is None:
        content = file.read_bytes()[: file.stat().st_size // 2]
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    args = arguments(shards_folder, out, **AVERAGED)
    line = refusal(capsys, args)
    assert f"{file} cannot be loaded" in line
    assert not Path("unpickled").exists() and not out.exists()
    if name == "metrics.jsonl":
        assert "move it away" in line
        file.unlink()
    elif name == "run.json":
        assert f"delete the whole folder {state} to begin anew" in line
        shutil.rmtree(state)
    else:
        assert f"delete the folder {file.parent} to go on from the one before" in line
        shutil.rmtree(file.parent)
    if (name, content) in (
        (f"{STEP}/counters.json", b"{}"),
        ("metrics.jsonl", b"{}\n"),
    ):  # once each: it takes a second
        assert main(args) == 0


def test_counters_of_another_step_are_refused(
    shards_folder: Path, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "out.state"
    shutil.copytree(RunFolder(stopped).state, state)
    shutil.copy(state / "step-00000004" / "counters.json", state / STEP / "counters.json")
    line = refusal(capsys, arguments(shards_folder, tmp_path / "out", **AVERAGED))
    assert "it says step 4" in line and "in the folder of step 8" in line
