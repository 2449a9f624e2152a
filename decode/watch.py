"""``--watch``: every checkpoint of a running training is evaluated as it appears, and acceptance over steps kept up to date.

    OUT/watch.json           what has been evaluated, and the numbers over steps
    OUT/report.html          the same as a page
    OUT/step-00000400/       the report of one checkpoint
    OUT/queue/               checkpoints that are due, kept from deletion

A checkpoint leaves the queue when its numbers are in watch.json, so a process that is killed loses none.
"""

import fcntl
import json
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from dflash_kit.benchmark_prompts import load_benchmark
from dflash_kit.checkpoint import weights_sha256
from dflash_kit.errors import KitError, require_dir_empty
from dflash_kit.interrupts import sigterm_interrupts
from dflash_kit.target import TargetSpec

from .catcher import Catcher, step_name
from .compare import NUMBERS, Run
from .files import write_whole
from .kept import keeping
from .modes import DEFAULT_POLL_S, DEFAULT_TIMEOUT_S
from .report import PAGE_NAME, REPORT_NAME
from .settings import EvalConfig
from .training_run import TrainingRun

WATCH_NAME, QUEUE_NAME, LOCK_NAME, FINISHED_NAME = "watch.json", "queue", "watch.lock", "finished"
EVALUATED, FAILED = "evaluated", "failed"


def watch_run(config: EvalConfig, run: Run) -> int:
    """Evaluate the checkpoints of a training until its finished drafter has been; the largest exit status.

    Raises:
        KitError: OUT holds something else; the first checkpoint cannot be evaluated; nothing happens for too long.
        KeyboardInterrupt: after Ctrl-C or SIGTERM; what is due stays in the queue.
    """
    training = TrainingRun(str(config.watch))
    out = config.out_folder
    training.require_apart(out)
    if config.replay is None:
        for name in config.benchmark_names:
            load_benchmark(name, config.limit)  # refused now rather than when the first checkpoint is there
    if config.target is not None:
        TargetSpec.from_pretrained(config.target, config.target_revision)
    record = Record(out, training, config.result_settings() | {"replay": config.replay})
    print(
        f"watching     {training.out}: {len(training.checkpoints())} checkpoints now, {len(record.steps())} evaluated before"
    )
    print(f"report       {out}", flush=True)
    if config.dry_run:
        return 0
    with ExitStack() as stack:
        stack.enter_context(closing(_lock(out)))
        record.begin()
        stack.enter_context(keeping())
        stack.enter_context(sigterm_interrupts())
        poll_s = config.watch_poll_s or DEFAULT_POLL_S
        catcher = stack.enter_context(Catcher(training, out / QUEUE_NAME, record.steps(), poll_s))
        try:
            return _follow(config, run, training, catcher, record)
        except KeyboardInterrupt:
            print(f"stopped as asked: {record.summary()}; {len(catcher.queued())} in the queue", flush=True)
            raise


def _follow(config: EvalConfig, run: Run, training: TrainingRun, catcher: Catcher, record: "Record") -> int:
    poll_s = config.watch_poll_s or DEFAULT_POLL_S
    timeout_s = config.watch_timeout_s or DEFAULT_TIMEOUT_S
    signs, seen_s, said = training.signs(), time.monotonic(), False
    while True:
        has_ended = training.finished() is not None  # before the last look, so that no checkpoint comes after it
        catcher.look()
        due = catcher.queued()
        record.note_missed(catcher.missed())
        if due:
            _evaluate(config, run, training, catcher, record, due[0])
            signs, seen_s, said = training.signs(), time.monotonic(), False
            continue
        if has_ended:
            _evaluate_finished(config, run, training, record)
            print(f"training has ended: {record.summary()}; {record.finished_words()}", flush=True)
            return record.status()
        if training.signs() != signs:
            signs, seen_s = training.signs(), time.monotonic()
        elif time.monotonic() - seen_s > timeout_s:
            raise KitError(
                f"nothing has happened in {training.out} for {timeout_s:g} s (watch_timeout_s), and its finished drafter is "
                f"not there; {record.summary()}: see to the training and run the same command again"
            )
        if not said:
            print(f"waiting for a checkpoint in {training.out} ({record.summary()})", flush=True)
            said = True
        time.sleep(min(poll_s, timeout_s))


