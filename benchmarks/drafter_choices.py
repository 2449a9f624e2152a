"""What each choice in training a drafter brings: one change at a time against a recipe, on the same shards.

Trains a drafter per variant with the commands of the recipe (same seed, steps and anchors unless the variant says
otherwise) and replays each on the same evaluation shards. Prints one JSON line: acceptance of the chain and of DDTree by
variant and evaluation set, the learning curve on held-out rows, how many rows were trained on, and the seconds of its
steps. What a variant brought is kept in OUT/NAME.json and not run again. None is begun that would not end within
``--time_limit_s``, judged by the slowest so far (those that are kept are shown whatever the time), and one that fails
does not keep the others back; what was left out is named with the reason.

``--jobs N`` runs N variants side by side, each with an equal share of the cores and with a log in OUT/NAME.log instead of
stderr; they share one GPU where there is one. Their train_s are then times under sharing, and "jobs" says of how many.
torch.compile's and Triton's caches are left common to all: their files appear whole, and a variant of the same shapes
takes what another has compiled.

--anchors counts those of a packed row, as the recipe's data.seq_len counts its tokens: 2,048 for 16,384 are the published
512 for 4,096, and half_anchors (1,024) is 256 for 4,096. sliding is four layers of five with a window of 256 tokens, which is
short of most answers; a longer one would not show on them.

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
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from dflash_kit.errors import run_cli  # noqa: E402
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
    start = Start(args.time_limit_s)
    results: dict[str, dict[str, Any]] = {}
    left_out: dict[str, str] = {}

    def attempt(name: str) -> None:
        try:
            if name in DISTILLING and not has_last:
                raise CommandError("the shards hold no last hidden states")
            results[name] = kept_result(name, args) or start.timed(lambda: new_result(name, args))
        except CommandError as error:
            left_out[name] = str(error)
            print(f"left out: {name}: {error}", file=sys.stderr)

    if args.jobs == 1:
        for name in names:
            attempt(name)
    else:
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(attempt, names))  # begun in this order; the list raises what went wrong otherwise
    results = {name: results[name] for name in names if name in results}
    left_out = {name: left_out[name] for name in names if name in left_out}
    print(json.dumps(summary(args, list(results.values()), left_out)))


class Start:
    """When variants may begin: none that would end behind the limit if it took as long as the slowest so far.

    Args:
        limit_s: seconds from now; None: any time.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s, self._t0, self._slowest_s = limit_s, time.perf_counter(), 0.0
        self._lock = threading.Lock()

    def timed(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Do the work and remember how long it took.

        Raises:
            CommandError: it would not end in time, or failed.
        """
        before_s = time.perf_counter()
        with self._lock:
            if self._limit_s is not None and before_s - self._t0 + self._slowest_s > self._limit_s:
                raise CommandError("it would not have ended in time")
        try:
            return work()
        finally:
            with self._lock:
                self._slowest_s = max(self._slowest_s, time.perf_counter() - before_s)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="recipe whose train section is varied")
    parser.add_argument("--shards", required=True, help="training shards")
    parser.add_argument("--evaluate", nargs="+", required=True, metavar="NAME=SHARDS", help="shards to replay on")
    parser.add_argument("--target", help="target folder; unset: the recipe's")
    parser.add_argument("--steps", type=int, required=True, help="optimizer steps of every variant")
    parser.add_argument("--anchors", type=int, default=2048, help="anchors of a packed row; half_anchors takes half")
    parser.add_argument("--jobs", type=int, default=1, help="variants that run side by side")
    parser.add_argument("--budgets", default="16,64,256", help="tree budgets of the replay")
    parser.add_argument("--limit", type=int, help="rows of each evaluation set at most")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="which, in this order")
    parser.add_argument("--time_limit_s", type=float, help="begin no variant that would end later than this")
    parser.add_argument("--out", default="runs/choices", help="folder for drafters and reports")
    args = parser.parse_args(argv)
    if not Path(args.config).is_file():
        parser.error(f"--config is {args.config!r}; name a recipe that is there, as configs/smollm2-h200.yaml")
    if args.jobs < 1:
        parser.error(f"--jobs is {args.jobs}; at least 1 is needed")
    odd = [pair for pair in args.evaluate if not all(pair.partition("="))]
    if odd:
        parser.error(f"--evaluate is {odd[0]!r}; a name, = and a shards folder are needed")
    return args


def record_of(name: str, args: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Where a variant's result is kept, and all that decides it."""
    passing = ("out", "variants", "time_limit_s", "jobs")
    asked = {key: value for key, value in vars(args).items() if key not in passing}
    asked |= {"recipe": Path(args.config).read_text(), "flags": flags_of(name, args)}
    return Path(args.out) / f"{name}.json", asked


def kept_result(name: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """What the variant brought in an earlier run with the same arguments; None: it has not ended in any.

    Raises:
        CommandError: the earlier run had other arguments.
    """
    record, asked = record_of(name, args)
    if not record.exists():
        return None
    kept = json.loads(record.read_text())
    if kept["asked"] != asked:
        raise CommandError(f"{record} is of other arguments or another recipe; choose another --out")
    return dict(kept["result"])


def new_result(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run the variant, and keep what it brought."""
    record, asked = record_of(name, args)
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
    log = Path(args.out) / f"{name}.log" if args.jobs > 1 else None
    call(train, args.jobs, log)
    acceptance = {}
    for pair in args.evaluate:
        label, _, shards = pair.partition("=")
        folder = Path(f"{out}-{label}")
        replay = ["decode/eval.py", "--ckpt", str(out), "--replay", shards, "--out", str(folder), *target]
        limit = ["--limit", str(args.limit)] if args.limit else []
        call([*replay, "--budgets", args.budgets, *limit], args.jobs, log)
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
        "jobs": args.jobs,
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


def call(command: list[str], jobs: int, log: Path | None) -> None:
    """Run one of the project's commands.

    Args:
        command: the first word is its file.
        jobs: how many such commands share the cores.
        log: to which all that it prints is added; None: to stderr.

    Raises:
        CommandError: it failed.
    """
    line = [sys.executable, str(ROOT / command[0]), *command[1:]]
    if log is None:
        done = subprocess.run(line, stdout=2, check=False)
    else:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            done = subprocess.run(line, stdout=file, stderr=file, env=os.environ | share_of_cores(jobs), check=False)
    if done.returncode:
        place = "stderr" if log is None else str(log)
        raise CommandError(f"{command[0]} ended with status {done.returncode}; its message stands on {place}")


def share_of_cores(jobs: int) -> dict[str, str]:
    """Variables that hold a process to its share: by default each takes all cores, to compute and to compile."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // jobs))
    return {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads}


def summary(args: argparse.Namespace, results: list[dict[str, Any]], left_out: dict[str, str]) -> dict[str, Any]:
    """Everything that the line says."""
    has_gpu = torch.cuda.is_available()
    return {
        "benchmark": "drafter_choices",
        "steps": args.steps,
        "jobs": args.jobs,
        "rows": len(open_shards(args.shards)),
        "variants": results,
        "left_out": left_out,
        "hardware": torch.cuda.get_device_name() if has_gpu else f"CPU, {os.cpu_count()} cores, {platform.machine()}",
        "versions": package_versions(),
        "commit": git_commit(),
    }


def command(argv: list[str] | None = None) -> int:
    """``main`` from a shell."""
    main(argv)
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(command))
