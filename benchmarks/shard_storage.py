"""What each form of shards costs and what fp8 does to acceptance, on hidden states of a real target.

1. The target answers prompts (vLLM, float32 states and last hidden states); the last rows are held out.
2. The same rows, in memory in float32, are written and read in every form, several times. Writing is rounding or quantising,
   checks, checksums, and the fsync of finished shards; reading is opening the folder anew (its files are in the page cache),
   comparing every checksum, and copying the states into a batch as the trainer does.
3. A small drafter is trained on the other rows in bfloat16, and replayed on the held-out rows in bfloat16, in fp8 and in float32.

A run that was stopped goes on where it was. The last line of stdout is one JSON object.

    python benchmarks/shard_storage.py --model runs/demo/model
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

FORMS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"},
    "fp8": {"dtype": "fp8"},
    "bf16+zstd": {"dtype": "bfloat16", "compression": "zstd"},
    "fp8+zstd": {"dtype": "fp8", "compression": "zstd"},
    "bf16+last": {"dtype": "bfloat16", "has_last_hidden": True},
    "fp8+last": {"dtype": "fp8", "has_last_hidden": True},
}
DRAFTER = {
    "drafter.num_hidden_layers": 2,
    "drafter.num_sliding_layers": 1,
    "drafter.sliding_window": 256,
    "drafter.block_size": 8,
    "data.seq_len": 304,
    "data.anchors": 24,
    "data.rows_per_step": 1,
    "data.holdout_fraction": 0,
    "loss.gamma": 2.0,
    "loss.sample_slots": "true",
    "optim.lr": 2e-3,
    "replay.every_steps": 0,
    "log_every_steps": 50,
    "save_every_steps": 100,
}


def main() -> None:
    """Do what is missing, measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/demo/model", help="target")
    parser.add_argument("--prompts", default="data/gsm8k_train.jsonl", help="JSONL with `prompt`")
    parser.add_argument("--num_prompts", type=int, default=220)
    parser.add_argument("--held_out", type=int, default=24, help="rows that are replayed and not trained on")
    parser.add_argument("--timed_rows", type=int, default=40, help="rows that are written and read")
    parser.add_argument("--turns", type=int, default=5, help="times that each form is written and read")
    parser.add_argument("--steps", type=int, default=1500, help="training steps")
    parser.add_argument("--budget", type=int, default=16, help="tree budget of the replay")
    parser.add_argument("--work", default="runs/shard-storage", help="folder for what is made")
    options = parser.parse_args()
    work = Path(options.work)
    extract(options, work / "source")
    split(work, options.held_out)
    train(options, work)
    print(json.dumps(report(options, work)))


def extract(options: argparse.Namespace, out: Path) -> None:
    """Prompts to float32 shards with last hidden states."""
    run(
        "extract/dump.py", "--model", options.model, "--prompts", options.prompts, "--out", out,
        "--limit", options.num_prompts, "--sampling.max_new_tokens", 128, "--max_num_seqs", 110,
        "--storage", "float32", "--last_hidden", "true",
    )  # fmt: skip


def split(work: Path, num_held_out: int) -> None:
    """Rows to train on in bfloat16, and held-out rows in three types."""
    from dflash_kit.shards import open_shards

    source = open_shards(work / "source")
    order = sorted(range(len(source)), key=lambda i: source.ids[i])  # they were finished in any order
    for name, dtype, rows in (
        ("train", "bfloat16", order[num_held_out:]),
        *((f"held-out-{dtype}", dtype, order[:num_held_out]) for dtype in ("float32", "bfloat16", "fp8")),
    ):
        write(work / name, [source[i] for i in rows], replace(source.header, dtype=dtype, has_last_hidden=False))


def train(options: argparse.Namespace, work: Path) -> None:
    """A small drafter, trained on bfloat16 shards."""
    settings = [word for name, value in DRAFTER.items() for word in (f"--{name}", value)]
    run(
        "train/run.py", "--shards", work / "train", "--target", options.model, "--out", work / "drafter",
        "--optim.max_steps", options.steps, "--cpu_threads", 1, *settings,
    )  # fmt: skip


