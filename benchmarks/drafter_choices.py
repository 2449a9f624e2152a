"""What each choice in training a drafter brings: one change at a time against a recipe, on the same shards.

Trains a drafter per variant with the commands of the recipe (same seed, steps and anchors unless the variant says
otherwise) and replays each on the same evaluation shards. Prints one JSON line: acceptance of the chain and of DDTree by
variant and evaluation set, the learning curve on held-out rows, how many rows were trained on, and the seconds of its
steps. What a variant brought is kept in OUT/NAME.json and not run again. None is begun that would not end within
``--time_limit_s``, judged by the slowest so far, and one that fails does not keep the others back; what was left out is
named with the reason.

Variants that distil (kl, lk_hybrid) need shards with last hidden states; they are left out where those lack. Those with
less data hold the rest out, which needs a recipe with replay.max_rows and without eval_shards: train_rows tells.

    python benchmarks/drafter_choices.py --config configs/smollm2-h200.yaml --shards runs/h200/shards \
        --evaluate gsm8k=runs/h200/eval-gsm8k humaneval=runs/h200/eval-humaneval --steps 600 --time_limit_s 540
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from dflash_kit.provenance import git_commit, package_versions  # noqa: E402
from dflash_kit.shards import open_shards  # noqa: E402

VARIANTS: dict[str, list[str]] = {
    "recipe": [],
    "dpace": ["--loss.kind", "dpace"],
    "kl": ["--loss.kind", "kl"],
    "lk_hybrid": ["--loss.kind", "lk_hybrid"],
    "gamma7": ["--loss.gamma", "7"],
    "layers2": ["--drafter.num_hidden_layers", "2"],
    "layers3": ["--drafter.num_hidden_layers", "3"],
    "block8": ["--drafter.block_size", "8", "--loss.gamma", "4"],
    "sliding": ["--drafter.num_sliding_layers", "4", "--drafter.sliding_window", "256"],
    "causal": ["--drafter.full_causal", "true"],
    "half_anchors": [],  # filled in from the recipe
    "noise": ["--data.feature_noise", "0.05"],
    "ema": ["--optim.ema_decay", "0.999"],
    "muon": ["--optim.kind", "muon"],
    "half_data": ["--data.holdout_fraction", "0.5"],
    "quarter_data": ["--data.holdout_fraction", "0.75"],
}
"""Name and the flags by which it differs from the recipe. Less data: the rest is held out, by a hash of the ids."""
DISTILLING = {"kl", "lk_hybrid"}


class CommandError(Exception):
    """One of the project's commands failed, and has said why on stderr."""


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    names = [name for name in args.variants.split(",") if name]
    unknown = sorted(set(names) - set(VARIANTS))
    if unknown:
        raise SystemExit(f"error: no variant is called {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    has_last = open_shards(args.shards).header.has_last_hidden
    t0, slowest_s = time.perf_counter(), 0.0
    results, left_out = [], {}
    for name in names:
        if name in DISTILLING and not has_last:
            left_out[name] = "the shards hold no last hidden states"
            continue
        if args.time_limit_s is not None and time.perf_counter() - t0 + slowest_s > args.time_limit_s:
            left_out[name] = "it would not have ended in time"
            continue
        before_s = time.perf_counter()
        try:
            results.append(result_of(name, args))
        except CommandError as error:
            left_out[name] = str(error)
            print(f"left out: {name}: {error}", file=sys.stderr)
        slowest_s = max(slowest_s, time.perf_counter() - before_s)
    print(json.dumps(summary(args, results, left_out)))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="recipe whose train section is varied")
    parser.add_argument("--shards", required=True, help="training shards")
    parser.add_argument("--evaluate", nargs="+", required=True, metavar="NAME=SHARDS", help="shards to replay on")
    parser.add_argument("--target", help="target folder; unset: the recipe's")
    parser.add_argument("--steps", type=int, required=True, help="optimizer steps of every variant")
    parser.add_argument("--anchors", type=int, default=2048, help="anchors of a packed row; half_anchors takes half")
    parser.add_argument("--budgets", default="16,64,256", help="tree budgets of the replay")
    parser.add_argument("--limit", type=int, help="rows of each evaluation set at most")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="which, in this order")
    parser.add_argument("--time_limit_s", type=float, help="begin no variant that would end later than this")
    parser.add_argument("--out", default="runs/choices", help="folder for drafters and reports")
    args = parser.parse_args(argv)
    odd = [pair for pair in args.evaluate if not all(pair.partition("="))]
    if odd:
        parser.error(f"--evaluate is {odd[0]!r}; a name, = and a shards folder are needed")
    return args


