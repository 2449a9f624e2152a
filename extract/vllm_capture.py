"""Capture by vLLM: the driver feeds requests, the worker writes the shards (see ``dflash_kit.vllm_connector``)."""

import os
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import fields
from importlib import import_module
from typing import Any

from dflash_kit.errors import KitError
from dflash_kit.spool_room import POLL_S
from dflash_kit.vllm_calls import ask, stop
from dflash_kit.vllm_environment import EXTRACTION, check_engine_args, environment, prepare_environment
from dflash_kit.vllm_version import installed_vllm

from .capture import Job, Progress
from .failures import Failures
from .gpu_part import memory_arguments
from .prefill import prefill_arguments
from .prompts import Sample, answer_seed

# How long rows may take from the end of a request to the writer before the run is given up.
STALL_S = 300.0
STATUS_EVERY_S = 0.5
PENDING_BYTES = 2 << 30
MAX_TEMPERATURE = 2.0


def engine_version() -> str:
    """Version of the installed vLLM; ``KitError`` when there is none."""
    version = installed_vllm()
    if version is None:
        raise KitError("vLLM is not installed; install it, or pass --engine transformers (slower, the same rows)")
    return version


def capture(job: Job, samples: list[Sample], summary: dict[str, Any]) -> Generator[Progress, None, None]:
    """Answer the samples that ask for it and write the rows of all; see ``Capture``.

    Raises:
        KitError: the engine does not start, fails at a sample or dies, a broken capture (by sample id), or a full disk.
    """
    prepare_environment(job.tensor_parallel_size, verbose=job.verbose, dtype=job.header.compute_dtype)
    if job.spool_bytes:  # a step may wait for the trainer
        os.environ.setdefault("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", str(30 * 86400))
    engine = start_engine(job, samples)
    try:
        run = _Run(engine, job, samples)
        yield from run.run()
        yield run.finish(run.failures.settle(summary))
    finally:
        stop(engine, finish="shard_writer_finish")


def start_engine(job: Job, samples: list[Sample]) -> Any:
    """A vLLM engine with our connector.

    Raises:
        KitError: it does not start; vLLM has logged the reason. Or a temperature that it does not take.
    """
    temperature = job.header.sampling["temperature"]
    if temperature > MAX_TEMPERATURE:  # else it would say so minutes later, at the first sample
        raise KitError(
            f"sampling.temperature is {temperature}; vLLM samples at {MAX_TEMPERATURE} at most: lower it, or take --engine transformers"
        )
    from vllm import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    on_cpu = current_platform.is_cpu()
    # The extraction method "drafts" each sampled token once more. On a CPU that doubles the work of decoding; with
    # asynchronous scheduling (0.26) it is wrong: once such a draft is accepted (a token said twice running), the worker
    # counts one token instead of two, and every later state of the request lies one place too early.
    skip_drafts = any(sample.loss_spans is None for sample in samples)
    own: dict[str, Any] = {
        "model": job.spec.name,
        "revision": job.spec.revision,
        "skip_tokenizer_init": True,
        "dtype": job.header.compute_dtype,
        "enforce_eager": on_cpu,
        "max_model_len": job.longest_tokens + 1,
        "max_num_seqs": job.max_num_seqs,
        "tensor_parallel_size": job.tensor_parallel_size,
        **memory_arguments(job),
        "enable_prefix_caching": job.prefix_caching,
        "disable_log_stats": True,
        "speculative_config": extraction_method(job),
        "kv_transfer_config": connector(job),
        "worker_extension_cls": "dflash_kit.vllm_worker.WriterAccess",
    }
    if skip_drafts:
        own |= {"async_scheduling": False, **prefill_arguments(job, on_cpu=on_cpu)}
    shown = {} if job.verbose or "use_tqdm_on_load" in job.engine_args else {"use_tqdm_on_load": False}
    if job.max_num_batched_tokens is not None:
        own["max_num_batched_tokens"] = job.max_num_batched_tokens
    check_engine_args(job.engine_args, own, [field.name for field in fields(EngineArgs)], "extraction")
    arguments = EngineArgs(**own, **shown, **job.engine_args)
    try:
        with environment(EXTRACTION):
            engine = LLMEngine.from_engine_args(arguments)
    except (RuntimeError, ValueError, OSError) as error:
        raise KitError(f"vLLM does not start: {error}; its own message stands above") from error
    if skip_drafts:
        engine.collective_rpc("skip_draft_tokens")
    return engine


