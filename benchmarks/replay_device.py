"""Replay on a device against live decoding of the same rounds on the same device, and whether the rounds are the same.

    python benchmarks/replay_device.py --ckpt data/drafters/smollm2-135m-instruct --target TARGET --out replay.json

Prompts of GSM8K are decoded live by the chain and by DDTree at every budget, on a GPU by the fused engine in bfloat16. What the
chain said is recorded with its taps and replayed. ``speedup`` is the seconds of all live rounds (prefill and capture left
out) over those of one replay of all rows (everything from the rows on the host to the rounds on the host), for each of
--anchors. In bfloat16 near-ties fall either way: ``against_live`` counts the responses of other methods whose text differs from the
recorded one, and in those of the same text the rounds that are not replay's. ``exact`` does it in float32, by the portable
engine, with fewer and shorter responses: no round may differ, nor may one of ``against_host``, the path of few operations, in float32.
``stages_s`` is of one more replay that waits after each stage; looking at slots and walking are parts of ``accepted``. ``left`` are anchors that
the kernels left to the path of few operations. Lines come as they are measured; the last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.decode_cpu import live_pass, portable_engine, record_row, spread
from benchmarks.measuring import ON_GPU, Report, attempt, now_s, numbers
from decode.conversation import Conversation
from decode.engine import Generation, Method
from decode.fused_engine import FusedEngine, reason_against
from dflash_kit import reach_counter
from dflash_kit.acceptance import RoundLog, summarise
from dflash_kit.benchmark_prompts import load_benchmark
from dflash_kit.checkpoint import read_provenance
from dflash_kit.drafter import Drafter
from dflash_kit.errors import run_cli
from dflash_kit.provenance import git_commit
from dflash_kit.replay import replay_rows
from dflash_kit.replay_accepted import AcceptedCounter
from dflash_kit.replay_blocks import PackedContexts
from dflash_kit.replay_device import counter_for
from dflash_kit.replay_fleet import Fleet
from dflash_kit.shards import Row
from dflash_kit.target import TargetSpec, load_target, load_tokenizer
from dflash_kit.target_ends import TargetEnds

Found = dict[tuple[str, int], list[RoundLog]]
"""Rounds of a row by method."""
DEVICE = "cuda" if ON_GPU else "cpu"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and print."""
    options = parse_options(argv)
    report = Report(
        options.limit_s,
        options.out,
        benchmark="replay_device",
        commit=git_commit(),
        device=torch.cuda.get_device_name() if ON_GPU else "cpu",
        torch=torch.__version__,
        checkpoint=Path(options.ckpt).name,
    )
    report.at("live decoding")
    speed = Bench(options, torch.bfloat16 if ON_GPU else torch.float32)
    live, rows = speed.decode(options.prompts, options.max_new_tokens, fused=ON_GPU)
    report.add(**speed.live_figures(live))
    for anchors in options.anchors:
        report.at(f"replay by {anchors} anchors")
        figures = attempt(lambda n=anchors: speed.replay_figures(live, rows, n))
        report.add(**{f"replay_{anchors}": figures})
    report.at("stages")
    report.add(stages_s=attempt(lambda: speed.stages(rows)))
    report.at("exactness")
    report.add(exact=attempt(lambda: exact_figures(options)))
    return report.finish()


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", required=True, help="drafter checkpoint")
    parser.add_argument("--target", help="target folder; default: the checkpoint's own")
    parser.add_argument("--budgets", type=numbers, default=[16, 64, 256])
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument(
        "--anchors", type=numbers, default=[0, 512, 2048], help="drafted together, at most; 0: what replay chooses"
    )
    parser.add_argument("--exact-prompts", type=int, default=4, help="decoded in float32, too")
    parser.add_argument("--exact-new-tokens", type=int, default=48)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=540.0, help="print what is there and end then; 0: never")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    options.target = options.target or read_provenance(options.ckpt)["target"]
    return options