def result_of(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """What the variant brought: from an earlier run with the same arguments, or from this one."""
    record = Path(args.out) / f"{name}.json"
    passing = ("out", "variants", "time_limit_s")
    asked = {key: value for key, value in vars(args).items() if key not in passing}
    asked |= {"recipe": Path(args.config).read_text(), "flags": flags_of(name, args)}
    if record.exists():
        kept = json.loads(record.read_text())
        if kept["asked"] == asked:
            return dict(kept["result"])
        raise CommandError(f"{record} is of other arguments or another recipe; choose another --out")
    result = run(name, args)
    partial = record.with_suffix(".incomplete")
    partial.write_text(json.dumps({"asked": asked, "result": result}))
    os.replace(partial, record)
    return result


def flags_of(name: str, args: argparse.Namespace) -> list[str]:
    """The flags by which a variant differs from the recipe."""
    return VARIANTS[name] if name != "half_anchors" else ["--data.anchors", str(args.anchors // 2)]


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train one variant and replay it on every evaluation set."""
    out = Path(args.out) / name
    flags = flags_of(name, args)
    target = ["--target", args.target] if args.target else []
    train = ["train/run.py", "--config", args.config, "--shards", args.shards, "--out", str(out), *target]
    if name != "half_anchors":
        train += ["--data.anchors", str(args.anchors)]
    train += ["--optim.max_steps", str(args.steps), *flags]
    call(train)
    acceptance = {}
    for pair in args.evaluate:
        label, _, shards = pair.partition("=")
        folder = Path(f"{out}-{label}")
        replay = ["decode/eval.py", "--ckpt", str(out), "--replay", shards, "--out", str(folder), *target]
        limit = ["--limit", str(args.limit)] if args.limit else []
        call([*replay, "--budgets", args.budgets, *limit])
        acceptance[label] = {
            f"{entry['method']}-{entry['budget']}": {
                "pooled": entry["acceptance_length_pooled"],
                "ci95": entry["acceptance_length_pooled_ci95"],
                "rounds": entry["rounds"],
            }
            for entry in json.loads((folder / "report.json").read_text())["results"]
        }
    records = [json.loads(line) for line in Path(f"{out}.state/metrics.jsonl").read_text().splitlines()]
    recorded = json.loads(Path(f"{out}.state/run.json").read_text())
    return {
        "variant": name,
        "flags": flags,
        "train_rows": recorded["train_rows"],
        "train_s": round(steps_s(records), 1),
        "acceptance_length": acceptance,
        "curve": [
            {k: v for k, v in r.items() if k not in ("kind", "time_utc")} for r in records if r.get("kind") == "replay"
        ],
        "last_loss": next((r.get("loss") for r in reversed(records) if r.get("kind") == "train"), None),
    }


def steps_s(records: list[dict[str, Any]]) -> float:
    """Seconds of a run's steps, also of one that was interrupted; starts, replays and saves are left out."""
    lines = [record for record in records if record["kind"] == "train"]
    before = [0, *(line["step"] for line in lines)]
    return sum(line["s_per_step"] * (line["step"] - first) for first, line in zip(before, lines, strict=False))


def call(command: list[str]) -> None:
    """Run one of the project's commands, the first word its file; all that it prints goes to stderr.

    Raises:
        CommandError: it failed.
    """
    done = subprocess.run([sys.executable, str(ROOT / command[0]), *command[1:]], stdout=2, check=False)
    if done.returncode:
        raise CommandError(f"{command[0]} ended with status {done.returncode}; its message stands on stderr")


def summary(args: argparse.Namespace, results: list[dict[str, Any]], left_out: dict[str, str]) -> dict[str, Any]:
    """Everything that the line says."""
    has_gpu = torch.cuda.is_available()
    return {
        "benchmark": "drafter_choices",
        "steps": args.steps,
        "rows": len(open_shards(args.shards)),
        "variants": results,
        "left_out": left_out,
        "hardware": torch.cuda.get_device_name() if has_gpu else f"CPU, {os.cpu_count()} cores, {platform.machine()}",
        "versions": package_versions(),
        "commit": git_commit(),
    }


if __name__ == "__main__":
    main()
