"""Which rows of the shards share a packed row, from their lengths alone, the same for the same (seed, epoch).

A packed row is a fixed number of tokens, filled with whole conversations: they are never padded to each other, and
attention keeps them apart. All ranks compute the same plan, so that nothing has to be sent around.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from .anchors import row_generator

T = TypeVar("T")

OPEN_ROWS = 64
"""Packed rows that are filled at the same time; more fill better and mix lengths less."""
SHUFFLE_STREAM = 1


def pack_epoch(lengths: Sequence[int], seq_len: int, *, seed: int, epoch: int) -> list[list[int]]:
    """Shuffle the rows and pack them best-fit.

    Args:
        lengths: tokens of each row; longer ones are counted as ``seq_len``, they will be cut.
        seq_len: tokens of a packed row.
        seed: of the run.
        epoch: from 0.

    Returns:
        For each packed row the indices of its rows. Every index occurs once.
    """
    order = row_generator(seed, epoch, SHUFFLE_STREAM, len(lengths)).permutation(len(lengths))
    packed: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (tokens left, index into packed), ascending
    for index in order.tolist():
        length = min(lengths[index], seq_len)
        at = bisect_left(open_rows, (length, -1))
        if at < len(open_rows):
            left, place = open_rows.pop(at)
        else:
            left, place = seq_len, len(packed)
            packed.append([])
        packed[place].append(index)
        if left > length:
            insort(open_rows, (left - length, place))
        if len(open_rows) > OPEN_ROWS:
            open_rows.pop(0)
    # Rows that were opened early are full of early draws; a second shuffle spreads them over the epoch's steps.
    again = row_generator(seed, epoch, SHUFFLE_STREAM + 1, len(packed)).permutation(len(packed))
    return [packed[i] for i in again.tolist()]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedIndex:
    """One packed row of the plan."""

    epoch: int
    row: int
    """Number of the packed row in its epoch; with the seed and the epoch it decides the anchors."""
    members: tuple[int, ...]
    """Indices of the rows in the shards; empty for a place that only evens out the ranks."""


class PackingPlan:
    """All packed rows of a run in order, cut into optimizer steps.

    A step takes ``rows_per_step`` packed rows, over all ranks and accumulated micro-steps together. The stream of
    packed rows runs over the epochs without a seam.

    Args:
        lengths: tokens of each row.
        seq_len: tokens of a packed row.
        rows_per_step: packed rows of an optimizer step.
        seed: of the run.
    """

    def __init__(self, lengths: Sequence[int], *, seq_len: int, rows_per_step: int, seed: int) -> None:
        self.lengths, self.seq_len, self.rows_per_step, self.seed = lengths, seq_len, rows_per_step, seed
        self._ends: list[int] = []
        self._held: tuple[int, list[list[int]]] = (-1, [])

    def num_steps(self, epochs: int) -> int:
        """Optimizer steps of that many epochs; the last one may have fewer packed rows."""
        return -(-self._end(epochs - 1) // self.rows_per_step)

    def rows(self, start: int, end: int) -> Iterator[PackedIndex]:
        """Packed rows number ``start`` up to ``end`` (exclusive), counted over all epochs."""
        epoch = 0
        for place in range(start, end):
            while self._end(epoch) <= place:
                epoch += 1
            row = place - (self._end(epoch - 1) if epoch else 0)
            yield PackedIndex(epoch=epoch, row=row, members=tuple(self._epoch(epoch)[row]))

    def step(self, step: int, rank: int, world_size: int, *, last_row: int | None = None) -> list[PackedIndex]:
        """The packed rows of one rank in one step: as many for every rank, empty ones where there are none left.

        Args:
            step: from 0.
            rank: of this process.
            world_size: number of processes.
            last_row: number of packed rows of the whole run; None for a run without an end.
        """
        first = step * self.rows_per_step
        end = first + self.rows_per_step if last_row is None else min(first + self.rows_per_step, last_row)
        rows = list(self.rows(first, end))
        empty = PackedIndex(epoch=rows[0].epoch if rows else 0, row=0, members=())
        return share_out(rows, empty, self.rows_per_step, rank, world_size)

    def num_rows(self, epochs: int) -> int:
        """Packed rows of that many epochs."""
        return self._end(epochs - 1)

    def _epoch(self, epoch: int) -> list[list[int]]:
        if self._held[0] != epoch:
            self._held = (epoch, pack_epoch(self.lengths, self.seq_len, seed=self.seed, epoch=epoch))
        return self._held[1]

    def _end(self, epoch: int) -> int:
        while len(self._ends) <= epoch:
            before = self._ends[-1] if self._ends else 0
            self._ends.append(before + len(self._epoch(len(self._ends))))
        return self._ends[epoch]


def share_out(rows: Sequence[T], empty: T, rows_per_step: int, rank: int, world_size: int) -> list[T]:
    """One rank's part of a step's packed rows: as many for every rank, ``empty`` where there are none left."""
    places = [micro * world_size + rank for micro in range(num_micro_steps(rows_per_step, world_size))]
    return [rows[place] if place < len(rows) else empty for place in places]


def num_micro_steps(rows_per_step: int, world_size: int) -> int:
    """Forward and backward passes of each rank in an optimizer step."""
    return -(-rows_per_step // world_size)


def fill_ratio(lengths: Sequence[int], packed: Sequence[Sequence[int]], seq_len: int) -> float:
    """Share of the packed tokens that are real."""
    tokens = int(np.minimum(np.asarray(lengths, dtype=np.int64), seq_len).sum())
    return tokens / max(len(packed) * seq_len, 1)
