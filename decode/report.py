"""The report: numbers by benchmark and method, as a table, as JSON, CSV and LaTeX, and as one HTML page."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dflash_kit.acceptance import AR, Acceptance, require_identity, summarise

from .auto_report import budget_lines, chosen_budgets, mark_best
from .files import write_whole
from .live import method_label
from .report_tables import CSV_NAME, TEX_NAME, csv_text, latex_text
from .results import Method, PromptResult, total_differences

REPORT_NAME, PAGE_NAME = "report.json", "report.html"
LOG_WIDTH = 110
"""Columns of the table where stdout is no terminal."""
CUT_RULE = (
    "A round that EOS or the length limit ends inside the accepted path has no bonus token; it counts whole, with "
    "the draft tokens up to the cut and an acceptance length of num_accepted + 1."
)
SPEED_RULE = (
    "Tokens per second count the tokens after the first over the time of all rounds; prefill is left out for every "
    "method. Speed-up is over the same engine's autoregressive loop."
)

BATCH_RULE = (
    "{} prompts at a time share a round (responses_per_round says how many on average did): milliseconds per round are those "
    "of the whole batch, tokens per second its total throughput, and the speed-up is over autoregressive decoding in such batches."
)


def build_report(
    results: Sequence[PromptResult],
    *,
    methods: Sequence[Method],
    num_draft_tokens: int,
    temperature: float,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """Numbers of every benchmark and method.

    Args:
        results: finished prompts.
        methods: name and budget, the baseline first.
        num_draft_tokens: B - 1.
        temperature: that was decoded at.
        facts: ``target``, ``checkpoint`` and whatever else is worth keeping.
    """
    entries: list[dict[str, Any]] = []
    for benchmark in dict.fromkeys(result.benchmark for result in results):
        of_benchmark = [result for result in results if result.benchmark == benchmark]
        summaries = {method: _summary(of_benchmark, method, num_draft_tokens) for method in methods}
        differing = total_differences(of_benchmark)
        for method, summary in summaries.items():
            differs = differing.get(method_label(method))
            baseline = next((s for m, s in summaries.items() if m[0] == AR), None)
            entries.append(
                {
                    "benchmark": benchmark,
                    "temperature": temperature,
                    "method": method[0],
                    "budget": method[1],
                    **summary.to_dict(),
                    "speedup": summary.speedup_over(baseline) if baseline is not None else None,
                    "differing_tokens": differs,
                    **({} if differs is None else _divergence(of_benchmark, method, differs)),
                    **chosen_budgets(of_benchmark, method),
                }
            )
    mark_best(entries)
    for entry in entries:
        require_identity(entry["acceptance_length_pooled"], entry["position_rates"])
    return {**facts, "cut_rounds": CUT_RULE, "speeds": _speed_rule(facts), "results": entries}


def _speed_rule(facts: dict[str, Any]) -> str:
    batch_size = facts.get("run", {}).get("batch size", 1)
    return SPEED_RULE if batch_size == 1 else f"{SPEED_RULE} {BATCH_RULE.format(batch_size)}"


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Write report.json, report.html, report.csv and report.tex, each complete or not at all."""
    from .report_html import render_page

    write_whole(folder / CSV_NAME, csv_text(report))
    write_whole(folder / TEX_NAME, latex_text(report))
    write_whole(folder / PAGE_NAME, render_page(report))
    write_whole(folder / REPORT_NAME, json.dumps(report, indent=2) + "\n")  # last: where it is, all are


def divergence_lines(report: dict[str, Any]) -> list[str]:
    """For every method that leaves autoregressive decoding: how often, and the largest logit gap of it."""
    lines = []
    for entry in report["results"]:
        worst = entry.get("largest_gap")
        if worst is not None:
            gap = "no logit gap, one of them only ends" if worst["gap"] is None else f"logit gap {worst['gap']:.3g}"
            steps = "" if worst["steps"] is None else f" ({worst['steps']:.3g} rounding steps)"
            lines.append(
                f"{entry['benchmark']} {method_label((entry['method'], entry['budget']))}: "
                f"{entry['diverging_responses']} of {entry['responses']} responses leave the autoregressive one; "
                f"at most {gap}{steps} at the first token that differs, token {worst['position']} of turn "
                f"{worst['turn']} of {worst['prompt_id']}: {worst['token']} instead of {worst['ar_token']}"
            )
    return lines


