"""Verification of a shards folder: every byte and every row, not just what training happens to read."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from .errors import KitError
from .shard_checks import check_row
from .shard_entry import ShardEntry
from .shard_file import ShardFile
from .shard_format import INCOMPLETE_SUFFIX, SHARD_GLOB, ShardsHeader, file_checksum, row_checksum
from .shard_journal import is_being_written
from .shard_manifest import Manifests, read_manifests
from .shard_share import Share, manifest_of_shard
from .shard_store import is_url
from .spool import read_consumed


@dataclass(slots=True)
class ShardsReport:
    """What a verification found."""

    shards: int = 0
    """Shards in the manifest that are there."""
    rows: int = 0
    """Rows in them."""
    tokens: int = 0
    """Tokens with states."""
    bytes: int = 0
    """Size of the shards."""
    consumed_shards: int = 0
    """Shards of a spool that the trainer has used and deleted; nothing of them is left to be checked."""
    consumed_rows: int = 0
    """Rows in them."""
    problems: list[str] = field(default_factory=list)
    """One line for each fault; empty when everything is sound."""
    notes: list[str] = field(default_factory=list)
    """Leftovers of a killed run, which the next run mends, and what a writer at work has not journalled yet."""

    @property
    def ok(self) -> bool:
        """No problem found."""
        return not self.problems


def verify_shards(folder: str | Path, share: Share | None = None) -> ShardsReport:
    """Re-read a folder: checksums, counts, lengths, unique ids, and each row's hidden states.

    Args:
        folder: a shards folder, or an object store's URL.
        share: read the shards of this share's process only, while others are still at work; None: of all.

    Returns:
        The report; faults of single shards are listed in it, not raised.

    Raises:
        KitError: not a shards folder, or its manifests cannot be read or do not agree.
    """
    if is_url(folder):
        from .shard_remote import verify_store  # which builds on this module

        return verify_store(str(folder), share)
    folder = Path(folder)
    manifests = read_manifests(folder)
    report = verify_entries(folder, manifests, share, lambda entry: nullcontext(folder / entry.file))
    if share is None:
        _find_losses(folder, manifests, report)
    return report


def verify_entries(
    folder: Path | str,
    manifests: Manifests,
    share: Share | None,
    opened: Callable[[ShardEntry], AbstractContextManager[Path]],
) -> ShardsReport:
    """What the journalled shards hold, and whether all rows are there; ``opened`` gives a shard's file while it is read."""
    if manifests.header is None:
        raise KitError(f"{folder} has a manifest without a header")
    shards = manifests.shards if share is None else manifests.of(share.manifest_name).shards
    report = ShardsReport()
    repetition = manifests.repetition()
    if repetition is not None:
        report.problems.append(repetition)
    for entry in shards:
        if entry.file in manifests.consumed:
            _count_consumed(report, entry)
            continue
        try:
            with opened(entry) as path:
                _verify_shard(path, entry, manifests.header)
        except KitError as error:
            if isinstance(folder, Path) and entry.file in read_consumed(folder):  # by a trainer that is at work
                _count_consumed(report, entry)
                continue
            report.problems.append(f"{entry.file}: {error}")
        report.shards += 1
        report.rows += entry.rows
        report.tokens += entry.tokens
        report.bytes += entry.bytes
    return report


def _count_consumed(report: ShardsReport, entry: ShardEntry) -> None:
    report.consumed_shards += 1
    report.consumed_rows += entry.rows


def _find_losses(folder: Path, manifests: Manifests, report: ShardsReport) -> None:
    """Shards that no manifest lists, and rows that a finished run had and that are listed no more."""
    listed = {entry.file for entry in manifests.shards}
    for path in sorted(folder.glob(SHARD_GLOB)):
        if path.name in listed:
            continue
        manifest = manifest_of_shard(path.name)
        if manifest is not None and is_being_written(folder / manifest):
            report.notes.append(f"{path.name}: not in {manifest} yet, which is being written")
        else:
            report.problems.append(
                f"{path.name}: not in a manifest, so its rows are not read; run the extraction again, which takes over "
                "what a killed run left, or move the file away"
            )
    find_lost_rows(manifests, report)
    unfinished = sorted(folder.glob(SHARD_GLOB + INCOMPLETE_SUFFIX))
    report.notes += [f"{path.name}: unfinished; the next run of the extraction mends it" for path in unfinished]


def find_lost_rows(manifests: Manifests, report: ShardsReport) -> None:
    """Rows that a finished run had and that no manifest lists any more."""
    num_rows = report.rows + report.consumed_rows
    if num_rows < manifests.least_rows:
        report.problems.append(
            f"{num_rows} rows are listed, but the last run that completed had {manifests.least_rows}; restore the "
            "manifest from a copy or run the extraction again"
        )


def _verify_shard(path: Path, entry: ShardEntry, header: ShardsHeader) -> None:
    shard = ShardFile(path)
    damaged_rows = []
    shard.header.require_compatible(header, "its schema")
    if (shard.num_rows, shard.num_bytes) != (entry.rows, entry.bytes):
        raise KitError(
            f"{shard.num_rows} rows and {shard.num_bytes} bytes; the manifest says {entry.rows} and {entry.bytes}"
        )
    for index in range(shard.num_rows):
        row, checksum = shard.row(index)
        if row.id != entry.ids[index] or len(row.input_ids) != entry.lengths[index]:
            raise KitError(f"row {index} is {row.id!r} with {len(row.input_ids)} tokens, unlike the manifest")
        if row_checksum(header.checksum, row) != checksum:
            damaged_rows.append(row.id)
        else:
            check_row(row, header)
    if damaged_rows:
        raise KitError(f"checksum wrong for rows {damaged_rows}")
    if file_checksum(header.checksum, path) != entry.checksum:
        raise KitError("checksum of the file is wrong, though each row is sound")