def extraction_method(job: Job) -> dict[str, Any]:
    """Argument ``speculative_config``: the "drafter" that only keeps states."""
    layers = [layer_id + 1 for layer_id in job.captured_layer_ids]  # vLLM counts from the embeddings
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
    }


def connector(job: Job) -> dict[str, Any]:
    """Argument ``kv_transfer_config``: our connector, with all that its writer needs."""
    return {
        "kv_connector": "ShardConnector",
        "kv_connector_module_path": "dflash_kit.vllm_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "folder": str(job.folder.absolute()),
            "header": job.header.to_dict(),
            "num_captured_layers": len(job.captured_layer_ids),
            "writer": job.writer_settings,
            "driver_pid": os.getpid(),
            "max_pending_bytes": PENDING_BYTES,
        },
    }


def sampling_arguments(job: Job, sample: Sample) -> dict[str, Any]:
    """How vLLM is to answer a sample (given responses: not at all, it says one token that is left out)."""
    is_given = sample.loss_spans is not None
    sampling = job.header.sampling
    greedy = is_given or sampling["temperature"] == 0
    return {
        "temperature": 0.0 if greedy else sampling["temperature"],
        "top_p": 1.0 if greedy else sampling["top_p"],
        "top_k": 0 if greedy else sampling["top_k"],
        "seed": None if greedy else answer_seed(sampling["seed"], sample.id),
        "max_tokens": 1 if is_given else sample.max_new_tokens,
        "ignore_eos": True,  # the end tokens are exactly the target's, not the tokenizer's as well
        "stop_token_ids": list(job.spec.eos_token_ids),
    }


def transfer_arguments(sample: Sample) -> dict[str, Any]:
    """What our connector has to know of a sample (``kv_transfer_params``)."""
    if sample.loss_spans is None:
        return {"sample_id": sample.id, "include_output_tokens": True}
    return {"sample_id": sample.id, "loss_spans": [list(span) for span in sample.loss_spans]}


