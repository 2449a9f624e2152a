"""Packed rows of a spool: shards come in windows, each packed on its own, and the windows form one stream.

A window is a few whole shards. Nothing depends on when a shard came but which window it is in, and that is kept in the
saved state; so a resumed run repeats what it had begun, and a window whose packed rows all lie before a saved state is
used up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from dflash_kit.shard_entry import ShardEntry
from dflash_kit.shards import Shards, ShardsHeader
from dflash_kit.spool import sample_of

from .batches import packed_length
from .packing import PackedIndex, pack_epoch, share_out


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """A few shards, packed."""

    number: int
    """From 0; takes the epoch's place where anchors and order are drawn."""
    first: int
    """Number of its first packed row in the stream."""
    rows_before: int
    """Rows of all windows before it, held-out ones included."""
    entries: tuple[ShardEntry, ...]
    shards: Shards
    train_rows: tuple[int, ...]
    """Indices into ``shards`` of the rows to train on."""
    packed: tuple[tuple[int, ...], ...]
    """For each packed row the places of its rows in ``train_rows``."""
    rows_until: tuple[int, ...]
    """Rows of the first 1, 2, … packed rows."""

    @property
    def end(self) -> int:
        """Number of the packed row behind its last one."""
        return self.first + len(self.packed)

    @property
    def num_rows(self) -> int:
        """Rows in its shards."""
        return len(self.shards)

    @property
    def num_bytes(self) -> int:
        """Size of its shards."""
        return sum(entry.bytes for entry in self.entries)

    @property
    def files(self) -> list[str]:
        """Names of its shards."""
        return [entry.file for entry in self.entries]


class SpoolPlan:
    """The stream of packed rows as far as it is known, cut into optimizer steps as ``PackingPlan`` cuts its own.

    Args:
        folder: the spool.
        header: of its shards.
        held_out: samples that are never trained on.
        seq_len: tokens of a packed row.
        rows_per_step: packed rows of an optimizer step.
        seed: of the run.
    """

    def __init__(
        self, folder: Path, header: ShardsHeader, held_out: set[str], *, seq_len: int, rows_per_step: int, seed: int
    ) -> None:
        self._folder, self._header, self._held_out = folder, header, held_out
        self._seq_len, self._rows_per_step, self._seed = seq_len, rows_per_step, seed
        self.windows: list[Window] = []
        """Windows that are not released yet."""
        self._next = (0, 0, 0)  # number, first packed row and rows before it of the next window
        self.is_closed = False
        """Whether no window will come any more."""
        self.total_rows = 0
        """Rows that the extractors announced, over all epochs."""

    @property
    def num_places(self) -> int:
        """Packed rows known by now."""
        return self._next[1]

    def restore(self, state: dict[str, Any]) -> None:
        """Begin where a saved state says (see ``state``); its windows are to be added next."""
        self._next = (state["number"], state["first"], state["rows_before"])
        self.total_rows = state["total_rows"]

    def state(self, step: int) -> dict[str, Any]:
        """What a run that goes on after ``step`` needs to know: windows from the one in use on, as lists of shards.

        Used-up windows that are not released yet are named, too: they are released once this state is saved.
        """
        used = [window for window in self.windows if window.end <= step * self._rows_per_step or self._is_over(step)]
        begun = self.windows[len(used) :]
        number, first, rows_before = (begun[0].number, begun[0].first, begun[0].rows_before) if begun else self._next
        return {
            "number": number,
            "first": first,
            "rows_before": rows_before,
            "total_rows": self.total_rows,
            "windows": [window.files for window in begun],
            "used": [file for window in used for file in window.files],
        }

    def add(self, entries: Sequence[ShardEntry]) -> None:
        """Append a window of these shards."""
        number, first, rows_before = self._next
        shards = Shards.of(self._folder, self._header, entries)
        rows = [i for i, row_id in enumerate(shards.ids) if sample_of(row_id) not in self._held_out]
        lengths = [packed_length(shards.lengths[i]) for i in rows]
        packed = pack_epoch(lengths, self._seq_len, seed=self._seed, epoch=number)
        window = Window(
            number=number,
            first=first,
            rows_before=rows_before,
            entries=tuple(entries),
            shards=shards,
            train_rows=tuple(rows),
            packed=tuple(tuple(members) for members in packed),
            rows_until=tuple(accumulate(len(members) for members in packed)),
        )
        self.windows.append(window)
        self._next = (number + 1, window.end, rows_before + window.num_rows)

    def has_step(self, step: int) -> bool:
        """Whether the packed rows of a step (from 0) are known; the last step may have fewer."""
        end = (step + 1) * self._rows_per_step
        return end <= self.num_places or (self.is_closed and step * self._rows_per_step < self.num_places)

    def is_over(self, step: int) -> bool:
        """Whether nothing is left after ``step`` steps, for certain."""
        return self.is_closed and self._is_over(step)

    def step(self, step: int, rank: int, world_size: int) -> list[tuple[Window | None, PackedIndex]]:
        """The packed rows of one rank in a step that ``has_step``, with their windows; see ``PackingPlan.step``."""
        first = step * self._rows_per_step
        last = min(first + self._rows_per_step, self.num_places)
        rows = [
            (
                window,
                PackedIndex(epoch=window.number, row=place - window.first, members=window.packed[place - window.first]),
            )
            for window in self.windows
            for place in range(max(first, window.first), min(last, window.end))
        ]
        empty = (None, PackedIndex(epoch=rows[0][1].epoch, row=0, members=()))
        return share_out(rows, empty, self._rows_per_step, rank, world_size)

    def rows_before_step(self, step: int) -> int:
        """Rows of the stream before a step, held-out ones included."""
        place = step * self._rows_per_step
        for window in self.windows:
            if window.first <= place < window.end:
                done = place - window.first
                return window.rows_before + (window.rows_until[done - 1] if done else 0)
        return self._next[2]

    def used_bytes(self, step: int) -> int:
        """Size of the shards that are used up after ``step`` steps and not released."""
        return sum(window.num_bytes for window in self.windows if window.end <= step * self._rows_per_step)

    def release(self, step: int) -> list[str]:
        """Forget the windows that are used up after ``step`` steps; returns the names of their shards."""
        files = self.state(step)["used"]
        self.windows = [window for window in self.windows if not set(window.files) <= set(files)]
        return list(files)

    def _is_over(self, step: int) -> bool:
        return self.is_closed and step * self._rows_per_step >= self.num_places
