"""Time decoding rounds and replay: ms per round by stage for AR, chain and DDTree; replay over live.

    OMP_NUM_THREADS=1 python benchmarks/decode_cpu.py --ckpt data/drafters/smollm2-135m-instruct --prompts 3 --max-new-tokens 32
    python benchmarks/decode_cpu.py --ckpt … --device cuda --prompts 64 --max-new-tokens 512

Each prompt of GSM8K is decoded by every method, then the same rounds are replayed from recorded taps, and all is repeated;
figures are medians over repetitions, with the lowest and highest. ``replay`` has an entry for each leading part of the
budgets: the time of the live rounds of the chain and of those budgets (prefill and autoregressive decoding left out) over
the time of replaying them in one pass. On a CPU times are processor time and all is float32, where the rounds must be equal;
on a GPU they are wall-clock time around synchronised work and all is bfloat16, where single rounds may differ. ``floor_s``
is the time of replay's matrix products alone, at the measured rate of large ones. The last line of the output is one JSON
object.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from decode.conversation import Conversation
from decode.engine import Engine, Generation, Method
from decode.fused_engine import FusedEngine, reason_against
from decode.target_runner import TargetRunner
from dflash_kit.acceptance import summarise
from dflash_kit.benchmark_prompts import load_benchmark
from dflash_kit.checkpoint import read_provenance
from dflash_kit.drafter import Drafter
from dflash_kit.provenance import git_commit
from dflash_kit.replay import replay_rows
from dflash_kit.shards import Row
from dflash_kit.target import TapRecorder, TargetSpec, load_target, load_tokenizer
from dflash_kit.target_ends import TargetEnds


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments()
    target = arguments.target or read_provenance(arguments.ckpt)["target"]
    budgets = sorted({int(word) for word in arguments.budgets.split(",")})
    dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    place = {"dtype": dtype, "device": arguments.device}
    model, tokenizer, spec = load_target(target, **place), load_tokenizer(target), TargetSpec.from_pretrained(target)
    drafter = Drafter.from_pretrained(arguments.ckpt, **place)
    ends = TargetEnds.from_pretrained(target, **place)
    prompts = [
        Conversation(tokenizer, prompt.turns, prompt.id).ask(0) for prompt in load_benchmark("gsm8k", arguments.prompts)
    ]
    methods = [Method("ar", 0), Method("chain", drafter.config.num_draft_tokens)]
    methods += [Method("ddtree", budget) for budget in budgets]
    # What greedy decoding says, and its taps; before the fused engine fuses the target's layers.
    engine = portable_engine(model, Drafter.from_pretrained(arguments.ckpt, **place), ends, spec)
    said = [g.token_ids for g in live_pass(engine, prompts, methods[:1], arguments.max_new_tokens)[methods[0]]]
    rows = [record_row(model, drafter, prompt, answer) for prompt, answer in zip(prompts, said, strict=True)]
    name = "portable"
    if arguments.device != "cpu":
        live_drafter = Drafter.from_pretrained(arguments.ckpt, **place)
        reason = reason_against(model, live_drafter, [(m.name, m.budget) for m in methods])
        if reason is None:
            name = "fused"
            context = min(spec.max_position_embeddings, max(map(len, prompts)) + arguments.max_new_tokens)
            engine = FusedEngine(
                model, live_drafter, eos_token_ids=spec.eos_token_ids, max_context=context, max_budget=budgets[-1]
            )
    engine._now_s = now_s  # processor time, whatever else the machine does
    live_pass(engine, prompts[:1], methods, 4)  # the first passes of a process are several times slower
    parts = [budgets[:length] for length in range(1, len(budgets) + 1)]
    live, replay_s, replayed = [], [[] for _ in parts], {}
    for _ in range(arguments.repetitions):
        live.append(live_pass(engine, prompts, methods, arguments.max_new_tokens))
        for part, seconds in zip(parts, replay_s, strict=True):
            start_s = now_s()
            replayed = [found for _, found in replay_rows(drafter, ends, rows, part, eos_token_ids=spec.eos_token_ids)]
            seconds.append(now_s() - start_s)
    num_unequal = sum(
        found[method.name, method.budget][0].num_accepted != generation.log.num_accepted
        for method in methods[1:]
        for found, generation in zip(replayed, live[0][method], strict=True)
    )
    report: dict[str, Any] = {
        "benchmark": "decode_cpu",
        "target": Path(target).name,
        "checkpoint": Path(arguments.ckpt).name,
        "commit": git_commit(),
        "device": torch.cuda.get_device_name() if arguments.device != "cpu" else processor(),
        "dtype": str(dtype).removeprefix("torch."),
        "live_engine": name,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        "cores": os.cpu_count(),
        "prompts": len(prompts),
        "new_tokens": sum(len(answer) for answer in said),
        "repetitions": arguments.repetitions,
        "methods": {f"{m.name}-{m.budget}": method_figures(live, m, methods[0], drafter) for m in methods},
        "replay": [
            replay_figures(
                live, methods[1 : 2 + len(part)], seconds, work_of(drafter, ends, rows, part, spec), arguments
            )
            for part, seconds in zip(parts, replay_s, strict=True)
        ],
        "responses_differing_between_replay_and_live": num_unequal,
    }
    print(json.dumps(report))


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", required=True, help="drafter checkpoint")
    parser.add_argument("--target", help="target folder; default: the checkpoint's own")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--budgets", default="16,32,64,128,256,512,1024")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=3)
    return parser.parse_args()


def now_s() -> float:
    """Processor time on a CPU, where others may share it; wall-clock time behind all work of a GPU."""
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def processor() -> str:
    """The processor's model, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def portable_engine(model: Any, drafter: Drafter, ends: TargetEnds, spec: TargetSpec) -> Any:
    """The engine that runs anywhere."""
    runner = TargetRunner(model, drafter.config.target_layer_ids)
    return Engine(runner, drafter, ends, eos_token_ids=spec.eos_token_ids, max_context=spec.max_position_embeddings)


