"""Make more training prompts: the target itself finishes questions whose beginnings come from a prompt file.

A drafter learns from the target's answers, so what it is asked need not be right or even answerable: it has to read like
what will be asked. Each prompt of the wanted kinds is cut at a random word, and the target writes on in the user's turn
(vLLM, temperature 0.9). Mathematics ends at its question mark and gets the wording of evaluation back. Nothing that an
evaluation asks is kept, nor anything twice.

    python data/invent_prompts.py --model runs/h200/model --prompts prompts.jsonl --count 30000 --out invented.jsonl
"""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "data")]

from training_prompts import asked_questions, normalise  # noqa: E402

from dflash_kit.benchmark_prompts import MATH_SUFFIX  # noqa: E402
from dflash_kit.errors import KitError, run_cli  # noqa: E402
from dflash_kit.target import TargetSpec, load_tokenizer  # noqa: E402

KEPT_SHARE = (0.15, 0.6)
"""Of a prompt's words, how many stay at least and at most."""
MIN_WORDS = 12
MAX_CHARS = 900


def main(argv: list[str] | None = None) -> int:
    """Write one JSON object a line: prompt and kind.

    Raises:
        KitError: the prompts or the target cannot be read.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the target: a folder or a hub id")
    parser.add_argument("--prompts", required=True, type=Path, help="JSONL of data/training_prompts.py")
    parser.add_argument("--out", required=True, type=Path, help="JSONL file to write")
    parser.add_argument("--count", type=int, default=30000, help="beginnings to finish, over all kinds")
    parser.add_argument("--kinds", default="gsm8k,chat", help="which kinds of prompts to begin with, in turn")
    parser.add_argument("--max_new_tokens", type=int, default=120)
    parser.add_argument("--max_num_seqs", type=int, default=512, help="questions that vLLM works on at once")
    parser.add_argument(
        "--engine_args", type=json.loads, default={}, help="further arguments of vLLM's engine, as JSON"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    rows = read_rows(options.prompts)
    TargetSpec.from_pretrained(options.model)  # before an engine is started
    started = list(beginnings(rows, options.kinds.split(","), options.count, options.seed))
    if not started:
        raise KitError(f"no prompt of the kinds {options.kinds} in {options.prompts} has {MIN_WORDS} words")
    finished = finish(started, options)
    kept, dropped = choose(started, finished, asked_questions() | {normalise(row["prompt"]) for row in rows})
    options.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept), encoding="utf-8")
    print(json.dumps({"prompts": len(kept), **Counter(row["kind"] for row in kept), "dropped": dropped}))
    return 0


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Prompts and their kinds.

    Raises:
        KitError: the file cannot be read, or a line holds something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise KitError(f"{path} cannot be read: {error}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
            rows.append({name: str(row[name]) for name in ("prompt", "kind")})
        except (ValueError, KeyError, TypeError) as error:
            wanted = "one JSON object with prompt and kind a line, as data/training_prompts.py writes"
            raise KitError(f"{path}, line {number}: wanted is {wanted}") from error
    return rows


def beginnings(rows: list[dict[str, Any]], kinds: list[str], count: int, seed: int) -> Iterator[dict[str, str]]:
    """``count`` cut prompts, the kinds in turn, each prompt cut at another word every time round."""
    source = random.Random(f"{seed}-invent")
    pools: dict[str, list[str]] = {}
    for kind in kinds:
        texts = [row["prompt"].removesuffix(MATH_SUFFIX) for row in rows if row["kind"] == kind]
        texts = [text for text in texts if len(text.split()) >= MIN_WORDS]
        if texts:
            source.shuffle(texts)
            pools[kind] = texts
    for number in range(count if pools else 0):
        kind = list(pools)[number % len(pools)]
        texts = pools[kind]
        yield {"kind": kind, "begun": cut(texts[number // len(pools) % len(texts)], source)}


def cut(text: str, source: random.Random) -> str:
    """The first words of a text, white space between them as it is."""
    words = text.split()
    kept = max(3, round(len(words) * source.uniform(*KEPT_SHARE)))
    at = 0
    for word in words[:kept]:
        at = text.index(word, at) + len(word)
    return text[:at]


def finish(started: list[dict[str, str]], options: argparse.Namespace) -> list[tuple[str, bool]]:
    """What the target writes on, and whether it came to an end, for each beginning."""
    from dflash_kit.vllm_environment import prepare_environment

    prepare_environment()
    from vllm import LLM, SamplingParams

    tokenizer = load_tokenizer(options.model)
    llm = LLM(
        options.model,
        max_num_seqs=options.max_num_seqs,
        max_model_len=1024,
        seed=options.seed,
        disable_log_stats=True,
        **options.engine_args,
    )
    prompts, sampling = [], []
    for row in started:
        chat = tokenizer.apply_chat_template([{"role": "user", "content": row["begun"]}], tokenize=False)
        open_turn = chat[: chat.rindex(row["begun"]) + len(row["begun"])]
        prompts.append({"prompt_token_ids": tokenizer(open_turn, add_special_tokens=False).input_ids[-800:]})
        stop = {"stop": ["?"], "include_stop_str_in_output": True} if row["kind"].startswith("gsm8k") else {}
        sampling.append(SamplingParams(temperature=0.9, max_tokens=options.max_new_tokens, **stop))
    outputs = [output.outputs[0] for output in llm.generate(prompts, sampling)]
    return [(output.text, output.finish_reason == "stop") for output in outputs]


def choose(
    started: list[dict[str, str]], finished: list[tuple[str, bool]], known: set[str]
) -> tuple[list[dict[str, str]], dict[str, int]]:
    """The prompts to keep, and how many were dropped for what reason."""
    kept, dropped, seen = [], Counter[str](), set(known)
    for row, (text, ended) in zip(started, finished, strict=True):
        prompt, is_maths = (row["begun"] + text).strip(), row["kind"].startswith("gsm8k")
        key = normalise(prompt + MATH_SUFFIX if is_maths else prompt)
        if not ended or (is_maths and not prompt.endswith("?")):
            dropped["without an end"] += 1
        elif len(prompt) > MAX_CHARS or (is_maths and "\n" in prompt):
            dropped["too long, or of several lines"] += 1
        elif key in seen or normalise(prompt) in seen:
            dropped["known already"] += 1
        else:
            seen.add(key)
            kept.append({"prompt": prompt + (MATH_SUFFIX if is_maths else ""), "kind": f"{row['kind']}-invented"})
    return kept, dict(dropped)


if __name__ == "__main__":
    sys.exit(run_cli(main))
