"""The rounds of one recorded row: where each method stands, and what it has accepted so far."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from .acceptance import RoundLog
from .replay_draft import RowContext
from .replay_reach import Method, Reach
from .shards import Row


@dataclass(slots=True)
class _Steps:
    """One response by one method."""

    at: int
    """Anchor of the next round; behind ``last`` when the response is complete."""
    last: int
    """The response's last token, which is no anchor."""
    num_accepted: list[int] = field(default_factory=list)


class RowWalk:
    """All responses of a row by all methods.

    Args:
        row: the conversation.
        methods: what to replay.
        eos_token_ids: where a response ends.
        max_new_tokens: end every response there; None: where it was recorded to end.
    """

    def __init__(
        self, row: Row, methods: Sequence[Method], eos_token_ids: Sequence[int], max_new_tokens: int | None
    ) -> None:
        self.row, self.methods, self.eos_token_ids = row, list(methods), eos_token_ids
        self.tokens = row.token_ids()
        self.context: RowContext | None = None
        self.reaches: dict[int, Reach] = {}
        """What is known of the anchors that some method may still come to."""
        self._steps: list[list[_Steps]] = []
        for first, last in response_ranges(row, eos_token_ids, max_new_tokens):
            self._steps.append([_Steps(first, last) for _ in methods])

    @property
    def is_done(self) -> bool:
        return all(step.at >= step.last for steps in self._steps for step in steps)

    @property
    def num_context(self) -> int:
        """Tokens in front of the last anchor that there can be, itself included."""
        return max(steps[0].last for steps in self._steps)

    def anchors(self) -> list[int]:
        """Where the methods stand, ascending."""
        return sorted({step.at for steps in self._steps for step in steps if step.at < step.last})

    def anchors_ahead(self, count: int) -> list[int]:
        """Further anchors that some method may come to, the next ones first."""
        standing = self.anchors()
        ahead = (
            anchor
            for steps in self._steps
            for anchor in range(min(step.at for step in steps), steps[0].last)
            if anchor not in self.reaches and anchor not in standing
        )
        return list(islice(ahead, count))

    def truth(self, anchor: int, num_draft_tokens: int) -> Tensor:
        """(M,) int64 true tokens behind an anchor, -1 behind the end of its response."""
        last = next(steps[0].last for steps in self._steps if steps[0].last > anchor)
        said = self.tokens[anchor + 1 : min(last, anchor + num_draft_tokens) + 1]
        return torch.nn.functional.pad(said.long(), (0, num_draft_tokens - len(said)), value=-1)

    def hop(self) -> None:
        """Let every method go on as long as its anchor is known."""
        for steps in self._steps:
            for method, step in zip(self.methods, steps, strict=True):
                while step.at < step.last and step.at in self.reaches:
                    step.num_accepted.append(self.reaches[step.at].num_accepted(method))
                    step.at += step.num_accepted[-1] + 1
        standing = self.anchors()
        self.reaches = {anchor: reach for anchor, reach in self.reaches.items() if standing and anchor > standing[0]}
        if not standing:
            self.context = None

    def logs(self) -> dict[Method, list[RoundLog]]:
        """The rounds by method, one log a response."""
        return {method: [self._log(steps[i]) for steps in self._steps] for i, method in enumerate(self.methods)}

    def _log(self, step: _Steps) -> RoundLog:
        ended = "eos" if int(self.tokens[step.last]) in self.eos_token_ids else "length"
        # The bonus token of a round that accepts the last token itself would stand behind the response.
        cut = ended if step.at > step.last else None
        return RoundLog(prompt_id=self.row.id, num_accepted=tuple(step.num_accepted), cut=cut)


def response_ranges(row: Row, eos_token_ids: Sequence[int], max_new_tokens: int | None) -> Iterator[tuple[int, int]]:
    """First and last token of each response that live decoding would say: up to its first EOS, or to the limit."""
    tokens = row.token_ids()
    for span in response_spans(row.token_mask()):
        first, end = _cut(tokens, span, eos_token_ids, max_new_tokens)
        yield first, end - 1


def response_spans(token_mask: Tensor) -> Iterator[tuple[int, int]]:
    """First token and end (exclusive) of every run of response tokens."""
    flags = torch.cat([torch.zeros(1, dtype=torch.bool), token_mask.cpu(), torch.zeros(1, dtype=torch.bool)])
    edges = (flags[1:] != flags[:-1]).nonzero().flatten().tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)


def _cut(
    tokens: Tensor, span: tuple[int, int], eos_token_ids: Sequence[int], max_new_tokens: int | None
) -> tuple[int, int]:
    """The part of a response that live decoding would say: up to its first EOS, or to the limit."""
    first, end = span
    if max_new_tokens is not None:
        end = min(end, first + max_new_tokens)
    stops = torch.isin(tokens[first:end], torch.tensor(list(eos_token_ids), dtype=tokens.dtype)).nonzero()
    return (first, first + int(stops[0]) + 1) if len(stops) else (first, end)