def _evaluate(
    config: EvalConfig, run: Run, training: TrainingRun, catcher: Catcher, record: "Record", step: int
) -> None:
    """One checkpoint out of the queue. A fault of one is noted; a fault of the first would be one of all."""
    folder = catcher.folder(step)
    shown = str(training.checkpoints().get(step, training.state / "checkpoints" / step_name(step)))
    entry: dict[str, Any] = {"step": step, "name": step_name(step), "checkpoint": shown}
    try:
        entry |= {"weights_sha256": weights_sha256(folder), **_measure(config, run, folder, step_name(step), shown)}
    except KitError as error:
        if not record.has_results():
            raise
        entry |= {"status": FAILED, "reason": str(error)}
        print(f"checkpoint {shown} cannot be evaluated: {error}", flush=True)
    record.add(entry)
    catcher.finish(step)


def _evaluate_finished(config: EvalConfig, run: Run, training: TrainingRun, record: "Record") -> None:
    """The finished drafter, which mostly is a checkpoint that has been evaluated."""
    finished = training.finished()
    assert finished is not None
    sha, step = weights_sha256(finished), training.finished_step()
    same = record.with_weights(sha)
    entry = {"step": step, "name": FINISHED_NAME, "checkpoint": str(finished), "weights_sha256": sha}
    if same is not None:
        entry |= {"same_as": same["name"], "step": same["step"]}
    elif record.finished() is None:
        entry |= _measure(config, run, finished, FINISHED_NAME, str(finished))
    else:
        return
    record.set_finished(entry)


def _measure(config: EvalConfig, run: Run, folder: Path, name: str, shown: str) -> dict[str, Any]:
    """Evaluate into OUT/NAME; the numbers of its report."""
    place = config.out_folder / name
    print(f"checkpoint   {shown}", flush=True)
    one = replace(config, watch=None, watch_poll_s=None, watch_timeout_s=None, ckpt=str(folder), out=str(place))
    status = run(one, shown)
    report = json.loads((place / REPORT_NAME).read_text(encoding="utf-8"))
    results = [
        {name: entry[name] for name in ("benchmark", "method", "budget")} | {key: entry.get(key) for key in NUMBERS}
        for entry in report["results"]
    ]
    return {"status": EVALUATED, "exit_status": status, "target": report["target"], "results": results}


