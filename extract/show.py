"""Samples on the screen: which tokens an engine would be fed, and which of them a drafter would learn."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from .prompts import Sample
from .spans import Span

SUPERVISED, PLAIN = "bold green", "dim"
# Around supervised parts where there are no colours; signs that prompts hardly ever hold.
BRACKETS = ("⟦", "⟧")


def show_samples(samples: Sequence[Sample], tokenizer: Any, console: Console | None = None) -> None:
    """Print samples: text and token ids, supervised parts in colour, or in brackets where there is no colour.

    Args:
        samples: what to show.
        tokenizer: the target's; decodes the tokens that are fed, so what stands there is what the target sees.
        console: where to print; None: stdout.
    """
    console = console or Console(file=sys.stdout, highlight=False)
    brackets = ("", "") if console.is_terminal and not console.no_color else BRACKETS
    for number, sample in enumerate(samples, start=1):
        ranges = list(parts(len(sample.token_ids), sample.loss_spans or []))
        texts = [_decoded(tokenizer, sample.token_ids[start:end]) for start, end, _ in ranges]
        numbers = [" ".join(map(str, sample.token_ids[start:end])) for start, end, _ in ranges]
        supervised = [is_supervised for _, _, is_supervised in ranges]
        heading = f"sample {number} of {len(samples)}  {sample.source}  id {sample.id}"
        for line in (
            Text(heading, style="bold"),
            Text().join(_marked(texts, supervised, brackets)),
            Text(_counts(sample)),
            Text("token ids ") + Text(" ").join(_marked(numbers, supervised, brackets)),
            Text(),
        ):
            console.print(line, soft_wrap=True)


def parts(num_tokens: int, spans: Sequence[Span]) -> Iterator[tuple[int, int, bool]]:
    """All tokens as ranges [start, end), and whether they are supervised."""
    position = 0
    for start, end in spans:
        if start > position:
            yield position, start, False
        yield start, end, True
        position = end
    if position < num_tokens:
        yield position, num_tokens, False


def _marked(texts: list[str], supervised: list[bool], brackets: tuple[str, str]) -> list[Text]:
    opening, closing = brackets
    return [
        Text(f"{opening}{text}{closing}", style=SUPERVISED) if is_supervised else Text(text, style=PLAIN)
        for text, is_supervised in zip(texts, supervised, strict=True)
    ]


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    text = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    return text.replace("\x1b", "␛")  # a prompt must not steer the terminal


def _counts(sample: Sample) -> str:
    num_tokens = len(sample.token_ids)
    if sample.loss_spans is None:
        return f"prompt of {num_tokens} tokens; the target answers with up to {sample.max_new_tokens}, all supervised"
    num_supervised = sum(end - start for start, end in sample.loss_spans)
    return f"{num_tokens} tokens, {num_supervised} supervised in {len(sample.loss_spans)} range(s)"
