"""Time decoding with the budget "auto" beside fixed budgets on a CPU, in processor time, so that other work counts less.

    OMP_NUM_THREADS=1 python benchmarks/decode_auto.py --ckpt data/drafters/smollm2-135m-instruct --target SMOLLM2

Prompts of GSM8K; each is decoded by every method in turn, and all is repeated. Figures are medians over repetitions, with
the lowest and highest; ratios are taken within a repetition. All responses must be equal. The last line of the output
is one JSON object.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from decode.auto_budget import AutoBudget, CostTable, summarise_choices
from decode.conversation import Conversation
from decode.engine import Engine, Generation, Method
from decode.target_runner import TargetRunner
from dflash_kit.acceptance import DDTREE_AUTO, summarise
from dflash_kit.benchmark_prompts import load_benchmark
from dflash_kit.drafter import Drafter
from dflash_kit.target import TargetSpec, load_target, load_tokenizer
from dflash_kit.target_ends import TargetEnds

Repetition = dict[Method, list[Generation]]


class ProcessorTimeEngine(Engine):
    """Measures, and chooses budgets, by processor time."""

    def now_s(self) -> float:
        return time.process_time()


def main() -> None:
    """Measure, and print one JSON object."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    model, tokenizer = load_target(arguments.target), load_tokenizer(arguments.target)
    spec = TargetSpec.from_pretrained(arguments.target)
    drafter = Drafter.from_pretrained(arguments.ckpt, dtype=torch.float32)
    engine = ProcessorTimeEngine(
        TargetRunner(model, drafter.config.target_layer_ids),
        drafter,
        TargetEnds.from_model(model),
        eos_token_ids=spec.eos_token_ids,
        max_context=spec.max_position_embeddings,
    )
    tables: list[CostTable] = []
    engine.auto_budget = AutoBudget(tables.append)
    prompts = [
        Conversation(tokenizer, prompt.turns, prompt.id).ask(0)
        for prompt in load_benchmark(arguments.benchmark, arguments.prompts)
    ]
    methods = [Method("ar", 0), Method("chain", drafter.config.num_draft_tokens)]
    methods += [Method("ddtree", int(word)) for word in arguments.budgets.split(",")]
    methods.append(Method(DDTREE_AUTO, arguments.cap))
    decode_all(engine, prompts[:1], methods, 8)  # the first passes of a process are several times slower
    start_s, load = time.perf_counter(), []
    found: list[Repetition] = []
    for _ in range(arguments.repetitions):
        found.append(decode_all(engine, prompts, methods, arguments.max_new_tokens))
        load.append(os.getloadavg()[0])
    said = [[g.token_ids for g in repetition[method]] for repetition in found for method in methods]
    fixed = [method for method in methods if method.name == "ddtree"]
    best = max(fixed, key=lambda method: statistics.median(rates(found, method)))
    report: dict[str, Any] = {
        "benchmark": "decode_auto",
        "prompts_of": arguments.benchmark,
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "clock": "processor time, one thread",
        "load_average": [round(value, 1) for value in load],
        "wall_s": round(time.perf_counter() - start_s),
        "prompts": len(prompts),
        "new_tokens": sum(len(tokens) for tokens in said[0]),
        "repetitions": arguments.repetitions,
        "responses_differing": sum(
            answer != other for answers in said for answer, other in zip(answers, said[0], strict=True)
        ),
        "calibrations": [table.to_dict() for table in tables],
        "methods": {f"{m.name}-{m.budget}": figures(found, m, drafter.config.num_draft_tokens) for m in methods},
        "chosen_budgets": summarise_choices([g.log for repetition in found for g in repetition[methods[-1]]]),
        "best_fixed_budget": best.budget,
        "auto_over_best_fixed": spread(
            [ours / theirs for ours, theirs in zip(rates(found, methods[-1]), rates(found, best), strict=True)]
        ),
    }
    print(json.dumps(report))


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", required=True, help="drafter checkpoint")
    parser.add_argument("--target", required=True, help="target folder")
    parser.add_argument("--benchmark", default="gsm8k")
    parser.add_argument("--budgets", default="4,16,64", help="the fixed ones")
    parser.add_argument("--cap", type=int, default=1024, help="largest tree of auto")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--repetitions", type=int, default=3)
    return parser.parse_args()


def decode_all(engine: Engine, prompts: list[list[int]], methods: list[Method], max_new_tokens: int) -> Repetition:
    """Decode every prompt by every method."""
    found: Repetition = {method: [] for method in methods}
    for prompt in prompts:
        prefix = engine.prefill(prompt, max_new_tokens, max(method.budget for method in methods))
        for method in methods:
            found[method].append(engine.decode(prefix, method))
    return found


def rates(found: list[Repetition], method: Method) -> list[float]:
    """Tokens per second of each repetition."""
    return [summarise([g.log for g in repetition[method]], 1 << 10).tokens_per_s or 0.0 for repetition in found]


def figures(found: list[Repetition], method: Method, num_draft_tokens: int) -> dict[str, Any]:
    """Acceptance, ms per round by stage and tokens per second."""
    parts = [summarise([g.log for g in repetition[method]], num_draft_tokens) for repetition in found]
    return {
        "acceptance_length": statistics.mean(part.acceptance_length_pooled or 0.0 for part in parts),
        "rounds": [part.rounds for part in parts],
        "ms_per_round": {
            stage: spread([part.ms_per_round[stage] for part in parts]) for stage in parts[0].ms_per_round
        },
        "tokens_per_s": spread([part.tokens_per_s or 0.0 for part in parts]),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {
        name: round(value, 3)
        for name, value in (("median", statistics.median(values)), ("min", min(values)), ("max", max(values)))
    }


if __name__ == "__main__":
    main()
