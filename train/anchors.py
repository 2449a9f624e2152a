"""Which tokens of a packed row become anchors, drawn anew each epoch.

An anchor and the token after it are both supervised tokens of one document. A row has a fixed number of blocks, so
that shapes never change; blocks for which no anchor is left are flagged unused. Documents share the blocks in
proportion to the anchors that they offer.

Shape legend: T tokens of a packed row, N blocks of a row.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def eligible_anchors(documents: Tensor, supervised: Tensor) -> Tensor:
    """(T,) bool: tokens that may be an anchor.

    Args:
        documents: (T,) document of each token, -1 for the row's unfilled tail.
        supervised: (T,) bool, tokens to be learnt.
    """
    eligible = torch.zeros_like(supervised)
    eligible[:-1] = supervised[:-1] & supervised[1:] & (documents[:-1] == documents[1:]) & (documents[:-1] >= 0)
    return eligible


def document_quotas(num_eligible: Sequence[int], num_anchors: int) -> list[int]:
    """Blocks for each document: all it offers if they fit, else its proportional share (largest remainder).

    Args:
        num_eligible: tokens of each document that may be an anchor.
        num_anchors: blocks of the row.
    """
    total = sum(num_eligible)
    if total <= num_anchors:
        return list(num_eligible)
    quotas = [num_anchors * n // total for n in num_eligible]
    by_remainder = sorted(range(len(quotas)), key=lambda i: (-(num_anchors * num_eligible[i] % total), i))
    for i in by_remainder[: num_anchors - sum(quotas)]:
        quotas[i] += 1
    return quotas


def draw_anchors(
    documents: Tensor, supervised: Tensor, num_anchors: int, *, seed: int, epoch: int, row: int
) -> tuple[Tensor, Tensor]:
    """Draw the anchors of one packed row: without repetition, ascending, the same for the same (seed, epoch, row).

    Returns:
        anchors: (N,) int64 indices into the row, used ones first; 0 for unused blocks.
        used: (N,) bool.
    """
    candidates = eligible_anchors(documents, supervised).nonzero().flatten().numpy()
    owners = documents.numpy()[candidates]
    _, counts = np.unique(owners, return_counts=True)
    keys = row_generator(seed, epoch, row).random(len(candidates))
    # The lowest keys of each document, all documents at once: one after the other they would take a call or five each.
    quotas = document_quotas(counts.tolist(), num_anchors)
    ranks = np.arange(len(candidates)) - np.repeat(np.cumsum(counts) - counts, counts)
    by_document = np.lexsort((keys, owners))
    drawn = np.sort(candidates[by_document[ranks < np.repeat(quotas, counts)]])
    anchors, used = torch.zeros(num_anchors, dtype=torch.int64), torch.zeros(num_anchors, dtype=torch.bool)
    anchors[: len(drawn)] = torch.from_numpy(drawn)
    used[: len(drawn)] = True
    return anchors, used


def row_generator(*key: int) -> np.random.Generator:
    """A random generator that depends on nothing but ``key``."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
