"""The best of many logits in one pass over the vocabulary.

Shape legend: V vocabulary, K best ones.
"""

import torch
from torch import Tensor
from torch.nn import functional

GROUP = 16
"""Tokens of which only the best is looked at first."""


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
