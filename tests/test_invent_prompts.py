"""Invented prompts: cut beginnings, and what is kept of what the target made of them."""

from __future__ import annotations

import random
import sys

import pytest

from dflash_kit.benchmark_prompts import MATH_SUFFIX, load_benchmark
from helpers import REPO

sys.path.insert(0, str(REPO / "data"))

from invent_prompts import KEPT_SHARE, beginnings, choose, cut
from training_prompts import normalise

TEXT = "Tom has 3 red  pens.\nHe buys 4 more, and gives half of them all to his sister Ann. How many are left?"


@pytest.mark.parametrize("seed", range(20))
def test_a_beginning_is_a_prefix_of_whole_words_within_the_share(seed: int) -> None:
    begun = cut(TEXT, random.Random(seed))
    assert TEXT.startswith(begun) and TEXT[len(begun)].isspace()
    share = len(begun.split()) / len(TEXT.split())
    assert KEPT_SHARE[0] - 0.05 <= share <= KEPT_SHARE[1] + 0.05


def test_kinds_take_turns_and_a_second_round_cuts_elsewhere() -> None:
    rows = [{"prompt": TEXT + MATH_SUFFIX, "kind": "gsm8k"}, {"prompt": "word " * 40, "kind": "chat"}]
    rows.append({"prompt": "too short", "kind": "chat"})
    found = list(beginnings(rows, ["gsm8k", "chat", "absent"], 40, seed=0))
    assert [row["kind"] for row in found] == ["gsm8k", "chat"] * 20
    assert len({row["begun"] for row in found if row["kind"] == "gsm8k"}) > 5
    assert not any("boxed" in row["begun"] for row in found)
    assert found == list(beginnings(rows, ["gsm8k", "chat", "absent"], 40, seed=0))


def test_what_is_kept_has_an_end_the_wording_and_is_new() -> None:
    asked = load_benchmark("gsm8k", 1)[0].turns[0]
    question = asked.removesuffix(MATH_SUFFIX)
    known = {normalise(asked), normalise("Is this known?")}
    started = [
        {"kind": "gsm8k", "begun": begun} for begun in ("New one: 2", "New one: 2", question[:20], "One", "Two\n")
    ]
    started += [{"kind": "chat", "begun": begun} for begun in ("Is this", "Write", "Long ")]
    finished = [(" and 2?", True), (" and 2?", True), (question[20:], True), (" without", True), ("lines?", True)]
    finished += [(" known?", True), (" no end", False), ("x" * 2000, True)]
    kept, dropped = choose(started, finished, known)
    assert kept == [{"prompt": "New one: 2 and 2?" + MATH_SUFFIX, "kind": "gsm8k-invented"}]
    assert dropped == {"known already": 3, "without an end": 2, "too long, or of several lines": 2}
