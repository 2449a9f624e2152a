"""What a report shows beside its numbers: examples, and one drawn round."""

from collections.abc import Sequence
from typing import Any

import torch

from dflash_kit.benchmark_prompts import benchmark_label, load_benchmark
from dflash_kit.drafter import Drafter
from dflash_kit.replay import response_spans
from dflash_kit.shards import Row, Shards
from dflash_kit.target import load_tokenizer
from dflash_kit.target_ends import TargetEnds

from .drawn_tree import anchor_of, choose_round, drawn_round, read_drawn, write_drawn
from .engine import Engine
from .examples import build_examples, decode_tokens
from .inputs import Inputs
from .live import open_conversation
from .replay import open_matching_shards
from .results import PromptResult, Response
from .settings import EvalConfig


def illustrations(
    config: EvalConfig, inputs: Inputs, results: Sequence[PromptResult], report: dict[str, Any]
) -> dict[str, Any]:
    """``examples`` and ``tree`` of a report whose numbers are there."""
    tokenizer = load_tokenizer(inputs.target, config.target_revision)
    rows: dict[str, Row] = {}
    texts: dict[tuple[str, str], str] = {}
    if config.replay is not None:
        shards = open_matching_shards(config, inputs.spec, inputs.drafter_config)
        wanted = {result.prompt_id for result in results[:1]}
        rows = {row.id: row for row in _first_rows(shards, wanted)}
        results = [
            result for result in results if result.prompt_id in rows
        ]  # a spool's trainer deletes what it has used
    else:
        for name in config.benchmark_names:
            label = benchmark_label(name)
            texts |= {(label, prompt.id): prompt.turns[0] for prompt in load_benchmark(name, config.limit)}

    def find(result: PromptResult, response: Response) -> tuple[str, list[int]]:
        if config.replay is None:
            return texts.get((result.benchmark, result.prompt_id), ""), list(response.token_ids)
        tokens, first = _said(rows[result.prompt_id], response)
        return decode_tokens(tokenizer, tokens[:first]), tokens[first : first + response.log.new_tokens]

    examples = build_examples(results, report["results"], tokenizer, find)
    return {"examples": examples, "tree": read_drawn(config.out_folder)}


def draw_live(
    config: EvalConfig, engine: Any, tokenizer: Any, results: Sequence[PromptResult], prompts: dict[str, Any]
) -> None:
    """Draw a round of a live run; the portable engine alone can draft it again.

    Args:
        config: what was decoded.
        engine: that decoded it; what it holds of a prompt is lost.
        tokenizer: the target's.
        results: finished prompts.
        prompts: by benchmark.
    """
    engine = getattr(engine, "single", engine)  # batches prefill by an engine for one prompt
    chosen = choose_round(results)
    if chosen is None or not isinstance(engine, Engine) or engine.drafter is None or engine.ends is None:
        return
    result, response, number = chosen
    prompt = next((p for p in prompts.get(result.benchmark, ()) if p.id == result.prompt_id), None)
    if prompt is None:
        return
    asked = open_conversation(tokenizer, config, result.benchmark, prompt).ask(0)
    token_ids = [*asked, *response.token_ids]
    anchor = len(asked) + anchor_of(response, number)
    engine.target.reserve(anchor + 1)
    _, taps = engine.target.prefill(torch.tensor(token_ids[:anchor], device=engine.target.device))
    assert taps is not None
    accepted = response.log.num_accepted[number]
    drawn = drawn_round(engine.drafter, engine.ends, taps[0], token_ids, anchor, response.method, accepted, tokenizer)
    write_drawn(config.out_folder, drawn, result, number)


def draw_replayed(
    config: EvalConfig,
    inputs: Inputs,
    drafter: Drafter,
    ends: TargetEnds,
    shards: Shards,
    results: Sequence[PromptResult],
) -> None:
    """Draw a round of a replay."""
    chosen = choose_round(results)
    if chosen is None:
        return
    result, response, number = chosen
    row = next(iter(_first_rows(shards, {result.prompt_id})), None)
    if row is None:  # gone since it was replayed
        return
    tokens, first = _said(row, response)
    anchor, accepted = first + anchor_of(response, number), response.log.num_accepted[number]
    tokenizer = load_tokenizer(inputs.target, config.target_revision)
    drawn = drawn_round(drafter, ends, row.hidden_states, tokens, anchor, response.method, accepted, tokenizer)
    write_drawn(config.out_folder, drawn, result, number)


def _first_rows(shards: Shards, wanted: set[str]) -> list[Row]:
    """Rows of these ids, read no further than the last of them."""
    found: list[Row] = []
    for row in shards:
        if len(found) == len(wanted):
            break
        if row.id in wanted:
            found.append(row)
    return found


def _said(row: Row, response: Response) -> tuple[list[int], int]:
    """All tokens of a row, and where the response begins in them."""
    spans = list(response_spans(row.token_mask()))
    return row.token_ids().tolist(), spans[response.turn][0]