class _Run:
    """Feeds the engine and watches the writer."""

    def __init__(self, engine: Any, job: Job, samples: list[Sample]) -> None:
        self._engine = engine
        self._job = job
        self._waiting = deque(samples)
        self._in_flight: dict[str, Sample] = {}  # by id, samples whose rows have not been accepted
        self._ended: set[str] = set()  # ids of those among them that the engine is through with
        self._given = {sample.id for sample in samples if sample.loss_spans is not None}
        self.failures = Failures(skip=job.skip_errors)
        self._num_ended_said = 0  # tokens of finished answers; a given response has none
        self._num_told_said = 0  # tokens that have been reported, those of unfinished answers included
        self._is_full = False  # a spool, whose trainer has to make room
        self._next_status_s = 0.0

    def run(self) -> Iterator[Progress]:
        """Until every row has been accepted by the writer; after a failure that ends the run, every one in flight."""
        self._report()  # the writer may have failed to open
        while self._waiting or self._engine.has_unfinished_requests():
            if self._is_full:  # asking for more would only fill the memory
                time.sleep(POLL_S)
                yield self._report()
                continue
            self._feed()
            self._take_outputs(self._step())
            if time.monotonic() >= self._next_status_s:
                yield self._report()
        yield self._report()  # the last rows may have been accepted before the engine told their answers
        progressed_s = time.monotonic()
        while self._in_flight:
            progress = self._report()
            if progress.num_rows or progress.num_failed or progress.is_waiting:
                progressed_s = time.monotonic()
                yield progress
                time.sleep(POLL_S if progress.is_waiting else 0)
            elif time.monotonic() - progressed_s > STALL_S:
                missing = ", ".join(sorted(self._in_flight)[:3])
                raise KitError(f"no states arrived for {len(self._in_flight)} samples ({missing}, …)")
            else:
                time.sleep(0.005)

    def finish(self, summary: dict[str, Any]) -> Progress:
        """Finish the last shard."""
        return self._read(self._ask("shard_writer_finish", (summary,)))

    def _feed(self) -> None:
        """Keep a few batches queued in the engine, not the whole file."""
        if self.failures.must_stop:
            self._waiting.clear()
        while self._waiting and self._engine.get_num_unfinished_requests() < 4 * self._job.max_num_seqs:
            sample = self._waiting.popleft()
            self._in_flight[sample.id] = sample
            prompt = {"prompt_token_ids": sample.token_ids}
            try:
                self._engine.add_request(sample.id, prompt, self._params(sample))
            except _refusals() as error:
                self.failures.take(self._in_flight.pop(sample.id), error)
                if self.failures.must_stop:
                    self._waiting.clear()

    def _params(self, sample: Sample) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            **sampling_arguments(self._job, sample),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,  # else an object a request and step, which nobody looks at
            extra_args={"kv_transfer_params": transfer_arguments(sample)},
        )

    def _step(self) -> list[Any]:
        try:
            return list(self._engine.step())
        except Exception as error:
            raise self._death(error) from error

    def _ask(self, name: str, args: tuple[Any, ...] = ()) -> list[Any]:
        try:
            return ask(self._engine, name, args)
        except Exception as error:
            raise self._death(error) from error

    def _death(self, error: Exception) -> KitError:
        sources = [sample.source for row_id, sample in self._in_flight.items() if row_id not in self._ended]
        return KitError(
            f"vLLM's engine died, or a process of it was killed ({error or type(error).__name__}; its own messages "
            f"stand above) while it worked on {len(sources)} samples ({', '.join(sources[:3])}{', …' * (len(sources) > 3)}); "
            "finished shards are intact: run the same command again to resume"
        )

    def _take_outputs(self, outputs: list[Any]) -> None:
        for output in outputs:  # of finished requests alone, see ``_params``
            if output.request_id not in self._given:  # there vLLM has to say a token, which is left out
                self._num_ended_said += len(output.outputs[0].token_ids)
            if output.request_id in self._in_flight:
                self._ended.add(output.request_id)
            reason = output.outputs[0].finish_reason
            if reason not in ("stop", "length", "repetition"):
                sample = self._in_flight.pop(output.request_id)
                self.failures.take(sample, f"vLLM ended it with {reason!r} instead of an answer")

    def _report(self) -> Progress:
        self._next_status_s = time.monotonic() + STATUS_EVERY_S
        return self._read(self._ask("shard_writer_status"))

    def _read(self, statuses: list[dict[str, Any] | None]) -> Progress:
        status = next((status for status in statuses if status is not None), None)
        if status is None:
            raise KitError("no vLLM worker writes shards; this is a bug")
        if status["error"]:
            raise KitError(status["error"])
        for sample_id, _ in status["accepted"]:
            self._in_flight.pop(sample_id, None)
            self._ended.discard(sample_id)
            self.failures.end_row()
        num_tokens = sum(num_tokens for _, num_tokens in status["accepted"])
        num_said = self._num_ended_said + _num_unfinished_tokens(self._engine)
        said, self._num_told_said = num_said - self._num_told_said, num_said
        num_failed = self.failures.take_count()
        self._is_full = bool(status.get("spool_full"))
        return Progress(
            len(status["accepted"]), num_tokens, status["bytes"], said, num_failed=num_failed, is_waiting=self._is_full
        )


def _num_unfinished_tokens(engine: Any) -> int:
    """Tokens of answers that are not finished, as vLLM's driver collects them."""
    states = engine.output_processor.request_states.values()
    return sum(state.detokenizer.num_output_tokens() for state in states if state.detokenizer is not None)


def _refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises for a request that it does not take; newer versions have a class of its own for it."""
    with suppress(ImportError, AttributeError):
        return (ValueError, import_module("vllm.exceptions").VLLMClientError)
    return (ValueError,)
