"""Re-check a shards folder: ``python -m extract.verify DIR``. Exit status 0 only when every row is sound."""

import json
import sys
from dataclasses import asdict

from dflash_kit.errors import KitError, run_cli
from dflash_kit.shards import ShardsReport, verify_shards

__all__ = ["main", "print_report", "verify_shards"]


HELP = """usage: python -m extract.verify DIR

Re-read a shards folder: every byte of every shard and every row against its checksum, the hidden states (finite, not
constant), the counts of the manifests, ids that stand twice, shards that no manifest lists, rows that a finished run had
and that are gone. Nothing is changed.

DIR  a shards folder, or an object store's URL, as written by extract/dump.py --out DIR

The last line of stdout is one JSON object. Exit status: 0 when everything is sound, 2 otherwise, with one line on stderr
that names what is wrong."""


def main(argv: list[str] | None = None) -> int:
    """Verify the folder named on the command line."""
    arguments = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(arguments):
        print(HELP)
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise KitError("one argument is needed, a shards folder: python -m extract.verify DIR")
    report = verify_shards(arguments[0])
    print_report(report)
    print(json.dumps(asdict(report)))
    return 0


def print_report(report: ShardsReport) -> None:
    """Print what was checked, and raise ``KitError`` when something is wrong."""
    for note in report.notes:
        print(f"note     {note}")
    print(f"verified {report.shards} shards, {report.rows} rows, {report.tokens:,} tokens, {report.bytes:,} bytes")
    if report.consumed_shards:
        print(
            f"used     {report.consumed_shards} shards with {report.consumed_rows} rows by the trainer of this spool; "
            "they are gone"
        )
    if report.problems:
        raise KitError(f"{len(report.problems)} problems: " + " | ".join(report.problems))


if __name__ == "__main__":
    sys.exit(run_cli(main))
