"""Whether shards are a spool, and what is known of it before training: its header, its size, and what will come."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from dflash_kit.errors import KitError
from dflash_kit.shards import ShardsHeader
from dflash_kit.spool_follower import SpoolFollower

from .settings import TrainConfig

STEP_SHARE = 4
"""A step's packed rows may take a quarter of the spool at most, or the extractor could be left without room."""
POLL_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class SpoolPlace:
    """A spool that an extractor has begun."""

    folder: Path
    header: ShardsHeader
    limit_bytes: int
    """Bytes of all its shards at most."""
    epochs: int
    total_rows: int
    """Rows over all epochs, as far as extractors have said."""

    def require_room(self, step_tokens: int) -> None:
        """Refuse steps that need more shards at once than the spool may hold.

        Raises:
            KitError: naming both sizes.
        """
        step_bytes = step_tokens * self.header.bytes_per_token
        if step_bytes > self.limit_bytes // STEP_SHARE:
            raise KitError(
                f"a step of data.rows_per_step × data.seq_len = {step_tokens:,} tokens takes up to {step_bytes:,} bytes of "
                f"shards; a spool of {self.limit_bytes:,} bytes allows a quarter of it: lower one of the two, or extract "
                f"with --spool_bytes {STEP_SHARE * step_bytes} or more"
            )

    def lines(self, rows_per_step: int, num_processes: int, micro_steps: int) -> list[str]:
        """What ``--dry_run`` prints of rows, packing and steps."""
        return [
            f"rows         {self.total_rows:,} announced, over {self.epochs} epochs",
            f"spool        {self.folder}, up to {self.limit_bytes:,} bytes; used shards are deleted",
            f"steps        of {rows_per_step} packed rows ({num_processes} processes x {micro_steps} micro-steps), "
            "to the end of the spool",
        ]


def find_spool(config: TrainConfig) -> SpoolPlace | None:
    """The spool that the settings ask for or the folder is; waits for its extractor to begin where they ask for it.

    Raises:
        KitError: none has begun in time, or settings that do not go with a spool.
    """
    if config.spool is False:
        return None
    follower = SpoolFollower(config.shards)
    follower.look()
    if config.spool is None and not follower.is_spool:
        return None
    if config.optim.max_steps is not None:
        raise KitError(
            f"optim.max_steps is {config.optim.max_steps} but {config.shards} is a spool, which is trained on to its end; "
            "leave it out"
        )
    t0, says = time.monotonic(), int(os.environ.get("RANK", 0)) == 0
    while not follower.is_spool or follower.header is None:
        if says:
            print(f"waiting for an extractor to begin in {config.shards} (dump.py --spool_bytes)", flush=True)
            says = False
        if time.monotonic() - t0 >= config.spool_timeout_s:
            raise KitError(
                f"no extractor has begun a spool in {config.shards} within {config.spool_timeout_s:g} s (spool_timeout_s); "
                "run extract/dump.py --spool_bytes with this folder, or leave out --spool"
            )
        time.sleep(POLL_S)
        follower.look()
    return SpoolPlace(
        folder=follower.folder,
        header=follower.header,
        limit_bytes=follower.limit_bytes,
        epochs=follower.epochs,
        total_rows=follower.total_rows,
    )
