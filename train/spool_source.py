"""The trainer's side of a spool, in the main process: which shards come next, when to give up, and deleting used ones."""

import shutil
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_kit.errors import KitError
from dflash_kit.row_split import hold_out
from dflash_kit.shard_entry import ShardEntry
from dflash_kit.shard_file import sync_folder
from dflash_kit.shards import Shards, ShardWriter
from dflash_kit.spool import ConsumedJournal, sample_of
from dflash_kit.spool_follower import SpoolFollower

from .spool_place import SpoolPlace

WINDOW_SHARE = 8
"""A window of an eighth of the spool: two of them and what waits for a saved state leave the extractor room."""
PATIENCE_S = 3.0
"""How long to wait for a whole window before taking what is there."""
POLL_S = 0.2
TURN_S = 5.0
HELD_OUT_NAME = "held-out"


@dataclass(frozen=True, kw_only=True, slots=True)
class News:
    """What a look at the spool has found; sent to all processes."""

    window: tuple[ShardEntry, ...] = ()
    """Shards of the next window."""
    is_ended: bool = False
    """No shard will come any more."""
    total_rows: int = 0
    """Rows that will have come in the end."""
    is_stuck: bool = False
    """Nothing has come for a while: what waits for a saved state may be in the way."""
    words: str = ""
    """What is waited for."""


class SpoolSource:
    """Follows the extractors and deletes what was used.

    Args:
        folder: the spool.
        timeout_s: how long to wait when no extractor lives.

    Raises:
        KitError: another trainer uses it.
    """

    def __init__(self, folder: Path, *, timeout_s: float) -> None:
        self._folder, self._timeout_s = folder, timeout_s
        self._journal = ConsumedJournal(folder)
        self._follower = SpoolFollower(folder)
        self._coming: deque[ShardEntry] = deque()
        self._quiet_s = time.monotonic()  # since when nothing has come
        self._dead_s: float | None = None  # since when no extractor lives

    def look(self, *, starved: bool) -> News:
        """The next window, or why there is none.

        Args:
            starved: training waits for it, so that a part of a window is taken rather than none.

        Raises:
            KitError: no extractor has lived for ``timeout_s``, or the spool is damaged.
        """
        alive = self._follower.is_alive()  # before looking: what it wrote before it died is seen
        self._fetch()
        is_ended = self._follower.is_ended and not alive  # the end of an earlier run counts once nobody goes on
        total_rows = self._follower.total_rows
        quiet_s = time.monotonic() - self._quiet_s
        wanted_bytes = self._follower.limit_bytes // WINDOW_SHARE
        there_bytes = sum(entry.bytes for entry in self._coming)
        if self._coming and (there_bytes >= wanted_bytes or is_ended or (starved and quiet_s >= PATIENCE_S)):
            return News(window=self._take(wanted_bytes), total_rows=total_rows)
        if is_ended and not self._coming:
            return News(is_ended=True, total_rows=total_rows)
        if alive or not starved:
            self._dead_s = None
        else:
            self._give_up_when_dead()
        words = f"waiting for the extractor of {self._folder}" + ("" if alive else ", which is not at work")
        return News(total_rows=total_rows, is_stuck=starved and quiet_s >= PATIENCE_S, words=words)

    def first_window(self) -> tuple[ShardEntry, ...] | None:
        """Wait a moment for the first window; it comes again with the next ``look``."""
        until_s = time.monotonic() + TURN_S
        while time.monotonic() < until_s:
            news = self.look(starved=True)
            if news.window:
                self._coming.extendleft(reversed(news.window))
                return news.window
            if news.is_ended:
                raise KitError(f"the spool {self._folder} has ended and all of it is used; extract into another one")
            time.sleep(POLL_S)
        return None

    def windows(self, names: list[list[str]]) -> list[tuple[ShardEntry, ...]]:
        """Windows that a saved state names, taken out of what comes.

        Raises:
            KitError: one of their shards is gone.
        """
        self._fetch()
        there = {entry.file: entry for entry in self._coming}
        for name in (name for files in names for name in files):
            if name not in there:
                raise KitError(
                    f"the saved state needs shard {self._folder / name}, which is gone (a later state has used it); begin "
                    "anew with another --out"
                )
        wanted = {name for files in names for name in files}
        self._coming = deque(entry for entry in self._coming if entry.file not in wanted)
        return [tuple(there[name] for name in files) for files in names]

    def consume(self, names: list[str], state_folder: Path) -> None:
        """Delete shards that a state saved in ``state_folder`` has left behind."""
        if names:
            sync_folder(state_folder)
            self._journal.consume(names)

    def discard(self, names: list[str]) -> None:
        """Delete shards that an earlier run had used up when it was killed."""
        self._journal.consume(names)
        self._coming = deque(entry for entry in self._coming if entry.file not in self._journal)

    def close(self) -> None:
        """Let another trainer use the spool."""
        self._journal.close()

    @property
    def rows_per_epoch(self) -> int:
        """Rows of one epoch."""
        return self._follower.total_rows // max(self._follower.epochs, 1)

    def _fetch(self) -> None:
        found = [entry for entry in self._follower.look() if entry.file not in self._journal]
        if found:
            self._coming.extend(found)
            self._quiet_s = time.monotonic()

    def _take(self, wanted_bytes: int) -> tuple[ShardEntry, ...]:
        window = [self._coming.popleft()]
        while self._coming and sum(entry.bytes for entry in window) < wanted_bytes:
            window.append(self._coming.popleft())
        return tuple(window)

    def _give_up_when_dead(self) -> None:
        now_s = time.monotonic()
        self._dead_s = self._dead_s or now_s
        if now_s - self._dead_s >= self._timeout_s:
            raise KitError(
                f"no extractor of {self._folder} has been at work for {self._timeout_s:g} s and it has not written every "
                "row; run its command again, then this one: training goes on from its last saved state "
                "(spool_timeout_s sets how long to wait)"
            )


@dataclass(frozen=True, slots=True)
class HoldOut:
    """How many rows of a spool are held out."""

    max_rows: int
    fraction: float
    """Share of an epoch's rows."""


def keep_held_out(source: SpoolSource, spool: SpoolPlace, place: Path, wanted: HoldOut) -> bool:
    """Copy rows of the first window to a shards folder of the trainer's own, once: they are never trained on.

    Args:
        source: the spool, followed.
        spool: the same.
        place: where the copy goes; left alone when it is there.
        wanted: how many.

    Returns:
        Whether that is done; False: the first window is not there yet, call again.
    """
    if place.exists() or wanted.max_rows == 0 or wanted.fraction == 0:
        return True
    entries = source.first_window()
    if entries is None:
        return False
    shards = Shards.of(spool.folder, spool.header, entries)
    unique = {sample_of(row_id): index for index, row_id in reversed(list(enumerate(shards.ids)))}
    samples = list(unique)
    num_rows = min(wanted.max_rows, max(1, round(wanted.fraction * source.rows_per_epoch)), len(samples) // 2)
    begun = place.with_name(place.name + ".incomplete")
    shutil.rmtree(begun, ignore_errors=True)
    with ShardWriter(begun, spool.header) as writer:
        for index in hold_out(samples, 1.0)[1][:num_rows]:
            row = shards[unique[samples[index]]]
            writer.add(replace(row, id=sample_of(row.id)))
    begun.rename(place)
    return True