class Bench:
    """A drafter and its target in one dtype."""

    def __init__(self, options: argparse.Namespace, dtype: torch.dtype) -> None:
        self.options = options
        self.place: dict[str, Any] = {"dtype": dtype, "device": DEVICE}
        self.spec, self.tokenizer = TargetSpec.from_pretrained(options.target), load_tokenizer(options.target)
        self.drafter = Drafter.from_pretrained(options.ckpt, **self.place)
        self.ends = TargetEnds.from_pretrained(options.target, **self.place)
        self.counter = type(counter_for(self.ends, []))
        """What replay takes."""
        self.methods = [Method("chain", self.drafter.config.num_draft_tokens)]
        self.methods += [Method("ddtree", budget) for budget in sorted(set(options.budgets))]
        self.engine = "portable"

    def decode(self, num_prompts: int, limit: int, *, fused: bool) -> tuple[dict[Method, list[Generation]], list[Row]]:
        """Live rounds of every method, and the chain's answers as rows."""
        prompts = [
            Conversation(self.tokenizer, prompt.turns, prompt.id).ask(0)
            for prompt in load_benchmark("gsm8k", num_prompts)
        ]
        engine = self._engine(max(map(len, prompts)) + limit, fused)
        live_pass(engine, prompts[:1], self.methods, 4)  # compiles and captures
        live = live_pass(engine, prompts, self.methods, limit)
        model = load_target(self.options.target, **self.place)  # the fused engine has changed its own
        said = [generation.token_ids for generation in live[self.methods[0]]]
        return live, [record_row(model, self.drafter, *each) for each in zip(prompts, said, strict=True)]

    def _engine(self, max_context: int, fused: bool) -> Any:
        model = load_target(self.options.target, **self.place)
        drafter = Drafter.from_pretrained(self.options.ckpt, **self.place)
        if not fused:
            return portable_engine(model, drafter, self.ends, self.spec)
        reason = reason_against(model, drafter, [(m.name, m.budget) for m in self.methods])
        if reason:
            raise SystemExit(f"the fused engine does not take this target: {reason}")
        self.engine = "fused"
        context = min(self.spec.max_position_embeddings, max_context)
        budget = max(method.budget for method in self.methods)
        return FusedEngine(
            model, drafter, eos_token_ids=self.spec.eos_token_ids, max_context=context, max_budget=budget
        )

    def live_figures(self, live: dict[Method, list[Generation]]) -> dict[str, Any]:
        """Acceptance and time of a round by method."""
        figures: dict[str, Any] = {}
        for method, generations in live.items():
            found = summarise([g.log for g in generations], self.drafter.config.num_draft_tokens)
            figures[f"{method.name}-{method.budget}"] = {
                "acceptance_length": found.acceptance_length_pooled,
                "rounds": found.rounds,
                "ms_per_round": found.ms_per_round,
            }
        return {
            "live_engine": self.engine,
            "dtype": str(self.place["dtype"]).removeprefix("torch."),
            "prompts": len(live[self.methods[0]]),
            "new_tokens": sum(len(g.token_ids) for g in live[self.methods[0]]),
            "live_s": round(live_s(live), 4),
            "live": figures,
        }

    def replay(self, rows: Sequence[Row], on_device: bool = True, anchors: int | None = None) -> list[Found]:
        """Rounds of the rows."""
        budgets = [method.budget for method in self.methods[1:]]
        found = replay_rows(
            self.drafter,
            self.ends,
            rows,
            budgets,
            eos_token_ids=self.spec.eos_token_ids,
            anchors_per_chunk=anchors or None,
            on_device=on_device,
        )
        return [logs for _, logs in found]

    def replay_figures(self, live: dict[Method, list[Generation]], rows: list[Row], anchors: int) -> dict[str, Any]:
        """Seconds, ratio and differing rounds for one number of anchors together."""
        self.replay(rows[:4], anchors=anchors)
        seconds = []
        for _ in range(self.options.repetitions):
            begin_s = now_s()
            found = self.replay(rows, anchors=anchors)
            seconds.append(now_s() - begin_s)
        drafted, num_left = self._work(rows, anchors)
        return {
            "replay_s": spread(seconds),
            "speedup": spread([live_s(live) / each for each in seconds]),
            "us_per_token": round(1e6 * min(seconds) / sum(len(g.token_ids) for g in live[self.methods[0]]), 2),
            "passes": len(drafted),
            "anchors": sum(drafted),
            "left": num_left,
            "against_live": against_live(live, found),
        }

    def _work(self, rows: list[Row], anchors: int) -> tuple[list[int], int]:
        """Anchors of each pass, and those that the kernels left."""
        drafted, counters = [], set()
        count = self.counter.count

        def counted(self: AcceptedCounter, hidden: torch.Tensor, truths: torch.Tensor) -> torch.Tensor:
            drafted.append(len(hidden))
            counters.add(self)
            return count(self, hidden, truths)

        with mock.patch.object(self.counter, "count", counted):
            self.replay(rows, anchors=anchors)
        return drafted, sum(getattr(counter, "num_left", 0) for counter in counters)

    def stages(self, rows: list[Row]) -> dict[str, float]:
        """Seconds by stage of one replay."""
        seconds = Counter[str]()
        timed = {
            "context": (PackedContexts, "__init__"),
            "draft": (PackedContexts, "draft"),
            "accepted": (self.counter, "count"),
            "look": (reach_counter, "_look"),
            "walk": (reach_counter, "_walk"),
            "next_anchors": (Fleet, "next_anchors"),
            "hop": (Fleet, "hop"),
            "logs": (Fleet, "logs"),
        }
        begin_s = now_s()
        with contextlib.ExitStack() as patches:
            for stage, (owner, name) in timed.items():
                patches.enter_context(mock.patch.object(owner, name, clocked(owner, name, stage, seconds)))
            self.replay(rows)
        return {stage: round(spent, 4) for stage, spent in seconds.items()} | {"all": round(now_s() - begin_s, 4)}


