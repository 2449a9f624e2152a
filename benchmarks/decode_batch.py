"""Time our engines at several batch sizes: tokens per second, milliseconds per round by stage, speed-ups.

    python benchmarks/decode_batch.py --shapes qwen3-8b --batch_sizes 1,8,32                      # random weights
    python benchmarks/decode_batch.py --ckpt DRAFTER --target FOLDER --batch_sizes 1,8 --prompts 8 # GSM8K prompts

With random weights almost nothing is accepted; prompts are of random tokens, half to the whole of ``--context`` long, and
``--prompts`` is a multiple of the largest batch, so that its slots stay full. Every batch size decodes the same prompts, turn
about with the others in each repetition; figures are medians over repetitions, with the lowest and highest. Batch size 1 is
the engine for one prompt. Prefill is left out. The fused engine's rounds are one stage, with the host's work in it. On a CPU the clock counts processor time, which other work on the machine
disturbs least. ``speedup`` is over autoregressive decoding at the same batch size, ``over_batch_1`` the same method's
throughput over that of one prompt at a time, both by the same engine. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.decode_round import SHAPES, random_drafter, random_model
from decode.batch_engine import BatchEngine
from decode.batch_response import Request
from decode.conversation import Conversation
from decode.engine import Engine, Generation, Method
from decode.fused_batch import FusedBatchEngine
from decode.fused_engine import FusedEngine
from decode.target_runner import TargetRunner
from dflash_kit.acceptance import AR, CHAIN, DDTREE, Acceptance, summarise
from dflash_kit.benchmark_prompts import load_benchmark
from dflash_kit.checkpoint import read_provenance
from dflash_kit.drafter import Drafter
from dflash_kit.target import TargetSpec, load_target, load_tokenizer
from dflash_kit.target_ends import TargetEnds

AnyEngine = Engine | BatchEngine | FusedEngine | FusedBatchEngine
Key = tuple[str, int, Method]
"""Engine, batch size, method."""
Found = dict[Key, list[Acceptance]]


def main() -> None:
    """Measure and print."""
    args = parse_arguments()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if device == "cpu":
        Engine.now_s = lambda _self: time.process_time()  # type: ignore[method-assign]
    torch.manual_seed(0)
    cases = [args.ckpt] if args.ckpt else args.shapes.split(",")
    results = [entry for case in cases for entry in measure(case, args, device, dtype)]
    report = {
        "benchmark": "decode_batch",
        "date": time.strftime("%Y-%m-%d"),
        "hardware": torch.cuda.get_device_name(0) if device == "cuda" else platform.processor() or platform.machine(),
        "clock": "wall" if device == "cuda" else "processor time",
        "threads": torch.get_num_threads(),
        "load_average_1min": os.getloadavg()[0],
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "weights": "real" if args.ckpt else "random, target and drafter",
        "prompts": args.prompts,
        "max_new_tokens": args.max_new_tokens,
        "repetitions": args.repetitions,
        "results": results,
    }
    line = json.dumps(report)
    if args.out:
        args.out.write_text(line + "\n")
    print(line)


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3-8b,smollm2-135m", help=f"comma-separated: {', '.join(SHAPES)}")
    parser.add_argument("--ckpt", help="drafter checkpoint: real weights and prompts instead of shapes")
    parser.add_argument("--target", help="target folder; default: the checkpoint's own")
    parser.add_argument("--engines", default="portable", help="comma-separated: portable, fused")
    parser.add_argument("--batch_sizes", default="1,8,32")
    parser.add_argument("--methods", default="ar,chain,ddtree")
    parser.add_argument("--budgets", default="64", help="DDTree budgets")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--context", type=int, default=512, help="longest prompt, with shapes")
    parser.add_argument("--max_new_tokens", type=int, default=32)
    parser.add_argument("--block_size", type=int, default=16, help="with shapes")
    parser.add_argument("--drafter_layers", type=int, default=5, help="with shapes")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, help="write the JSON object here, too")
    return parser.parse_args()


def measure(case: str, args: argparse.Namespace, device: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """All methods at all batch sizes for one shape or checkpoint."""
    make = load_real if args.ckpt else make_random
    model, drafter, prompts, eos = make(case, args, device, dtype)
    sizes = [int(word) for word in args.batch_sizes.split(",")]
    budgets = {AR: [0], CHAIN: [drafter.config.num_draft_tokens], DDTREE: map(int, args.budgets.split(","))}
    methods = [Method(name, budget) for name in args.methods.split(",") for budget in budgets[name]]
    runner, ends = TargetRunner(model, drafter.config.target_layer_ids), TargetEnds.from_model(model)
    max_budget = max(method.budget for method in methods)
    common: dict[str, Any] = {"eos_token_ids": eos, "max_context": max(map(len, prompts)) + args.max_new_tokens + 1}
    engines: dict[tuple[str, int], AnyEngine] = {}
    for name in args.engines.split(","):
        for size in sizes:
            batch: dict[str, Any] = {} if size == 1 else {"batch_size": size}
            if name == "fused":
                fused: type[Any] = FusedEngine if size == 1 else FusedBatchEngine
                engines[name, size] = fused(model, drafter, **common, **batch, max_budget=max_budget)
            else:
                portable: type[Any] = Engine if size == 1 else BatchEngine
                engines[name, size] = portable(runner, drafter, ends, **common, **batch)
    found: Found = {}
    tokens: dict[Key, list[list[int]]] = {}
    for (_, size), engine in engines.items():  # the first passes of a process are slower
        for method in methods:
            decode(engine, prompts[:size], 3, method)
    for _ in range(args.repetitions):
        for method in methods:
            num_draft_tokens = 0 if method.name == AR else drafter.config.num_draft_tokens
            for (name, size), engine in engines.items():
                said = decode(engine, prompts, args.max_new_tokens, method)
                found.setdefault((name, size, method), []).append(summarise([g.log for g in said], num_draft_tokens))
                tokens[name, size, method] = [g.token_ids for g in said]
    return [entry(case, key, found, tokens) for key in found]


def decode(engine: AnyEngine, prompts: list[list[int]], max_new_tokens: int, method: Method) -> list[Generation]:
    """Responses in the order of the prompts."""
    if isinstance(engine, Engine | FusedEngine):
        return [engine.decode(engine.prefill(prompt, max_new_tokens, method.budget), method) for prompt in prompts]
    waiting = deque(Request(prompt_ids=p, max_new_tokens=max_new_tokens, tag=i) for i, p in enumerate(prompts))
    done = {request.tag: generation for request, generation in engine.decode(waiting, method)}
    return [done[i] for i in range(len(prompts))]


def entry(case: str, key: Key, found: Found, tokens: dict[Key, list[list[int]]]) -> dict[str, Any]:
    """Figures of one method at one batch size."""
    engine, size, method = key
    first = found[key][0]
    baseline = found.get((engine, size, Method(AR, 0)), [])
    alone = found.get((engine, 1, method), [])
    unlike = sum(a != b for a, b in zip(tokens[key], tokens.get((engine, 1, method), []), strict=False))
    values = {
        "case": case,
        "engine": engine,
        "batch_size": size,
        "method": method.name,
        "budget": method.budget,
        "responses_per_round": round(first.responses_per_round or 0, 3),
        "acceptance_length": round(first.acceptance_length_pooled or 0, 3),
        "tokens_per_s": spread([f.tokens_per_s or 0.0 for f in found[key]]),
        "ms_per_round": {stage: spread([f.ms_per_round[stage] for f in found[key]]) for stage in first.ms_per_round},
        "speedup": spread([f.speedup_over(b) or 0.0 for f, b in zip(found[key], baseline, strict=False)]),
        "over_batch_1": spread([f.speedup_over(a) or 0.0 for f, a in zip(found[key], alone, strict=False)]),
        "responses_unlike_batch_1": unlike if alone else None,
    }
    print(json.dumps(values), flush=True)
    return values


def spread(values: list[float]) -> dict[str, float] | None:
    """Median, lowest and highest; None without values."""
    if not values:
        return None
    return {
        k: round(v, 3) for k, v in (("median", statistics.median(values)), ("min", min(values)), ("max", max(values)))
    }


def make_random(
    name: str, args: argparse.Namespace, device: str, dtype: torch.dtype
) -> tuple[Any, Drafter, list[list[int]], tuple[int, ...]]:
    """Target and drafter of a shape, and prompts of random tokens and lengths; nothing ends a response early."""
    model = random_model(SHAPES[name], device, dtype)
    drafter = random_drafter(SHAPES[name], args.block_size, args.drafter_layers, device, dtype)
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(max(1, args.context // 2), args.context + 1, (args.prompts,), generator=draw).tolist()
    prompts = [torch.randint(0, 1000, (length,), generator=draw).tolist() for length in lengths]
    return model, drafter, prompts, ()


def load_real(
    ckpt: str, args: argparse.Namespace, device: str, dtype: torch.dtype
) -> tuple[Any, Drafter, list[list[int]], tuple[int, ...]]:
    """Target, drafter and prompts of GSM8K."""
    target = args.target or read_provenance(ckpt)["target"]
    tokenizer, spec = load_tokenizer(target), TargetSpec.from_pretrained(target)
    prompts = [Conversation(tokenizer, p.turns, p.id).ask(0) for p in load_benchmark("gsm8k", args.prompts)]
    drafter = Drafter.from_pretrained(ckpt, dtype=dtype, device=device)
    return load_target(target, dtype=dtype, device=device), drafter, prompts, tuple(spec.eos_token_ids)


if __name__ == "__main__":
    main()
