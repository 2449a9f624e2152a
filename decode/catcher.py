"""Checkpoints of a running training, taken aside before the trainer deletes them.

Evaluating one takes longer than looking, so a thread looks while the evaluation goes on. What it finds is hard-linked into a
queue, which takes no room of its own until the trainer deletes the original (copied where links are not possible).
"""

import contextlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from dflash_kit.checkpoint import CONFIG_NAME, PROVENANCE_NAME
from dflash_kit.errors import KitError

from .training_run import TrainingRun

QUEUED = re.compile(r"step-(\d{8,12})")
WEIGHTS_SUFFIXES = (".safetensors", ".safetensors.index.json")
PART = re.compile(r"-\d+-of-(\d+)\.safetensors$")
"""End of the name of one of so many files of split weights."""
MAX_HEADER_BYTES = 100 << 20


def step_name(step: int) -> str:
    """Folder name of a step, in the order of steps."""
    return f"step-{step:08d}"


class Catcher:
    """Looks for new checkpoints in a thread, from ``with`` on.

    Args:
        run: whose checkpoints to take.
        queue: folder to take them to; what an earlier process left there is still due.
        done: steps that are not needed any more.
        poll_s: seconds between looks.
    """

    def __init__(self, run: TrainingRun, queue: Path, done: Iterable[int], poll_s: float) -> None:
        self.run, self.queue, self._poll_s = run, queue, poll_s
        self._done, self._lock = set(done), threading.Lock()
        self._gone: set[int] = set()
        self._stop = threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._look_on, name="catcher", daemon=True)

    def __enter__(self) -> Self:
        self.queue.mkdir(parents=True, exist_ok=True)
        for entry in self.queue.iterdir():
            match = QUEUED.fullmatch(entry.name)
            if match is None or int(match[1]) in self._done:
                shutil.rmtree(entry, ignore_errors=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # what is due stays for the next process
            self.queue.rmdir()

    def queued(self) -> list[int]:
        """Steps that are due, ascending.

        Raises:
            KitError: checkpoints could not be taken.
        """
        if self._error is not None:
            raise KitError(
                f"checkpoints of {self.run.out} cannot be kept in {self.queue}: {self._error}; mend that and run again"
            ) from self._error
        with self._lock:
            found = [QUEUED.fullmatch(entry.name) for entry in self.queue.iterdir()]
        return sorted(int(match[1]) for match in found if match)

    def folder(self, step: int) -> Path:
        """Where a queued checkpoint is."""
        return self.queue / step_name(step)

    def finish(self, step: int) -> None:
        """Let go of a checkpoint that has been evaluated."""
        with self._lock:
            self._done.add(step)
            shutil.rmtree(self.folder(step), ignore_errors=True)

    def missed(self) -> list[int]:
        """Steps whose checkpoint was written and deleted before it could be taken, ascending."""
        with self._lock:
            return sorted(self._gone)

    def look(self) -> None:
        """Take whatever is new, now; what stands in the way, ``queued`` raises."""
        try:
            self._take_new()
        except OSError as error:
            self._error = error

    def _take_new(self) -> None:
        with self._lock:
            there = self.run.checkpoints()
            held = self._done | {int(m[1]) for m in (QUEUED.fullmatch(e.name) for e in self.queue.iterdir()) if m}
            for step, source in there.items():
                if step not in held and take(source, self.folder(step)):
                    held.add(step)
            # One that is not there yet is no loss: a checkpoint is deleted only when a later one is written.
            newest = max([*there, *held], default=0)
            self._gone = {
                step for step in self.run.written_steps() if step < newest and step not in held and step not in there
            }

    def _look_on(self) -> None:
        while self._error is None and not self._stop.is_set():
            self.look()
            self._stop.wait(self._poll_s)


def take(source: Path, place: Path) -> bool:
    """Link or copy a checkpoint; False when it is not whole (yet, or any more). All of it is there, or nothing.

    Raises:
        OSError: it could not be written here.
    """
    with contextlib.ExitStack() as stack:
        try:
            # Once a file is open its content stays, whatever the trainer deletes.
            files = [
                (file.name, file, stack.enter_context(file.open("rb")))
                for file in sorted(source.iterdir())
                if file.name in (CONFIG_NAME, PROVENANCE_NAME) or file.name.endswith(WEIGHTS_SUFFIXES)
            ]
        except (FileNotFoundError, NotADirectoryError):
            return False
        if not _is_whole([(name, handle) for name, _, handle in files]):
            return False
        begun = place.with_name(place.name + ".incomplete")
        shutil.rmtree(begun, ignore_errors=True)
        begun.mkdir(parents=True)
        for name, file, handle in files:
            _link_or_copy(file, handle, begun / name)
        os.replace(begun, place)
    return True


def _link_or_copy(file: Path, handle: IO[bytes], copy: Path) -> None:
    with contextlib.suppress(OSError):
        os.link(os.path.realpath(file), copy)  # a link to a link would go with what that points to
        if os.path.samestat(os.stat(copy), os.fstat(handle.fileno())):
            return
    copy.unlink(missing_ok=True)
    handle.seek(0)
    with copy.open("wb") as written:
        shutil.copyfileobj(handle, written, 1 << 22)


def _is_whole(files: list[tuple[str, IO[bytes]]]) -> bool:
    """Whether a configuration and all weights are there, and every weight file is as long as its header says."""
    weights = {name: handle for name, handle in files if name.endswith(".safetensors")}
    parts = [match for match in map(PART.search, weights) if match]
    has_index = any(name.endswith(WEIGHTS_SUFFIXES[1]) for name, _ in files)
    if parts and not (has_index and all(len(parts) == int(match[1]) for match in parts)):
        return False
    return (
        any(name == CONFIG_NAME for name, _ in files) and bool(weights) and all(map(_has_its_length, weights.values()))
    )


def _has_its_length(handle: IO[bytes]) -> bool:
    size = os.fstat(handle.fileno()).st_size
    header_bytes = int.from_bytes(handle.read(8), "little")
    if not 0 < header_bytes <= min(size, MAX_HEADER_BYTES):
        return False
    try:
        header = json.loads(handle.read(header_bytes))
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return False
    return 8 + header_bytes + max(ends, default=0) == size
