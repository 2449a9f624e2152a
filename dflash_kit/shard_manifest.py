"""The manifests of a shards folder, one a writer, and what they say together.

One JSON object a line. Kinds: ``header`` (the first line), ``split`` (into how many shares the samples are split from here
on), ``shard`` (one finished shard), ``parity_passed`` and ``parity_failed`` (one check of an engine's states),
``summary`` (one run), ``spool`` and ``end`` (an extraction into a spool begins, and has written every row).
Readers take all manifests of a folder, in the order of their names; a writer appends to its own (``shard_journal``).
"""

import gc
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import KitError
from .shard_entry import ShardEntry, check_header, check_summary, count_in
from .shard_format import ShardsHeader
from .shard_share import Share, manifest_names
from .spool import SpoolRecord, read_consumed, spool_record


@dataclass(slots=True)
class Manifest:
    """What the complete lines of one manifest say."""

    name: str
    """File name inside the folder."""
    header: ShardsHeader | None = None
    """None: its writer was killed before the first line was complete."""
    world_size: int | None = None
    """Into how many shares its writer split the samples when it last began; None: it did not get as far as that."""
    shards: list[ShardEntry] = field(default_factory=list)
    """Finished shards, in the order in which they were finished."""
    summary: dict[str, Any] | None = None
    """Of the writer's last run that completed."""
    parity_failure: str | None = None
    """Sample, layer and difference of a parity check that failed; nothing that follows lifts it."""
    has_parity: bool = False
    """Whether a parity check was passed."""
    spool: SpoolRecord | None = None
    """What its writer said of the spool when it last began; None: shards that stay."""
    is_ended: bool = False
    """Whether a spool's writer has finished every row."""
    whole_bytes: int = 0
    """Length of the complete lines; whatever follows is a torn line."""


@dataclass(slots=True)
class Manifests:
    """The manifests of a folder, one a writer, sorted by name. The headers of those with shards agree."""

    parts: list[Manifest] = field(default_factory=list)
    consumed: set[str] = field(default_factory=set)
    """Shards of a spool that the trainer has used: their rows count as done, their files may be gone."""

    @property
    def header(self) -> ShardsHeader | None:
        """Header of the shards, or of those to come; None when no writer got as far as that."""
        known = [part for part in self.parts if part.header is not None]
        return next((part.header for part in known if part.shards), known[0].header if known else None)

    @property
    def shards(self) -> list[ShardEntry]:
        """Finished shards of all writers."""
        return [entry for part in self.parts for entry in part.shards]

    @property
    def summary(self) -> dict[str, Any] | None:
        """Summary of the last run that completed, added up over its writers.

        None when none did, or when runs of different splits did (their counts would overlap).
        """
        found = [part.summary for part in self.parts if part.summary is not None]
        if not found or len({summary.get("world_size", 1) for summary in found}) > 1:
            return None
        if len(found) == 1:
            return found[0]
        dropped: Counter[str] = Counter()
        for summary in found:
            dropped.update(summary.get("dropped", {}))
        asked = sum(summary.get("asked", 0) for summary in found)
        return {"asked": asked, "dropped": dict(dropped), "world_size": found[0]["world_size"]}

    @property
    def least_rows(self) -> int:
        """Rows that there must be at least: those that the last whole runs of one split asked for and did not drop."""
        rows: Counter[int] = Counter()
        for part in self.parts:
            if part.summary is not None:
                num_dropped = sum(part.summary.get("dropped", {}).values())
                rows[part.summary.get("world_size", 1)] += part.summary.get("asked", 0) - num_dropped
        return max(rows.values(), default=0)

    @property
    def has_parity(self) -> bool:
        """Whether some rows of the folder have passed a parity check."""
        return any(part.has_parity for part in self.parts)

    def of(self, name: str) -> Manifest:
        """The manifest of this name; an empty one when it is not there."""
        return next((part for part in self.parts if part.name == name), Manifest(name))

    def repetition(self) -> str | None:
        """Where an id stands twice, in words; None when each stands once."""
        ids = [row_id for part in self.parts for entry in part.shards for row_id in entry.ids]
        if len(set(ids)) == len(ids):
            return None
        seen: dict[str, str] = {}
        for part in self.parts:
            for entry in part.shards:
                for row_id in entry.ids:
                    place = f"{entry.file} ({part.name})"
                    if row_id in seen:
                        return f"sample {row_id} is in {seen[row_id]} and again in {place}"
                    seen[row_id] = place
        raise AssertionError("a set is smaller than a list without repetitions")


def read_manifests(folder: Path) -> Manifests:
    """Read all manifests of a folder; nothing is changed. One without a complete line counts as empty.

    Raises:
        KitError: no manifest, a damaged one, two of different headers, or shards that failed a parity check.
    """
    with without_garbage_collection():
        # Used shards last: what is in no manifest yet cannot have been used.
        parts = [read_manifest(folder / name) for name in _names(folder)]
        consumed = read_consumed(folder)
    return join_manifests(folder, parts, consumed)


