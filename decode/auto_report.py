"""What the report says about budgets: the best fixed one, what "auto" chose, and the costs that it chose by."""

import json
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from dflash_kit.acceptance import DDTREE, DDTREE_AUTO
from dflash_kit.errors import KitError

from .auto_budget import CostTable, summarise_choices
from .results import PromptResult

COSTS_NAME = "auto-costs.jsonl"

Entry = dict[str, Any]


def keep_costs(folder: Path, table: CostTable) -> None:
    """Add a calibration to the report folder.

    Raises:
        KitError: it cannot be written.
    """
    path = folder / COSTS_NAME
    try:
        torn = path.exists() and not path.read_bytes().endswith(b"\n")
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" * torn + json.dumps(table.to_dict()) + "\n")
    except OSError as error:
        raise KitError(f"{path} cannot be written: {error.strerror}; free some space and run again") from error


def read_costs(folder: Path) -> list[dict[str, Any]]:
    """Calibrations in the order that they were made; a line that a kill left unfinished is passed over."""
    path = folder / COSTS_NAME
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def chosen_budgets(results: Iterable[PromptResult], method: tuple[str, int]) -> dict[str, Any]:
    """Further keys of a report entry: what the rounds of "auto" verified; none for other methods."""
    if method[0] != DDTREE_AUTO:
        return {}
    logs = [response.log for result in results for response in result.responses if response.method == method]
    return {"chosen_budgets": summarise_choices(logs)}


def mark_best(entries: list[Entry]) -> None:
    """Give the entries of fixed budgets ``best_budget``: the most tokens per second of a benchmark, where several compete."""
    for benchmark in {entry["benchmark"] for entry in entries}:
        trees = [e for e in entries if e["benchmark"] == benchmark and e["method"] == DDTREE and e["tokens_per_s"]]
        best = max(trees, key=lambda entry: entry["tokens_per_s"], default=None)
        for entry in trees if len(trees) > 1 else ():
            entry["best_budget"] = entry is best


def budget_lines(report: dict[str, Any]) -> list[str]:
    """A line a benchmark: the best fixed budget, and how "auto" compares with it."""
    lines = []
    for entry in report["results"]:
        if entry.get("best_budget"):
            lines.append(
                f"{entry['benchmark']}: the best of the fixed budgets is {entry['budget']} (*), "
                f"{entry['tokens_per_s']:.1f} tokens/s"
            )
        chosen = entry.get("chosen_budgets")
        if chosen is None:
            continue
        fixed = [e for e in report["results"] if e["benchmark"] == entry["benchmark"] and e["method"] == DDTREE]
        best = max((e["tokens_per_s"] or 0 for e in fixed), default=0)
        over = (
            f", {entry['tokens_per_s'] / best:.2f} of the best fixed budget's" if best and entry["tokens_per_s"] else ""
        )
        lines.append(
            f"{entry['benchmark']}: auto chose {chosen['mean']:.1f} nodes a round on average, median "
            f"{chosen['median']:g}, at most {entry['budget']} allowed{over}"
        )
    return lines


def render_auto(report: dict[str, Any]) -> str:
    """Section of the page on the budget "auto"; empty without it."""
    entries = [entry for entry in report["results"] if entry.get("chosen_budgets")]
    if not entries:
        return ""
    parts = ["<h2>Budget auto</h2>", "<p>Rounds by the number of nodes that were verified.</p>"]
    for entry in entries:
        ranges = [(_range(bin_), str(bin_["rounds"])) for bin_ in entry["chosen_budgets"]["histogram"]]
        parts.append(_table([(entry["benchmark"], "rounds"), *ranges]))
    for table in report.get("auto_costs", ()):
        parts.append(
            f"<p>Measured at {table['context_tokens']} tokens of context: a draft {table['draft_ms']:.2f} ms; a verification:</p>"
        )
        pairs = zip(table["nodes"], table["verify_ms"], strict=True)
        parts.append(_table([("nodes", "ms"), *((str(nodes), f"{ms:.2f}") for nodes, ms in pairs)]))
    return "\n".join(parts)


def _range(bin_: dict[str, int]) -> str:
    return str(bin_["to"]) if bin_["from"] == bin_["to"] else f"{bin_['from']}–{bin_['to']}"


def _table(columns: list[tuple[str, str]]) -> str:
    """Two rows, a pair a column, the first one headings."""
    head, body = ("".join(f"<td>{escape(column[row])}</td>" for column in columns) for row in (0, 1))
    return f'<div class="wide"><table><tbody><tr class="first">{head}</tr><tr>{body}</tr></tbody></table></div>'
