"""Engines and turns of `extract_gpu.py`: plain prefill, our connector with several sinks, vLLM's own connector."""

from __future__ import annotations

import fcntl
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

DEFAULT_ENGINES = ("plain", "shards", "stock")
ENGINES = (*DEFAULT_ENGINES, "plain_as_ours")


def start_other(job: Any, **more: Any) -> Any:
    """An engine like the extractor's, with or without states."""
    from vllm import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(
            model=job.spec.name,
            skip_tokenizer_init=True,
            dtype=job.header.compute_dtype,
            enforce_eager=current_platform.is_cpu(),
            max_model_len=job.longest_tokens + 1,
            max_num_seqs=job.max_num_seqs,
            max_num_batched_tokens=job.max_num_batched_tokens,
            gpu_memory_utilization=job.gpu_memory_utilization,
            enable_prefix_caching=False,
            disable_log_stats=True,
            **job.engine_args,
            **more,
        )
    )


def start_stock(job: Any, folder: Path) -> Any:
    """vLLM's own connector."""
    from extract.vllm_capture import extraction_method

    connector = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return start_other(job, speculative_config=extraction_method(job), kv_transfer_config=connector)


def start_shards(job: Any, samples: list[Any]) -> Any:
    """Ours, with a sink that can be changed."""
    from extract import vllm_capture

    own = vllm_capture.connector
    switchable = {"kv_connector": "SwitchableConnector", "kv_connector_module_path": "extract_sinks"}
    vllm_capture.connector = lambda of: own(of) | switchable  # type: ignore[assignment]
    try:
        return vllm_capture.start_engine(job, samples)
    finally:
        vllm_capture.connector = own


def plain_turn(engine: Any, samples: list[Any], turn: int) -> dict[str, float]:
    """Until the last token is computed."""
    t0 = time.perf_counter()
    step_through(engine, samples, turn)
    return {"seconds": time.perf_counter() - t0}


def stock_turn(engine: Any, samples: list[Any], turn: int, folder: Path) -> dict[str, float]:
    """Until the last file is complete: the connector holds a lock on each until then."""
    t0 = time.perf_counter()
    paths = step_through(engine, samples, turn)
    computed_s = time.perf_counter() - t0
    for path in paths:
        with open(path + ".lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
    seconds = time.perf_counter() - t0
    shutil.rmtree(folder)
    return {"seconds": seconds, "computing_s": computed_s, "last_files_s": seconds - computed_s}


def shards_turn(engine: Any, job: Any, samples: list[Any], turn: int, folder: Path | None) -> dict[str, float]:
    """Until the last shard in a new folder is finished and journalled; without a folder, until the last row is on the host."""
    from extract.vllm_capture import _Run

    class Run(_Run):
        last_output_s = 0.0

        def _take_outputs(self, outputs: list[Any]) -> None:
            super()._take_outputs(outputs)
            self.last_output_s = time.perf_counter()

    name = f"turn-{turn}"
    switch_to(engine, None if folder is None else folder / name)
    t0 = time.perf_counter()
    run = Run(engine, job, [replace(sample, id=f"{turn}-{sample.id}") for sample in samples])
    for _ in run.run():
        pass
    accepted_s = time.perf_counter()
    engine.collective_rpc("shard_writer_flush")
    end_s = time.perf_counter()
    switch_to(engine, None)
    if folder is not None:
        num_shards = len(list((folder / name).glob("*.arrow")))
        print(f"{num_shards} shards in {folder / name}", file=sys.stderr)
        shutil.rmtree(folder / name)
    return {
        "seconds": end_s - t0, "computing_s": run.last_output_s - t0, "last_rows_s": accepted_s - run.last_output_s,
        "last_shards_s": end_s - accepted_s,
    }  # fmt: skip


def switch_to(engine: Any, folder: Path | None) -> None:
    """Have the worker write to a new folder; None: the null sink."""
    statuses = engine.collective_rpc("shard_writer_finish", args=({"switch_to": str(folder or "")},))
    errors = [status["error"] for status in statuses if status and status["error"]]
    if errors:
        raise RuntimeError(errors[0])


def step_through(engine: Any, samples: list[Any], turn: int) -> list[str]:
    """Prefill every sample; returns the paths that a connector names."""
    from vllm import SamplingParams

    for sample in samples:
        params = SamplingParams(max_tokens=1, detokenize=False, ignore_eos=True, temperature=0.0)
        engine.add_request(f"{turn}-{sample.id}", {"prompt_token_ids": sample.token_ids}, params)
    paths = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished and output.kv_transfer_params:
                paths.append(output.kv_transfer_params["hidden_states_path"])
    return paths
