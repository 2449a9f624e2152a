"""Whose a file in a shards folder is, and who takes which sample: several processes may write into one folder.

Each writes under names of its own, so that nobody waits for anybody. A process that writes alone has ``manifest.jsonl``
and ``shard-00012.arrow``; the one of rank 3 among several has ``manifest-r00003.jsonl`` and
``shard-r00003-00012.arrow``.
"""

import re
from dataclasses import dataclass

from .errors import KitError

MAX_WORLD_SIZE = 100_000  # ranks have five digits in file names, so that names sort by rank
_MANIFEST = re.compile(r"manifest(-r\d{5})?\.jsonl")
_SHARD = re.compile(r"shard-(?:r(\d{5})-)?(\d{5,})\.arrow")


@dataclass(frozen=True, slots=True)
class Share:
    """One of the equal shares into which the samples of an extraction fall, by their ids."""

    rank: int = 0
    """Which share, 0 ≤ rank < world_size."""
    world_size: int = 1
    """Number of shares = of processes, over all hosts; 1: one process does everything."""

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= MAX_WORLD_SIZE:
            raise KitError(f"world_size is {self.world_size}; allowed: 1..{MAX_WORLD_SIZE} processes over all hosts")
        if not 0 <= self.rank < self.world_size:
            raise KitError(
                f"rank is {self.rank}; with a world_size of {self.world_size} it must be in 0..{self.world_size - 1}"
            )

    @property
    def manifest_name(self) -> str:
        """The manifest that this share's process writes."""
        return "manifest.jsonl" if self.world_size == 1 else f"manifest-r{self.rank:05d}.jsonl"

    def shard_name(self, index: int) -> str:
        """The final name of the process's shard of this number."""
        return f"shard-{index:05d}.arrow" if self.world_size == 1 else f"shard-r{self.rank:05d}-{index:05d}.arrow"

    def shard_index(self, name: str) -> int | None:
        """Number of a shard of this process; None for any other file."""
        found = _SHARD.fullmatch(name)
        if found is None or found[1] != (None if self.world_size == 1 else f"{self.rank:05d}"):
            return None
        return int(found[2])

    def takes(self, sample_id: str) -> bool:
        """Whether a sample falls into this share; its id begins with 16 hexadecimal digits."""
        return self.world_size == 1 or int(sample_id[:16], 16) % self.world_size == self.rank


def manifest_names(names: list[str]) -> list[str]:
    """The manifests among the names in a folder, sorted; empty when it is no shards folder."""
    return sorted(name for name in names if name.startswith("manifest") and _MANIFEST.fullmatch(name))


def manifest_of_shard(name: str) -> str | None:
    """Name of the manifest that lists a shard of this name; None when no writer gives such a name."""
    found = _SHARD.fullmatch(name)
    if found is None:
        return None
    return f"manifest-r{found[1]}.jsonl" if found[1] else "manifest.jsonl"
