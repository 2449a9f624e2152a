"""Prompts that drafters are evaluated on, in the wording that published DFlash figures use.

The files lie in `data/` (its README names sources and licences). Evaluation prompts never enter training.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dflash_kit.benchmark_hub import HUB_BENCHMARKS, HUB_PREFIX, MATH_SUFFIX, PUBLISHED_PROMPTS, load_rows, open_hub
from dflash_kit.errors import KitError

SHUFFLE_SEED = 0
"""A limited benchmark is the first rows after this shuffle of Python's ``random``.

z-lab's present benchmark script selects so; those that made the figures of the papers let ``datasets`` shuffle with the same
seed, which gives other rows.
"""

CODE_PREFIX = "Write a solution to the following problem and make sure that it passes the tests:\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkPrompt:
    """One conversation to decode."""

    id: str
    """Unique within its benchmark."""
    turns: tuple[str, ...]
    """User turns; the target's own reply goes between two of them."""


def load_benchmark(name: str, limit: int | None = None) -> list[BenchmarkPrompt]:
    """Load a benchmark by name, or any JSONL file by path (rows with `prompt`, `turns` or user `messages`).

    Args:
        name: a name in `BENCHMARKS` or `HUB_BENCHMARKS`; `NAME=PLACE` for one of the latter with its data elsewhere; a path
            that ends in .jsonl; or `hf:org/name[:config[:split]]` with rows as in a JSONL file.
        limit: most prompts to return; a smaller number than there are selects after a shuffle with seed 0. None: all that
            are bundled or in a file, the published number of one that comes from the hub.

    Raises:
        KitError: unknown name, a limit below 1, an unusable file (with its line number), or no way to the hub.
    """
    if limit is not None and limit < 1:
        raise KitError(f"limit of benchmark {name} is {limit}; give at least 1, or none for all prompts")
    known, equals, place = name.partition("=")
    if known in HUB_BENCHMARKS:
        if equals and not place:
            raise KitError(f"benchmark {name!r} names no data; write {known}=FILE, or {known} alone for the hub's")
        prompts = list(_published_prompts(known, place if equals else None))
        return _selected(prompts, PUBLISHED_PROMPTS if limit is None else limit)
    if equals and known in BENCHMARKS:
        raise KitError(f"benchmark {known} is bundled; leave out '={place}', or name the file alone")
    if name.startswith(HUB_PREFIX):
        rows = open_hub(name)
        return _selected(
            _read_rows(((f"row {i}", row) for i, row in enumerate(rows, start=1)), name, _turns_of_any_row), limit
        )
    if name in BENCHMARKS:
        file, to_turns = BENCHMARKS[name]
        path = data_folder() / file
    elif name.endswith(".jsonl"):
        path, to_turns = Path(name), _turns_of_any_row
    else:
        known_names = ", ".join([*BENCHMARKS, *HUB_BENCHMARKS])
        raise KitError(
            f"unknown benchmark '{name}'; known: {known_names}, or the path of a .jsonl file, or hf:org/name"
        )
    return _selected(_read_prompts(path, to_turns), limit)


def benchmark_label(name: str) -> str:
    """What reports call a benchmark: its name without the place of its data."""
    known, equals, _ = name.partition("=")
    return known if equals and known in HUB_BENCHMARKS else name


def _selected(prompts: list[BenchmarkPrompt], limit: int | None) -> list[BenchmarkPrompt]:
    if limit is None or limit >= len(prompts):
        return prompts
    random.Random(SHUFFLE_SEED).shuffle(prompts)
    return prompts[:limit]


@lru_cache(maxsize=8)
def _published_prompts(name: str, place: str | None) -> tuple[BenchmarkPrompt, ...]:
    """All prompts of a benchmark of the hub; read once, as decoding, the report and a watch ask for them again."""
    prompts: list[BenchmarkPrompt] = []
    seen: set[str] = set()
    for row_id, turn in load_rows(name, HUB_BENCHMARKS[name], place):
        unique = row_id if row_id not in seen else f"{row_id}-{len(seen)}"
        seen.add(unique)
        prompt = BenchmarkPrompt(id=unique, turns=(turn,))
        try:
            _require_unicode(prompt)
        except ValueError as err:
            raise KitError(f"data of benchmark {name}: row {unique}: {err}") from err
        prompts.append(prompt)
    if not prompts:
        raise KitError(f"benchmark {name} holds no prompts")
    return tuple(prompts)


