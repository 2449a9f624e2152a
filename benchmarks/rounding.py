"""How far half precision moves the margin between the two likeliest tokens, by the pass that computes it.

    python benchmarks/rounding.py --target runs/demo/model --prompts 16 --new-tokens 200 --out rounding.json

Greedy decoding in bfloat16 may leave autoregressive decoding where two logits nearly tie; an evaluation fails where they are
further apart than rounding explains (`decode/divergence.py`). This measures what rounding does: answers of the target to
GSM8K prompts are judged again, all of a pass's rows teacher-forced, by transformers (whole prefill; one row with a cache) and by the
fused target (prefill; chains and trees of several row counts), and at every token the difference of the reference's two likeliest
logits is compared with that of a float32 prefill. Errors are in rounding steps of the dtype at the largest logit.
``swings`` are the same between a pass and the fused prefill, both in half precision. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import numbers
from decode.conversation import Conversation
from decode.divergence import rounding_step
from decode.float32_pass import plain_logits
from decode.fused_target import PREFILL_ROWS, FusedTarget
from dflash_kit.benchmark_prompts import load_benchmark
from dflash_kit.errors import run_cli
from dflash_kit.target import load_target, load_tokenizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PATH = 15
"""Tokens of the answer in a tree; its other nodes are random."""


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--one-row-prompts", type=int, default=2, help="judged by transformers row by row, too")
    parser.add_argument("--rows", type=numbers, default=[1, 16, 72, 264], help="of the fused target's chains and trees")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    prompts, answers, reference = float32_answers(options)
    model = load_target(options.target, dtype=torch.bfloat16, device=DEVICE)
    report: dict[str, Any] = {
        "benchmark": "rounding",
        "target": Path(options.target).name,
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU",
        "torch": torch.__version__,
        "dtype": "bfloat16",
        "prompts": len(prompts),
        "answer_tokens": sum(map(len, answers)),
        "passes": {},
    }
    found: dict[str, list[Tensor]] = {}

    def measure(name: str, judge: Callable[[list[int], list[int]], Tensor], count: int | None = None) -> None:
        found[name] = [judge(*pair) for pair in list(zip(prompts, answers, strict=True))[:count]]
        report["passes"][name] = statistics(found[name], reference)
        print(name, json.dumps(report["passes"][name]), flush=True)

    measure("transformers, prefill", lambda prompt, answer: prefill(model, prompt, answer, reference))
    measure("transformers, one row", lambda p, a: one_row(model, p, a, reference), options.one_row_prompts)
    context = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    target = FusedTarget(model, [0], context + 64, max(options.rows))
    measure("fused, prefill", lambda p, a: fused_prefill(target, p, a, reference))
    for count in options.rows:
        measure(f"fused, chain of {count} rows", lambda p, a, n=count: fused_rows(target, p, a, reference, n, n))
        if count > PATH + 1:
            name = f"fused, tree of {count} rows"
            measure(name, lambda p, a, n=count: fused_rows(target, p, a, reference, n, PATH + 1))
    if DEVICE == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        target._passes.clear()
        measure("fused, prefill, sums in float32", lambda p, a: fused_prefill(target, p, a, reference))
        for count in options.rows[2:]:
            name = f"fused, chain of {count} rows, sums in float32"
            measure(name, lambda p, a, n=count: fused_rows(target, p, a, reference, n, n))
    report["swings"] = {
        name: statistics(values, reference, found["fused, prefill"][: len(values)])
        for name, values in found.items()
        if name != "fused, prefill"
    }
    report["worst"] = worst_places(found, reference)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return 0


class Reference:
    """The two likeliest tokens behind every prefix of one answer, by a float32 prefill."""

    def __init__(self, logits: Tensor) -> None:
        best = logits.topk(2)
        self.pairs, self.margin = best.indices, best.values[:, 0] - best.values[:, 1]
        self.step = logits.new_tensor([rounding_step(row, torch.bfloat16) for row in logits])

    def margin_of(self, logits: Tensor) -> Tensor:
        """(T,) what ``logits`` (T, V) say of the same tokens."""
        both = logits.float().gather(1, self.pairs)
        return both[:, 0] - both[:, 1]


References = dict[tuple[int, ...], Reference]


@torch.no_grad()
def float32_answers(options: argparse.Namespace) -> tuple[list[list[int]], list[list[int]], References]:
    """Prompts, greedy answers, and what float32 says of them."""
    tokenizer = load_tokenizer(options.target)
    prompts = [Conversation(tokenizer, p.turns, p.id).ask(0) for p in load_benchmark("gsm8k", options.prompts)]
    model = load_target(options.target, dtype=torch.float32, device=DEVICE)
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=DEVICE)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=DEVICE)
    said = model.generate(
        padded,
        attention_mask=mask,
        max_new_tokens=options.new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    answers = said[:, longest:].tolist()
    references = {
        tuple(answer): Reference(plain_logits(model, (prompt + answer)[:-1], len(answer)).own)
        for prompt, answer in zip(prompts, answers, strict=True)
    }
    del model
    gc.collect()
    return prompts, answers, references


def prefill(model: Any, prompt: list[int], answer: list[int], reference: References) -> Tensor:
    """Margins (T,) by one pass of transformers."""
    return reference[tuple(answer)].margin_of(plain_logits(model, (prompt + answer)[:-1], len(answer)).own)


@torch.no_grad()
def one_row(model: Any, prompt: list[int], answer: list[int], reference: References) -> Tensor:
    """Margins (T,) by transformers, token after token with a cache."""
    out = model(torch.tensor([prompt], device=DEVICE), use_cache=True)
    rows = [out.logits[0, -1]]
    for token in answer[:-1]:
        out = model(torch.tensor([[token]], device=DEVICE), past_key_values=out.past_key_values, use_cache=True)
        rows.append(out.logits[0, -1])
    return reference[tuple(answer)].margin_of(torch.stack(rows))


@torch.no_grad()
def fused_prefill(target: FusedTarget, prompt: list[int], answer: list[int], reference: References) -> Tensor:
    """Margins (T,) by the fused target's passes over a prompt."""
    ids = torch.tensor(prompt + answer, device=DEVICE)
    target.length.zero_()
    target.long_context = False
    step = target.prefill_pass()
    logits = []
    for start in range(0, ids.numel(), PREFILL_ROWS):
        piece = ids[start : start + PREFILL_ROWS]
        step.tree.tokens.zero_()
        step.tree.tokens[: piece.numel()] = piece
        target.run(step)
        logits.append(step.logits[: piece.numel()].clone())
        target.length += piece.numel()
    return reference[tuple(answer)].margin_of(torch.cat(logits)[len(prompt) - 1 : -1])


