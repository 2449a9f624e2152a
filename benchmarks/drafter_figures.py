"""What a drafter accepts on the benchmarks, greedily and sampled, and what no drafter could: one command.

    python benchmarks/drafter_figures.py --ckpt data/drafters/smollm2-135m-instruct --target runs/demo/model --work runs/figures \
        --out benchmarks/replay_smollm2_cpu_202612.json

GSM8K test (128 prompts), HumanEval (164) and MT-Bench (80, two turns, the second behind the target's own first answer) in the
published wording. At each temperature the target answers through ``extract/dump.py`` (shards below --work with the states in
float32 and the last hidden state), and the chain and DDTree are replayed on what it said: for greedy answers these are the rounds
of live decoding, for sampled ones they have their distribution. Everything is kept in --work: killed, the same command goes on; a
second drafter with the same taps finds the answers there. --minutes ends it early, with what was done by then: prompts are taken in
the shuffled order of the protocol, benchmark by benchmark, so that any part of it is a fair sample.

``ceiling`` is the oracle's part, see ``drafter_ceiling``. It reads the last hidden states, which are bfloat16: at temperature 0,
``top_1_agreement`` says how often rounding alone moves the target's likeliest token.

On a GPU: --device cuda (drafting in bfloat16), and --extract "--dtype bfloat16 --storage bfloat16" for bfloat16 answers;
without vLLM add --engine transformers there.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from drafter_ceiling import Ceiling, Oracle

from dflash_kit.acceptance import RoundLog, summarise
from dflash_kit.benchmark_prompts import load_benchmark
from dflash_kit.drafter import Drafter
from dflash_kit.provenance import git_commit
from dflash_kit.replay import methods, replay_rows, response_spans
from dflash_kit.shards import Row, Shards, open_shards
from dflash_kit.target import TargetSpec, load_tokenizer
from dflash_kit.target_ends import TargetEnds

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = {"gsm8k": 128, "humaneval": 164, "mt-bench": 80}
Message = dict[str, str]
Key = tuple[str, str, int]
"""Benchmark, prompt and turn."""


def main() -> None:
    """Extract, replay, sum up."""
    options = parse_options()
    options.work.mkdir(parents=True, exist_ok=True)
    figures = Figures(options)
    for temperature in options.temperatures:
        figures.measure(temperature)
    Path(options.out).write_text(json.dumps(figures.report(), indent=1) + "\n")


def parse_options() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", required=True, type=Path, help="drafter checkpoint")
    parser.add_argument("--target", required=True, help="target folder or hub id")
    parser.add_argument("--work", required=True, type=Path, help="folder for prompts, shards and rounds")
    parser.add_argument("--out", required=True, help="JSON file to write; replaced")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--temperatures", default=[0.0, 1.0], type=lambda text: [float(t) for t in text.split(",")])
    parser.add_argument("--budgets", default=[16, 64, 256], type=lambda text: [int(b) for b in text.split(",")])
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--max-prompts", type=int, default=None, help="of each benchmark, at most")
    parser.add_argument("--turns", type=int, default=2, choices=[1, 2], help="turns of a conversation, at most")
    parser.add_argument("--minutes", type=float, default=None, help="for replay and ceiling; then sum up what is done")
    parser.add_argument("--extract", default="--storage float32", type=str, help="further options of extract/dump.py")
    return parser.parse_args()


class Figures:
    """Rounds and ceilings of one drafter, kept in files that grow line by line."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
        self.drafter = Drafter.from_pretrained(options.ckpt, dtype=dtype, device=options.device)
        self.ends = TargetEnds.from_pretrained(options.target, dtype=dtype, device=options.device, with_final_norm=True)
        self.spec, self.tokenizer = TargetSpec.from_pretrained(options.target), load_tokenizer(options.target)
        self.prompts = {name: load_benchmark(name, count) for name, count in BENCHMARKS.items()}
        self.deadline_s = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
        self.temperatures: dict[float, Rounds] = {}

    def measure(self, temperature: float) -> None:
        """All benchmarks at one temperature, as far as time goes."""
        rounds = self.temperatures[temperature] = Rounds(
            self.options.work / f"rounds-{self.options.ckpt.name}-t{temperature:g}.jsonl"
        )
        answers = self.answers(temperature)
        for name, prompts in self.prompts.items():
            keys = [(name, p.id, turn) for p in prompts[: self.options.max_prompts] for turn in range(len(p.turns))]
            todo = [key for key in keys if key in answers and not rounds.has(key)]
            budgets = self.options.budgets
            rows = (answers[key].row for key in todo)
            found = replay_rows(self.drafter, self.ends, rows, budgets, eos_token_ids=self.spec.eos_token_ids)
            for key in todo:
                if time.monotonic() > self.deadline_s:  # rows in flight are lost, and done again next time
                    return
                row, logs = next(found)
                ceiling = Oracle(self.ends, temperature, self.drafter.config.num_draft_tokens, budgets).look(row)
                rounds.add(key, {f"{m}-{b}": log for (m, b), (log,) in logs.items()}, ceiling)
                print(f"{name} {temperature:g}: {key[1]} turn {key[2] + 1}, {len(row.input_ids)} tokens", flush=True)

    def answers(self, temperature: float) -> dict[Key, Answer]:
        """Where the target's answer to every turn lies; turns are extracted one after the other."""
        answers: dict[Key, Answer] = {}
        said: dict[tuple[str, str], list[Message]] = {}
        for turn in range(self.options.turns):
            asked: dict[Key, list[Message]] = {}
            for name, prompts in self.prompts.items():
                for prompt in prompts[: self.options.max_prompts]:
                    if turn < len(prompt.turns):
                        before = said.get((name, prompt.id), [])
                        asked[name, prompt.id, turn] = [*before, {"role": "user", "content": prompt.turns[turn]}]
            shards = self.extract(temperature, turn, list(asked.values()))
            places = {prompt_of(row): index for index, row in enumerate(shards)}
            for key, messages in asked.items():
                index = places[tuple(self.tokens(messages))]
                answers[key] = Answer(shards, index)
                row = shards[index]
                said[key[:2]] = [*messages, {"role": "assistant", "content": self.said(row)}]
        return answers

    def tokens(self, messages: list[Message]) -> list[int]:
        """The conversation as the target reads it."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def said(self, row: Row) -> str:
        """The answer as the next turn shows it to the target."""
        return str(self.tokenizer.decode(row.token_ids()[len(prompt_of(row)) :].tolist(), skip_special_tokens=True))

    def extract(self, temperature: float, turn: int, conversations: list[list[Message]]) -> Shards:
        """Let the target answer; finished shards are found again."""
        limit = self.options.max_prompts
        name = f"t{temperature:g}-turn-{turn + 1}" + (f"-first-{limit}" if limit else "")
        prompts, shards = self.options.work / f"{name}.jsonl", self.options.work / f"shards-{name}"
        prompts.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
        if not (shards / "manifest.jsonl").exists() or '"summary"' not in (shards / "manifest.jsonl").read_text():
            words = f"--model {self.options.target} --prompts {prompts} --out {shards} --last_hidden true"
            words += f" --sampling.temperature {temperature:g} --sampling.max_new_tokens {self.options.max_new_tokens}"
            layers = json.dumps(list(self.drafter.config.target_layer_ids), separators=(",", ":"))
            if temperature > 0 and self.options.device == "cpu" and "transformers" not in self.options.extract:
                # vLLM 0.32 cannot take back a seeded CPU sample, which it does when it prefills a prompt in pieces.
                longest = self.spec.max_position_embeddings
                words += f" --max_num_batched_tokens {longest} --engine_args.enable_chunked_prefill false"
            command = [sys.executable, "extract/dump.py", *shlex.split(words), "--target_layer_ids", layers]
            subprocess.run([*command, *shlex.split(self.options.extract)], cwd=ROOT, check=True)
        return open_shards(shards)

    def report(self) -> dict[str, Any]:
        """Summaries of what was measured."""
        return {
            "benchmark": "drafter_figures",
            "target": Path(self.options.target).name,
            "checkpoint": self.options.ckpt.name,
            "commit": git_commit(),
            "hardware": f"{self.options.device}, {torch.get_num_threads()} threads of {os.cpu_count()} cores",
            "dtype": str(self.ends.head.dtype).removeprefix("torch."),
            "max_new_tokens": self.options.max_new_tokens,
            "prompts_of_the_protocol": {name: len(prompts) for name, prompts in self.prompts.items()},
            "results": [
                result
                for temperature, rounds in self.temperatures.items()
                for name in self.prompts
                for result in self.results(name, temperature, rounds)
            ],
        }

    def results(self, name: str, temperature: float, rounds: Rounds) -> Iterator[dict[str, Any]]:
        """The methods on one benchmark, and their ceilings."""
        lines = [line for key, line in rounds.lines.items() if key[0] == name]
        if not lines:
            return
        num_drafted = self.drafter.config.num_draft_tokens
        what = {"benchmark": name, "temperature": temperature}
        for method, budget in methods(self.drafter.config, self.options.budgets):
            logs = [RoundLog.from_dict(line["rounds"][f"{method}-{budget}"]) for line in lines]
            yield {**what, "method": method, "budget": budget, **short(summarise(logs, num_drafted).to_dict())}
        ceilings = [Ceiling.from_dict(line["ceiling"]) for line in lines]
        for kind, found in Ceiling.sum_up(ceilings, [line["key"][1] for line in lines], num_drafted).items():
            yield {**what, "method": kind, **(short(found) if "rounds" in found else found)}


class Answer:
    """A row of shards, read when it is needed."""

    def __init__(self, shards: Shards, index: int) -> None:
        self.shards, self.index = shards, index

    @property
    def row(self) -> Row:
        return self.shards[self.index]


class Rounds:
    """What was measured on each prompt, one line each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: dict[Key, dict[str, Any]] = {}
        for text in path.read_text().splitlines() if path.exists() else []:
            if text.endswith("}"):  # the last line of a killed run may be half of one
                line = json.loads(text)
                self.lines[tuple(line["key"])] = line

    def has(self, key: Key) -> bool:
        return key in self.lines

    def add(self, key: Key, logs: dict[str, RoundLog], ceiling: Ceiling) -> None:
        """Keep the rounds of one answer."""
        rounds = {method: log.to_dict() | {"prompt_id": key[1]} for method, log in logs.items()}
        self.lines[key] = {"key": list(key), "rounds": rounds, "ceiling": ceiling.to_dict()}
        with self.path.open("a") as file:
            file.write(json.dumps(self.lines[key]) + "\n")


def prompt_of(row: Row) -> tuple[int, ...]:
    """Tokens in front of the answer."""
    first = next(iter(response_spans(row.token_mask())))[0]
    return tuple(row.token_ids()[:first].tolist())


def short(found: dict[str, Any]) -> dict[str, Any]:
    """Rounded, and without what replay does not know."""
    found = {key: value for key, value in found.items() if value not in (None, {}, [])}
    for key, value in found.items():
        if isinstance(value, float):
            found[key] = round(value, 4)
        elif isinstance(value, list):
            found[key] = [round(each, 4) for each in value]
    return found


if __name__ == "__main__":
    main()
