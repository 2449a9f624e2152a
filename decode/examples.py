"""Examples of a report: what was said, and which of it came from accepted drafts."""

from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any

from dflash_kit.acceptance import AR, CHAIN, RoundLog

from .live import method_label
from .results import Method, PromptResult, Response

MAX_TOKENS = 200
MAX_PROMPT_CHARACTERS = 700
FIRST, ACCEPTED, BONUS = "first", "accepted", "bonus"

FindText = Callable[[PromptResult, Response], tuple[str, list[int]]]
"""Text of the prompt and tokens of a response."""


def build_examples(
    results: Sequence[PromptResult], entries: Sequence[dict[str, Any]], tokenizer: Any, find: FindText
) -> list[dict[str, Any]]:
    """The first prompt of each benchmark as the chain said it, and as the method with the longest rounds did.

    Args:
        results: finished prompts.
        entries: of the report, which tell the method with the longest rounds.
        tokenizer: the target's.
        find: prompt and tokens of a response.
    """
    found = []
    for benchmark in dict.fromkeys(result.benchmark for result in results):
        first = next(result for result in results if result.benchmark == benchmark)
        for method in _methods_to_show([e for e in entries if e["benchmark"] == benchmark]):
            response = next((r for r in first.responses if r.turn == 0 and r.method == method), None)
            if response is None:
                continue
            prompt, token_ids = find(first, response)
            found.append(
                {
                    "benchmark": benchmark,
                    "prompt_id": first.prompt_id,
                    "prompt": prompt[:MAX_PROMPT_CHARACTERS] + ("…" if len(prompt) > MAX_PROMPT_CHARACTERS else ""),
                    "method": method[0],
                    "budget": method[1],
                    "tokens": len(token_ids),
                    "rounds": len(response.log.num_accepted),
                    "pieces": pieces(response.log, token_ids, tokenizer),
                }
            )
    return found


def spans(log: RoundLog) -> Iterator[tuple[str, int, int]]:
    """Where each token of a response comes from: kind, number of tokens, and round (from 1; 0 for the first token).

    The first token is the prefill's own; a round that was cut has no bonus token.
    """
    yield FIRST, 1, 0
    for number, accepted in enumerate(log.num_accepted, start=1):
        if accepted:
            yield ACCEPTED, accepted, number
        if number < len(log.num_accepted) or log.cut is None:
            yield BONUS, 1, number


def pieces(log: RoundLog, token_ids: Sequence[int], tokenizer: Any) -> list[dict[str, Any]]:
    """The text of each span, up to ``MAX_TOKENS`` tokens; a character that two spans share goes to the later one."""
    found: list[dict[str, Any]] = []
    done, text = 0, ""
    for kind, count, number in spans(log):
        if done >= min(len(token_ids), MAX_TOKENS):
            break
        done += count
        whole = decode_tokens(tokenizer, token_ids[:done]).rstrip("\ufffd")
        found.append({"text": whole[len(text) :], "kind": kind, "round": number, "tokens": count})
        text = whole
    return found


def decode_tokens(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Text of tokens, special ones included, spacing untouched."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def examples_html(examples: Sequence[dict[str, Any]]) -> str:
    """All examples with their key; empty text without any."""
    if not examples:
        return ""
    key = (
        '<p class="note key"><span class="a">accepted draft tokens</span><span class="b">those of the next round</span>'
        '<span class="n">bonus token</span><span class="f">first token, from the prefill</span>'
        "Point at a span to see its round.</p>"
    )
    parts, last = [key], None
    for example in examples:
        where = (example["benchmark"], example["prompt_id"])
        if where != last:
            parts.append(f"<h3>{escape(example['benchmark'])}: {escape(example['prompt_id'][:40])}</h3>")
            parts.append(f'<div class="asked">{escape(example["prompt"])}</div>')
        last = where
        label = method_label((example["method"], example["budget"]))
        rounds = example["rounds"]
        tau = f", τ {(example['tokens'] - 1) / rounds:.2f}" if rounds else ""
        shown = sum(piece["tokens"] for piece in example["pieces"])
        rest = f"; the first {shown} are shown" if shown < example["tokens"] else ""
        parts.append(f'<p class="note">{escape(label)}: {example["tokens"]} tokens in {rounds} rounds{tau}{rest}</p>')
        parts.append(f'<div class="said">{"".join(_span(piece) for piece in example["pieces"])}</div>')
    return "\n".join(parts)


def _span(piece: dict[str, Any]) -> str:
    mark = {FIRST: "f", BONUS: "n", ACCEPTED: "ab"[piece["round"] % 2]}[piece["kind"]]
    words = {FIRST: "first token", BONUS: "bonus token", ACCEPTED: f"{piece['tokens']} accepted"}[piece["kind"]]
    title = words if piece["kind"] == FIRST else f"round {piece['round']}: {words}"
    return f'<span class="{mark}" title="{title}">{escape(piece["text"])}</span>'


def _methods_to_show(entries: Sequence[dict[str, Any]]) -> list[Method]:
    drafted = [e for e in entries if e["method"] != AR and e["acceptance_length_pooled"] is not None]
    chain = [(e["method"], e["budget"]) for e in drafted if e["method"] == CHAIN]
    trees = [e for e in drafted if e["method"] != CHAIN]
    best = max(trees, key=lambda e: e["acceptance_length_pooled"], default=None)
    return chain + ([(best["method"], best["budget"])] if best is not None else [])
