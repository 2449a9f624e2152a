"""How the target's token is drawn from its logits: greedily, or from a tempered and truncated softmax."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of the target's distribution; drafts are never tempered or truncated."""

    temperature: float = 0.0
    """Divides the logits; 0 takes the likeliest token (greedy)."""
    top_p: float = 1.0
    """Smallest set of likeliest tokens with at least this probability is kept; 1 keeps all."""
    top_k: int = 0
    """Likeliest tokens that are kept, before top_p; 0 keeps all."""

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn at all."""
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """(rows, V) float32 of logits (rows, V)."""
        return torch.softmax(self.scores(logits), dim=-1)

    def scores(self, logits: Tensor) -> Tensor:
        """Logits (rows, V) float32, tempered and truncated in the order of transformers: temperature, top-k, top-p; a new tensor."""
        from transformers import TopKLogitsWarper, TopPLogitsWarper

        scores = logits.float() / self.temperature
        ids = torch.empty(0)  # the warpers look at scores only
        if self.top_k:
            scores = TopKLogitsWarper(self.top_k)(ids, scores)
        if self.top_p < 1:
            scores = TopPLogitsWarper(self.top_p)(ids, scores)
        return scores


GREEDY = Sampling()


def choose_tokens(logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> list[int]:
    """The target's token behind every row of logits (rows, V): argmax, or a sample.

    Every row gets its own independent sample, whatever the tree holds there. So the token at each step of
    the walk is a fresh draw of the target given its true prefix, and the response has exactly the target's
    distribution.
    """
    if sampling.is_greedy:
        return logits.argmax(dim=-1).tolist()
    return torch.multinomial(sampling.probabilities(logits), 1, generator=generator)[:, 0].tolist()
