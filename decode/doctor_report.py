"""The doctor's report: a table on stdout and doctor.json."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dflash_kit.acceptance import Acceptance
from dflash_kit.errors import KitError
from dflash_kit.provenance import collect_provenance

from .diagnosis import LEFT_OUT, Diagnosis, verdict_of
from .doctor_race import Measured
from .report import LOG_WIDTH
from .settings import EvalConfig

if TYPE_CHECKING:
    from .doctor import Case

DOCTOR_NAME = "doctor.json"
RULE = (
    "Chain acceptance, pooled over prompts; the gain is over the drafter as configured on the same tokens, with a 99 % percentile "
    "interval (bootstrap over prompts). Alternatives that are behind on the first tokens of each answer are not taken further."
)


def build_doctor_report(
    config: EvalConfig,
    case: "Case",
    device: str,
    dtype: str,
    configured: Acceptance,
    measured: Sequence[Measured],
    diagnosis: Diagnosis,
    argv: list[str] | None,
) -> dict[str, Any]:
    """All that was measured, as plain values."""
    length = configured.acceptance_length_pooled or 0.0
    return {
        "target": case.inputs.target,
        "checkpoint": config.ckpt,
        "verdict": {
            "status": diagnosis.status,
            "text": diagnosis.text,
            "advice": diagnosis.advice,
            "cause": None if diagnosis.status != "cause" else _cause(diagnosis, length),
        },
        "as_configured": configured.to_dict(),
        "recorded_acceptance_length": case.recorded,
        "rule": RULE,
        "alternatives": [_alternative(m, diagnosis, length) for m in measured],
        "notes": case.notes,
        "not_measurable": case.not_measurable,
        "run": {
            "device": device,
            "dtype": dtype,
            "prompts": case.names,
            "max_new_tokens": case.max_new_tokens,
            "enable_thinking": config.enable_thinking,
        },
        "provenance": collect_provenance(argv),
    }


def _cause(diagnosis: Diagnosis, length: float) -> dict[str, str]:
    best = diagnosis.best
    if best is not None and verdict_of(best, diagnosis, length) == "explains it":
        return {"family": best.hypothesis.family, "name": best.hypothesis.name}
    return {"family": "target", "name": "another target than the drafter was trained with"}


def _alternative(measured: Measured, diagnosis: Diagnosis, length: float) -> dict[str, Any]:
    gain = measured.gain
    return {
        "family": measured.hypothesis.family,
        "name": measured.hypothesis.name,
        "advice": measured.hypothesis.advice,
        "tokens_per_answer": measured.tokens,
        "rounds": measured.acceptance.rounds,
        "acceptance_length_pooled": measured.acceptance.acceptance_length_pooled,
        "gain": None if gain is None else gain.difference,
        "ci99": None if gain is None else gain.difference_ci99,
        "confidence": None if gain is None else gain.confidence,
        "verdict": verdict_of(measured, diagnosis, length),
    }


def write_doctor_report(folder: Path, report: dict[str, Any]) -> None:
    """Write doctor.json, complete or not at all.

    Raises:
        KitError: it cannot be written.
    """
    partial = folder / (DOCTOR_NAME + ".incomplete")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, folder / DOCTOR_NAME)
    except OSError as error:
        raise KitError(f"report in {folder} cannot be written: {error}; name another folder with --out") from error


def print_doctor_report(report: dict[str, Any], console: Console | None = None) -> None:
    """The table, what cannot be measured, and the verdict, on stdout."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=LOG_WIDTH)
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False)
    for heading in ("hypothesis", "change", "tokens", "τ", "gain", "99 %", "verdict"):
        is_number = heading in ("tokens", "τ", "gain", "99 %")
        table.add_column(heading, justify="right" if is_number else "left", overflow="fold", no_wrap=is_number)
    configured = report["as_configured"]
    tokens = str(report["run"]["max_new_tokens"])
    table.add_row("–", "as configured", tokens, _number(configured["acceptance_length_pooled"]), "", "", "")
    shown = _worth_showing(report["alternatives"])
    for entry in shown:
        table.add_row(*_cells(entry), style="bold" if entry["verdict"] == "explains it" else None)
    console.print(table)
    num_others = len(report["alternatives"]) - len(shown)
    if num_others:
        console.print(f"{num_others} more alternatives, behind the best of their kind early, are in {DOCTOR_NAME}")
    for kind, lines in (("note", report["notes"]), ("not measurable", report["not_measurable"])):
        for line in lines:
            console.print(f"{kind}: {escape(line)}", highlight=False, soft_wrap=True)
    console.print(f"verdict: {escape(report['verdict']['text'])}", highlight=False, soft_wrap=True)
    console.print(f"what to do: {escape(report['verdict']['advice'])}", highlight=False, soft_wrap=True)


def _worth_showing(alternatives: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Alternatives on whole answers, and the best of every other kind; they come sorted."""
    seen: set[str] = set()
    shown = []
    for entry in alternatives:
        if entry["verdict"] != LEFT_OUT or entry["family"] not in seen:
            shown.append(entry)
        seen.add(entry["family"])
    return shown


def _cells(entry: dict[str, Any]) -> list[str]:
    interval = "" if entry["ci99"] is None else f"{entry['ci99'][0]:+.2f} … {entry['ci99'][1]:+.2f}"
    gain = "" if entry["gain"] is None else f"{entry['gain']:+.2f}"
    length = _number(entry["acceptance_length_pooled"])
    names = [escape(entry["family"]), escape(entry["name"])]
    return [*names, str(entry["tokens_per_answer"]), length, gain, interval, entry["verdict"]]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
