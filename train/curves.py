"""Curves of a run as one PNG: acceptance length, loss, learning rate and the accuracy of each slot over the steps."""

import io
from collections.abc import Callable, Sequence
from typing import Any

SIZE_INCHES, DOTS_PER_INCH = (10, 6.4), 100
COLOURS = ("#2563eb", "#d97706", "#059669", "#be185d", "#7c3aed", "#475569")
SHOWN_SLOTS = (1, 2, 4, 8, 15)
MARKERS_UP_TO = 40
"""Points that are few enough to be marked each."""

Line = dict[str, Any]
"""One line of metrics.jsonl."""


def draw_curves(train: Sequence[Line], replays: Sequence[Line]) -> bytes:
    """The picture, as PNG.

    Args:
        train: lines of kind ``train``, ascending by step.
        replays: lines of kind ``replay``, likewise; may be empty.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels: tuple[tuple[str, Callable[[Any], None]], ...] = (
        ("acceptance length τ, replayed on held-out rows", lambda axes: _draw_lengths(axes, replays)),
        ("loss", lambda axes: _draw(axes, train, {"": lambda line: line["loss"]})),
        ("accuracy of a slot's likeliest token", lambda axes: _draw_slots(axes, train)),
        ("learning rate", lambda axes: _draw(axes, train, {"": lambda line: line["lr"]})),
    )
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH)
        FigureCanvasAgg(figure)
        for axes, (title, draw) in zip(figure.subplots(2, 2).flat, panels, strict=True):
            draw(axes)
            axes.set_title(title, fontsize=10, loc="left")
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
            axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
            if axes.get_legend_handles_labels()[0]:
                axes.legend(frameon=False, fontsize=8)
        for axes in figure.axes[2:]:
            axes.set_xlabel("optimizer step")
        figure.subplots_adjust(left=0.07, right=0.98, top=0.95, bottom=0.08, hspace=0.3, wspace=0.17)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _draw_lengths(axes: Any, replays: Sequence[Line]) -> None:
    if not replays:
        axes.text(0.5, 0.5, "nothing was replayed", ha="center", va="center", transform=axes.transAxes)
        return
    names = dict.fromkeys(name for line in replays for name in line["methods"])
    series = {name: _length_of(name) for name in names}
    _draw(axes, replays, series)
    best = [line for line in replays if line["best"]]
    if best and "chain" in names:
        last = best[-1]
        length = last["methods"]["chain"]["acceptance_length_pooled"]
        axes.plot(
            [last["step"]], [length], "*", ms=13, color="#dc2626", label=f"best: step {last['step']}, {length:.2f}"
        )


def _length_of(name: str) -> Callable[[Line], float | None]:
    return lambda line: line["methods"].get(name, {}).get("acceptance_length_pooled")


def _draw_slots(axes: Any, train: Sequence[Line]) -> None:
    num_slots = len(train[-1]["slot_accuracy"]) if train else 0
    shown = sorted({slot for slot in (*SHOWN_SLOTS, num_slots) if 0 < slot <= num_slots})
    _draw(axes, train, {f"slot {slot}": _accuracy_of(slot) for slot in shown})
    axes.set_ylim(0, 1)


def _accuracy_of(slot: int) -> Callable[[Line], float | None]:
    return lambda line: line["slot_accuracy"][slot - 1]


def _draw(axes: Any, lines: Sequence[Line], series: dict[str, Callable[[Line], float | None]]) -> None:
    """One curve for each series; steps without a value are left out."""
    for place, (label, value_of) in enumerate(series.items()):
        points = [(line["step"], value) for line in lines if (value := value_of(line)) is not None]
        marker = "o" if len(points) <= MARKERS_UP_TO else None
        colour = COLOURS[place % len(COLOURS)]
        steps, values = [step for step, _ in points], [value for _, value in points]
        axes.plot(steps, values, color=colour, marker=marker, ms=3, lw=1.3, label=label or None)