class Record:
    """watch.json and the page beside it.

    Args:
        out: new, empty, or of an earlier watch of the same run with the same settings.
        training: the run.
        settings: all that decides the results.

    Raises:
        KitError: it holds something else, or belongs to another run or other settings.
    """

    def __init__(self, out: Path, training: TrainingRun, settings: dict[str, Any]) -> None:
        self.out, self._training = out, training
        self._file = out / WATCH_NAME
        self._values: dict[str, Any] = {
            "watched": str(training.out.absolute()),
            "run": training.identity(),
            "settings": json.loads(json.dumps(settings)),
            "checkpoints": [],
            "missed": [],
            "finished": None,
        }
        if self._file.exists():
            self._resume()
        elif not out.is_dir() or {entry.name for entry in out.iterdir()} - {QUEUE_NAME, LOCK_NAME}:
            require_dir_empty(out, "report folder")

    def _resume(self) -> None:
        try:
            there = json.loads(self._file.read_text(encoding="utf-8"))
            steps = [entry["step"] for entry in there["checkpoints"]]
            known = {name: there[name] for name in self._values} | {"settings": dict(there["settings"])}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise KitError(f"{self._file} is no record of a watch ({error}); name a new folder with --out") from error
        for name in ("watched", "run"):
            if None not in (known[name], self._values[name]) and known[name] != self._values[name]:
                raise KitError(
                    f"report folder {self.out} belongs to another run ({name} is {known[name]} there and "
                    f"{self._values[name]} now); name a new folder with --out"
                )
        if not steps:  # nothing has been evaluated yet
            return
        for name in sorted(known["settings"] | self._values["settings"]):
            before, now = known["settings"].get(name), self._values["settings"].get(name)
            if before != now:
                raise KitError(
                    f"report folder {self.out} holds results with {name} = {before}, but this run has {name} = {now}; "
                    "name a new folder with --out"
                )
        self._values = known | {"run": self._values["run"] or known["run"]}

    def begin(self) -> None:
        """Make the folder one of this watch, before anything else is written there."""
        if not self._file.exists() or not self._values["checkpoints"]:
            self._write()

    def steps(self) -> set[int]:
        """Steps that were evaluated; those that failed are tried again while their checkpoint is there."""
        return {entry["step"] for entry in self._values["checkpoints"] if entry["status"] == EVALUATED}

    def has_results(self) -> bool:
        """Whether any checkpoint was evaluated."""
        return bool(self.steps())

    def add(self, entry: dict[str, Any]) -> None:
        """Keep a checkpoint's numbers; they are on disk when this returns."""
        others = [one for one in self._values["checkpoints"] if one["step"] != entry["step"]]
        self._values["missed"] = [step for step in self._values["missed"] if step != entry["step"]]
        self._values["checkpoints"] = sorted([*others, entry], key=lambda one: one["step"])
        self._write()

    def note_missed(self, steps: list[int]) -> None:
        """Keep the steps that were never seen."""
        new = sorted(set(steps) - set(self._values["missed"]))
        if new:
            self._values["missed"] = sorted({*self._values["missed"], *new})
            print(f"missed       steps {', '.join(map(str, new))}: deleted before they could be evaluated", flush=True)
            self._write()

    def finished(self) -> dict[str, Any] | None:
        """What is known of the finished drafter."""
        found: dict[str, Any] | None = self._values["finished"]
        return found

    def set_finished(self, entry: dict[str, Any]) -> None:
        """Keep what the finished drafter is."""
        self._values["finished"] = entry
        self._write()

    def with_weights(self, sha256: str) -> dict[str, Any] | None:
        """The evaluated checkpoint with these weights."""
        for entry in self._values["checkpoints"]:
            if entry["status"] == EVALUATED and entry["weights_sha256"] == sha256:
                return dict(entry)
        return None

    def status(self) -> int:
        """0 when all were evaluated and no evaluation found a fault; missed ones are reported, not a fault."""
        entries = [*self._values["checkpoints"], self._values["finished"] or {}]
        return max(1 if entry.get("status") == FAILED else entry.get("exit_status", 0) for entry in entries)

    def summary(self) -> str:
        """Such as ``3 checkpoints evaluated, none missed``."""
        failed = sum(entry["status"] == FAILED for entry in self._values["checkpoints"])
        missed = self._values["missed"]
        words = f"{len(self.steps())} checkpoints evaluated, " + (f"{len(missed)} missed" if missed else "none missed")
        return words + (f", {failed} not evaluated for a fault" if failed else "")

    def finished_words(self) -> str:
        """Which checkpoint the finished drafter is."""
        found = self._values["finished"]
        if found.get("same_as"):
            return f"the finished drafter is that of step {found['step']}"
        return f"the finished drafter was evaluated, too ({self.out / FINISHED_NAME})"

    def _write(self) -> None:
        from .watch_page import render_watch

        self._values["run"] = self._values["run"] or self._training.identity()
        try:
            write_whole(self.out / PAGE_NAME, render_watch(self._values))
            write_whole(self._file, json.dumps(self._values, indent=1) + "\n")
        except OSError as error:
            raise KitError(f"{self._file} cannot be written: {error}; free some space and run again") from error


def _lock(out: Path) -> IO[bytes]:
    """One watcher at a time."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / LOCK_NAME).open("ab")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise KitError(
            f"another process is watching into {out}; wait for it, or name another folder with --out"
        ) from error
    except OSError as error:
        raise KitError(f"report folder {out} cannot be written: {error.strerror}; name another with --out") from error
    return file
