"""Following a spool while it is written: which shards are finished by now, and whether more will come.

Manifests are read on from where the last look ended, so that a look costs what is new.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from .errors import KitError
from .shard_entry import ShardEntry
from .shard_format import ShardsHeader
from .shard_journal import is_being_written
from .shard_manifest import Manifest, require_agreement, take_line
from .shard_share import manifest_names
from .spool import has_extractor, read_consumed


class SpoolFollower:
    """Looks at a spool again and again; changes nothing.

    Args:
        folder: the spool, which may not be there yet.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._parts: dict[str, Manifest] = {}
        self._num_lines: dict[str, int] = {}

    @property
    def header(self) -> ShardsHeader | None:
        """Header of the shards; None before an extractor has begun."""
        return next((part.header for part in self._parts.values() if part.header is not None), None)

    @property
    def is_spool(self) -> bool:
        """Whether an extractor has said that it is."""
        return any(part.spool is not None for part in self._parts.values())

    @property
    def limit_bytes(self) -> int:
        """Bytes of all shards at most."""
        return max((part.spool.limit_bytes for part in self._parts.values() if part.spool is not None), default=0)

    @property
    def epochs(self) -> int:
        """How often each sample comes."""
        return max((part.spool.epochs for part in self._parts.values() if part.spool is not None), default=1)

    @property
    def total_rows(self) -> int:
        """Rows over all epochs; an estimate as long as not all extractors of a split have begun."""
        sums = []
        for world_size, parts in self._splits():
            rows = [part.spool.rows for part in parts if part.spool is not None]
            if rows:
                sums.append(sum(rows) * world_size // len(rows))
        return max(sums, default=0)

    @property
    def is_ended(self) -> bool:
        """Whether every extractor of a split has written its end, and no other split has announced more rows.

        A split that was resumed by another number of processes, with more epochs, has its end in the manifests still.
        """
        rows = {
            world_size: sum(part.spool.rows for part in parts if part.spool) for world_size, parts in self._splits()
        }
        return any(
            len(parts) == world_size and all(part.is_ended for part in parts) and rows[world_size] == max(rows.values())
            for world_size, parts in self._splits()
        )

    def is_alive(self) -> bool:
        """Whether an extractor lives: a driver, or an engine that still writes."""
        return has_extractor(self.folder) or any(is_being_written(self.folder / name) for name in self._parts)

    def look(self) -> list[ShardEntry]:
        """Shards that were finished since the last look, in the order of each manifest, without used ones.

        Raises:
            KitError: a damaged manifest, two headers, or shards that failed their parity check.
        """
        try:
            names = manifest_names([path.name for path in self.folder.iterdir()])
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = [entry for name in names for entry in self._read_on(name)]
        known = [(name, part.header) for name, part in self._parts.items() if part.spool is not None]
        require_agreement(self.folder, known)
        for name, part in self._parts.items():
            if part.parity_failure is not None:
                raise KitError(
                    f"the shards in {self.folder} failed their parity check ({part.parity_failure}; {name}): what was "
                    f"trained on them is not fit for use; delete {self.folder} and extract again"
                )
        used = read_consumed(self.folder) if found else set()
        return [entry for entry in found if entry.file not in used]

    def _read_on(self, name: str) -> list[ShardEntry]:
        path, part = self.folder / name, self._parts.get(name, Manifest(name))
        try:
            if path.stat().st_size < part.whole_bytes:  # a start that failed was begun anew
                part = Manifest(name)
            with path.open("rb") as file:
                file.seek(part.whole_bytes)
                data = file.read()
        except OSError as error:
            raise KitError(f"{path} cannot be read: {error.strerror}") from error
        if part.whole_bytes == 0:
            self._num_lines[name] = 0
        self._parts[name] = part
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole.splitlines():
            self._num_lines[name] += 1
            try:
                take_line(part, json.loads(str(line, "utf-8")), self._num_lines[name])
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise KitError(
                    f"{path} line {self._num_lines[name]} is damaged ({error}); restore the manifest from a copy"
                ) from error
        part.whole_bytes += len(whole)
        found, part.shards = part.shards, []
        return found

    def _splits(self) -> Iterator[tuple[int, list[Manifest]]]:
        """Manifests of one split together: a run may have been resumed by another number of processes."""
        splits: dict[int, list[Manifest]] = defaultdict(list)
        for part in self._parts.values():
            if part.world_size is not None and part.spool is not None:
                splits[part.world_size].append(part)
        yield from splits.items()
