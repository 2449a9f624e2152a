"""Plots of a report as SVG text: nothing is fetched when they are shown, and their ink follows the page's."""

import io
from collections.abc import Callable, Sequence
from typing import Any

from dflash_kit.acceptance import AR, CHAIN, DDTREE

from .live import method_label

COLOURS = ("#2f7de1", "#d9730d", "#12996b", "#cf3f79", "#8458e0", "#6b7a8d")
STAGE_COLOURS = {
    "draft": "#2f7de1",
    "build": "#d9730d",
    "verify": "#12996b",
    "walk": "#cf3f79",
    "commit": "#8458e0",
    "round": "#6b7a8d",
}
INK, FRAME = "#010203", "#040506"
"""Stand for the page's own colours, which a plot cannot know."""
SIZE_INCHES, SMALL_INCHES = (6.0, 3.3), (4.4, 3.1)

LEAST_ROUNDS = 10
"""A share of fewer rounds than this says nothing."""

Entry = dict[str, Any]
Point = tuple[float, float, Sequence[float] | None]
"""x, y and the interval of y."""


def by_benchmark(results: list[Entry]) -> dict[str, list[Entry]]:
    """Entries of each benchmark, in the report's order."""
    groups: dict[str, list[Entry]] = {}
    for entry in results:
        groups.setdefault(entry["benchmark"], []).append(entry)
    return groups


def plot_budgets(results: list[Entry], key: str, axis: str) -> str:
    """A number of DDTree over its budget, the chain as a dashed line, one colour a benchmark; empty without any.

    Args:
        results: entries of the report.
        key: ``acceptance_length_pooled`` or ``tokens_per_s``.
        axis: its name on the axis.
    """
    groups = {
        benchmark: [e for e in entries if e.get(key) is not None and e["method"] in (CHAIN, DDTREE)]
        for benchmark, entries in by_benchmark(results).items()
    }
    if not any(groups.values()):
        return ""

    def draw(axes: Any) -> None:
        for colour, (benchmark, entries) in zip(colours(), groups.items(), strict=False):
            trees = [e for e in entries if e["method"] == DDTREE]
            _line(axes, [(e["budget"], e[key], e.get(key + "_ci95")) for e in trees], colour, benchmark)
            for chain in entries:
                if chain["method"] == CHAIN:
                    label = None if trees else f"{benchmark}, chain"
                    axes.axhline(chain[key], ls="--", lw=1, color=colour, label=label)
        _budget_axis(axes, sorted({e["budget"] for e in results if e["method"] == DDTREE}))
        axes.set_ylabel(axis)

    return svg(draw, f"budgets {key}")


def plot_positions(entries: list[Entry], benchmark: str) -> str:
    """Share of rounds that accept the draft token at each position, one line a method."""

    def draw(axes: Any) -> None:
        for colour, entry in zip(colours(), _drafted(entries), strict=False):
            rates = entry["position_rates"]
            axes.plot(range(1, len(rates) + 1), rates, marker="o", ms=3, color=colour, label=_label(entry))
        axes.set_ylim(0, 1.02)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("position in the block")
        axes.set_ylabel("accepted, share of all rounds")

    return svg(draw, f"positions {benchmark}", size=SMALL_INCHES)


def depth_rates(position_rates: Sequence[float], rounds: int) -> list[float]:
    """Of the rounds that accepted everything above a depth, the share that accepts there, too.

    Ends where fewer than ``LEAST_ROUNDS`` came (at depth 1 all did).
    """
    rates: list[float] = []
    before = 1.0
    for rate in position_rates:
        if rates and before * rounds < LEAST_ROUNDS - 0.5:
            break
        rates.append(rate / before)
        before = rate
    return rates


def plot_depths(entries: list[Entry], benchmark: str) -> str:
    """Acceptance at each depth among the rounds that came so far, one line a method."""

    def draw(axes: Any) -> None:
        for colour, entry in zip(colours(), _drafted(entries), strict=False):
            rates = depth_rates(entry["position_rates"], entry["rounds"])
            axes.plot(range(1, len(rates) + 1), rates, marker="o", ms=3, color=colour, label=_label(entry))
        axes.set_ylim(0, 1.02)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("depth in the tree")
        axes.set_ylabel("accepted, of rounds that got there")

    return svg(draw, f"depths {benchmark}", size=SMALL_INCHES)


