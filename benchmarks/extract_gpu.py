"""Extraction against plain prefill and against vLLM's own connector, by the same vLLM, on one GPU.

Three engines with random weights stay loaded side by side and take turns over the same random prompts (given
conversations: prefill only): ``plain`` (no states), ``shards`` (ours), and ``stock`` (vLLM's
ExampleHiddenStatesConnector, one safetensors file a request). A turn ends when the last token is computed, the last
shard is finished, or the last file is complete. Prints one JSON line: tokens a second of each (median, lowest, highest
turn), ratios turn by turn, and what the machine's links and files can do.

    python benchmarks/extract_gpu.py --shape 8b --out /dev/shm
"""

import argparse
import fcntl
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)
sys.path.insert(1, str(ROOT / "benchmarks"))

from extract_cpu import spread  # noqa: E402

ENGINES = ("plain", "shards", "stock")


def main() -> None:
    """Start the engines, run the turns, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", help="8b, smollm2 or tiny")
    parser.add_argument("--num_prompts", type=int, default=128, help="prompts in a turn")
    parser.add_argument("--num_tokens", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--batched_tokens", type=int, default=16384, help="tokens of one engine step")
    parser.add_argument("--turns", type=int, default=4, help="turns of each engine, after one to warm up")
    parser.add_argument("--taps", type=int, default=5)
    parser.add_argument("--memory", type=float, default=0.3, help="share of the GPU's memory for each engine")
    parser.add_argument("--engines", default=",".join(ENGINES), help="which of plain, shards, stock")
    parser.add_argument("--out", default="/dev/shm", help="folder on the storage to measure")
    options = parser.parse_args()

    import torch
    from train_step import SHAPES

    from extract import vllm_capture

    if options.shape not in SHAPES:
        parser.error(f"--shape is {options.shape!r}; allowed: {', '.join(SHAPES)}")
    unknown = set(options.engines.split(",")) - set(ENGINES)
    if unknown:
        parser.error(f"--engines names {', '.join(sorted(unknown))}; allowed: {', '.join(ENGINES)}")
    if not Path(options.out).is_dir():
        parser.error(f"--out is {options.out!r}; name a folder on the storage to measure")
    if not torch.cuda.is_available():
        parser.error("no GPU is visible here; benchmarks/extract_cpu.py measures on a CPU")

    vllm_capture.prepare_environment()
    with tempfile.TemporaryDirectory(dir=options.out) as folder:
        print(json.dumps(measure(options, Path(folder))))


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All turns; the report."""
    import torch

    from dflash_kit.provenance import git_commit, package_versions

    samples, job = make_job(options, folder)
    engines = {name: START[name](job, samples, folder) for name in options.engines.split(",")}
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    turns: dict[str, list[float]] = {name: [] for name in engines}
    busy: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(options.turns + 1):
        order = list(engines) if turn % 2 else list(engines)[::-1]
        for name in order:
            with GpuMeter() as meter:
                seconds = TURN[name](engines[name], job, samples, turn, folder)
            print(f"turn {turn} {name}: {num_tokens / seconds:.0f} tokens/s", file=sys.stderr, flush=True)
            if turn > 0:
                turns[name].append(num_tokens / seconds)
                busy[name].append(meter.busy_share)
    bytes_per_token = job.header.bytes_per_token
    median = {name: statistics.median(values) for name, values in turns.items()}
    report = {
        "benchmark": "extract_gpu",
        "shape": options.shape,
        "prompts": len(samples),
        "tokens": num_tokens,
        "taps": job.header.num_taps,
        "bytes_per_token": bytes_per_token,
        "storage": options.out,
        "tokens_per_s": {name: spread(values) for name, values in turns.items()},
        "ratio_to_plain": {
            name: spread([a / b for a, b in zip(turns[name], turns["plain"], strict=True)])
            for name in engines
            if name != "plain" and "plain" in engines
        },
        "gpu_busy_share": {name: round(statistics.median(values), 3) for name, values in busy.items()},
        "written_gb_per_s": {
            name: round(1e-9 * bytes_per_token * value, 2) for name, value in median.items() if name != "plain"
        },
        "pinned_copy_gb_per_s": round(copy_rate(), 1),
        "writer_gb_per_s": {"row by row": round(writer_rate(job, folder), 2)},
        "device": torch.cuda.get_device_name(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": package_versions() | {"vllm": job.header.engine_version},
        "commit": git_commit(),
    }
    for engine in engines.values():
        engine.engine_core.shutdown(timeout=1.0)
    return report


def make_job(options: argparse.Namespace, folder: Path) -> tuple[list[Any], Any]:
    """A target that has only a configuration (its weights are random), and prompts of random tokens."""
    import torch
    from train_step import SHAPES, write_target

    from dflash_kit.shards import ShardsHeader
    from dflash_kit.target import tap_layer_ids
    from extract import vllm_capture
    from extract.capture import Job
    from extract.prompts import Sample

    spec = write_target(folder / "target", SHAPES[options.shape])
    random = torch.Generator().manual_seed(0)
    samples = []
    for i in range(options.num_prompts):
        ids = torch.randint(1, spec.vocab_size - 1, (options.num_tokens,), generator=random).tolist()
        span = (len(ids) // 4, len(ids))
        samples.append(Sample(id=str(i), source="", token_ids=ids, loss_spans=[span], max_new_tokens=0))
    header = ShardsHeader.from_target(
        spec,
        target_layer_ids=tap_layer_ids(spec.num_layers, options.taps),
        compute_dtype="bfloat16",
        engine="vllm",
        engine_version=vllm_capture.engine_version(),
        sampling={"temperature": 0.0},
    )
    job = Job(
        spec=spec,
        header=header,
        folder=folder / "shards",
        max_shard_bytes=256 << 20,
        max_num_seqs=options.num_prompts,
        longest_tokens=options.num_tokens,
        gpu_memory_utilization=options.memory,
        max_num_batched_tokens=options.batched_tokens,
        engine_args={"load_format": "dummy"},
    )
    return samples, job


def start_other(job: Any, **more: Any) -> Any:
    """An engine like the extractor's, with or without states."""
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(
            model=job.spec.name,
            skip_tokenizer_init=True,
            dtype=job.header.compute_dtype,
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
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "stock")},
    }
    return start_other(job, speculative_config=extraction_method(job), kv_transfer_config=connector)


