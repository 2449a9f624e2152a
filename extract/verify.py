"""Re-check a shards folder: ``python -m extract.verify DIR``. Exit status 0 only when every row is sound."""

import json
import sys
from dataclasses import asdict

from dflash_kit.errors import KitError, run_cli
from dflash_kit.shards import ShardsReport, verify_shards

__all__ = ["main", "print_report", "verify_shards"]


def main(argv: list[str] | None = None) -> int:
    """Verify the folder named on the command line."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise KitError("one argument is needed, a shards folder: python -m extract.verify DIR")
    report = verify_shards(arguments[0])
    print_report(report)
    print(json.dumps(asdict(report)))
    return 0


def print_report(report: ShardsReport) -> None:
    """Print what was checked, and raise ``KitError`` when something is wrong."""
    for note in report.notes:
        print(f"note     {note}; the next run of the extraction mends it")
    print(f"verified {report.shards} shards, {report.rows} rows, {report.tokens:,} tokens, {report.bytes:,} bytes")
    if report.problems:
        raise KitError(f"{len(report.problems)} shards are damaged: " + " | ".join(report.problems))


if __name__ == "__main__":
    sys.exit(run_cli(main))
