"""Time vLLM's autoregressive decoding and chain beside ours: the same weights, prompts and machine, one run.

    python benchmarks/decode_vllm.py --target runs/demo/model --ckpt data/drafters/smollm2-135m-instruct
    python benchmarks/decode_vllm.py --shape qwen3-8b --context 512          # random weights, on a GPU
    python benchmarks/decode_vllm.py --dtype float32 --target … --ckpt …     # on a GPU: whether tokens and rounds are the same

One prompt at a time, greedy. Ours comes first and last, so that a machine that changes its speed meanwhile shows; between
them vLLM without the drafter, and with it. On a GPU ours is the fused engine in bfloat16, in float32 and on a CPU the portable one.
In float32 on a GPU vLLM computes attention by its Triton kernels, since FlashAttention takes half precision alone, and compiles nothing.
Prefill is left out everywhere; vLLM's times are those of its own metrics. ``differing_tokens`` are against our own first
autoregressive responses; ``unequal_rounds`` are responses whose accepted draft tokens are not those of our chain, round for round.
The last line of the output is one JSON object. Random weights accept almost nothing: there the time of a round is what counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from decode.conversation import Conversation
from decode.engine import Engine, Generation, Method
from decode.results import count_differences
from decode.target_runner import TargetRunner
from decode.vllm_engine import VllmSetup, reason_against_vllm, start_vllm
from dflash_kit.acceptance import summarise
from dflash_kit.benchmark_prompts import load_benchmark
from dflash_kit.drafter import Drafter
from dflash_kit.target import TargetSpec, load_target, load_tokenizer
from dflash_kit.target_ends import TargetEnds
from dflash_kit.vllm_version import installed_vllm

WARM_UP_TOKENS = 8
HAS_GPU = torch.cuda.is_available()
EXACT = {"attention_backend": "TRITON_ATTN", "optimization_level": 0}
"""For float32 on a GPU, where tokens and rounds count: compiling takes minutes there."""

Generations = dict[Method, list[Generation]]


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.shape:
            setup, prompts = random_setup(arguments, Path(folder))
        else:
            setup, prompts = real_setup(arguments)
        methods = [Method("ar", 0), Method("chain", setup.num_draft_tokens)]
        load_before = os.getloadavg()[0]
        first, name = ours(setup, prompts, methods, arguments)
        theirs: Generations = {}
        for method in methods:
            theirs |= vllms(setup, prompts, method, arguments)
        last, _ = ours(setup, prompts, methods, arguments)
    runs = [(f"dflash-kit, {name}", first), (f"vllm {installed_vllm()}", theirs), (f"dflash-kit, {name}, again", last)]
    report = {
        "benchmark": "decode_vllm",
        "target": arguments.shape or Path(arguments.target).name,
        "drafter": "random" if arguments.shape else str(arguments.ckpt),
        "hardware": torch.cuda.get_device_name() if HAS_GPU else f"CPU ({platform.processor() or platform.machine()})",
        "cores": None if HAS_GPU else len(os.sched_getaffinity(0)) if arguments.threads is None else arguments.threads,
        "load_before_and_after": [load_before, os.getloadavg()[0]],
        "dtype": arguments.dtype,
        "torch": torch.__version__,
        "prompts": len(prompts),
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "max_new_tokens": arguments.max_new_tokens,
        "repetitions": arguments.repetitions,
        "results": [
            figures(engine, found, method, first, arguments.repetitions) for engine, found in runs for method in methods
        ],
    }
    print(json.dumps(report))


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="target folder or hub id")
    parser.add_argument("--ckpt", help="drafter checkpoint")
    parser.add_argument("--shape", help="random weights of this shape instead (GPU): qwen3-8b, qwen3-4b, smollm2-135m")
    parser.add_argument("--context", type=int, default=512, help="tokens of each random prompt")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repetitions", type=int, default=3, help="all prompts so often in each engine; medians count")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16" if HAS_GPU else "float32")
    parser.add_argument("--threads", type=int, help="CPU threads of both; default: all cores")
    arguments = parser.parse_args()
    if not arguments.shape and not (arguments.target and arguments.ckpt):
        parser.error("give --target and --ckpt, or --shape")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    return arguments


def real_setup(arguments: argparse.Namespace) -> tuple[VllmSetup, list[list[int]]]:
    """A checkpoint and its target, on GSM8K prompts."""
    tokenizer, spec = load_tokenizer(arguments.target), TargetSpec.from_pretrained(arguments.target)
    prompts = [Conversation(tokenizer, p.turns, p.id).ask(0) for p in load_benchmark("gsm8k", arguments.prompts)]
    setup = make_setup(
        arguments, arguments.target, arguments.ckpt, spec.eos_token_ids, spec.max_position_embeddings, prompts
    )
    return setup, prompts


def random_setup(arguments: argparse.Namespace, folder: Path) -> tuple[VllmSetup, list[list[int]]]:
    """Random weights on the disk, as both engines read them, and random prompts."""
    from decode_round import SHAPES, random_drafter, random_model

    shape = SHAPES[arguments.shape]
    random_model(shape).save_pretrained(folder / "target")
    random_drafter(shape, 16, 5).save_pretrained(folder / "drafter")
    prompts = torch.randint(8, shape["vocab_size"], (arguments.prompts, arguments.context)).tolist()
    return make_setup(arguments, str(folder / "target"), str(folder / "drafter"), (), 16384, prompts), prompts


def make_setup(
    arguments: argparse.Namespace,
    target: str,
    ckpt: str,
    eos_token_ids: tuple[int, ...],
    max_positions: int,
    prompts: list[list[int]],
) -> VllmSetup:
    """What all engines run."""
    config = Drafter.from_pretrained(ckpt).config
    if reason := reason_against_vllm(config, on_cpu=not HAS_GPU):
        sys.exit(f"error: {reason}")
    return VllmSetup(
        target=target,
        ckpt=ckpt,
        num_draft_tokens=config.num_draft_tokens,
        eos_token_ids=eos_token_ids,
        dtype=arguments.dtype,
        max_context=max(map(len, prompts)) + arguments.max_new_tokens,
        max_positions=max_positions,
        num_cores=arguments.threads,
        engine_args=EXACT if HAS_GPU and arguments.dtype == "float32" else {},
    )


def ours(
    setup: VllmSetup, prompts: list[list[int]], methods: list[Method], arguments: argparse.Namespace
) -> tuple[Generations, str]:
    """Our own engine: responses by method, repetition after repetition, and the engine's name."""
    dtype, device = getattr(torch, arguments.dtype), "cuda" if HAS_GPU else "cpu"
    is_fused = HAS_GPU and dtype == torch.bfloat16
    drafter = Drafter.from_pretrained(setup.ckpt, dtype=dtype, device=device)
    model = load_target(setup.target, dtype=dtype, device=device)
    context = {"eos_token_ids": setup.eos_token_ids, "max_context": setup.max_context}
    engine: Any
    if is_fused:
        from decode.fused_engine import FusedEngine

        engine = FusedEngine(model, drafter, **context, max_budget=setup.num_draft_tokens)
    else:
        runner = TargetRunner(model, drafter.config.target_layer_ids)
        engine = Engine(runner, drafter, TargetEnds.from_model(model), **context)
    found = decode_all(engine, prompts, methods, arguments)
    name = "fused" if is_fused else "portable"
    del engine, model, drafter
    if HAS_GPU:
        torch.cuda.empty_cache()
    return found, name


