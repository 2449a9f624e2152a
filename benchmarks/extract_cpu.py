"""Extraction against plain prefill of the same prompts, by the same vLLM, on a CPU.

Two engines are started, one plain and one with the shard connector, and take turns over the same token prompts (given
conversations: prefill only). A turn of extraction ends when its rows are in a finished, fsynced shard. The figure is
tokens a second; the CPU time of the engine's own processes is given besides: it says what extraction costs even when
something else runs on the machine. The last line of stdout is one JSON object with medians and the spread (lowest and
highest turn).

    python benchmarks/extract_cpu.py --model runs/demo/model --prompts data/gsm8k_train.jsonl
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    """Run the turns and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/demo/model", help="target")
    parser.add_argument("--prompts", default="data/gsm8k_train.jsonl", help="JSONL with `prompt`")
    parser.add_argument("--num_prompts", type=int, default=96, help="prompts in a turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each engine")
    parser.add_argument("--max_num_seqs", type=int, default=64, help="conversations at once")
    options = parser.parse_args()

    from dflash_kit import vllm_calls
    from extract import vllm_capture

    samples, job = make_job(options)
    vllm_capture.prepare_environment()
    plain, plain_processes = with_processes(lambda: start_plain_engine(job))
    ours, our_processes = with_processes(lambda: vllm_capture.start_engine(job, samples))
    turns: dict[str, list[float]] = {"plain": [], "extract": []}
    cpu_s: dict[str, list[float]] = {"plain": [], "extract": []}
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    for turn in range(options.rounds + 1):
        for name, engine, processes in (("plain", plain, plain_processes), ("extract", ours, our_processes)):
            cpu0_s = cpu_seconds(processes)
            seconds = run_turn(engine, job, samples, turn, is_extraction=name == "extract")
            if turn > 0:  # the first turn warms up
                turns[name].append(num_tokens / seconds)
                cpu_s[name].append(1e3 * (cpu_seconds(processes) - cpu0_s) / num_tokens)
                print(f"turn {turn} {name}: {num_tokens / seconds:.0f} tokens/s", file=sys.stderr, flush=True)
    report = {
        "benchmark": "extract_cpu",
        "engine": job.header.engine_version,
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": os.getloadavg()[0],
        "prompts": len(samples),
        "tokens": num_tokens,
        "taps": job.header.num_taps,
        **{f"{name}_tokens_per_s": spread(values) for name, values in turns.items()},
        **{f"{name}_cpu_ms_per_token": spread(values) for name, values in cpu_s.items()},
        "ratio": spread([e / p for e, p in zip(turns["extract"], turns["plain"], strict=True)]),
    }
    vllm_calls.stop(ours, finish="shard_writer_finish")
    plain.engine_core.shutdown()
    print(json.dumps(report))


def make_job(options: argparse.Namespace) -> tuple[list[Any], Any]:
    """Given conversations (nothing is generated) and where their rows go."""
    from dflash_kit.shards import ShardsHeader
    from dflash_kit.target import TargetSpec, load_tokenizer, tap_layer_ids
    from extract import vllm_capture
    from extract.capture import Job
    from extract.prompts import Sample, read_prompts
    from extract.spans import encode_prompt

    spec, tokenizer = TargetSpec.from_pretrained(options.model), load_tokenizer(options.model)
    samples = []
    for conversation in read_prompts(options.prompts):
        ids = encode_prompt(tokenizer, conversation.messages)
        samples.append(
            Sample(id=str(len(samples)), source=conversation.source, token_ids=ids, loss_spans=[], max_new_tokens=0)
        )
        if len(samples) == options.num_prompts:
            break
    header = ShardsHeader.from_target(
        spec,
        target_layer_ids=tap_layer_ids(spec.num_layers, 5),
        compute_dtype="float32",
        engine="vllm",
        engine_version=vllm_capture.engine_version(),
        sampling={"temperature": 0.0},
    )
    job = Job(
        spec=spec,
        header=header,
        folder=Path(tempfile.mkdtemp(prefix="extract_cpu-")) / "shards",
        max_shard_bytes=1 << 30,
        max_num_seqs=options.max_num_seqs,
        longest_tokens=max(sample.max_tokens for sample in samples),
    )
    return samples, job


def with_processes(start: Any) -> tuple[Any, list[Any]]:
    """An engine and the processes that its start brought up."""
    import psutil

    before = set(psutil.Process().children(recursive=True))
    engine = start()
    return engine, [p for p in psutil.Process().children(recursive=True) if p not in before]


def cpu_seconds(processes: list[Any]) -> float:
    """CPU time that processes have used up to now."""
    return sum(p.cpu_times().user + p.cpu_times().system for p in processes)


def start_plain_engine(job: Any) -> Any:
    """The same engine without the extraction method and the connector."""
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(
            model=job.spec.name,
            skip_tokenizer_init=True,
            dtype=job.header.compute_dtype,
            enforce_eager=True,
            max_model_len=job.longest_tokens + 1,
            max_num_seqs=job.max_num_seqs,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
    )


def run_turn(engine: Any, job: Any, samples: list[Any], turn: int, *, is_extraction: bool) -> float:
    """Seconds that one pass over the samples takes, to the last token or the last durable row."""
    from dataclasses import replace

    from vllm import SamplingParams

    from extract.vllm_capture import _Run

    t0 = time.perf_counter()
    if is_extraction:
        run = _Run(engine, job, [replace(sample, id=f"{turn}-{sample.id}") for sample in samples])
        for _ in run.run():
            pass
        engine.collective_rpc("shard_writer_flush")
    else:
        for sample in samples:
            prompt = {"prompt_token_ids": sample.token_ids}
            engine.add_request(f"{turn}-{sample.id}", prompt, SamplingParams(max_tokens=1, detokenize=False))
        while engine.has_unfinished_requests():
            engine.step()
    return time.perf_counter() - t0


def spread(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest of several turns."""
    return {name: round(f(values), 4) for name, f in (("median", statistics.median), ("low", min), ("high", max))}


if __name__ == "__main__":
    main()