def work_of(
    drafter: Drafter, ends: TargetEnds, rows: list[Row], budgets: list[int], spec: TargetSpec
) -> dict[str, float]:
    """Blocks drafted, slots with logits, and floating-point operations of the matrix products of one replay."""
    blocks, slots = Counter[str](), Counter[str]()
    draft, logits = Drafter.blocks, TargetEnds.logits

    def counted_draft(self: Drafter, noise: torch.Tensor, *rest: Any) -> torch.Tensor:
        blocks["all"] += noise.shape[:-1].numel() // self.config.block_size
        return draft(self, noise, *rest)

    def counted_logits(self: TargetEnds, hidden: torch.Tensor) -> torch.Tensor:
        slots["all"] += hidden.shape[:-1].numel()
        return logits(self, hidden)

    with (
        mock.patch.object(Drafter, "blocks", counted_draft),
        mock.patch.object(TargetEnds, "logits", counted_logits),
    ):
        for _ in replay_rows(drafter, ends, rows, budgets, eos_token_ids=spec.eos_token_ids):
            pass
    layer = sum(p.numel() for layer in drafter.layers for p in layer.parameters() if p.ndim == 2)
    key_value = sum(p.numel() for n, p in drafter.named_parameters() if "k_proj" in n or "v_proj" in n)
    context = sum(len(row.input_ids) for row in rows) * (drafter.fc.weight.numel() + key_value)
    products = blocks["all"] * drafter.config.block_size * layer + slots["all"] * ends.head.numel() + context
    return {"blocks": blocks["all"], "slots_with_logits": slots["all"], "gflop": 2e-9 * products}


def replay_figures(
    live: list[dict[Method, list[Generation]]],
    methods: list[Method],
    replay_s: list[float],
    work: dict[str, float],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Replay over live for the chain and some budgets."""
    live_s = [sum(decode_s(repetition, method) for method in methods) for repetition in live]
    return {
        "budgets": [method.budget for method in methods[1:]],
        "live_s": spread(live_s),
        "replay_s": spread(replay_s),
        "speedup": spread([one / other for one, other in zip(live_s, replay_s, strict=True)]),
        **{key: round(value, 2) for key, value in work.items()},
        "floor_s": round(work["gflop"] / matrix_gflops(arguments.device), 4),
    }


@functools.cache
def matrix_gflops(device: str) -> float:
    """Rate of a large product, the best of some, in 1e9 operations a second."""
    size, dtype = (1024, torch.float32) if device == "cpu" else (8192, torch.bfloat16)
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    best_s = float("inf")
    for _ in range(10):
        start_s = now_s()
        left @ right
        best_s = min(best_s, now_s() - start_s)
    return 2e-9 * size**3 / best_s


def live_pass(
    engine: Any, prompts: list[list[int]], methods: list[Method], max_new_tokens: int
) -> dict[Method, list[Generation]]:
    """Decode every prompt by every method."""
    found: dict[Method, list[Generation]] = {method: [] for method in methods}
    for prompt in prompts:
        prefix = engine.prefill(prompt, max_new_tokens, max(method.budget for method in methods))
        for method in methods:
            found[method].append(engine.decode(prefix, method))
    return found


@torch.no_grad()
def record_row(model: Any, drafter: Drafter, prompt: list[int], answer: list[int]) -> Row:
    """What extraction would write, in float32."""
    ids = torch.tensor(prompt + answer[:-1], device=drafter.fc.weight.device)
    with TapRecorder(model, drafter.config.target_layer_ids) as recorder:
        model(ids[None], logits_to_keep=1)
        taps = recorder.taps()[0]
    ids, mask = ids.cpu(), torch.arange(len(ids)) >= len(prompt)
    return Row(id="", input_ids=ids.int(), loss_mask=mask, hidden_states=taps.cpu(), next_token=answer[-1])


def decode_s(repetition: dict[Method, list[Generation]], method: Method) -> float:
    """Seconds of all rounds of a method."""
    return sum(generation.log.decode_s or 0.0 for generation in repetition[method])


def method_figures(
    live: list[dict[Method, list[Generation]]], method: Method, baseline: Method, drafter: Drafter
) -> dict[str, Any]:
    """Acceptance, ms per round by stage, tokens per second and speed-up: medians over repetitions, and spread."""
    num_draft_tokens = 0 if method == baseline else drafter.config.num_draft_tokens
    found = [summarise([g.log for g in repetition[method]], num_draft_tokens) for repetition in live]
    speedups = [decode_s(repetition, baseline) / decode_s(repetition, method) for repetition in live]
    return {
        "acceptance_length": found[0].acceptance_length_pooled,
        "rounds": found[0].rounds,
        "ms_per_round": {stage: spread([f.ms_per_round[stage] for f in found]) for stage in found[0].ms_per_round},
        "tokens_per_s": spread([f.tokens_per_s or 0.0 for f in found]),
        "speedup": spread(speedups),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {
        k: round(v, 4) for k, v in (("median", statistics.median(values)), ("min", min(values)), ("max", max(values)))
    }


if __name__ == "__main__":
    main()
