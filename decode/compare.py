"""Several checkpoints side by side: each evaluated with the same settings, then their acceptance compared by prompt."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_kit.acceptance import AR, CHAIN, paired_difference
from dflash_kit.errors import KitError

from .checkpoints import NamedCheckpoint
from .files import write_whole
from .kept import keeping
from .live import method_label
from .report import REPORT_NAME
from .results import Method, PromptResult, read_results
from .settings import EvalConfig

COMPARISON_NAME, COMPARISON_PAGE = "compare.json", "compare.html"
OWN_FILES = {COMPARISON_NAME, COMPARISON_PAGE}
NUMBERS = (
    "prompts",
    "rounds",
    "acceptance_length_pooled",
    "acceptance_length_pooled_ci95",
    "acceptance_length_per_prompt",
    "position_rates",
    "tokens_per_s",
    "speedup",
)
DIFFERENCE_RULE = (
    "Δ: difference of the pooled τ to the first checkpoint, over the prompts that both answered; its 95 % interval "
    "resamples prompts, each for both at once, and one without 0 tells two drafters apart."
)
OTHER_TARGETS = " The targets differ here and so do their answers: Δ is of other texts and tells no drafters apart."

Run = Callable[[EvalConfig, str], int]
"""Evaluates one checkpoint: its settings, and what the report calls it; the exit status."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """What one checkpoint's folder holds when its evaluation has ended."""

    checkpoint: NamedCheckpoint
    report: dict[str, Any]
    results: list[PromptResult]


def compare(config: EvalConfig, checkpoints: Sequence[NamedCheckpoint], run: Run) -> int:
    """Evaluate every checkpoint into OUT/NAME and write the comparison to OUT; the largest exit status.

    Raises:
        KitError: OUT holds something else; a checkpoint cannot be evaluated.
    """
    if config.push_to_hub is not None:
        raise KitError("push_to_hub with several checkpoints: publish one of them by itself")
    if config.doctor:
        raise KitError("doctor with several checkpoints: examine one of them by itself")
    out = config.out_folder
    require_own_folder(out, [checkpoint.name for checkpoint in checkpoints])
    status = 0
    with keeping():
        for number, checkpoint in enumerate(checkpoints, start=1):
            print(f"checkpoint   {number} of {len(checkpoints)}: {checkpoint.name}", flush=True)
            one = replace(config, ckpt=str(checkpoint.folder), out=str(out / checkpoint.name))
            status = max(status, run(one, checkpoint.given))
    if config.dry_run:
        return status
    evaluated = [read_evaluated(checkpoint, out / checkpoint.name) for checkpoint in checkpoints]
    comparison = build_comparison(evaluated)
    write_comparison(out, comparison)
    return status


def require_own_folder(out: Path, names: Sequence[str]) -> None:
    """Refuse a folder that holds anything but this comparison's own reports.

    Raises:
        KitError: naming what is there.
    """
    if out.is_file():
        raise KitError(f"out is {out}, a file; name a folder")
    others = sorted({entry.name for entry in out.iterdir()} - OWN_FILES - set(names)) if out.is_dir() else []
    if others:
        raise KitError(
            f"report folder {out} holds {', '.join(others[:3])}, which is no part of the comparison of {', '.join(names)}; "
            "name a new folder with --out"
        )


def read_evaluated(checkpoint: NamedCheckpoint, folder: Path) -> Evaluated:
    """Report and results of one finished evaluation.

    Raises:
        KitError: there is no report that can be read.
    """
    try:
        report = json.loads((folder / REPORT_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KitError(f"{folder / REPORT_NAME} cannot be read ({error}), so nothing can be compared") from error
    return Evaluated(checkpoint=checkpoint, report=report, results=read_results(folder))


def build_comparison(evaluated: Sequence[Evaluated]) -> dict[str, Any]:
    """Numbers of every benchmark and method, the checkpoints beside each other; the first is the base of differences."""
    base = evaluated[0]
    rows: list[dict[str, Any]] = []
    for benchmark, label in _rows(evaluated):
        columns: dict[str, Any] = {}
        for one in evaluated:
            entry = _entry(one.report, benchmark, label)
            if entry is None:
                columns[one.checkpoint.name] = None
                continue
            numbers = {name: entry.get(name) for name in NUMBERS}
            numbers["ms_per_round"] = (entry.get("ms_per_round") or {}).get("total")
            if one is not base:
                found = paired_difference(_logs(one, benchmark, label), _logs(base, benchmark, label))
                numbers["difference"] = None if found is None or label == AR else found.to_dict()
            columns[one.checkpoint.name] = numbers
        rows.append({"benchmark": benchmark, "method": label, "checkpoints": columns})
    return {
        "base": base.checkpoint.name,
        "checkpoints": [
            {
                "name": one.checkpoint.name,
                "checkpoint": one.report["checkpoint"],
                "target": one.report["target"],
                "block_size": one.report.get("run", {}).get("block size"),
                "warnings": one.report.get("warnings", []),
            }
            for one in evaluated
        ],
        "run": base.report.get("run", {}),
        "settings": base.report.get("settings", {}),
        "differences": DIFFERENCE_RULE
        + (OTHER_TARGETS if len({one.report["target"] for one in evaluated}) > 1 else ""),
        "results": rows,
    }


def write_comparison(out: Path, comparison: dict[str, Any]) -> None:
    """Write compare.json and compare.html, and print the table."""
    from .compare_page import print_comparison, render_comparison

    try:
        write_whole(out / COMPARISON_NAME, json.dumps(comparison, indent=2) + "\n")
        write_whole(out / COMPARISON_PAGE, render_comparison(comparison))
    except OSError as error:
        raise KitError(f"comparison in {out} cannot be written: {error}; mend that and run again") from error
    print_comparison(comparison)
    print(f"comparison: {out / COMPARISON_NAME} and {COMPARISON_PAGE} beside it")


def row_label(method: Method) -> str:
    """A method's name across checkpoints: the chain is one row whatever the block size."""
    return CHAIN if method[0] == CHAIN else method_label(method)


def _rows(evaluated: Sequence[Evaluated]) -> list[tuple[str, str]]:
    """Benchmarks and methods that any of them has, in the order of the reports."""
    found: dict[tuple[str, str], None] = {}
    for one in evaluated:
        for entry in one.report["results"]:
            found.setdefault((entry["benchmark"], row_label((entry["method"], entry["budget"]))))
    benchmarks = list(dict.fromkeys(benchmark for benchmark, _ in found))
    return sorted(found, key=lambda row: benchmarks.index(row[0]))


def _entry(report: dict[str, Any], benchmark: str, label: str) -> dict[str, Any] | None:
    for entry in report["results"]:
        if entry["benchmark"] == benchmark and row_label((entry["method"], entry["budget"])) == label:
            return dict(entry)
    return None


def _logs(one: Evaluated, benchmark: str, label: str) -> list[Any]:
    return [
        response.log
        for result in one.results
        if result.benchmark == benchmark
        for response in result.responses
        if row_label(response.method) == label
    ]
