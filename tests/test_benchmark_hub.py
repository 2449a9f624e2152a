"""Benchmarks of the hub, from stand-in files with the hub's columns: wording, selection, and what cannot be had."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

import dflash_kit.benchmark_hub
from dflash_kit.benchmark_hub import HUB_BENCHMARKS
from dflash_kit.benchmark_prompts import _published_prompts, benchmark_label, load_benchmark
from dflash_kit.errors import KitError

SUFFIX = "\nPlease reason step by step, and put your final answer within \\boxed{}."
STAND_INS: dict[str, tuple[dict[str, Any], str, str]] = {
    "math500": (
        {
            "problem": "What is $1+1$?",
            "solution": "2",
            "answer": "2",
            "subject": "Algebra",
            "level": 1,
            "unique_id": "a/1.json",
        },
        "What is $1+1$?" + SUFFIX,
        "a/1.json",
    ),
    "aime24": (
        {"id": 60, "problem": "Find x.", "solution": "…", "answer": "204", "url": "u", "year": "2024"},
        "Find x." + SUFFIX,
        "60",
    ),
    "mbpp": (
        {
            "source_file": "f",
            "task_id": 2,
            "prompt": "Write a function.",
            "code": "def f(): 0",
            "test_list": ["assert 1"],
        },
        "Write a function.",
        "2",
    ),
    "alpaca": (
        {"instruction": "Sort these.", "input": "3, 1", "output": "1, 3", "text": "Below …"},
        "Sort these.\n\nInput:\n3, 1",
        "alpaca-1",
    ),
    "livecodebench": (
        {
            "question_title": "t",
            "question_content": "Add.",
            "question_id": "abc_a",
            "starter_code": "class S:\n    pass",
        },
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate a correct "
        "Python program that matches the specification and passes all tests. You will NOT return anything except for the "
        "program\n\n### Question:\nAdd.\n\n### Format: Use the following code structure:\n```python\nclass S:\n    pass\n```\n\n"
        "### Answer: (use the provided format with backticks)",
        "abc_a",
    ),
    "swe-bench-lite": (
        {"repo": "r", "instance_id": "r-1", "problem_statement": "It fails.", "patch": "…"},
        "Problem Statement:\nIt fails.\nPlease fix the issue described above.",
        "r-1",
    ),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    _published_prompts.cache_clear()


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("name", list(HUB_BENCHMARKS))
def test_wording_of_a_row_in_the_hubs_columns(name: str, tmp_path: Path) -> None:
    row, turn, row_id = STAND_INS[name]
    (prompt,) = load_benchmark(f"{name}={write(tmp_path / 'rows.jsonl', [row])}")
    assert (prompt.id, prompt.turns) == (row_id, (turn,))
    assert benchmark_label(f"{name}={tmp_path}") == name


def test_rows_without_the_optional_columns(tmp_path: Path) -> None:
    rows = write(
        tmp_path / "a.jsonl", [{"instruction": "Say hello.", "input": ""}, {"instruction": "Count.", "input": "3"}]
    )
    assert [p.turns[0] for p in load_benchmark(f"alpaca={rows}")] == ["Say hello.", "Count.\n\nInput:\n3"]
    rows = write(tmp_path / "l.jsonl", [{"question_content": "Add.", "question_id": "1", "starter_code": ""}])
    (prompt,) = load_benchmark(f"livecodebench={rows}")
    assert "Write your code in the following format:\n```python\n# YOUR CODE HERE\n```" in prompt.turns[0]


def test_a_folder_as_the_hub_has_it(tmp_path: Path) -> None:
    """Splits by name; the published one is taken."""
    write(tmp_path / "train.jsonl", [{"problem": "wrong split"}])
    write(tmp_path / "test.jsonl", [{"problem": "one"}, {"problem": "two"}])
    assert [p.turns[0] for p in load_benchmark(f"math500={tmp_path}")] == ["one" + SUFFIX, "two" + SUFFIX]
    parts = tmp_path / "lcb"
    write(parts / "test.jsonl", [{"question_content": "first", "question_id": "1"}])
    write(parts / "test2.jsonl", [{"question_content": "second", "question_id": "2"}])
    assert [p.id for p in load_benchmark(f"livecodebench={parts}")] == ["1", "2"]


def test_the_published_number_is_taken_after_a_shuffle(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [{"problem": f"p{i}", "unique_id": str(i)} for i in range(500)])
    order = list(range(500))
    random.Random(0).shuffle(order)
    assert [p.id for p in load_benchmark(f"math500={file}")] == [str(i) for i in order[:128]]
    assert [p.id for p in load_benchmark(f"math500={file}", 3)] == [str(i) for i in order[:3]]
    assert [p.id for p in load_benchmark(f"math500={file}", 900)] == [str(i) for i in range(500)]


def test_what_is_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    asked: list[tuple[Any, ...]] = []
    rows = {name: row for name, (row, _, _) in STAND_INS.items()}

    def load(*arguments: Any, **options: Any) -> Any:
        asked.append((*arguments, options))
        name = next(n for n, b in HUB_BENCHMARKS.items() if b.repo in str(asked[-1]))
        return datasets.Dataset.from_list([rows[name]])

    monkeypatch.setattr(dflash_kit.benchmark_hub, "load_dataset", load)
    for name in HUB_BENCHMARKS:
        assert load_benchmark(name)[0].turns == (STAND_INS[name][1],)
    assert asked[0] == ("HuggingFaceH4/MATH-500", None, {"split": "test"})
    assert asked[2] == ("google-research-datasets/mbpp", "sanitized", {"split": "test"})
    assert asked[4][1]["data_files"][-1] == "hf://datasets/livecodebench/code_generation_lite/test6.jsonl"
    monkeypatch.setattr(
        dflash_kit.benchmark_hub,
        "load_dataset",
        lambda *a, **k: datasets.Dataset.from_list(
            [{"prompt": f"{a} {k}", "turns": None}, {"prompt": None, "turns": ["b", "c"]}]
        ),
    )
    first, second = load_benchmark("hf:org/name:config:part")
    assert first.turns == ("('org/name', 'config') {'split': 'part'}",)
    assert (second.id, second.turns) == ("row-2", ("b", "c"))


@pytest.mark.parametrize("name", list(HUB_BENCHMARKS))
def test_offline_says_what_would_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> Any:
        raise ConnectionError("Couldn't reach the hub\nlong explanation")

    monkeypatch.setattr(dflash_kit.benchmark_hub, "load_dataset", unreachable)
    with pytest.raises(KitError) as refused:
        load_benchmark(name)
    message = str(refused.value)
    assert "Couldn't reach the hub; give its data as" in message
    assert f"{name}=FILE (JSONL or Parquet with column {HUB_BENCHMARKS[name].columns[0]})" in message
    assert HUB_BENCHMARKS[name].repo in message
    assert "long explanation" not in message
    with pytest.raises(KitError, match="hf:org/name cannot be fetched: Couldn't reach the hub"):
        load_benchmark("hf:org/name")


@pytest.mark.parametrize(
    ("place", "rows", "words"),
    [
        ("rows.jsonl", [{"question": "x"}], "lack column 'problem' .there are question."),
        ("rows.jsonl", [{"problem": "fine"}, {"problem": " "}], "row 2 has no text in 'problem'"),
        ("rows.txt", [{"problem": "x"}], "Parquet file, a folder of them"),
        ("absent.jsonl", None, "Parquet file, a folder of them"),
        ("rows.jsonl", "not json\n", "cannot be read: JSON parse error"),
        ("rows.jsonl", "", "cannot be read: there is no row in it"),
    ],
)
def test_data_that_do_not_fit(tmp_path: Path, place: str, rows: Any, words: str) -> None:
    if isinstance(rows, str):
        (tmp_path / place).write_text(rows)
    elif rows is not None:
        write(tmp_path / place, rows)
    with pytest.raises(KitError, match=words):
        load_benchmark(f"math500={tmp_path / place}")


def test_names_that_are_none() -> None:
    with pytest.raises(KitError, match="known: .*aime25, math500, aime24, mbpp, alpaca, livecodebench"):
        load_benchmark("maths500")
    with pytest.raises(KitError, match="'math500=' names no data"):
        load_benchmark("math500=")
    with pytest.raises(KitError, match="gsm8k is bundled"):
        load_benchmark("gsm8k=rows.jsonl")
    with pytest.raises(KitError, match="names no data set"):
        load_benchmark("hf:")
