"""Capture by a running vLLM server: requests go to it by HTTP, its connector writes the shards."""

import threading
import time
from collections import deque
from collections.abc import Generator
from contextlib import suppress
from functools import partial
from typing import Any

from dflash_kit.errors import KitError
from dflash_kit.shard_manifest import read_manifests

from .capture import Capture, Job, Progress
from .prompts import Sample
from .server import Server, ServerRefusal
from .vllm_capture import STALL_S, STATUS_EVERY_S, sampling_arguments, transfer_arguments

# Requests are answered in threads of ours; more would not make a server faster.
MAX_THREADS = 512


def server_capture(server: Server) -> Capture:
    """The capture that uses this server, whose session is open."""
    return partial(capture, server)


def capture(
    server: Server, job: Job, samples: list[Sample], summary: dict[str, Any]
) -> Generator[Progress, None, None]:
    """Have the server answer the samples that ask for it and write the rows of all; see ``Capture``.

    Raises:
        KitError: the server is gone or its engine stopped, a sample that it refuses, a broken capture, or a full disk.
    """
    requests = _Requests(server, job, samples)
    missing = {sample.id for sample in samples}
    progressed_s = time.monotonic()
    try:
        while missing:
            requests.raise_error()
            status = _sound(server.status())
            accepted = [(sample_id, num_tokens) for sample_id, num_tokens in status["accepted"] if sample_id in missing]
            missing.difference_update(sample_id for sample_id, _ in accepted)
            if accepted or requests.num_open:
                progressed_s = time.monotonic()
            elif time.monotonic() - progressed_s > STALL_S:
                raise KitError(f"no states arrived for {len(missing)} samples ({', '.join(sorted(missing)[:3])}, …)")
            num_tokens = sum(num_tokens for _, num_tokens in accepted)
            yield Progress(len(accepted), num_tokens, status["bytes"], requests.take_said())
            requests.wait(STATUS_EVERY_S if missing else 0.0)
        yield Progress(0, 0, _sound(server.finish(summary))["bytes"])
    finally:
        requests.stop()
        with suppress(KitError):  # it has ended, or is gone; the error that led here is told
            server.finish(None)
    _require_rows(job, samples)


class _Requests:
    """Threads that send the samples, one request at a time each; they end with the process if they are not waited for."""

    def __init__(self, server: Server, job: Job, samples: list[Sample]) -> None:
        self._server = server
        self._job = job
        self._waiting = deque(samples)
        self._num_said = 0
        self._error: KitError | None = None
        self._changed = threading.Condition()
        # A few batches are queued in the engine, not the whole file.
        num_threads = min(len(samples), 4 * job.max_num_seqs, MAX_THREADS)
        self.num_open = num_threads
        for _ in range(num_threads):
            threading.Thread(target=self._run, name="server-requests", daemon=True).start()

    def raise_error(self) -> None:
        """Raise the first error that a request has met."""
        if self._error is not None:
            raise self._error

    def take_said(self) -> int:
        """Tokens of the answers that came since the last call."""
        with self._changed:
            said, self._num_said = self._num_said, 0
        return said

    def wait(self, timeout_s: float) -> None:
        """Wait, but not for longer than until an error or the last answer."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None, timeout_s if self.num_open else timeout_s / 10)

    def stop(self) -> None:
        """Send no more."""
        self._waiting.clear()

    def _run(self) -> None:
        while self._error is None:
            try:
                sample = self._waiting.popleft()
            except IndexError:
                break
            try:
                num_said = self._ask(sample)
            except KitError as error:
                with self._changed:
                    self._error = self._error or error
                    self._changed.notify_all()
            else:
                with self._changed:
                    self._num_said += num_said
        with self._changed:
            self.num_open -= 1

    def _ask(self, sample: Sample) -> int:
        """Have one sample answered and captured; returns the tokens of the answer."""
        request = {
            "prompt": sample.token_ids,
            **sampling_arguments(self._job, sample),
            "kv_transfer_params": transfer_arguments(sample),
        }
        try:
            answer = self._server.complete(request)
        except ServerRefusal as error:
            raise KitError(f"{sample.source}: {error}") from error
        reason = answer["choices"][0]["finish_reason"]
        if reason not in ("stop", "length", "repetition"):
            raise KitError(f"sample {sample.id}: vLLM ended it with {reason!r} instead of an answer")
        return 0 if sample.loss_spans is not None else int(answer["usage"]["completion_tokens"])


def _sound(status: dict[str, Any]) -> dict[str, Any]:
    if status["error"]:
        raise KitError(f"the server says: {status['error']}")
    return status


def _require_rows(job: Job, samples: list[Sample]) -> None:
    """What the server says is no proof: the folder has to show it."""
    done = {row_id for entry in read_manifests(job.folder).shards for row_id in entry.ids}
    missing = [sample.id for sample in samples if sample.id not in done]
    if missing:
        raise KitError(
            f"the server reports {len(missing)} samples as written that {job.folder} does not list ({missing[0]}, …); "
            "run the same command again"
        )
