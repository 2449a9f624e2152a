"""A tiny spool between real processes: commands, a watch on its size, and which rows each step was trained on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from train_helpers import launched_environment

from helpers import REPO

NUM_SAMPLES, NUM_EPOCHS = 40, 3
SPOOL_BYTES, MAX_SHARD_BYTES = 460_000, 40_000
WAIT_S = 240.0

# Runs the trainer and writes down what each step was trained on; steps that are done again after a kill come again. With
# HOLD_AT it begins no further step when so many lines are in that journal, until the file GO is there.
RECORDING_TRAINER = """
import json, os, sys, time
import train.loop as loop
from dflash_kit.errors import run_cli
from train.cli import main
real = loop.begin_step
def is_held():
    num_lines, journal = os.environ["HOLD_AT"].split(" ", 1)
    with open(journal) if os.path.exists(journal) else open(os.devnull) as file:
        return file.read().count("\\n") >= int(num_lines) and not os.path.exists(os.environ["GO"])
def recorded(trainer, rows, lr, **more):
    while os.environ.get("HOLD_AT") and is_held():
        time.sleep(0.02)
    result = real(trainer, rows, lr, **more)
    line = {"step": trainer.counters.step, "rank": trainer.parallel.rank, "ids": [i for row in rows for i in row.ids]}
    with open(os.environ["STEPS_FILE"], "a") as file:
        file.write(json.dumps(line) + "\\n")
    return result
loop.begin_step = recorded
sys.exit(run_cli(main))
"""


def write_prompts(path: Path) -> Path:
    """Conversations with given responses, so that one forward pass makes a row."""
    draws = random.Random(0)
    lines = [{"input_ids": [draws.randrange(256) for _ in range(draws.randrange(40, 63))]} for _ in range(NUM_SAMPLES)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def extractor_arguments(target: Path, prompts: Path, folder: Path, *more: str) -> list[str]:
    return [
        *("--model", str(target), "--prompts", str(prompts), "--out", str(folder), "--engine", "transformers"),
        *("--target_layer_ids", "[1, 3]", "--max_shard_bytes", str(MAX_SHARD_BYTES), "--spool_bytes", str(SPOOL_BYTES)),
        *("--epochs", str(NUM_EPOCHS), *more),
    ]


def trainer_arguments(folder: Path, out: Path, *more: str) -> list[str]:
    settings: dict[str, Any] = {
        "shards": folder,
        "out": out,
        "spool": "true",
        "spool_timeout_s": 60,
        "drafter.num_hidden_layers": 1,
        "drafter.block_size": 4,
        "data.seq_len": 64,
        "data.anchors": 8,
        "data.rows_per_step": 2,
        "data.holdout_fraction": 0.1,
        "replay.max_rows": 3,
        "replay.every_steps": 0,
        "replay.budgets": "[4]",
        "save_every_steps": 1000,
    }
    return [*(f"--{name}={value}" for name, value in settings.items()), *more]


class Process:
    """A command whose lines are kept; killed with its children when the test is over."""

    def __init__(self, arguments: list[str], **environment: str) -> None:
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            arguments,
            cwd=REPO,
            env=launched_environment(PYTHONUNBUFFERED="1", PYTHONPATH=str(REPO), **environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def says(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL, at once and for all of its processes."""
        if self.is_running():
            os.killpg(self._process.pid, signal.SIGKILL)
        self.status()

    def terminate(self) -> None:
        """SIGTERM; it is not waited for."""
        self._process.terminate()

    def status(self) -> int:
        status = self._process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return status

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip())


def extractor(target: Path, prompts: Path, folder: Path, *more: str) -> Process:
    program = "tests/forked_vllm.py" if "vllm" in more else "extract/dump.py"
    return Process([sys.executable, program, *extractor_arguments(target, prompts, folder, *more)])


def trainer(
    folder: Path, out: Path, steps_file: Path, *more: str, hold_at: int | None = None, go: Path | None = None
) -> Process:
    """The trainer; with ``hold_at`` it stands still once so many shards are used, until ``go`` is there (None: for good)."""
    arguments = [sys.executable, "-c", RECORDING_TRAINER, *trainer_arguments(folder, out, *more)]
    held = "" if hold_at is None else f"{hold_at} {folder / 'consumed.jsonl'}"
    return Process(arguments, STEPS_FILE=str(steps_file), HOLD_AT=held, GO=str(go or folder / "never"))


class SizeWatch(threading.Thread):
    """Samples the size of everything with rows in a spool until it is stopped."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.peak_bytes, self.num_samples = folder, 0, 0
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(0.01):
            self.peak_bytes = max(self.peak_bytes, spool_size(self.folder))
            self.num_samples += 1

    def __enter__(self) -> SizeWatch:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self.join()


def spool_size(folder: Path) -> int:
    """Bytes of finished, growing and kept shards, of files that were all there at one instant."""
    while True:
        sizes = {}
        for path in folder.glob("*.arrow*"):
            with contextlib.suppress(FileNotFoundError):
                sizes[path] = path.stat().st_size
        if all(path.exists() for path in sizes):  # else one may have been deleted before another grew
            return sum(sizes.values())


def wait_until(condition: Callable[[], bool], *processes: Process) -> None:
    """Wait for what processes bring about; fails when one of them has ended."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        are_running = all(
            process.is_running() for process in processes
        )  # first: what they did before they ended counts
        if condition():
            return
        lines = [line for process in processes for line in process.lines]
        assert are_running and time.monotonic() < deadline_s, "\n".join(lines)
        time.sleep(0.05)


def num_consumed(folder: Path) -> int:
    path = folder / "consumed.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def manifest_lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    texts = [path.read_text() for path in sorted(folder.glob("manifest*"))]
    lines = [json.loads(line) for text in texts for line in text[: text.rfind("\n") + 1].splitlines()]
    return [line for line in lines if line["kind"] == kind]


def trained_ids(steps_file: Path) -> Counter[str]:
    """How often each sample was trained on, by the last time that each step was done."""
    steps: dict[tuple[int, int], list[str]] = {}
    for line in steps_file.read_text().splitlines():
        record = json.loads(line)
        steps[record["step"], record["rank"]] = record["ids"]
    return Counter(row_id.partition("@")[0] for ids in steps.values() for row_id in ids)