COLUMNS = ("benchmark", "method", "n", "rounds", "τ", "95 %", "τ/prompt", "ms/round", "tok/s", "speed", "diff")
"""Headings of the table; the page spells them out."""


def print_report(report: dict[str, Any], console: Console | None = None) -> None:
    """The table on stdout."""
    temperature = report["results"][0]["temperature"] if report["results"] else 0
    batch_size = report.get("run", {}).get("batch size", 1)
    at_once = f", batches of {batch_size}" if batch_size > 1 else ""
    title = escape(f"{report['checkpoint']} on {report['target']}, temperature {temperature:g}{at_once}")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("benchmark", "method") else "right", no_wrap=True)
    last = None
    for entry in report["results"]:
        if last not in (None, entry["benchmark"]):
            table.add_row()
        table.add_row(*map(escape, table_row(entry, first=last != entry["benchmark"])))
        last = entry["benchmark"]
    if console is None:
        console = Console()
        if not console.is_terminal:
            console.width = LOG_WIDTH
    widen(console, table)
    console.print(table)
    console.print(
        f"n prompts; τ pooled acceptance length; diff: tokens unlike autoregressive. {CUT_RULE}", highlight=False
    )
    if batch_size > 1:
        console.print(BATCH_RULE.format(batch_size), highlight=False)
    for line in [*budget_lines(report), *divergence_lines(report)]:
        console.print(escape(line), highlight=False)


def widen(console: Console, table: Table) -> None:
    """A terminal that is narrower than the table breaks its lines; rich would cut the numbers away."""
    needed = console.measure(table, options=console.options.update(max_width=10 * LOG_WIDTH)).maximum
    console.width = max(console.width, needed)


def table_row(entry: dict[str, Any], *, first: bool) -> list[str]:
    """One entry in words, one for each of ``COLUMNS``; the benchmark is named in its first row only."""
    interval = entry["acceptance_length_pooled_ci95"] if entry["method"] != AR else None
    return [
        entry["benchmark"] if first else "",
        method_label((entry["method"], entry["budget"])) + ("*" if entry.get("best_budget") else ""),
        str(entry["prompts"]),
        str(entry["rounds"]),
        _number(entry["acceptance_length_pooled"], 2),
        "–" if interval is None else f"{interval[0]:.2f}–{interval[1]:.2f}",
        _number(entry["acceptance_length_per_prompt"], 2),
        _number(entry["ms_per_round"].get("total"), 1),
        _number(entry["tokens_per_s"], 1),
        _number(entry["speedup"], 2) + ("×" if entry["speedup"] is not None else ""),
        "–" if entry["differing_tokens"] is None else str(entry["differing_tokens"]),
    ]


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _divergence(results: Iterable[PromptResult], method: Method, differing_tokens: int) -> dict[str, Any]:
    """How many responses leave the autoregressive one, and the largest logit gap among their first differing tokens.

    Results of versions that recorded no divergences have no such count.
    """
    found = [(d, result.prompt_id) for result in results for d in result.divergences if d.method == method]
    if not found:
        return {"diverging_responses": None if differing_tokens else 0, "largest_gap": None}
    worst, prompt_id = max(found, key=lambda pair: pair[0].severity)
    return {
        "diverging_responses": len(found),
        "largest_gap": {
            "gap": worst.gap,
            "steps": worst.steps,
            "prompt_id": prompt_id,
            "turn": worst.turn,
            "position": worst.position,
            "ar_token": worst.ar_token,
            "token": worst.token,
        },
    }


def _summary(results: Iterable[PromptResult], method: Method, num_draft_tokens: int) -> Acceptance:
    logs = [response.log for result in results for response in result.responses if response.method == method]
    return summarise(logs, 0 if method[0] == AR else num_draft_tokens)
