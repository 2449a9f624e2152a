"""report.html: one page that needs no other file and no network."""

from html import escape
from typing import Any

from dflash_kit.acceptance import AR

from .auto_report import budget_lines, render_auto
from .drawn_tree import tree_html
from .examples import examples_html
from .live import method_label
from .page import cards, facts, figure, grid, note, page, section, table
from .plots import LEAST_ROUNDS, by_benchmark, plot_budgets, plot_depths, plot_positions, plot_speedups, plot_stages
from .report import CUT_RULE, SPEED_RULE, divergence_lines, table_row

HEADINGS = (
    "benchmark",
    "method",
    "prompts",
    "rounds",
    "τ pooled",
    "95 % interval",
    "τ per prompt",
    "ms/round",
    "tokens/s",
    "speed-up",
    "differing tokens",
)
BUDGET_CAPTION = "DDTree, pooled mean with its 95 % bootstrap interval over prompts; dashed: the chain."
DEPTH_CAPTION = (
    "By position: share of all rounds that accepted the token there; the shares add up to τ − 1. By depth: of the rounds "
    f"that accepted everything above it, the share that accepts there, too, as far as {LEAST_ROUNDS} rounds came."
)


def render_page(report: dict[str, Any]) -> str:
    """The whole page as text."""
    results = report["results"]
    examples, tree = examples_html(report.get("examples") or []), tree_html(report.get("tree"))
    sections = [("results", "Results"), ("budgets", "Budgets"), ("benchmarks", "By benchmark")]
    sections += [("examples", "Examples")] if examples else []
    sections += [("tree", "One tree")] if tree else []
    parts = [
        *(f'<p class="warning">Warning: {escape(text)}</p>' for text in report.get("warnings", ())),
        cards(_best(results)),
        facts(report.get("run", {}).items()),
        section("results", "Results"),
        _table(results),
        note(CUT_RULE),
        note(report.get("speeds", SPEED_RULE)) if any(entry["tokens_per_s"] for entry in results) else "",
        *(note(line) for line in [*budget_lines(report), *divergence_lines(report)]),
        render_auto(report),
        figure(plot_speedups(results), "Speed-up over the same engine's autoregressive loop."),
        section("budgets", "Acceptance length and speed by budget"),
        grid(
            [
                figure(plot_budgets(results, "acceptance_length_pooled", "acceptance length τ"), BUDGET_CAPTION),
                figure(
                    plot_budgets(results, "tokens_per_s", "tokens per second"), "Tokens per second; dashed: the chain."
                ),
            ]
        ),
        section("benchmarks", "By benchmark"),
        note(DEPTH_CAPTION),
        *(_benchmark(name, entries) for name, entries in by_benchmark(results).items()),
        section("examples", "Examples") + examples if examples else "",
        section("tree", "One tree of the run") + tree if tree else "",
    ]
    return page(str(report["checkpoint"]), f"A drafter for {report['target']}", [p for p in parts if p], sections)


def _best(results: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The longest rounds, or the fastest method where it was timed, of each benchmark."""
    found = []
    for benchmark, entries in by_benchmark(results).items():
        drafted = [e for e in entries if e["method"] != AR and e["acceptance_length_pooled"] is not None]
        if not drafted:
            continue
        best = max(drafted, key=lambda e: (e["speedup"] or 0.0, e["acceptance_length_pooled"]))
        label = method_label((best["method"], best["budget"]))
        length = f"τ {best['acceptance_length_pooled']:.2f}"
        value = length if best["speedup"] is None else f"{best['speedup']:.2f}×"
        words = label if best["speedup"] is None else f"{label}, {length}"
        found.append((value, f"{benchmark}: {words}"))
    return found


def _benchmark(name: str, entries: list[dict[str, Any]]) -> str:
    stages = plot_stages(entries, name)
    figures = [figure(plot_positions(entries, name), ""), figure(plot_depths(entries, name), "")]
    if stages:
        figures.append(figure(stages, "Time of a round by stage."))
    return f"<h3>{escape(name)}</h3>{grid(figures, three=True)}"


def _table(results: list[dict[str, Any]]) -> str:
    rows, last = [], None
    for entry in results:
        rows.append(table_row(entry, first=entry["benchmark"] != last))
        last = entry["benchmark"]
    return table(HEADINGS, rows, text_columns=2)