def start_shards(job: Any, samples: list[Any]) -> Any:
    """Ours."""
    from extract import vllm_capture

    return vllm_capture.start_engine(job, samples)


START = {
    "plain": lambda job, samples, folder: start_other(job),
    "shards": lambda job, samples, folder: start_shards(job, samples),
    "stock": lambda job, samples, folder: start_stock(job, folder),
}


def plain_turn(engine: Any, job: Any, samples: list[Any], turn: int, folder: Path) -> float:
    """Seconds until the last token is computed."""
    t0 = time.perf_counter()
    step_through(engine, samples, turn)
    return time.perf_counter() - t0


def stock_turn(engine: Any, job: Any, samples: list[Any], turn: int, folder: Path) -> float:
    """Seconds until the last file is complete: the connector holds a lock on each until then."""
    t0 = time.perf_counter()
    paths = step_through(engine, samples, turn)
    print(f"computing {time.perf_counter() - t0:.2f} s", file=sys.stderr)
    for path in paths:
        with open(path + ".lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
    seconds = time.perf_counter() - t0
    shutil.rmtree(folder / "stock")
    return seconds


def shards_turn(engine: Any, job: Any, samples: list[Any], turn: int, folder: Path) -> float:
    """Seconds until the last shard is finished and journalled."""
    from extract.vllm_capture import _Run

    class Run(_Run):
        last_output_s = 0.0

        def _take_outputs(self, outputs: list[Any]) -> None:
            super()._take_outputs(outputs)
            self.last_output_s = time.perf_counter()

    t0 = time.perf_counter()
    run = Run(engine, job, [replace(sample, id=f"{turn}-{sample.id}") for sample in samples])
    for _ in run.run():
        pass
    accepted_s = time.perf_counter()
    engine.collective_rpc("shard_writer_flush")
    seconds = time.perf_counter() - t0
    print(
        f"computing {run.last_output_s - t0:.2f} s, last rows {accepted_s - run.last_output_s:.2f} s, "
        f"last shards {t0 + seconds - accepted_s:.2f} s, {len(list(job.folder.glob('*.arrow')))} shards",
        file=sys.stderr,
    )
    for path in job.folder.glob("*.arrow"):
        path.unlink()  # room for the next turn; nothing reads them here
    return seconds


TURN = {"plain": plain_turn, "shards": shards_turn, "stock": stock_turn}


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


class GpuMeter:
    """Share of time in which the GPU ran a kernel, as the driver samples it."""

    busy_share = float("nan")

    def __enter__(self) -> "GpuMeter":
        self._samples: list[float] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        self._thread.join()
        if self._samples:
            self.busy_share = statistics.mean(self._samples)

    def _sample(self) -> None:
        import torch

        while not self._end.wait(0.1):
            self._samples.append(torch.cuda.utilization() / 100)


def copy_rate() -> float:
    """GB/s from the GPU into pinned memory."""
    import torch

    source = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    target = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    t0 = time.perf_counter()
    for _ in range(8):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return 8 * source.nbytes / (time.perf_counter() - t0) / 1e9


def writer_rate(job: Any, folder: Path) -> float:
    """GB/s of the shard writer alone: rows from memory to finished shards."""
    import torch

    from dflash_kit.shards import Row, ShardWriter

    states = torch.randn(job.longest_tokens, job.header.row_width).bfloat16()
    row = Row(
        id="",
        input_ids=torch.arange(1, job.longest_tokens + 1, dtype=torch.int32),
        loss_mask=torch.ones(job.longest_tokens, dtype=torch.bool),
        hidden_states=states,
    )
    num_rows = max(4, int(4e9 / states.nbytes))
    t0 = time.perf_counter()
    with ShardWriter(folder / "alone", job.header) as writer:
        for i in range(num_rows):
            writer.add(replace(row, id=f"row-{i}"), taps_are_sound=True)
    seconds = time.perf_counter() - t0
    shutil.rmtree(folder / "alone")
    return num_rows * states.nbytes / seconds / 1e9


if __name__ == "__main__":
    main()
