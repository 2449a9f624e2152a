"""Extractions that are killed at random instants and started again; a program that test_extract_kills.py runs.

Each run is a process of its own, forked from this one, which has imported everything once: a run then takes a second.
The instants are drawn over the whole run: a number of finished shards to wait for, and some time on top, in which a run writes a
few more; the first of them strike while the target is loaded. The time is the run's own processor time, and the kernel ends the
run when it is over: however busy the machine is, a run comes no further. Each folder sees four kills before a run may finish it.
"""

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from dflash_kit.errors import run_cli
from dflash_kit.target import load_config, load_tokenizer
from extract.cli import main

NUM_KILLS = 20
NUM_FOLDERS = 5


def preload(target: str) -> None:
    """Import here what a run would import, and run nothing: threads would not survive a fork."""
    config = load_config(target)
    load_tokenizer(target)
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(config)


def start(argv: list[str], log: Path, arm: Callable[[], object] = lambda: None) -> int:
    """Run the command in a process of its own, in which ``arm`` was called before; returns its id."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            arm()
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            status = run_cli(main, argv)
        finally:
            sys.stdout.flush()
            os._exit(status)
    return pid


def finish(argv: list[str], log: Path) -> None:
    _, status = os.waitpid(start(argv, log), 0)
    if status:
        raise SystemExit(f"{argv} ended with {status}: {log.read_text()[-2000:]}")


def kill_once(argv: list[str], log: Path, num_new: int, delay_s: float) -> bool:
    """Start the command and have it killed when it has finished so many shards and the delay is over; False: it had ended."""

    def arm() -> None:
        real, num_left = os.rename, num_new

        def light() -> None:  # its signal is not caught, and ends a process as SIGKILL does
            signal.setitimer(signal.ITIMER_PROF, delay_s)

        def rename(source: Any, target: Any) -> None:
            nonlocal num_left
            real(source, target)
            num_left -= str(target).endswith(".arrow")
            if num_left == 0:
                light()

        os.rename = rename
        if num_new == 0:
            light()

    _, status = os.waitpid(start(argv, log, arm), 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGPROF, status
    return os.WIFSIGNALED(status)


def run(folder: Path, argv: list[str], num_rows: int) -> None:
    draw = random.Random(0)
    log = folder / "log"
    preload(argv[argv.index("--model") + 1])
    finish([*argv, "--out", str(folder / "whole")], log)
    told = []
    for number in range(NUM_FOLDERS):
        out = folder / f"killed-{number}"
        command = [*argv, "--out", str(out)]
        for _ in range(NUM_KILLS // NUM_FOLDERS):  # all but the first hit a run that resumes
            held = shards_in(out)
            if number == 0:  # while the target is loaded, mostly
                num_new, delay_s = 0, draw.uniform(0.001, 0.5)
            else:
                num_new, delay_s = draw.randrange(1, max(2, (num_rows - len(held)) // 2)), draw.uniform(0.001, 0.02)
            was_killed = kill_once(command, log, num_new, delay_s)
            now = shards_in(out)
            told.append(
                {"killed": was_killed, "held": len(now), "intact": all(now[name] == held[name] for name in held)}
            )
        finish(command, log)
        last = shards_in(out)
        told[-1]["intact"] &= all(last[name] == now[name] for name in now)
    print(json.dumps(told))


def shards_in(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("*.arrow")} if out.exists() else {}


if __name__ == "__main__":
    run(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]))
