"""The report as report.csv and as report.tex, a booktabs table in the style of the published ones."""

import csv
import io
from typing import Any

from dflash_kit.acceptance import AR

from .live import method_label

CSV_NAME, TEX_NAME = "report.csv", "report.tex"
SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{char: "\\" + char for char in "&%$#_{}"},
}
NAMES = {"ar": "Autoregressive", "chain": "DFlash", "ddtree": "DDTree", "ddtree-auto": "DDTree (auto)"}
DASH = "--"

Entry = dict[str, Any]


def csv_text(report: dict[str, Any]) -> str:
    """One line for each benchmark and method; intervals, position rates and stages spread over columns of their own."""
    rows = [_flat(report, entry) for entry in report["results"]]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def latex_text(report: dict[str, Any]) -> str:
    """Methods down, benchmarks across: speed-up and τ of each (τ alone for replay), and their means; the best bold."""
    results = report["results"]
    benchmarks = list(dict.fromkeys(entry["benchmark"] for entry in results))
    methods = list(dict.fromkeys((entry["method"], entry["budget"]) for entry in results))
    keys = ["speedup", "acceptance_length_pooled"]
    if not any(entry.get("speedup") is not None for entry in results):
        keys = keys[1:]
    values = {
        method: [_value(results, benchmark, method, key) for benchmark in benchmarks for key in keys]
        for method in methods
    }
    if len(benchmarks) > 1:
        for row in values.values():
            row += [_mean(row[i :: len(keys)]) for i in range(len(keys))]
    groups = [_latex(name) for name in benchmarks] + (["Avg."] if len(benchmarks) > 1 else [])
    best = [max((v for v in column if v is not None), default=None) for column in zip(*values.values(), strict=True)]
    lines = [
        r"% \usepackage{booktabs}",
        *_caption(report),
        rf"\begin{{tabular}}{{l{'r' * len(keys) * len(groups)}}}",
        r"\toprule",
        " & ".join([""] + [rf"\multicolumn{{{len(keys)}}}{{c}}{{{name}}}" for name in groups]) + r" \\",
        "".join(rf"\cmidrule(lr){{{2 + i * len(keys)}-{1 + (i + 1) * len(keys)}}}" for i in range(len(groups))),
        " & ".join(["Method"] + ["Speedup", r"$\tau$"][2 - len(keys) :] * len(groups)) + r" \\",
        r"\midrule",
        *(_row(method, row, best, keys) for method, row in values.items()),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _flat(report: dict[str, Any], entry: Entry) -> dict[str, Any]:
    """An entry with one plain value a column."""
    row: dict[str, Any] = {"target": report["target"], "checkpoint": report["checkpoint"]}
    for name, value in entry.items():
        if name.endswith("_ci95"):
            low, high = value or (None, None)
            row |= {f"{name}_low": low, f"{name}_high": high}
        elif name == "position_rates":
            row |= {f"position_{k}": rate for k, rate in enumerate(value, start=1)}
        elif isinstance(value, dict):
            row |= {f"{name}_{key}": inner for key, inner in value.items() if not isinstance(inner, dict | list)}
        elif not isinstance(value, list):
            row[name] = value
    return row


def _caption(report: dict[str, Any]) -> list[str]:
    run = report.get("run", {})
    temperature = report["results"][0]["temperature"] if report["results"] else 0
    words = [f"{report['checkpoint']} on {report['target']}", f"temperature {temperature:g}"]
    words += [str(run[name]) for name in ("mode", "hardware", "dtype") if run.get(name)]
    text = ", ".join(words).replace("\n", " ")
    return [f"% {text}", "% tau: pooled acceptance length, bonus token counted; speed-up over the same engine's loop"]


def _row(method: tuple[str, int], row: list[float | None], best: list[float | None], keys: list[str]) -> str:
    name, budget = method
    label = NAMES.get(name, _latex(method_label(method))) + (f" ({budget})" if name == "ddtree" else "")
    cells = []
    for i, (value, top) in enumerate(zip(row, best, strict=True)):
        text = DASH if value is None else f"{value:.2f}"
        if keys[i % len(keys)] == "speedup" and value is not None:
            text += r"$\times$"
        cells.append(rf"\textbf{{{text}}}" if value is not None and value == top and name != AR else text)
    return " & ".join([label, *cells]) + r" \\"


def _value(results: list[Entry], benchmark: str, method: tuple[str, int], key: str) -> float | None:
    for entry in results:
        if entry["benchmark"] == benchmark and (entry["method"], entry["budget"]) == method:
            value = entry.get(key)
            return None if value is None else float(value)
    return None


def _mean(values: list[float | None]) -> float | None:
    """None where a benchmark has no value: means over different benchmarks compare nothing."""
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found and len(found) == len(values) else None


def _latex(text: str) -> str:
    return "".join(SPECIAL.get(char, char) for char in text)
