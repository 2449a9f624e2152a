"""Plots of a report as SVG text: nothing is fetched when they are shown."""

import io
from collections.abc import Callable
from typing import Any

from dflash_kit.acceptance import AR, CHAIN, DDTREE

from .live import method_label

COLOURS = ("#2563eb", "#d97706", "#059669", "#be185d", "#7c3aed", "#475569")
STAGE_COLOURS = {"draft": "#2563eb", "build": "#d97706", "verify": "#059669", "walk": "#be185d", "commit": "#7c3aed"}
SIZE_INCHES = (6.4, 3.6)

Entry = dict[str, Any]


def by_benchmark(results: list[Entry]) -> dict[str, list[Entry]]:
    """Entries of each benchmark, in the report's order."""
    groups: dict[str, list[Entry]] = {}
    for entry in results:
        groups.setdefault(entry["benchmark"], []).append(entry)
    return groups


def plot_budgets(results: list[Entry]) -> str:
    """Acceptance length of DDTree over its budget, the chain as a dashed line, one colour a benchmark."""

    def draw(axes: Any) -> None:
        for colour, (benchmark, entries) in zip(_colours(), by_benchmark(results).items(), strict=False):
            trees = [e for e in entries if e["method"] == DDTREE and e["acceptance_length_pooled"] is not None]
            if trees:
                lengths = [e["acceptance_length_pooled"] for e in trees]
                intervals = [e["acceptance_length_pooled_ci95"] or [m, m] for e, m in zip(trees, lengths, strict=True)]
                errors = [[m - low for m, (low, _) in zip(lengths, intervals, strict=True)]]
                errors.append([high - m for m, (_, high) in zip(lengths, intervals, strict=True)])
                errors = [[max(0.0, e) for e in side] for side in errors]
                budgets = [e["budget"] for e in trees]
                axes.errorbar(budgets, lengths, yerr=errors, marker="o", capsize=3, color=colour, label=benchmark)
            for chain in entries:
                if chain["method"] == CHAIN and chain["acceptance_length_pooled"] is not None:
                    label = None if trees else f"{benchmark}, chain"
                    axes.axhline(chain["acceptance_length_pooled"], ls="--", lw=1, color=colour, label=label)
        budgets = sorted({e["budget"] for e in results if e["method"] == DDTREE})
        if budgets:
            axes.set_xscale("log", base=2)
            axes.set_xticks(budgets, [str(b) for b in budgets])
            axes.minorticks_off()
        axes.set_xlabel("tree budget (nodes)")
        axes.set_ylabel("acceptance length τ")

    return _svg(draw, "budgets")


def plot_positions(entries: list[Entry], benchmark: str) -> str:
    """Share of rounds that accept the draft token at each position, one line a method."""

    def draw(axes: Any) -> None:
        drafted = [e for e in entries if e["method"] != AR]
        for colour, entry in zip(_colours(), drafted, strict=False):
            rates = entry["position_rates"]
            label = method_label((entry["method"], entry["budget"]))
            axes.plot(range(1, len(rates) + 1), rates, marker="o", ms=3, color=colour, label=label)
        axes.set_ylim(0, 1)
        axes.set_xlabel("position in the block")
        axes.set_ylabel("accepted, share of rounds")

    return _svg(draw, f"positions {benchmark}")


def plot_stages(entries: list[Entry], benchmark: str) -> str:
    """Milliseconds of a round by stage, stacked, one bar a method; empty text where no stages are known."""
    timed = [e for e in entries if set(e["ms_per_round"]) - {"total"}]  # engines of others tell no stages
    if not timed:
        return ""

    def draw(axes: Any) -> None:
        labels = [method_label((e["method"], e["budget"])) for e in timed]
        left = [0.0] * len(timed)
        for stage, colour in STAGE_COLOURS.items():
            widths = [e["ms_per_round"].get(stage, 0.0) for e in timed]
            axes.barh(labels, widths, left=left, color=colour, label=stage)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel("ms per round")

    return _svg(draw, f"stages {benchmark}")


def _colours() -> list[str]:
    return [*COLOURS] * 10


def _svg(draw: Callable[[Any], None], name: str) -> str:
    """Draw into a figure of its own and return its <svg> element."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # The salt keeps the ids of several plots on one page apart, and a plot the same from run to run.
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "path", "font.size": 9}):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        draw(axes)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside right upper", frameon=False, fontsize=8)  # never over the curves
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
