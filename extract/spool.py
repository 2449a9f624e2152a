"""Extraction into a spool: its epochs, its room, and how the trainer hears of beginning and end."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from dflash_kit.errors import KitError
from dflash_kit.shard_file import ShardFile
from dflash_kit.shard_journal import journal_end, journal_spool
from dflash_kit.shard_manifest import Manifests, read_manifest
from dflash_kit.shard_share import Share
from dflash_kit.shards import ShardsHeader
from dflash_kit.spool import SpoolRecord, epoch_id, extractor_at_work
from dflash_kit.spool_room import stored_bytes, writer_part

from .plan import Plan
from .prompts import Sample
from .settings import ExtractConfig


def require_same_use(config: ExtractConfig, found: Manifests) -> None:
    """Refuse a spool without a limit, and a limit on shards that were written to stay.

    Raises:
        KitError: the folder was begun otherwise.
    """
    is_spool = any(part.spool is not None for part in found.parts)
    if is_spool and not config.spool_bytes:
        raise KitError(
            f"{config.out} is a spool, whose trainer deletes used shards; give --spool_bytes, or a new folder"
        )
    if config.spool_bytes and not is_spool and found.shards:
        raise KitError(
            f"{config.out} holds shards that were written to stay, and a spool's shards are deleted; name a new folder "
            "or leave out spool_bytes"
        )


def over_epochs(samples: list[Sample], epochs: int, seed: int) -> list[Sample]:
    """Every sample once an epoch, in an order of each epoch's own that depends on nothing but the seed.

    Args:
        samples: in the order of the inputs.
        epochs: how often each is wanted.
        seed: of the order.
    """
    found = []
    for epoch in range(epochs):
        order = list(samples)
        random.Random(f"{seed} {epoch}").shuffle(order)
        found += [replace(sample, id=epoch_id(sample.id, epoch)) for sample in order]
    return found


def room_of(config: ExtractConfig, plan: Plan, header: ShardsHeader) -> int:
    """This process's part of the spool in bytes, 0 without one.

    Raises:
        KitError: it is less than a few shards.
    """
    if not config.spool_bytes:
        return 0
    longest_row_bytes = stored_bytes(plan.longest_tokens, header)
    return writer_part(config.spool_bytes, config.shares[0].world_size, config.max_shard_bytes, longest_row_bytes)


def begin(config: ExtractConfig, plan: Plan, folder: Path, share: Share) -> None:
    """Tell the trainer what will come; a share of no rows is told, too, or its end would not count."""
    if not config.spool_bytes:
        return
    record = SpoolRecord(limit_bytes=config.spool_bytes, epochs=config.epochs, rows=plan.num_done + len(plan.samples))
    path = folder / share.manifest_name
    if plan.samples or read_manifest(path).spool != record:
        journal_spool(path, record)


def end(folder: Path, share: Share) -> None:
    """Tell the trainer that every row of this share is in a finished shard."""
    path = folder / share.manifest_name
    if not read_manifest(path).is_ended:
        journal_end(path)


@contextmanager
def at_work(config: ExtractConfig, folder: Path) -> Iterator[None]:
    """Show the trainer of a spool that this process lives."""
    if not config.spool_bytes:
        yield
        return
    with extractor_at_work(folder):
        yield


def kept_ids(kept: Path, num_rows: int) -> list[str]:
    """Ids of the first rows of a kept shard."""
    shard = ShardFile(kept)
    return [shard.row(index)[0].id for index in range(min(num_rows, shard.num_rows))]


def kept_name(share: Share) -> str:
    """Link to the first shard of a run, which stays until its parity was checked."""
    return f"parity-{share.rank:05d}.arrow"
