"""Conversations laid end to end into a packed row: a few operations for the whole row, for several threads do this at a time
and each call of an operation takes the interpreter lock from the thread that trains.

Shape legend: T tokens of a packed row, K taps, D hidden size, F = K * D.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_kit.shards import Row


@dataclass(frozen=True, kw_only=True, slots=True)
class LaidTokens:
    """What a packed row holds beside states."""

    token_ids: Tensor
    """(T,) int64; 0 in the unfilled tail."""
    supervised: Tensor
    """(T,) bool: tokens to be learnt."""
    positions: Tensor
    """(T,) int64: place in the document."""
    documents: Tensor
    """(T,) int64; -1 in the tail."""
    lengths: tuple[int, ...]
    """Tokens of each conversation that fit, the one without a state included."""
    num_cut_tokens: int
    """Tokens that did not fit."""


def lay_tokens(rows: Sequence[Row], seq_len: int) -> LaidTokens:
    """Lay the conversations' tokens end to end; what does not fit into ``seq_len`` is cut off."""
    token_ids, supervised = np.zeros(seq_len, dtype=np.int64), np.zeros(seq_len, dtype=np.bool_)
    lengths: list[int] = []
    start = num_cut = 0
    for row in rows:
        held = len(row.input_ids)
        wanted = held + row.is_generated
        length = min(wanted, seq_len - start)
        num_cut += wanted - length
        stated = slice(start, start + min(held, length))
        token_ids[stated] = row.input_ids.numpy()[:length]
        supervised[stated] = row.loss_mask.numpy()[:length]
        start += length
        if length > held:  # said last: learnt, but without a state
            token_ids[start - 1], supervised[start - 1] = row.next_token, True
        lengths.append(length)
    ends = np.cumsum(lengths, dtype=np.int64)
    positions, documents = np.zeros(seq_len, dtype=np.int64), np.full(seq_len, -1, dtype=np.int64)
    positions[:start] = np.arange(start) - np.repeat(ends - lengths, lengths)
    documents[:start] = np.repeat(np.arange(len(rows)), lengths)
    return LaidTokens(
        token_ids=torch.from_numpy(token_ids),
        supervised=torch.from_numpy(supervised),
        positions=torch.from_numpy(positions),
        documents=torch.from_numpy(documents),
        lengths=tuple(lengths),
        num_cut_tokens=num_cut,
    )


def lay_states(states: Sequence[Tensor], lengths: Sequence[int], seq_len: int, empty: Tensor, *, pin: bool) -> Tensor:
    """(T, F) states of the conversations in the places of their tokens, zero where a token has none.

    Args:
        states: (tokens with states, F) of each conversation.
        lengths: places of each.
        seq_len: T.
        empty: (1, F) zeros of the states' dtype.
        pin: into pinned memory.
    """
    pieces: list[Tensor] = []
    for held, length in zip(states, lengths, strict=True):
        pieces.append(held[:length])
        if length > len(held):
            pieces.append(empty)
    pieces.append(empty.expand(seq_len - sum(lengths), -1))
    laid = torch.empty(seq_len, empty.shape[1], dtype=empty.dtype, pin_memory=pin)
    return torch.cat(pieces, out=laid)
