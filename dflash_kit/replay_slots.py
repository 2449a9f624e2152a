"""What replay has to know of the slots of a block: their best log-probabilities, and where the true token stands.

Scores are those of the tree builder: float32 logit less float32 log of the sum of exponentials.

Shape legend: N anchors, m depths, V vocabulary, K ranks kept per depth, D hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .replay_reach import NO_RANK
from .target_ends import TargetEnds

LOGITS_AT_ONCE = 1 << 27
"""Half a gigabyte in float32."""
GROUP = 16
"""Tokens of which only the best is looked at first."""


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """Slots of N anchors at m depths.

    Attributes:
        log_probs: (N, m, K) float32, best first.
        own: (N, m) float32 log-probability of the true token.
        ranks: (N, m) int64 rank of the true token: no more than it is where ``is_unsure``, K where it is K or more, NO_RANK
            where there is no true token or the logits are no numbers.
        is_unsure: (N, m) bool, more tokens equal the true one than were kept.
    """

    log_probs: Tensor
    own: Tensor
    ranks: Tensor
    is_unsure: Tensor

    @classmethod
    def of(cls, ends: TargetEnds, hidden: Tensor, truths: Tensor, num_ranks: int) -> "SlotFacts":
        """Look at slots (N, m, D) with true tokens (N, m), -1 where there is none, some anchors at a time."""
        num_depths, vocabulary = hidden.shape[1], ends.head.shape[0]
        step = max(1, LOGITS_AT_ONCE // (num_depths * vocabulary))
        found = [
            _look(ends.logits(hidden[start : start + step]).float(), truths[start : start + step], num_ranks)
            for start in range(0, len(hidden), step)
        ]
        return cls(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _look(logits: Tensor, truths: Tensor, num_ranks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four attributes from logits (n, m, V)."""
    vocabulary = logits.shape[-1]
    log_sums = logits.logsumexp(-1, keepdim=True)
    values, token_ids = best_logits(logits, num_ranks)
    truth = truths.clamp(min=0)[..., None]
    true_logits = logits.gather(-1, truth)
    is_before = (values > true_logits) | ((values == true_logits) & (token_ids < truth))
    is_cut = (values[..., -1:] == true_logits) & (vocabulary > num_ranks)
    is_known = (truths >= 0)[..., None] & log_sums.isfinite()
    ranks = torch.where(is_known, is_before.sum(-1, keepdim=True), NO_RANK)
    log_probs = torch.where(log_sums.isfinite(), values - log_sums, -torch.inf)
    return log_probs, (true_logits - log_sums)[..., 0], ranks[..., 0], (is_cut & is_known)[..., 0]


def best_logits(logits: Tensor, num_ranks: int, group_bests: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The best of logits (…, V) in descending order, and their token ids, (…, K) each; equal ones in any order.

    One pass over the vocabulary instead of the many of a selection: the best tokens are all in the groups of the best maxima, which may
    be known already: ``group_bests`` (…, V / GROUP).
    """
    vocabulary = logits.shape[-1]
    if vocabulary < 2 * GROUP * num_ranks:
        return logits.topk(min(num_ranks, vocabulary), dim=-1)
    padded = functional.pad(logits, (0, -vocabulary % GROUP), value=-torch.inf) if vocabulary % GROUP else logits
    groups = padded.unflatten(-1, (GROUP, -1))  # token g + j * (V / GROUP) is the j-th of group g
    chosen = (groups.amax(-2) if group_bests is None else group_bests).topk(num_ranks, dim=-1, sorted=False).indices
    members = groups.gather(-1, chosen[..., None, :].expand(*chosen.shape[:-1], GROUP, -1)).flatten(-2)
    values, places = members.topk(num_ranks, dim=-1)
    return values, chosen.gather(-1, places % num_ranks) + places // num_ranks * groups.shape[-1]
