"""The demo, several times over: wall time by stage, acceptance, and extraction speed, with their spread.

Runs the commands of ``make demo`` with the demo's recipe into fresh folders and reads what they wrote. Prints one JSON
line. Run it on an otherwise idle machine.

    python benchmarks/demo.py --runs 3
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dflash_kit.provenance import git_commit, package_versions  # noqa: E402

RECIPE = "configs/smollm2-demo.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--work", default="runs/benchmark-demo", help="folder for what the runs make")
    args = parser.parse_args()
    model = Path("runs/demo/model")
    subprocess.run([sys.executable, "-m", "dflash_kit.gguf", "--out", model], cwd=ROOT, check=True, stdout=sys.stderr)
    runs = [run(ROOT / args.work / str(i)) for i in range(args.runs)]
    print(json.dumps(summary(runs)))


def run(folder: Path) -> dict[str, Any]:
    """One demo from prompts to report."""
    shutil.rmtree(folder, ignore_errors=True)
    shards, drafter, report = (str(folder / name) for name in ("shards", "drafter", "report"))
    python, accelerate = sys.executable, str(Path(sys.executable).parent / "accelerate")
    launch = [accelerate, "launch", "--config_file", "configs/accelerate/cpu_zero1.yaml"]
    commands = {
        "extract": [python, "extract/dump.py", "--config", RECIPE, "--out", shards],
        "train": [*launch, "train/run.py", "--config", RECIPE, "--shards", shards, "--out", drafter],
        "eval": [python, "decode/eval.py", "--config", RECIPE, "--ckpt", drafter, "--out", report],
    }
    seconds, last_lines = {}, {}
    for stage, command in commands.items():
        t0 = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        seconds[stage] = time.perf_counter() - t0
        last_lines[stage] = done.stdout.strip().splitlines()[-1]
        print(f"{stage}: {seconds[stage]:.0f} s", file=sys.stderr)
    extracted = json.loads(last_lines["extract"])
    results = json.loads((folder / "report" / "report.json").read_text())["results"]
    return {"seconds": seconds, "extract_tokens_per_s": extracted["tokens_per_s"], "results": results}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Median, least and greatest of everything that varies."""
    stages = runs[0]["seconds"]
    table = []
    for entry in runs[0]["results"]:
        key = ("benchmark", "method", "budget")
        same = [r for one in runs for r in one["results"] if all(r[k] == entry[k] for k in key)]
        table.append(
            {k: entry[k] for k in key}
            | {"prompts": entry["prompts"], "rounds": entry["rounds"]}
            | {
                name: spread([r[name] for r in same])
                for name in ("acceptance_length_pooled", "acceptance_length_per_prompt", "tokens_per_s", "speedup")
            }
        )
    return {
        "benchmark": "demo",
        "runs": len(runs),
        "wall_s": {stage: spread([one["seconds"][stage] for one in runs]) for stage in stages},
        "wall_s_total": spread([sum(one["seconds"].values()) for one in runs]),
        "extract_tokens_per_s": spread([one["extract_tokens_per_s"] for one in runs]),
        "results": table,
        "machine": {"processor": processor(), "cores": os.cpu_count(), "platform": platform.platform()},
        "versions": package_versions(),
        "commit": git_commit(),
    }


def spread(values: list[float | None]) -> dict[str, float] | None:
    """Median, min and max; None where there is no value."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"median": round(statistics.median(known), 4), "min": round(min(known), 4), "max": round(max(known), 4)}


def processor() -> str:
    """The processor's name as Linux gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
