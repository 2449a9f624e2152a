"""What a run leaves beside its result, so that the same command goes on where a kill stopped it.

    OUT                      the finished drafter: config.json, model.safetensors, provenance.json, nothing else
    OUT.state/
        lock                 held by the trainer that writes here
        run.json             what must not change between runs (the fingerprint)
        train.yaml           the resolved configuration
        metrics.jsonl        one line per logged step and replay
        bad-steps.jsonl      the rows of each step that was skipped
        report.html, .png    curves of the run, written at its end
        step-00000400/       trainer state: weights, their average, optimizer, random state, counters
        checkpoints/step-…/  drafters in the published layout

Each folder is written under another name and renamed, so that it is there whole or not at all.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dflash_kit.checkpoint import PROVENANCE_NAME, follow_link, read_provenance
from dflash_kit.errors import KitError, require_dir_empty

from .average import WeightAverage
from .counters import Counters, as_object, read_counters, whole, writes
from .fingerprint import require_same
from .lock import LOCK_NAME, RunLock
from .parallel import Parallel
from .sharding import gathered, part_of, parts_of_state

STEP_NAME = re.compile(r"step-(\d{8})")
WEIGHTS_NAME, OPTIMIZER_NAME, COUNTERS_NAME = "weights.safetensors", "optimizer.pt", "counters.json"
AVERAGE_NAME = "average.safetensors"
SHARDED_NAME = "sharded"


class RunFolder:
    """The folders of one run.

    Args:
        out: where the finished drafter goes; a link is followed, and the state then lies beside the real folder.

    Raises:
        KitError: no folder of this name can have another beside it, or the file system refuses the name.
    """

    def __init__(self, out: str | Path) -> None:
        try:
            self.out = follow_link(out)
            if self.out.name in ("", ".."):
                raise KitError(f"output folder is {str(out)!r}; name a folder to create, such as runs/drafter")
            self.out.with_name(self.out.name + ".incomplete").lstat()  # the longest name that will be needed here
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, ValueError) as error:  # a name too long, or one with a zero in it
            why = getattr(error, "strerror", None) or error
            raise KitError(f"output folder {str(out)!r} cannot be used ({why}); name another") from error
        self.state = self.out.with_name(self.out.name + ".state")
        self.checkpoints = self.state / "checkpoints"
        self.metrics = self.state / "metrics.jsonl"
        self.bad_steps = self.state / "bad-steps.jsonl"
        self._record = self.state / "run.json"
        self._lock = RunLock(self.state)

    def is_finished(self, fingerprint: Mapping[str, Any]) -> bool:
        """Whether the result is there already.

        Raises:
            KitError: something else is there, or a result of other settings.
        """
        if not (self.out / PROVENANCE_NAME).is_file():
            require_dir_empty(self.out, "output folder")
            return False
        written = read_provenance(self.out).get("fingerprint")
        if not isinstance(written, dict):
            raise KitError(f"{self.out} holds a drafter that this trainer did not write; choose another --out")
        require_same(written, fingerprint, f"the finished drafter {self.out}")
        return True

    def lock(self) -> None:
        """Keep other trainers out until ``release``; the main process calls it.

        Raises:
            KitError: another trainer is at work or has just finished, something else is there, or it cannot be written.
        """
        if not self._record.exists():
            self._require_unused()
        self._lock.take()
        if (self.out / PROVENANCE_NAME).exists():
            raise KitError(f"{self.out} was finished by another trainer just now; nothing to do")

    def release(self) -> None:
        """Let other trainers in; a folder in which nothing was begun goes away again."""
        self._lock.release(delete=not self._record.exists())

    def begin(self, fingerprint: Mapping[str, Any]) -> None:
        """Record what must not change, or compare with what an earlier run recorded.

        Raises:
            KitError: another run's settings are recorded there, or it cannot be written.
        """
        if self._record.exists():
            require_same(self.recorded(), fingerprint, f"the run in {self.state}")
            return
        self._require_unused()
        partial = self._record.with_suffix(".incomplete")
        with writes(self._record):
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(fingerprint, indent=1))
            os.replace(partial, self._record)

    def recorded(self) -> dict[str, Any]:
        """The fingerprint that an earlier run left here or in its result; empty where there was none.

        Raises:
            KitError: the record is damaged.
        """
        if self._record.exists():
            remedy = f"delete the whole folder {self.state} to begin anew, or choose another --out"
            with whole(self._record, remedy):
                return as_object(json.loads(self._record.read_text()))
        return dict(read_provenance(self.out).get("fingerprint") or {})

    def _require_unused(self) -> None:
        """Refuse a state folder without a record, unless it holds only what a trainer killed at its very start left."""
        begun = {LOCK_NAME, self.checkpoints.name, self._record.with_suffix(".incomplete").name}
        if not self.state.is_dir() or {entry.name for entry in self.state.iterdir()} - begun:
            require_dir_empty(self.state, "state folder")

    def has_weights(self) -> bool:
        """Whether a saved state or a finished drafter is here."""
        return bool(self.steps()) or (self.out / PROVENANCE_NAME).is_file()

    def steps(self) -> list[int]:
        """Steps whose trainer state is whole, ascending."""
        if not self.state.is_dir():
            return []
        found = [STEP_NAME.fullmatch(entry.name) for entry in self.state.iterdir() if entry.is_dir()]
        return sorted(int(match[1]) for match in found if match)

    def step_folder(self, step: int) -> Path:
        """Trainer state after ``step`` steps."""
        return self.state / f"step-{step:08d}"

    def checkpoint(self, step: int) -> Path:
        """Drafter after ``step`` steps."""
        return self.checkpoints / f"step-{step:08d}"

    def prune(self, keep_last: int, best_step: int | None) -> None:
        """Delete all but the latest states and checkpoints; the best checkpoint stays."""
        for step in self.steps()[:-keep_last]:
            shutil.rmtree(self.step_folder(step), ignore_errors=True)
        found = [STEP_NAME.fullmatch(entry.name) for entry in self.checkpoints.iterdir()]
        steps = sorted(int(match[1]) for match in found if match)
        for step in steps[:-keep_last]:
            if step != best_step:
                shutil.rmtree(self.checkpoint(step), ignore_errors=True)

    def cut_metrics(self, step: int) -> None:
        """Drop lines of steps that will be done again.

        Raises:
            KitError: the file is damaged, or cannot be written.
        """
        for file in (self.metrics, self.bad_steps):
            if file.exists():
                _cut_lines(file, step)


def save_state(
    run: RunFolder,
    parallel: Parallel,
    drafter: nn.Module,
    optimizer: torch.optim.Optimizer,
    counters: Counters,
    average: WeightAverage | None = None,
) -> None:
    """Write the trainer state after ``counters.step`` steps; all processes call it.

    Raises:
        KitError: the disk is full or not writable.
    """
    place = run.step_folder(counters.step)
    begun = place.with_name(place.name + ".incomplete")

    def start() -> None:
        shutil.rmtree(begun, ignore_errors=True)
        _orderly(lambda: begun.mkdir(parents=True), begun)

    def finish() -> None:
        _orderly(lambda: _publish(begun, place, counters), begun)

    parallel.on_main(start)
    if _is_sharded(parallel):
        _orderly(lambda: parallel.accelerator.save_state(str(begun / SHARDED_NAME)), begun)
        parallel.wait()
    else:
        # Gathered by all processes, written by one; nothing is copied where the weights are whole already.
        weights, held = drafter.state_dict(), optimizer.state_dict()
        if parallel.is_fsdp:
            weights, held = gathered(weights), gathered(held)
        parallel.on_main(lambda: _orderly(lambda: _save_whole(begun, parallel, weights, held), begun))
    if average is not None:
        parallel.on_main(lambda: _orderly(lambda: average.save(begun / AVERAGE_NAME), begun))
    parallel.on_main(finish)


def load_state(
    run: RunFolder,
    step: int,
    parallel: Parallel,
    drafter: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: WeightAverage | None = None,
) -> Counters:
    """Put weights, their average, optimizer and random state back; all processes call it.

    Raises:
        KitError: the state is damaged, or was saved by another number of DeepSpeed processes.
    """
    place = run.step_folder(step)
    remedy = f"delete the folder {place} to go on from the one before it, or the whole folder {run.state} to begin anew"
    with whole(place / COUNTERS_NAME, remedy):
        counters = read_counters(place / COUNTERS_NAME, step)
    if _is_sharded(parallel):
        with whole(place / SHARDED_NAME, remedy):
            parallel.accelerator.load_state(str(place / SHARDED_NAME))
    else:
        with whole(place / WEIGHTS_NAME, remedy):
            like = drafter.state_dict()
            saved = load_file(place / WEIGHTS_NAME)
            drafter.load_state_dict({name: part_of(t, like[name]) if name in like else t for name, t in saved.items()})
        with whole(place / OPTIMIZER_NAME, remedy):
            _load_optimizer(place / OPTIMIZER_NAME, parallel, optimizer)
    if average is not None:
        with whole(place / AVERAGE_NAME, remedy):
            average.load(place / AVERAGE_NAME)
    return counters


def _cut_lines(file: Path, step: int) -> None:
    with whole(file, "only what was logged is in it: move it away to go on without its lines"):
        lines = [line for line in file.read_text().split("\n")[:-1] if line]
        kept = [line for line in lines if as_object(json.loads(line))["step"] <= step]
    partial = file.with_suffix(".incomplete")
    with writes(file):
        partial.write_text("".join(line + "\n" for line in kept))
        os.replace(partial, file)


def _is_sharded(parallel: Parallel) -> bool:
    return bool(parallel.accelerator.distributed_type == DistributedType.DEEPSPEED)


def _save_whole(folder: Path, parallel: Parallel, weights: dict[str, Tensor], held: dict[str, Any]) -> None:
    save_file({name: t.detach().cpu() for name, t in weights.items()}, folder / WEIGHTS_NAME)
    state = {"optimizer": held, "cpu_random": torch.get_rng_state()}
    if parallel.device.type == "cuda":
        state["gpu_random"] = torch.cuda.get_rng_state(parallel.device)
    torch.save(state, folder / OPTIMIZER_NAME)


def _load_optimizer(file: Path, parallel: Parallel, optimizer: torch.optim.Optimizer) -> None:
    state = torch.load(file, map_location="cpu", weights_only=True)
    held = parts_of_state(state["optimizer"], optimizer) if parallel.is_fsdp else state["optimizer"]
    optimizer.load_state_dict(held)
    torch.set_rng_state(state["cpu_random"])
    if "gpu_random" in state and parallel.device.type == "cuda":
        torch.cuda.set_rng_state(state["gpu_random"], parallel.device)


def _publish(begun: Path, place: Path, counters: Counters) -> None:
    (begun / COUNTERS_NAME).write_text(json.dumps(asdict(counters)))
    for file in begun.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
    shutil.rmtree(place, ignore_errors=True)
    os.replace(begun, place)


def _orderly(action: Callable[[], Any], begun: Path) -> None:
    """Turn a failure to write into one line, and take away what was begun."""
    try:
        action()
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError on a full disk
        shutil.rmtree(begun, ignore_errors=True)
        if isinstance(error, torch.OutOfMemoryError):  # of weights that are gathered to be saved
            raise
        raise KitError(f"trainer state {begun} cannot be written: {error}; free some space and run again") from error
