"""A response of a batch: what is asked for, and what it has become so far.

Time. A round belongs to all responses in it: each is charged its equal share of the seconds, by stage and in total, and its
share of the round itself (``RoundLog.batch_rounds``). So the sums over responses are seconds and rounds of the batch.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dflash_kit.acceptance import RoundLog

from .engine import Generation


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A response that is asked for."""

    prompt_ids: list[int]
    """The whole prompt, template included."""
    max_new_tokens: int
    """Tokens to decode at most; cut to what the context has left."""
    generator: torch.Generator | None = None
    """Source of this response's samples, on the target's device."""
    prompt_id: str = ""
    """Kept in the log."""
    name: str = ""
    """For messages."""
    tag: Any = None
    """Whatever the caller wants to find again."""


@dataclass(slots=True)
class BatchResponse:
    """A response in the making: its first token, then those of rounds that it shares with others."""

    request: Request
    max_new_tokens: int
    tokens: list[int]
    num_accepted: list[int] = field(default_factory=list)
    cut: str | None = None
    stage_s: dict[str, float] = field(default_factory=dict)
    decode_s: float = 0.0
    batch_rounds: float = 0.0

    def has_ended(self, eos_token_ids: Collection[int]) -> bool:
        return self.tokens[-1] in eos_token_ids or len(self.tokens) >= self.max_new_tokens

    def add(self, tokens: Sequence[int], num_accepted: int, cut: str | None) -> None:
        """Take in what a round has said: accepted tokens, and the bonus token unless the response was cut inside them."""
        self.tokens += tokens
        self.num_accepted.append(num_accepted)
        self.cut = cut

    def charge(self, round_s: float, stage_s: Mapping[str, float], num_sharing: int) -> None:
        """Its share of a round of so many seconds that so many responses were in."""
        for stage, seconds in stage_s.items():
            self.stage_s[stage] = self.stage_s.get(stage, 0.0) + seconds / num_sharing
        self.decode_s += round_s / num_sharing
        self.batch_rounds += 1 / num_sharing

    def generation(self, stages: Sequence[str]) -> Generation:
        """The finished response; ``stages`` name those of the engine, also where there was no round."""
        log = RoundLog(
            prompt_id=self.request.prompt_id,
            num_accepted=tuple(self.num_accepted),
            cut=self.cut,
            stage_s={stage: self.stage_s.get(stage, 0.0) for stage in stages},
            decode_s=self.decode_s,
            batch_rounds=self.batch_rounds,
        )
        assert log.new_tokens == len(self.tokens), "rounds and tokens disagree: a bug of the engine"
        return Generation(self.tokens, log)
