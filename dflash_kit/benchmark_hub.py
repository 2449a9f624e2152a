"""Benchmarks that may not lie in this repository: fetched from the hub, or read from files of the same columns.

Wording, data set and number of prompts are those of the published DFlash and DDTree figures: compared with z-lab's present script, and
for what that no longer has with copies of its earlier loader, which DDTree's script imports (``swe-bench`` there is ``swe-bench-lite`` here).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_kit.errors import KitError
from dflash_kit.hub_connection import load_dataset

HUB_PREFIX = "hf:"
PUBLISHED_PROMPTS = 128
MATH_SUFFIX = "\nPlease reason step by step, and put your final answer within \\boxed{}."
SUFFIXES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}

LCB_SYSTEM = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a correct "
    "Python program that matches the specification and passes all tests. You will NOT return anything except for the program"
)
LCB_WITH_CODE = "### Format: Use the following code structure:"
LCB_WITHOUT_CODE = "### Format: Write your code in the following format:"
LCB_FOOTER = "### Answer: (use the provided format with backticks)"
LCB_FILES = tuple(f"test{number}.jsonl" for number in ("", 2, 3, 4, 5, 6))

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class HubBenchmark:
    """Where a benchmark is, and how a row becomes a user turn."""

    repo: str
    """Data set on the hub."""
    config: str | None = None
    split: str = "test"
    files: tuple[str, ...] = ()
    """JSON files of the data set, where the hub's own loader needs code of the data set."""
    columns: tuple[str, ...]
    """Columns that are read; all but those in ``optional`` are needed."""
    optional: tuple[str, ...] = ()
    id_column: str | None = None
    to_turn: Callable[[Row], str]

    @property
    def where(self) -> str:
        """The data set in words."""
        config = f", configuration {self.config}" if self.config else ""
        return f"{self.repo}{config}, split {self.split}"


def _math(row: Row) -> str:
    return str(row["problem"]) + MATH_SUFFIX


def _alpaca(row: Row) -> str:
    given = row.get("input")
    return f"{row['instruction']}\n\nInput:\n{given}" if given else str(row["instruction"])


def _livecodebench(row: Row) -> str:
    code = row.get("starter_code")
    head, block = (LCB_WITH_CODE, code) if code else (LCB_WITHOUT_CODE, "# YOUR CODE HERE")
    question = f"### Question:\n{row['question_content']}"
    return f"{LCB_SYSTEM}\n\n{question}\n\n{head}\n```python\n{block}\n```\n\n{LCB_FOOTER}"


def _swe_bench(row: Row) -> str:
    return f"Problem Statement:\n{row['problem_statement']}\nPlease fix the issue described above."


HUB_BENCHMARKS: dict[str, HubBenchmark] = {
    "math500": HubBenchmark(repo="HuggingFaceH4/MATH-500", columns=("problem",), id_column="unique_id", to_turn=_math),
    "aime24": HubBenchmark(
        repo="HuggingFaceH4/aime_2024", split="train", columns=("problem",), id_column="id", to_turn=_math
    ),
    "mbpp": HubBenchmark(
        repo="google-research-datasets/mbpp",
        config="sanitized",
        columns=("prompt",),
        id_column="task_id",
        to_turn=lambda row: str(row["prompt"]),
    ),
    "alpaca": HubBenchmark(
        repo="tatsu-lab/alpaca",
        split="train",
        columns=("instruction", "input"),
        optional=("input",),
        to_turn=_alpaca,
    ),
    "livecodebench": HubBenchmark(
        repo="livecodebench/code_generation_lite",
        files=LCB_FILES,
        columns=("question_content", "starter_code"),
        optional=("starter_code",),
        id_column="question_id",
        to_turn=_livecodebench,
    ),
    "swe-bench-lite": HubBenchmark(
        repo="princeton-nlp/SWE-bench_Lite",
        columns=("problem_statement",),
        id_column="instance_id",
        to_turn=_swe_bench,
    ),
}