def vllms(setup: VllmSetup, prompts: list[list[int]], method: Method, arguments: argparse.Namespace) -> Generations:
    """One vLLM engine's responses."""
    engine = start_vllm(setup, method.name)
    try:
        return decode_all(engine, prompts, [method], arguments)
    finally:
        engine.close()


def decode_all(
    engine: Any, prompts: list[list[int]], methods: list[Method], arguments: argparse.Namespace
) -> Generations:
    """Every prompt by every method, the methods of a prompt behind each other, all of it repeated."""
    budget = max(method.budget for method in methods)

    def decode(prompt: list[int], limit: int, method: Method) -> Generation:
        decoded: Generation = engine.decode(engine.prefill(prompt, limit, budget), method)
        return decoded

    for method in methods:  # the first passes are several times slower
        decode(prompts[0], WARM_UP_TOKENS, method)
    found: Generations = {method: [] for method in methods}
    for _ in range(arguments.repetitions):
        for prompt in prompts:
            for method in methods:
                found[method].append(decode(prompt, arguments.max_new_tokens, method))
    return found


def figures(engine: str, found: Generations, method: Method, first: Generations, repetitions: int) -> dict[str, Any]:
    """Numbers of one engine and method; times are of the repetition with the median total."""
    baseline, chain = first[Method("ar", 0)], first[method]
    size = len(baseline) // repetitions
    turns = [found[method][start : start + size] for start in range(0, len(baseline), size)]
    times = sorted(turns, key=lambda turn: sum(generation.log.decode_s or 0.0 for generation in turn))
    summary = summarise([generation.log for generation in times[len(times) // 2]], method.budget)
    rates = [summarise([generation.log for generation in turn], method.budget).tokens_per_s for turn in turns]
    pairs = list(zip(found[method], baseline, strict=True))
    return {
        "engine": engine,
        "method": method.name,
        "acceptance_length_pooled": summary.acceptance_length_pooled,
        "rounds": summary.rounds,
        "new_tokens": summary.new_tokens,
        "ms_per_round": summary.ms_per_round["total"],
        "tokens_per_s": summary.tokens_per_s,
        "tokens_per_s_lowest_and_highest": [min(filter(None, rates)), max(filter(None, rates))],
        "differing_tokens": sum(count_differences(g.token_ids, ar.token_ids) for g, ar in pairs),
        "unequal_rounds": sum(
            g.log.num_accepted != c.log.num_accepted for g, c in zip(found[method], chain, strict=True)
        ),
    }


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
