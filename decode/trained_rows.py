"""Which rows of replayed shards the drafter was trained on: there it says what it has seen, and acceptance is flattering.

A checkpoint records a digest of its training rows and where they were, not their ids. So the ids are looked for in the replayed
shards themselves (wherever they lie now) and in the recorded folder, split as training splits them, until the digest fits.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_kit.checkpoint import read_provenance
from dflash_kit.errors import KitError
from dflash_kit.row_split import hold_out, ids_digest
from dflash_kit.shard_manifest import read_manifests
from dflash_kit.shard_store import is_url
from dflash_kit.shards import Shards, open_shards
from dflash_kit.spool import sample_of

from .modes import STATE_SUFFIX
from .results import PromptResult

HELD_OUT_NAME = "held-out"
MAX_ORIGINS = 8
"""Drafters that started from drafters (``--init``) are followed so far back."""

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRows:
    """The training rows of a drafter, and of those that it started from, as far as they can be told."""

    ids: frozenset[str]
    """Ids of samples; a spool's rows have those of their samples."""
    unknown: tuple[str, ...]
    """Shards folders of trainings whose rows cannot be told."""

    @classmethod
    def of(cls, provenance: Record, shards: Shards) -> "TrainedRows":
        """What a checkpoint's provenance says, looked up in the shards to replay and in the folders that it names.

        A checkpoint of another program has no record: no ids, nothing unknown.
        """
        ids: set[str] = set()
        unknown = []
        for record in _trainings(provenance):
            found = _rows_of(record, shards)
            if found is None:
                unknown.append(str(_part(record, "config").get("shards")))
            else:
                ids |= {sample_of(row_id) for row_id in found}
        return cls(ids=frozenset(ids), unknown=tuple(unknown))

    def count(self, ids: Sequence[str]) -> int:
        """How many of these rows are training rows."""
        return sum(sample_of(row_id) in self.ids for row_id in ids)

    def warning(self, ids: Sequence[str], replay: str) -> str | None:
        """The one line that a user should read before the numbers; None where there is nothing to say.

        Args:
            ids: of the rows of the shards.
            replay: the shards as they were named.
        """
        num_trained = self.count(ids)
        if not num_trained:
            return None
        return (
            f"{num_trained} of the {len(ids)} rows of {replay} are training rows of this drafter, on which acceptance is "
            "flattering; replay shards of other prompts"
        )

    def describe(self, ids: Sequence[str]) -> str | None:
        """How many replayed rows are training rows, for announcement and report; None: there is no record of training."""
        num_trained = self.count(ids)
        if self.unknown:
            least = f"{num_trained} or more" if num_trained else "not known"
            return f"{least} of {len(ids)}: {', '.join(self.unknown)} of its training is not here, or has changed since"
        return f"{num_trained} of {len(ids)}" if self.ids else None

    def add_to(self, facts: dict[str, Any], results: Sequence[PromptResult], replay: str) -> None:
        """Put into a report's facts how many of the rows that were replayed are training rows."""
        ids = [result.prompt_id for result in results]
        if described := self.describe(ids):
            facts["run"]["training rows"] = described
        if warning := self.warning(ids, replay):
            facts["warnings"].append(warning)


def _trainings(provenance: Record) -> Iterator[Record]:
    """Records of this training, and of those behind it whose folders are still here."""
    for _ in range(MAX_ORIGINS):
        yield provenance
        name = _part(provenance, "init").get("name")
        if not isinstance(name, str) or not Path(name).is_dir():
            return
        try:
            provenance = read_provenance(name)
        except KitError:
            return


def _rows_of(record: Record, shards: Shards) -> set[str] | None:
    """Ids of one training's rows; empty where there is no record of it, None where they cannot be told."""
    fingerprint, config = _part(record, "fingerprint"), _part(record, "config")
    if not isinstance(config.get("shards"), str) or not fingerprint:
        return set()
    try:
        if fingerprint.get("spool"):
            return _used_rows(config)
        for ids in _candidates(config["shards"], shards):
            rows = _training_side(config, ids)
            if ids_digest(rows) == fingerprint.get("train_rows_digest"):
                return set(rows)
    except (KitError, TypeError, ValueError, KeyError):  # a folder that is gone, a record that somebody wrote
        return None
    return None


def _candidates(place: str, shards: Shards) -> Iterator[list[str]]:
    yield shards.ids
    if not is_url(place) and os.path.realpath(place) != os.path.realpath(shards.folder):
        yield open_shards(place).ids


def _training_side(config: Record, ids: list[str]) -> list[str]:
    """Those of a folder's rows that training takes, in its order."""
    return [ids[i] for i in hold_out(ids, _held_out_share(config))[0]]


def _used_rows(config: Record) -> set[str]:
    """Samples that training took from a spool: rows of used shards, which stay in its manifests."""
    manifests = read_manifests(Path(config["shards"]))
    used = {sample_of(row) for shard in manifests.shards if shard.file in manifests.consumed for row in shard.ids}
    if _held_out_share(config) == 0:
        return used
    return used - set(open_shards(Path(config["out"] + STATE_SUFFIX) / HELD_OUT_NAME).ids)


def _held_out_share(config: Record) -> float:
    holds_out = config["eval_shards"] is None and config["replay"]["max_rows"]
    return float(config["data"]["holdout_fraction"]) if holds_out else 0.0


def _part(record: Record, name: str) -> Record:
    part = record.get(name)
    return part if isinstance(part, dict) else {}