def data_folder() -> Path:
    """Folder of the bundled prompt sets: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "data", package.parent / "data"):
        if (folder / "gsm8k_test.jsonl").is_file():
            return folder
    raise KitError(f"the bundled prompt sets are missing beside {package}; install dflash-kit again")


def _read_prompts(path: Path, to_turns: Callable[[dict[str, Any]], list[str]]) -> list[BenchmarkPrompt]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as err:
        raise KitError(f"cannot read benchmark {path}: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise KitError(f"benchmark {path} is not UTF-8 text") from err
    whole = ((f"line {number}", line) for number, line in enumerate(lines, start=1) if line.strip())
    return _read_rows(whole, str(path), to_turns)


def _read_rows(
    rows: Iterable[tuple[str, str | dict[str, Any]]], source: str, to_turns: Callable[[dict[str, Any]], list[str]]
) -> list[BenchmarkPrompt]:
    """Prompts of rows, each given with its place and as an object or as a line of JSON."""
    prompts: list[BenchmarkPrompt] = []
    place_of_id: dict[str, str] = {}
    for place, value in rows:
        try:
            row = json.loads(value) if isinstance(value, str) else _without_nulls(value)
            row_id = place.replace(" ", "-") if row.get("id") is None else row["id"]
            prompt = BenchmarkPrompt(id=str(row_id), turns=tuple(to_turns(row)))
            _require_unicode(prompt)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as err:
            raise KitError(f"{source} {place}: {err}; a row is a JSON object with prompt, turns or messages") from err
        if prompt.id in place_of_id:
            raise KitError(f"{source} {place}: id '{prompt.id}' was used in {place_of_id[prompt.id]}")
        place_of_id[prompt.id] = place
        prompts.append(prompt)
    if not prompts:
        raise KitError(f"benchmark {source} holds no prompts")
    return prompts


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """A data set has every column in every row."""
    return {name: value for name, value in row.items() if value is not None}


def _require_unicode(prompt: BenchmarkPrompt) -> None:
    """JSON can spell half of a surrogate pair (``"\\ud800"``), which no tokenizer takes and no file can hold."""
    for text in (prompt.id, *prompt.turns):
        half = next((char for char in text if "\ud800" <= char <= "\udfff"), None)
        if half is not None:
            raise ValueError(f"the text holds {half!r}, half of a surrogate pair, which is no character")


def _turns_of_any_row(row: dict[str, Any]) -> list[str]:
    """User turns of a row in one of the three usual shapes."""
    if "messages" in row:
        others = sorted({str(message["role"]) for message in row["messages"]} - {"user"})
        if others:
            raise ValueError(
                f"messages hold turns of {', '.join(others)}; a benchmark's are user turns only, the target writes the replies"
            )
        turns = [message["content"] for message in row["messages"]]
    else:
        turns = row["turns"] if "turns" in row else [row["prompt"]]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError("every turn must be text that is not empty")
    return turns


def _math_turns(row: dict[str, Any]) -> list[str]:
    return [row["prompt"] + MATH_SUFFIX]


def _code_turns(row: dict[str, Any]) -> list[str]:
    return [f"{CODE_PREFIX}```python\n{row['prompt']}\n```"]


def _chat_turns(row: dict[str, Any]) -> list[str]:
    return list(row["turns"])


BENCHMARKS: dict[str, tuple[str, Callable[[dict[str, Any]], list[str]]]] = {
    "gsm8k": ("gsm8k_test.jsonl", _math_turns),
    "humaneval": ("humaneval.jsonl", _code_turns),
    "mt-bench": ("mt_bench.jsonl", _chat_turns),
    "aime25": ("aime25.jsonl", _math_turns),
}
"""Name -> file in `data/` and the wording of one row."""