def load_rows(name: str, benchmark: HubBenchmark, place: str | None) -> list[tuple[str, str]]:
    """Id and user turn of every row, in the data set's order.

    Args:
        name: of the benchmark, for messages.
        benchmark: what it is.
        place: a JSONL, JSON or Parquet file, a folder that ``datasets`` loads, or ``hf:org/name[:config[:split]]``; None
            takes the published data set.

    Raises:
        KitError: it cannot be had, lacks a column, or holds a row without text.
    """
    table = _open(name, benchmark, place)
    source = benchmark.where if place is None else place
    missing = [c for c in benchmark.columns if c not in table.column_names and c not in benchmark.optional]
    if missing:
        raise KitError(
            f"data of benchmark {name} in {source} lack column {missing[0]!r} (there are {', '.join(table.column_names)}); "
            f"give the data of {benchmark.where}"
        )
    wanted = [c for c in (*benchmark.columns, benchmark.id_column) if c in table.column_names]
    found = []
    for number, row in enumerate(table.select_columns(wanted), start=1):
        text = [row[column] for column in benchmark.columns if column not in benchmark.optional]
        if not all(isinstance(value, str) and value.strip() for value in text):
            raise KitError(
                f"data of benchmark {name} in {source}: row {number} has no text in {benchmark.columns[0]!r}"
            )
        row_id = row.get(benchmark.id_column) if benchmark.id_column else None
        found.append((f"{name}-{number}" if row_id is None else str(row_id), benchmark.to_turn(row)))
    return found


def open_hub(text: str) -> Any:
    """A data set named ``hf:org/name[:config[:split]]``.

    Raises:
        KitError: malformed, or it cannot be fetched.
    """
    repo, config, split = (*text.removeprefix(HUB_PREFIX).split(":", 2), "", "")[:3]
    if not repo:
        raise KitError(f"benchmark {text!r} names no data set; write hf:org/name, hf:org/name:config or :config:split")
    print(f"fetching     {text}, or from the hub's cache here", file=sys.stderr, flush=True)
    try:
        return load_dataset(repo, config or None, split=split or "test")
    except Exception as error:  # the library, the hub's client and the network raise errors of many kinds
        raise KitError(
            f"benchmark {text} cannot be fetched: {_first_line(error)}; check name, configuration and split "
            "(hf:org/name:config:split, split test unless named) and the connection, or name a local .jsonl file"
        ) from error


def _open(name: str, benchmark: HubBenchmark, place: str | None) -> Any:
    if place is not None and place.startswith(HUB_PREFIX):
        return open_hub(place)
    if place is not None:
        return _open_local(name, benchmark, Path(place))
    print(f"fetching     {name} from the hub ({benchmark.where}), or from its cache here", file=sys.stderr, flush=True)
    try:
        if benchmark.files:
            files = [f"hf://datasets/{benchmark.repo}/{file}" for file in benchmark.files]
            return load_dataset("json", data_files=files, split="train")
        return load_dataset(benchmark.repo, benchmark.config, split=benchmark.split)
    except Exception as error:  # as above
        raise KitError(
            f"benchmark {name} is not bundled and cannot be fetched from the hub: {_first_line(error)}; give its data as "
            f"{name}=FILE (JSONL or Parquet with column {benchmark.columns[0]}), {name}=FOLDER or {name}=hf:ORG/NAME:CONFIG:SPLIT "
            f"(published: {benchmark.where})"
        ) from error


def _open_local(name: str, benchmark: HubBenchmark, path: Path) -> Any:
    if not path.exists() or (path.is_file() and path.suffix not in SUFFIXES):
        raise KitError(
            f"data of benchmark {name} are {str(path)!r}; a JSONL, JSON or Parquet file, a folder of them, or hf:ORG/NAME is needed"
        )
    try:
        if path.is_file():
            return load_dataset(SUFFIXES[path.suffix], data_files=str(path), split="train")
        files = [str(path / file) for file in benchmark.files if (path / file).is_file()]
        if files:
            return load_dataset("json", data_files=files, split="train")
        splits = load_dataset(str(path))
        return splits[benchmark.split] if benchmark.split in splits else splits[next(iter(splits))]
    except Exception as error:  # as above
        raise KitError(f"data of benchmark {name} in {path} cannot be read: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    if isinstance(error, StopIteration):
        return "there is no row in it"
    if error.__cause__ is not None and "occurred while generating" in str(error):  # the reason is one further down
        return _first_line(error.__cause__)
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
