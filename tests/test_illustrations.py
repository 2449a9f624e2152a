"""Examples and the drawn tree of a report: who said which token, and whether the picture is of the round that was."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafting import decode_once, make_engine, record_row, tiny_drafter, train_briefly
from torch import Tensor

from decode.drawn_tree import anchor_of, choose_round, drawn_round, tree_html
from decode.engine import Engine
from decode.examples import ACCEPTED, BONUS, FIRST, build_examples, examples_html, pieces, spans
from decode.illustrate import draw_replayed, illustrations
from decode.plots import depth_rates, plot_lines
from decode.results import PromptResult, Response
from decode.settings import EvalConfig
from dflash_kit.acceptance import RoundLog
from dflash_kit.target import load_target, load_tokenizer
from dflash_kit.tree import Tree, build_tree
from helpers import make_byte_tokenizer


def test_spans_add_up_to_the_response() -> None:
    for log in (
        RoundLog(num_accepted=(2, 0, 3)),
        RoundLog(num_accepted=(2, 0, 3), cut="eos"),
        RoundLog(num_accepted=(1,), cut="length"),
        RoundLog(num_accepted=()),
    ):
        found = list(spans(log))
        assert sum(count for _, count, _ in found) == log.new_tokens
        assert sum(count for kind, count, _ in found if kind == ACCEPTED) == sum(log.num_accepted)
        assert sum(kind == BONUS for kind, _, _ in found) == len(log.num_accepted) - (log.cut is not None)
    assert list(spans(RoundLog(num_accepted=(2, 0), cut=None))) == [
        (FIRST, 1, 0),
        (ACCEPTED, 2, 1),
        (BONUS, 1, 1),
        (BONUS, 1, 2),
    ]


def test_a_character_of_several_tokens_is_shown_once() -> None:
    """The tokenizer has a token a byte, so that two spans share the bytes of one character."""
    tokenizer = make_byte_tokenizer()
    text = "a–ä<b>"
    token_ids = tokenizer(text)["input_ids"]
    assert len(token_ids) == len(text.encode())
    log = RoundLog(num_accepted=(1, 3, len(token_ids) - 8))
    found = pieces(log, token_ids, tokenizer)
    assert "".join(piece["text"] for piece in found) == text
    assert sum(piece["tokens"] for piece in found) == len(token_ids)


def test_the_page_marks_each_span_and_escapes_it() -> None:
    tokenizer = make_byte_tokenizer()
    token_ids = tokenizer("x<b>yz")["input_ids"]
    log = RoundLog(prompt_id="p", num_accepted=(3, 0))
    response = Response(turn=0, method=("chain", 7), log=log, token_ids=tuple(token_ids))
    result = PromptResult(benchmark="b&c", prompt_id="p", responses=(response,), differing_tokens={})
    entry = {"benchmark": "b&c", "method": "chain", "budget": 7, "acceptance_length_pooled": 2.5}
    found = build_examples([result], [entry], tokenizer, lambda *_: ("asked <i>", token_ids))
    page = examples_html(json.loads(json.dumps(found)))
    said = page[page.index('class="said"') :]
    assert re.findall(r'<span class="(\w)"[^>]*>([^<]*)</span>', said) == [
        ("f", "x"),
        ("b", "&lt;b&gt;"),
        ("n", "y"),
        ("n", "z"),
    ]
    assert "asked &lt;i&gt;" in page
    assert "<b>" not in page
    assert "6 tokens in 2 rounds, τ 2.50" in page
    assert examples_html([]) == ""


def test_dollars_in_names_are_no_formulas() -> None:
    """Matplotlib refuses a page that holds half a formula."""
    assert plot_lines({"run $^$ of a_b": [(1, 2.0, None)]}, "name", "x $_$", "y").startswith("<svg")


def test_a_row_that_is_gone_since_its_replay_costs_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spool's trainer deletes what it has used."""
    response = Response(turn=0, method=("chain", 7), log=RoundLog(num_accepted=(3, 0)))
    result = PromptResult(benchmark="b", prompt_id="gone", responses=(response,), differing_tokens={})
    config: Any = EvalConfig(ckpt="c", replay="s", out=str(tmp_path))
    nothing: Any = SimpleNamespace(target=None, spec=None, drafter_config=None)
    monkeypatch.setattr("decode.illustrate.load_tokenizer", lambda *_: None)
    monkeypatch.setattr("decode.illustrate.open_matching_shards", lambda *_: [])
    draw_replayed(config, nothing, nothing, nothing, [], [result])  # type: ignore[arg-type]
    assert illustrations(config, nothing, [result], {"results": []}) == {"examples": [], "tree": None}


