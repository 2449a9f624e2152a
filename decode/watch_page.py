"""Acceptance over the steps of a training, as a page that is written anew with every checkpoint."""

from html import escape
from typing import Any

from .compare import row_label
from .page import cards, facts, figure, grid, note, page, section, table
from .plots import Point, plot_lines

Values = dict[str, Any]


def render_watch(values: Values) -> str:
    """The whole page as text.

    Args:
        values: what watch.json holds.
    """
    entries = [entry for entry in points(values) if entry.get("results")]
    rows = list(
        dict.fromkeys((r["benchmark"], row_label((r["method"], r["budget"]))) for e in entries for r in e["results"])
    )
    rows = [row for row in rows if row[1] != "ar"]
    benchmarks = list(dict.fromkeys(benchmark for benchmark, _ in rows))
    figures = [
        figure(
            plot_lines(
                {label: _line(entries, name, label) for benchmark, label in rows if benchmark == name},
                f"steps {name}",
                "training step",
                "acceptance length τ",
            ),
            f"{name}: pooled mean with its 95 % interval over prompts.",
        )
        for name in benchmarks
    ]
    missed = values["missed"]
    failed = [entry for entry in values["checkpoints"] if entry["status"] != "evaluated"]
    parts = [
        cards(_numbers(values, entries, rows)),
        f'<p class="warning">{escape(_missed_words(missed))}</p>' if missed else "",
        *(
            f'<p class="warning">Step {entry["step"]} was not evaluated: {escape(entry["reason"])}</p>'
            for entry in failed
        ),
        section("steps", "Acceptance length over training steps"),
        grid(figures) if figures else note("No checkpoint has been evaluated yet."),
        section("table", "All checkpoints"),
        table(["step", *(f"{benchmark} {label}" for benchmark, label in rows)], _table(values, entries, rows)),
        note("The report of each checkpoint is in the folder of its name beside this page."),
        facts([("target", entries[-1]["target"])] if entries else []),
    ]
    return page(values["watched"], "Checkpoints of a training, evaluated as they appear", [p for p in parts if p])


def points(values: Values) -> list[dict[str, Any]]:
    """Checkpoints by step, and the finished drafter where it is one that was not evaluated before."""
    finished = values["finished"] or {}
    more = [finished] if finished.get("results") and finished.get("step") is not None else []
    return sorted([*values["checkpoints"], *more], key=lambda entry: entry["step"])


def _line(entries: list[Values], benchmark: str, label: str) -> list[Point]:
    found: list[Point] = []
    for entry in entries:
        numbers = _find(entry, benchmark, label)
        if numbers is not None and numbers["acceptance_length_pooled"] is not None:
            interval = numbers["acceptance_length_pooled_ci95"]
            found.append((entry["step"], numbers["acceptance_length_pooled"], interval))
    return found


def _find(entry: Values, benchmark: str, label: str) -> Values | None:
    for numbers in entry["results"]:
        if numbers["benchmark"] == benchmark and row_label((numbers["method"], numbers["budget"])) == label:
            return dict(numbers)
    return None


def _numbers(values: Values, entries: list[Values], rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    shown = [(str(len(entries)), "checkpoints evaluated"), (str(len(values["missed"])), "missed")]
    if entries and rows:
        benchmark, label = rows[0]
        line = _line(entries, benchmark, label)
        if line:
            best = max(line, key=lambda point: point[1])
            shown.append((f"{line[-1][1]:.2f}", f"τ now, step {line[-1][0]:g} ({benchmark}, {label})"))
            shown.append((f"{best[1]:.2f}", f"best τ, step {best[0]:g}"))
    finished = values["finished"]
    state = "training goes on" if finished is None else f"finished drafter: step {finished['step']}"
    return [*shown, ("✓" if finished else "…", state)]


def _table(values: Values, entries: list[Values], rows: list[tuple[str, str]]) -> list[list[str]]:
    lines: dict[int, list[str]] = {}
    for entry in entries:
        cells = []
        for benchmark, label in rows:
            numbers = _find(entry, benchmark, label)
            length = None if numbers is None else numbers["acceptance_length_pooled"]
            cells.append("–" if length is None else f"{length:.3f}")
        is_final = values["finished"] is not None and values["finished"]["step"] == entry["step"]
        lines[entry["step"]] = [f"{entry['step']}{' (finished drafter)' if is_final else ''}", *cells]
    for step in values["missed"]:
        lines.setdefault(step, [f"{step} (missed)", *("–" for _ in rows)])
    return [lines[step] for step in sorted(lines)]


def _missed_words(missed: list[int]) -> str:
    return f"Missed: the trainer deleted the checkpoints of steps {', '.join(map(str, missed))} before they could be evaluated."