def clocked(owner: type, name: str, stage: str, seconds: Counter[str]) -> Any:
    """A method that adds its time to a stage."""
    work: Callable[..., Any] = getattr(owner, name)

    def run(*inputs: Any, **named: Any) -> Any:
        begin_s = now_s()
        found = work(*inputs, **named)
        seconds[stage] += now_s() - begin_s
        return found

    return staticmethod(run) if isinstance(owner.__dict__[name], classmethod) else run


def live_s(live: dict[Method, list[Generation]]) -> float:
    """Seconds of all rounds."""
    return sum(generation.log.decode_s or 0.0 for generations in live.values() for generation in generations)


def against_live(live: dict[Method, list[Generation]], found: list[Found]) -> dict[str, int]:
    """Texts that are not the chain's, and in the others the rounds that are not replay's."""
    counts = Counter({"texts_differing": 0, "rounds_compared": 0, "rounds_differing": 0})
    said = [generation.token_ids for generation in next(iter(live.values()))]
    for method, generations in live.items():
        for text, generation, replayed in zip(said, generations, found, strict=True):
            if generation.token_ids != text:
                counts["texts_differing"] += 1
                continue
            mine, theirs = rounds_of(replayed[method.name, method.budget][0]), rounds_of(generation.log)
            counts["rounds_compared"] += len(theirs)
            counts["rounds_differing"] += len(theirs - mine)
    return dict(counts)


def rounds_of(log: RoundLog) -> set[tuple[int, int]]:
    """Where each round began, and what it accepted."""
    starts = [sum(n + 1 for n in log.num_accepted[:i]) for i in range(len(log.num_accepted))]
    return set(zip(starts, log.num_accepted, strict=True))


def exact_figures(options: argparse.Namespace) -> dict[str, Any]:
    """The same in float32 by the portable engine, where nothing may differ."""
    bench = Bench(options, torch.float32)
    live, rows = bench.decode(options.exact_prompts, options.exact_new_tokens, fused=False)
    seconds, found = {}, {}
    for name, on_device in (("device", True), ("host", False)):
        begin_s = now_s()
        found[name] = bench.replay(rows, on_device)
        seconds[name] = round(now_s() - begin_s, 4)
    pairs = [
        (rounds_of(mine), rounds_of(theirs))
        for ours, host in zip(found["device"], found["host"], strict=True)
        for method in ours
        for mine, theirs in zip(ours[method], host[method], strict=True)
    ]
    return {
        "against_live": against_live(live, found["device"]),
        "against_host": {
            "rounds_compared": sum(len(theirs) for _, theirs in pairs),
            "rounds_differing": sum(len(theirs - mine) for mine, theirs in pairs),
        },
        "seconds": seconds,
    }


def command(argv: list[str] | None = None) -> int:
    """``main`` from a shell."""
    main(argv)
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(command))
