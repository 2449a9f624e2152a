"""The comparison of several checkpoints as a table and as compare.html."""

from collections.abc import Callable
from html import escape
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape as escape_markup
from rich.table import Table

from dflash_kit.acceptance import AR

from .page import facts, figure, grid, note, page, section, table
from .plots import Point, plot_lines
from .report import LOG_WIDTH, widen

Row = dict[str, Any]


def print_comparison(comparison: dict[str, Any], console: Console | None = None) -> None:
    """The table on stdout."""
    if console is None:
        console = Console()
        if not console.is_terminal:
            console.width = max(LOG_WIDTH, 30 + 34 * len(comparison["checkpoints"]))
    names = headings(comparison)
    tables = [("Acceptance length τ", names, table_rows(comparison))]
    speeds = speed_rows(comparison)
    if speeds:
        num_names = len(comparison["checkpoints"])
        tables.append(("Tokens per second, speed-up", names[: 2 + num_names], speeds))
    for title, columns, rows in tables:
        shown = _table(title, columns, rows)
        widen(console, shown)
        console.print(shown)
    console.print(comparison["differences"], highlight=False)


def _table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    look: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}
    shown = Table(title=title, title_justify="left", **look)
    for number, name in enumerate(columns):
        shown.add_column(escape_markup(name), justify="left" if number < 2 else "right", no_wrap=number < 2)
    for row in rows:
        shown.add_row(*map(escape_markup, row))
    return shown


def headings(comparison: dict[str, Any]) -> list[str]:
    """Benchmark, method, τ of each checkpoint, and differences to the first."""
    names = [checkpoint["name"] for checkpoint in comparison["checkpoints"]]
    return ["benchmark", "method", *names, *(f"Δ {name}" for name in names[1:])]


def table_rows(comparison: dict[str, Any]) -> list[list[str]]:
    """The cells under ``headings``; the benchmark is named in its first row only."""
    return _rows(
        comparison,
        lambda columns: [*map(_length, columns), *map(_difference, columns[1:])],
        [row for row in comparison["results"] if row["method"] != AR],
    )


def speed_rows(comparison: dict[str, Any]) -> list[list[str]]:
    """Benchmark, method, and the speed of each checkpoint; none for replay."""
    if not _is_timed(comparison):
        return []
    return _rows(comparison, lambda columns: list(map(_speed, columns)), comparison["results"])


def _rows(comparison: dict[str, Any], cells: Callable[[list[Row | None]], list[str]], of: list[Row]) -> list[list[str]]:
    rows, last = [], None
    for row in of:
        columns = [row["checkpoints"][checkpoint["name"]] for checkpoint in comparison["checkpoints"]]
        rows.append([row["benchmark"] if row["benchmark"] != last else "", row["method"], *cells(columns)])
        last = row["benchmark"]
    return rows


def render_comparison(comparison: dict[str, Any]) -> str:
    """The whole page as text."""
    names = [checkpoint["name"] for checkpoint in comparison["checkpoints"]]
    speeds = speed_rows(comparison)
    benchmarks = list(dict.fromkeys(row["benchmark"] for row in comparison["results"]))
    plots = []
    for benchmark in benchmarks:
        rows = [row for row in comparison["results"] if row["benchmark"] == benchmark]
        plots.append(f"<h3>{escape(benchmark)}</h3>" + grid(_figures(rows, names, benchmark), three=True))
    parts = [
        *(
            f'<p class="warning">Warning, {escape(one["name"])}: {escape(text)}</p>'
            for one in comparison["checkpoints"]
            for text in one["warnings"]
        ),
        facts((one["name"], f"{one['checkpoint']}, for {one['target']}") for one in comparison["checkpoints"]),
        facts((k, v) for k, v in comparison["run"].items() if k not in ("block size", "created (UTC)")),
        section("results", "Acceptance length τ"),
        table(headings(comparison), table_rows(comparison), text_columns=2),
        note(comparison["differences"]),
        section("speeds", "Tokens per second, and speed-up over autoregressive decoding") if speeds else "",
        table(["benchmark", "method", *names], speeds, text_columns=2) if speeds else "",
        section("plots", "By benchmark"),
        *plots,
    ]
    targets = ", ".join(dict.fromkeys(one["target"] for one in comparison["checkpoints"]))
    return page(" · ".join(names), f"{len(names)} drafters compared, for {targets}", [p for p in parts if p])


def _figures(rows: list[Row], names: list[str], benchmark: str) -> list[str]:
    budgets: dict[str, list[Point]] = {}
    speeds: dict[str, list[Point]] = {}
    positions: dict[str, list[Point]] = {}
    for name in names:
        for row in rows:
            numbers = row["checkpoints"][name]
            if numbers is None or numbers["acceptance_length_pooled"] is None:
                continue
            if row["method"].startswith("ddtree-") and row["method"][7:].isdigit():
                budget, interval = int(row["method"][7:]), numbers["acceptance_length_pooled_ci95"]
                budgets.setdefault(name, []).append((budget, numbers["acceptance_length_pooled"], interval))
                if numbers["tokens_per_s"]:
                    speeds.setdefault(name, []).append((budget, numbers["tokens_per_s"], None))
            if row["method"] == "chain":
                positions[name] = [(k, rate, None) for k, rate in enumerate(numbers["position_rates"], start=1)]
    axis = "tree budget (nodes)"
    return [
        figure(
            plot_lines(budgets, f"lengths {benchmark}", axis, "acceptance length τ", budgets=True),
            "DDTree, with the 95 % interval of each checkpoint alone.",
        ),
        figure(plot_lines(speeds, f"speeds {benchmark}", axis, "tokens per second", budgets=True), "DDTree."),
        figure(
            plot_lines(positions, f"chain {benchmark}", "position in the block", "accepted, share of rounds"),
            "The chain.",
        ),
    ]


def _is_timed(comparison: dict[str, Any]) -> bool:
    return any(
        numbers and numbers["tokens_per_s"] for row in comparison["results"] for numbers in row["checkpoints"].values()
    )


def _length(numbers: Row | None) -> str:
    if numbers is None or numbers["acceptance_length_pooled"] is None:
        return "–"
    interval = numbers["acceptance_length_pooled_ci95"]
    around = "" if interval is None else f" ({interval[0]:.2f}–{interval[1]:.2f})"
    return f"{numbers['acceptance_length_pooled']:.2f}{around}"


def _difference(numbers: Row | None) -> str:
    found = None if numbers is None else numbers.get("difference")
    if found is None:
        return "–"
    interval = found["difference_ci95"]
    around = "" if interval is None else f" ({interval[0]:+.2f} to {interval[1]:+.2f})"
    return f"{found['difference']:+.2f}{around}"


def _speed(numbers: Row | None) -> str:
    if numbers is None or numbers["tokens_per_s"] is None:
        return "–"
    speedup = "" if numbers["speedup"] is None else f", {numbers['speedup']:.2f}×"
    return f"{numbers['tokens_per_s']:.1f}{speedup}"