def join_manifests(folder: Path | str, parts: list[Manifest], consumed: set[str] | None = None) -> Manifests:
    """What manifests of one folder (or of one object store's URL) say together; refuses as ``read_manifests`` does."""
    manifests = Manifests(parts, consumed or set())
    # One without shards is what a start that failed has left, or what a writer has just begun (which looks at the others).
    require_agreement(folder, [(part.name, part.header) for part in manifests.parts if part.shards])
    failed = next((part for part in manifests.parts if part.parity_failure is not None), None)
    if failed is not None:
        raise KitError(
            f"the shards in {folder} failed their parity check ({failed.parity_failure}; {failed.name}) and are not fit to "
            f"train on: delete {folder} and extract again"
        )
    return manifests


def read_manifest(path: Path) -> Manifest:
    """Parse the complete lines; a torn last line (killed while journalling) is left out, nothing is changed.

    Raises:
        KitError: a complete line that is not one of ours.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise KitError(f"{path} cannot be read: {error.strerror}") from error
    return parse_manifest(data, path.name, str(path))


def parse_manifest(data: bytes, name: str, path: str) -> Manifest:
    """What the complete lines of a manifest's text say; ``path`` names it in messages."""
    manifest = Manifest(name, whole_bytes=data.rfind(b"\n") + 1)
    for number, line in enumerate(data[: manifest.whole_bytes].splitlines(), start=1):
        try:
            take_line(manifest, json.loads(str(line, "utf-8")), number)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise KitError(f"{path} line {number} is damaged ({error}); restore the manifest from a copy") from error
    return manifest


def read_headers(folder: Path, names: list[str]) -> list[tuple[str, ShardsHeader | None]]:
    """(manifest's name, header) from the first lines alone; None where a first line is not complete."""
    return [(name, _read_first_line(folder / name)) for name in names]


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Parsing makes objects by the million, none of them garbage; looking for some takes longer than parsing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _names(folder: Path) -> list[str]:
    try:
        names = manifest_names(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except OSError as error:
        raise KitError(f"{folder} cannot be read: {error.strerror}") from error
    if not names:
        why = (
            "it has no manifest.jsonl" if folder.is_dir() else "it is a file" if folder.exists() else "nothing is there"
        )
        raise KitError(f"{folder} is not a shards folder: {why}; name the folder that extraction wrote")
    return names


def require_agreement(folder: Path | str, headers: list[tuple[str, ShardsHeader | None]]) -> None:
    """Refuse shards of two kinds in one folder; a manifest whose first line is not complete agrees with all."""
    known = [(name, header) for name, header in headers if header is not None]
    for name, header in known[1:]:
        difference = known[0][1].difference(header)
        if difference is not None:
            field_name, mine, theirs = difference
            raise KitError(
                f"{folder} holds shards of two kinds: {field_name} is {mine} in {known[0][0]} but {theirs} in {name}; "
                "extract each kind into a folder of its own"
            )


def _read_first_line(path: Path) -> ShardsHeader | None:
    try:
        with path.open("rb") as file:
            line = file.readline()
        if not line.endswith(b"\n"):
            return None
        values = json.loads(line)
        if values.pop("kind") != "header":
            raise ValueError("the first line is no header")
        return ShardsHeader.from_dict(check_header(values))
    except OSError as error:
        raise KitError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise KitError(f"{path} line 1 is damaged ({error}); restore the manifest from a copy") from error


def take_line(manifest: Manifest, line: dict[str, Any], number: int) -> None:
    """Take one complete line into a manifest; what it raises stands for a damaged line."""
    kind = line.pop("kind")
    if (kind == "header") != (number == 1):
        raise ValueError(f"kind {kind!r} where the {'header' if number == 1 else 'journal'} belongs")
    if kind == "header":
        manifest.header = ShardsHeader.from_dict(check_header(line))
        manifest.world_size = 1 if manifest.name == Share().manifest_name else None
    elif kind == "shard":
        manifest.shards.append(ShardEntry.from_dict(line))
    elif kind == "summary":
        manifest.summary = check_summary(line)
    elif kind == "split":
        manifest.world_size = count_in(line, "world_size")
    elif kind == "parity_failed":
        manifest.parity_failure = f"sample {line['sample']}, layer {line['layer']}, difference {line['difference']}"
    elif kind == "parity_passed":
        manifest.has_parity = True
    elif kind == "spool":
        manifest.spool, manifest.is_ended = spool_record(line), False
    elif kind == "end":
        manifest.is_ended = True
    else:
        raise ValueError(f"unknown kind {kind!r}")
