"""Time decoding rounds and replay on a CPU: ms per round by stage for AR, chain and DDTree; replay over live.

    OMP_NUM_THREADS=1 python benchmarks/decode_cpu.py --ckpt runs/demo/drafter --prompts 4 --max-new-tokens 64

Each prompt of GSM8K is decoded by every method, and all is repeated; figures are medians over repetitions, with the
lowest and highest. ``replay_speedup`` is the time of the live rounds of the chain and of all tree budgets (prefill
and autoregressive decoding left out) over the time of replaying the same rounds from recorded taps, in one pass; the
rounds must be equal. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from decode.conversation import Conversation
from decode.engine import Engine, Generation, Method
from decode.target_runner import TargetRunner
from dflash_kit.acceptance import summarise
from dflash_kit.benchmark_prompts import load_benchmark
from dflash_kit.checkpoint import read_provenance
from dflash_kit.drafter import Drafter
from dflash_kit.replay import replay_row
from dflash_kit.shards import Row
from dflash_kit.target import TapRecorder, TargetSpec, load_target, load_tokenizer
from dflash_kit.target_ends import TargetEnds


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments()
    target = arguments.target or read_provenance(arguments.ckpt)["target"]
    budgets = [int(word) for word in arguments.budgets.split(",")]
    model, tokenizer, spec = load_target(target), load_tokenizer(target), TargetSpec.from_pretrained(target)
    drafter = Drafter.from_pretrained(arguments.ckpt, dtype=torch.float32)
    ends = TargetEnds.from_model(model)
    runner = TargetRunner(model, drafter.config.target_layer_ids)
    engine = Engine(runner, drafter, ends, eos_token_ids=spec.eos_token_ids, max_context=spec.max_position_embeddings)
    prompts = [
        Conversation(tokenizer, prompt.turns, prompt.id).ask(0) for prompt in load_benchmark("gsm8k", arguments.prompts)
    ]
    methods = [Method("ar", 0), Method("chain", drafter.config.num_draft_tokens)]
    methods += [Method("ddtree", budget) for budget in budgets]
    live_pass(engine, prompts[:1], methods, 8)  # the first passes of a process are several times slower
    live = [live_pass(engine, prompts, methods, arguments.max_new_tokens) for _ in range(arguments.repetitions)]
    said = [generation.token_ids for generation in live[0][methods[0]]]
    rows = [record_row(model, drafter, prompt, answer) for prompt, answer in zip(prompts, said, strict=True)]
    replay_s = []
    for _ in range(arguments.repetitions):
        start_s = time.perf_counter()
        replayed = [replay_row(drafter, ends, row, budgets, eos_token_ids=spec.eos_token_ids) for row in rows]
        replay_s.append(time.perf_counter() - start_s)
    num_unequal = sum(
        found[method.name, method.budget][0].num_accepted != generation.log.num_accepted
        for method in methods[1:]
        for found, generation in zip(replayed, live[0][method], strict=True)
    )
    drafted_s = [sum(decode_s(repetition, method) for method in methods[1:]) for repetition in live]
    report: dict[str, Any] = {
        "benchmark": "decode_cpu",
        "target": str(target),
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "prompts": len(prompts),
        "new_tokens": sum(len(answer) for answer in said),
        "repetitions": arguments.repetitions,
        "methods": {f"{m.name}-{m.budget}": method_figures(live, m, methods[0], drafter) for m in methods},
        "live_s": spread(drafted_s),
        "replay_s": spread(replay_s),
        "replay_speedup": statistics.median(drafted_s) / statistics.median(replay_s),
        "rounds_differing_between_replay_and_live": num_unequal,
    }
    print(json.dumps(report))


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", required=True, help="drafter checkpoint")
    parser.add_argument("--target", help="target folder; default: the checkpoint's own")
    parser.add_argument("--budgets", default="16,64")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=3)
    return parser.parse_args()


def live_pass(
    engine: Engine, prompts: list[list[int]], methods: list[Method], max_new_tokens: int
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
    ids = torch.tensor(prompt + answer[:-1])
    with TapRecorder(model, drafter.config.target_layer_ids) as recorder:
        model(ids[None], logits_to_keep=1)
        taps = recorder.taps()[0]
    mask = torch.arange(len(ids)) >= len(prompt)
    return Row(id="", input_ids=ids.int(), loss_mask=mask, hidden_states=taps, next_token=answer[-1])


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
