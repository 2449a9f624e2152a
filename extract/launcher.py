"""Several extracting processes on one host, each with GPUs of its own: started, watched and ended together."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from dflash_kit.errors import KitError
from dflash_kit.shard_share import Share
from dflash_kit.vllm_environment import core_slices

from .capture import Progress
from .places import Place
from .progress import PROGRESS, ExtractionProgress

# How long a process may take to finish its shards when it is asked to end, before it is killed.
GRACE_S = 120.0
# How a process ends that was asked to: see ``run_cli``, and by SIGTERM before it got that far.
ENDED_ON_REQUEST = (130, -signal.SIGTERM)


class Worker:
    """One process (``worker.py``), and what it has told.

    Args:
        share: what it takes.
        arguments: the command line of ``dump.py`` as it was given.
        environment: of the process.
        events: where (worker, kind, value) is put for each event, for each line for people, and at the end.
    """

    def __init__(
        self, share: Share, arguments: list[str], environment: dict[str, str], events: "queue.SimpleQueue[Any]"
    ) -> None:
        self.share = share
        self.to_do = self.max_bytes = 0
        self.rows = self.tokens = self.bytes = self.failed = 0
        self.is_waiting = False
        self.result: dict[str, Any] | None = None
        self.error: str | None = None
        self._events = events
        self.process = subprocess.Popen(
            worker_command(share, arguments),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches us alone, and we end the others in order
        )
        self._readers = [
            threading.Thread(target=read, args=(stream,), daemon=True)
            for read, stream in ((self._read_stdout, self.process.stdout), (self._read_stderr, self.process.stderr))
        ]
        for thread in (*self._readers, threading.Thread(target=self._wait, daemon=True)):
            thread.start()

    @property
    def bytes_to_come(self) -> int:
        """Disk space that it still needs at most, by the share of its rows that are to be done."""
        return self.max_bytes * (self.to_do - self.rows) // max(self.to_do, 1)

    @property
    def has_succeeded(self) -> bool:
        """Whether it has ended with everything in finished shards."""
        return self.result is not None and self.process.poll() == 0

    def stop(self) -> None:
        """Ask the process to finish its shards and end."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()

    def kill(self) -> None:
        """End the process and its engine at once; finished shards stay."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _read_stdout(self, stream: Any) -> None:
        for line in stream:
            try:
                event = json.loads(line)
                self._events.put((self, event.pop("event"), event))
            except (ValueError, AttributeError, KeyError):  # something that a library has to say
                self._put_text(line)

    def _read_stderr(self, stream: Any) -> None:
        for line in stream:
            self._put_text(line)

    def _put_text(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip().rsplit("\r", 1)[-1]  # of a bar, its last state
        if text.startswith("error: "):
            self.error = text.removeprefix("error: ")
        elif text.strip():
            self._events.put((self, "text", text))

    def _wait(self) -> None:
        status = self.process.wait()
        for thread in self._readers:
            thread.join(timeout=5.0)  # an engine that ends after its driver may hold the pipes open
        self._events.put((self, "end", status))


@contextmanager
def _on_cores(cores: list[int] | None) -> Iterator[None]:
    """Keep this thread, and with it what it starts, to some cores: set afterwards, a process would begin on all of them."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def launch(
    shares: list[Share],
    arguments: list[str],
    place: Place,
    *,
    gpus_each: int,
    workers_per_gpu: int = 1,
    progress: str = "text",
) -> dict[str, Any]:
    """Run one process a share until all are done; when one fails the others finish their shards and end.

    Args:
        shares: what each of them takes.
        arguments: the command line of ``dump.py`` as it was given.
        place: where the shards go.
        gpus_each: GPUs that a process needs.
        workers_per_gpu: processes that share a GPU.
        progress: how the work is shown, one of ``PROGRESS``.

    Returns:
        Totals over the processes, for the last line of output; where some failed, ``errors`` says why, by ranks.

    Raises:
        KitError: too few GPUs, or too little disk; nothing runs any more.
        KeyboardInterrupt: after all have finished their shards and ended.
    """
    gpus = gpu_groups(len(shares), gpus_each, workers_per_gpu)
    # Engines on GPUs of their own have few busy threads each; several on one would have more than there are cores.
    cores = [] if gpus and workers_per_gpu == 1 else core_slices(len(shares))
    num_gpus = -(-len(shares) // workers_per_gpu) * gpus_each
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    workers: list[Worker] = []
    label = f"extract ×{len(shares)}"
    with PROGRESS[progress](0, 0, label=label, num_gpus=num_gpus) as shown:
        try:
            for index, share in enumerate(shares):
                with _on_cores(cores[index] if cores else None):
                    workers.append(Worker(share, arguments, _environment(gpus[index] if gpus else None), events))
            failed = _watch(workers, events, shown, place)
        finally:
            _stop(workers, shown)
    return _totals(workers, failed, shown, place.name)


def worker_command(share: Share, arguments: list[str]) -> list[str]:
    """What runs a share: the same command line with a rank (of options given twice, the last counts).

    The code stands in the command because vLLM's processes would import a main module once more.
    """
    code = f"import sys; from dflash_kit.errors import run_cli; sys.exit(run_cli('{__package__}.worker'))"
    own = [f"--rank={share.rank}", f"--world_size={share.world_size}", "--num_workers=1", "--verify=false"]
    return [sys.executable, "-P", "-c", code, *arguments, *own]


def gpu_groups(num_workers: int, gpus_each: int, workers_per_gpu: int = 1) -> list[str]:
    """``CUDA_VISIBLE_DEVICES`` of each process, in order; empty on a host without GPUs.

    Raises:
        KitError: there are fewer GPUs than the processes need.
    """
    if not torch.cuda.is_available():
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]
    most = len(devices) // gpus_each * workers_per_gpu
    if num_workers > most:
        each = f"{gpus_each} GPUs each (tensor_parallel_size)" if gpus_each > 1 else "1 GPU each"
        each = f"1 GPU for {workers_per_gpu} of them (workers_per_gpu)" if workers_per_gpu > 1 else each
        needed = -(-num_workers // workers_per_gpu) * gpus_each
        raise KitError(
            f"num_workers {num_workers} with {each} need {needed}; {len(devices)} are visible here: allowed are up to "
            f"{most} workers"
        )
    groups = [i // workers_per_gpu * gpus_each for i in range(num_workers)]
    return [",".join(devices[first : first + gpus_each]) for first in groups]


def _environment(gpus: str | None) -> dict[str, str]:
    environment = dict(os.environ)
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    if "." not in str(__package__):  # a checkout, which is on our path but may not be on the child's
        root = str(Path(__file__).resolve().parents[1])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return environment


def _watch(workers: list[Worker], events: Any, progress: ExtractionProgress, place: Place) -> list[Worker]:
    """Take events until all processes have ended; returns those that failed."""
    failed: list[Worker] = []
    num_running = len(workers)
    while num_running:
        worker, kind, value = events.get()
        if kind == "text":
            progress.note(f"[rank {worker.share.rank}] {value}")
        elif kind == "plan":
            progress.expect(value["to_do"], sum(value["dropped"].values()))
            worker.to_do, worker.max_bytes = value["to_do"], value["max_bytes"]
            place.require_room(sum(each.bytes_to_come for each in workers), num_writers=len(workers))
        elif kind == "progress":
            rows, tokens = value["rows"] - worker.rows, value["tokens"] - worker.tokens
            failed_here = value.get("failed", 0) - worker.failed
            worker.rows, worker.tokens, worker.bytes = value["rows"], value["tokens"], value["bytes"]
            worker.failed += failed_here
            worker.is_waiting = value.get("is_waiting", False)
            num_bytes, is_waiting = sum(each.bytes for each in workers), any(each.is_waiting for each in workers)
            progress.update(Progress(rows, tokens, num_bytes, num_failed=failed_here, is_waiting=is_waiting))
        elif kind == "done":
            worker.result = value["result"]
        else:
            num_running -= 1
            if not worker.has_succeeded and not (failed and value in ENDED_ON_REQUEST):
                failed.append(worker)
                worker.error = worker.error or f"it ended with status {value}; what it printed stands above"
                if len(failed) == 1 and num_running:
                    progress.note(f"[rank {worker.share.rank}] failed; {num_running} others finish their shards")
                for other in workers:
                    other.stop()
    return failed


def _stop(workers: list[Worker], progress: ExtractionProgress) -> None:
    """Let processes that still run finish their shards; kill those that do not end, and all at a second Ctrl-C."""
    running = [worker for worker in workers if worker.process.poll() is None]
    if running:
        progress.note(f"{len(running)} processes finish their shards; Ctrl-C again ends them at once")
    for worker in running:
        worker.stop()
    deadline_s = time.monotonic() + GRACE_S
    try:
        for worker in running:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline_s - time.monotonic()))
    finally:
        for worker in running:
            if worker.process.poll() is None:
                worker.kill()


def _totals(workers: list[Worker], failed: list[Worker], progress: ExtractionProgress, out: str) -> dict[str, Any]:
    totals = {"out": out, "workers": len(workers), "rows_added": progress.num_rows, **progress.totals()}
    if failed:
        return {**totals, "errors": _by_ranks(failed)}
    results = [worker.result for worker in workers if worker.result is not None]
    dropped: Counter[str] = Counter()
    for result in results:
        dropped.update(result["dropped"])
    counts = {name: sum(result[name] for result in results) for name in ("asked", "rows")}
    return {**totals, **counts, "dropped": dict(dropped)}


def _by_ranks(failed: list[Worker]) -> dict[str, str]:
    """Errors by the ranks that had them: eight processes that read one broken line say one thing."""
    ranks: dict[str, list[int]] = {}
    for worker in failed:
        ranks.setdefault(worker.error or "", []).append(worker.share.rank)
    return {", ".join(map(str, sorted(found))): error for error, found in ranks.items()}