def report(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """All figures."""
    from dflash_kit.provenance import git_commit, package_versions
    from dflash_kit.shards import open_shards

    source = open_shards(work / "source")
    rows = [detached(source[i]) for i in range(options.timed_rows)]
    turns: dict[str, list[dict[str, float]]] = {form: [] for form in FORMS}
    for turn in range(options.turns + 1):
        for form in FORMS:
            figures = measure(work / "form", rows, replace(source.header, has_last_hidden=False), FORMS[form])
            if turn > 0:  # the first turn warms up
                turns[form].append(figures)
    replayed = {dtype: replay(options, work, dtype) for dtype in ("float32", "bfloat16", "fp8")}
    return {
        "benchmark": "shard_storage",
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": os.getloadavg()[0],
        "rows": len(rows),
        "tokens": sum(len(row.input_ids) for row in rows),
        "taps": source.header.num_taps,
        "hidden_size": source.header.hidden_size,
        "forms": {
            form: {name: spread([one[name] for one in found]) for name in found[0]} for form, found in turns.items()
        },
        "drafter_steps": options.steps,
        "replay_of_held_out_rows": replayed,
        "versions": package_versions(),
        "commit": git_commit(),
    }


def measure(folder: Path, rows: list[Any], header: Any, form: dict[str, Any]) -> dict[str, float]:
    """Write and read the rows once."""
    import torch

    from dflash_kit.shards import open_shards

    header = replace(header, **form)
    if not header.has_last_hidden:
        rows = [replace(row, last_hidden=None) for row in rows]
    shutil.rmtree(folder, ignore_errors=True)
    num_tokens, longest = sum(len(row.input_ids) for row in rows), max(len(row.input_ids) for row in rows)
    batch = torch.empty(longest, header.row_width, dtype=torch.bfloat16)
    last = torch.empty(longest, header.hidden_size, dtype=torch.bfloat16)

    def read() -> None:
        for row in open_shards(folder):
            batch[: len(row.hidden_states)] = row.hidden_states
            if row.last_hidden is not None:
                last[: len(row.last_hidden)] = row.last_hidden

    (write_s, write_cpu_s), (read_s, read_cpu_s) = timed(lambda: write(folder, rows, header)), timed(read)
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.arrow"))
    shutil.rmtree(folder)
    return {
        "bytes_per_token": num_bytes / num_tokens,
        "write_mb_per_s": num_bytes / write_s / 1e6,
        "read_mb_per_s": num_bytes / read_s / 1e6,
        "write_cpu_us_per_token": write_cpu_s / num_tokens * 1e6,
        "read_cpu_us_per_token": read_cpu_s / num_tokens * 1e6,
    }


def write(folder: Path, rows: list[Any], header: Any) -> None:
    """Write the rows that the folder does not hold yet."""
    from dflash_kit.shards import ShardWriter

    with ShardWriter(folder, header) as writer:
        for row in rows:
            if row.id not in writer.done_ids:
                writer.add(row if header.has_last_hidden else replace(row, last_hidden=None))


def replay(options: argparse.Namespace, work: Path, dtype: str) -> dict[str, Any]:
    """Acceptance of the drafter on the held-out rows in one type, and how many rows have rounds unlike those in float32."""
    out = work / f"report-{dtype}"
    run(
        "decode/eval.py", "--ckpt", work / "drafter", "--replay", work / f"held-out-{dtype}", "--out", out,
        "--budgets", options.budget, "--cpu_threads", 1,
    )  # fmt: skip
    names = ("budget", "prompts", "rounds", "acceptance_length_pooled", "acceptance_length_per_prompt")
    results = json.loads((out / "report.json").read_text())["results"]
    own, exact = rounds_by_row(out), rounds_by_row(work / "report-float32")
    return {
        result["method"]: {
            **{name: result[name] for name in names},
            "rows_unlike_float32": sum(own[key] != exact[key] for key in own if key[1] == result["method"]),
        }
        for result in results
    }


def rounds_by_row(report: Path) -> dict[tuple[str, str], list[int]]:
    """Accepted tokens of each round, by row and method."""
    lines = [json.loads(line) for line in (report / "results.jsonl").read_text().splitlines()]
    return {
        (line["prompt_id"], response["method"]): response["log"]["num_accepted"]
        for line in lines
        for response in line.get("responses", [])
    }


def detached(row: Any) -> Any:
    """The row in memory of its own, not in that of its file."""
    return replace(row, hidden_states=row.hidden_states.clone(), last_hidden=row.last_hidden.clone())


def run(*words: object) -> None:
    """A command of the kit, its output on stderr."""
    subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, check=True, stdout=sys.stderr)


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds that something takes, and CPU seconds of this process: they hold when others are at work, too."""
    t0, cpu0 = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - t0, time.process_time() - cpu0


def spread(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest of several turns."""
    return {name: round(f(values), 1) for name, f in (("median", statistics.median), ("low", min), ("high", max))}


if __name__ == "__main__":
    main()