@torch.no_grad()
def fused_rows(
    target: FusedTarget, prompt: list[int], answer: list[int], reference: References, num_rows: int, path_rows: int
) -> Tensor:
    """Margins (T,) by passes of ``num_rows`` rows, of which ``path_rows`` (scattered) are tokens of the answer.

    The answer's first margin is that of the prompt's last token, taken from the prefill.
    """
    generator = torch.Generator().manual_seed(len(prompt))
    first, _ = target.prefill(torch.tensor(prompt, device=DEVICE))
    logits = [first[None].clone()]
    for start in range(0, len(answer) - 1, path_rows):
        piece = answer[start : min(start + path_rows, len(answer) - 1)]
        tokens, depths, parents, path = scattered(piece, num_rows, generator)
        step = target.verify(tokens.to(DEVICE), depths.to(DEVICE), parents.to(DEVICE))
        logits.append(step.logits[path.to(DEVICE)].clone())
        target.commit(path.to(DEVICE))
    return reference[tuple(answer)].margin_of(torch.cat(logits))


def scattered(piece: list[int], num_rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A tree of ``num_rows`` rows that holds the path ``piece``; tokens, depths, parents and the path's rows."""
    chosen = torch.randperm(num_rows - 1, generator=generator)[: len(piece) - 1].sort().values + 1
    path = [0, *chosen.tolist()]
    row_of = {row: i for i, row in enumerate(path)}
    tokens, depths, parents = [piece[0]], [0], [0]
    last = 0
    for row in range(1, num_rows):
        if row in row_of:
            parents.append(last)
            tokens.append(piece[row_of[row]])
            last = row
        else:
            parents.append(int(torch.randint(row, (1,), generator=generator)))
            tokens.append(int(torch.randint(1000, 40000, (1,), generator=generator)))
        depths.append(depths[parents[-1]] + 1)
    return torch.tensor(tokens), torch.tensor(depths[1:]), torch.tensor(parents[1:]), torch.tensor(path)


def statistics(values: list[Tensor], reference: References, against: list[Tensor] | None = None) -> dict[str, Any]:
    """Errors of margins in steps, over all answers; against float32, or against another pass."""
    references = list(reference.values())[: len(values)]
    others = against or [r.margin for r in references]
    steps = torch.cat([((v - o) / r.step) for v, o, r in zip(values, others, references, strict=True)]).abs().cpu()
    return {
        "tokens": steps.numel(),
        "mean": round(float(steps.mean()), 3),
        "p99": round(float(steps.quantile(0.99)), 2),
        "p999": round(float(steps.quantile(0.999)), 2),
        "most": round(float(steps.max()), 2),
        "above_4": int((steps > 4).sum()),
        "above_8": int((steps > 8).sum()),
    }


def worst_places(found: dict[str, list[Tensor]], reference: References) -> list[dict[str, Any]]:
    """The five places where any pass is furthest off, with every pass's error there."""
    references = list(reference.values())
    places = []
    for prompt, ref in enumerate(references):
        errors = {
            name: (values[prompt] - ref.margin) / ref.step for name, values in found.items() if prompt < len(values)
        }
        most = torch.stack(list(errors.values())).abs().amax(0)
        for position in most.topk(2).indices.tolist():
            places.append(
                {
                    "prompt": prompt,
                    "position": position,
                    "most": round(float(most[position]), 2),
                    "margin_steps": round(float(ref.margin[position] / ref.step[position]), 2),
                    "errors": {name: round(float(e[position]), 2) for name, e in errors.items()},
                }
            )
    return sorted(places, key=lambda place: -float(place["most"]))[:5]


if __name__ == "__main__":
    sys.exit(run_cli(main))