def plot_stages(entries: list[Entry], benchmark: str) -> str:
    """Milliseconds of a round by stage, stacked, one bar a method; empty text where no stages are known."""
    timed = [e for e in entries if set(e["ms_per_round"]) - {"total"}]  # engines of others tell no stages
    if not timed:
        return ""

    def draw(axes: Any) -> None:
        labels = [_label(e) for e in timed]
        left = [0.0] * len(timed)
        for stage, colour in STAGE_COLOURS.items():
            widths = [e["ms_per_round"].get(stage, 0.0) for e in timed]
            if any(widths):
                axes.barh(labels, widths, left=left, color=colour, label=stage, height=0.6)
                left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel("ms per round")

    return svg(draw, f"stages {benchmark}", size=SMALL_INCHES)


def plot_speedups(results: list[Entry]) -> str:
    """Speed-up over autoregressive decoding, a group of bars for each benchmark; empty text where nothing was timed."""
    timed = [e for e in results if e.get("speedup") is not None and e["method"] != AR]
    if not timed:
        return ""
    benchmarks = list(dict.fromkeys(e["benchmark"] for e in timed))
    labels = list(dict.fromkeys(_label(e) for e in timed))
    width = 0.8 / len(labels)

    def draw(axes: Any) -> None:
        for i, (colour, label) in enumerate(zip(colours(), labels, strict=False)):
            found = {e["benchmark"]: e["speedup"] for e in timed if _label(e) == label}
            places = [at + (i - (len(labels) - 1) / 2) * width for at in range(len(benchmarks))]
            bars = axes.bar(places, [found.get(b, 0.0) for b in benchmarks], width * 0.92, color=colour, label=label)
            axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=1, color=INK)
        axes.axhline(1, color=INK, lw=0.8)
        axes.set_xticks(range(len(benchmarks)), benchmarks)
        axes.set_ylabel("speed-up")

    return svg(draw, "speedups", size=(12.4, 3.3) if len(benchmarks) * len(labels) > 8 else SIZE_INCHES)


def plot_lines(lines: dict[str, list[Point]], name: str, x_axis: str, y_axis: str, *, budgets: bool = False) -> str:
    """One line for each name, with intervals where there are any; empty text without a point."""
    if not any(lines.values()):
        return ""

    def draw(axes: Any) -> None:
        for colour, (label, points) in zip(colours(), lines.items(), strict=False):
            _line(axes, points, colour, label)
        if budgets:
            _budget_axis(axes, sorted({int(x) for points in lines.values() for x, _, _ in points}))
        else:
            axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel(x_axis)
        axes.set_ylabel(y_axis)

    return svg(draw, name)


def colours() -> list[str]:
    """Colours of lines in their order, repeated when there are many."""
    return [*COLOURS] * 10


def svg(draw: Callable[[Any], None], name: str, *, size: tuple[float, float] = SIZE_INCHES) -> str:
    """Draw into a figure of its own and return its <svg> element."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    look: Any = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK)
    look |= dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), FRAME)
    # The salt keeps the ids of several plots on one page apart, and a plot the same from run to run.
    # Names of folders and benchmarks may hold dollars, which are no formulas.
    look |= {"svg.hashsalt": name, "svg.fonttype": "path", "text.parse_math": False}
    with matplotlib.rc_context({**look, "font.size": 9, "axes.linewidth": 0.8, "lines.linewidth": 1.8}):
        plot = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(plot)
        axes = plot.add_subplot()
        axes.set_axisbelow(True)
        axes.grid(lw=0.6)
        draw(axes)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            # Never over the curves.
            plot.legend(
                loc="outside upper left", frameon=False, fontsize=8.5, ncols=5 if size[0] > 5 else 3, handlelength=1.4
            )
        buffer = io.StringIO()
        plot.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue().replace(INK, "currentColor").replace(FRAME, "var(--line)")
    return text[text.index("<svg") :]


def _line(axes: Any, points: Sequence[Point], colour: str, label: str) -> None:
    if not points:
        return
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    intervals = [p[2] or (p[1], p[1]) for p in points]
    errors = [
        [max(0.0, y - low) for y, (low, _) in zip(ys, intervals, strict=True)],
        [max(0.0, high - y) for y, (_, high) in zip(ys, intervals, strict=True)],
    ]
    axes.errorbar(xs, ys, yerr=errors, marker="o", ms=4, capsize=3, elinewidth=1, color=colour, label=label)


def _budget_axis(axes: Any, budgets: list[int]) -> None:
    if budgets:
        axes.set_xscale("log", base=2)
        axes.set_xticks(budgets, [str(b) for b in budgets])
        axes.minorticks_off()
    axes.set_xlabel("tree budget (nodes)")


def _drafted(entries: list[Entry]) -> list[Entry]:
    return [e for e in entries if e["method"] != AR]


def _label(entry: Entry) -> str:
    return method_label((entry["method"], entry["budget"]))