def test_depth_rates_are_shares_of_those_that_came_so_far() -> None:
    accepted = [0, 3, 1, 0, 2, 3] * 10
    rates = [sum(a >= k for a in accepted) / 60 for k in range(1, 6)]
    assert depth_rates(rates, 60) == pytest.approx([4 / 6, 3 / 4, 2 / 3, 0.0])  # nobody came to depth 5
    assert depth_rates(rates, 24) == pytest.approx([4 / 6, 3 / 4, 2 / 3])  # 24 · 2/6 = 8 came to depth 4
    assert depth_rates([0.0, 0.0], 3) == [0.0]


class SpyEngine(Engine):
    """Keeps the draft logits of every round."""

    drafts: list[Tensor]

    def _draft(self, anchor: int) -> Tensor:
        logits = super()._draft(anchor)
        self.drafts.append(logits)
        return logits


@pytest.mark.parametrize("method", [("chain", 7), ("ddtree", 12)])
def test_the_drawn_round_is_the_one_that_was_decoded(tiny_target: Path, method: tuple[str, int]) -> None:
    """Nodes, probabilities and path against what the engine itself drafted in that round."""
    model, tokenizer = load_target(tiny_target), load_tokenizer(tiny_target)
    drafter, ends = tiny_drafter(tiny_target, sharpness=1.0)
    prompt = list(b"Say hello, please.")
    engine = SpyEngine(
        *(lambda e: (e.target, e.drafter, e.ends))(make_engine(model, drafter)), eos_token_ids=(), max_context=512
    )
    said = decode_once(make_engine(model, None), prompt, "ar", 0, 24).token_ids
    train_briefly(drafter, ends, [record_row(model, drafter, prompt, said)], steps=25)
    engine.drafts = []
    generation = decode_once(engine, prompt, *method, 24)
    response = Response(turn=0, method=method, log=generation.log, token_ids=tuple(generation.token_ids))
    result = PromptResult(benchmark="b", prompt_id="p", responses=(response,), differing_tokens={})
    chosen = choose_round([result])
    assert chosen is not None
    number = chosen[2]
    accepted = generation.log.num_accepted[number]
    assert accepted == max(generation.log.num_accepted) > 0

    token_ids = [*prompt, *generation.token_ids]
    anchor = len(prompt) + anchor_of(response, number)
    engine.target.reserve(anchor + 1)
    _, taps = engine.target.prefill(torch.tensor(token_ids[:anchor]))
    assert taps is not None
    drawn = drawn_round(drafter, ends, taps[0], token_ids, anchor, method, accepted, tokenizer)

    logits = engine.drafts[number]
    tree = build_tree(logits, 12) if method[0] == "ddtree" else _chain(logits)
    log_q = logits.double().log_softmax(-1)
    assert drawn["num_nodes"] == len(tree)
    assert [(node["parent"], node["depth"]) for node in drawn["nodes"]] == list(
        zip(tree.parents.tolist(), tree.depths.tolist(), strict=True)
    )
    for node, token, depth in zip(drawn["nodes"], tree.tokens.tolist(), tree.depths.tolist(), strict=True):
        assert node["probability"] == pytest.approx(float(log_q[depth - 1, token].exp()), rel=1e-3)
        assert node["text"] == tokenizer.decode([token])
    path = [node for node in drawn["nodes"] if node["accepted"]]
    assert [node["depth"] for node in path] == list(range(1, accepted + 1))
    said_there = token_ids[anchor + 1 : anchor + 1 + accepted]
    assert [node["text"] for node in path] == [tokenizer.decode([token]) for token in said_there]
    product = 1.0
    for node in path:
        product *= node["probability"]
    assert path[-1]["path_probability"] == pytest.approx(product, rel=1e-5)

    page = tree_html(json.loads(json.dumps({"benchmark": "b", "prompt_id": "p", "round": number + 1} | drawn)))
    assert page.count('<g class="yes">') == accepted
    assert page.count("<rect") == len(tree) + 1 + (drawn["bonus"] is not None)


def _chain(logits: Tensor) -> Tree:
    depths = torch.arange(1, len(logits) + 1)
    return Tree(logits.argmax(-1), depths, depths - 1)
