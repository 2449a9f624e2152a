"""report.html: one page that needs no other file and no network."""

from html import escape
from typing import Any

from .auto_report import budget_lines, render_auto
from .plots import by_benchmark, plot_budgets, plot_positions, plot_stages
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
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1e293b; background: #fff; max-width: 72rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .wide { overflow-x: auto; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #e2e8f0; white-space: nowrap; }
th:nth-child(1), td:nth-child(1), th:nth-child(2), td:nth-child(2) { text-align: left; }
tr.first td { border-top: 2px solid #94a3b8; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; } dt { color: #64748b; }
dd { margin: 0; overflow-wrap: anywhere; } figure { margin: 1rem 0; } figcaption, .note { color: #64748b; }
.pair { display: flex; flex-wrap: wrap; gap: 1rem; } .pair figure { flex: 1 1 26rem; }
svg { width: 100%; height: auto; max-width: 44rem; } .warning { color: #b45309; }
"""


def render_page(report: dict[str, Any]) -> str:
    """The whole page as text."""
    results = report["results"]
    parts = [
        f"<h1>Drafter {escape(str(report['checkpoint']))} on {escape(str(report['target']))}</h1>",
        *(f'<p class="warning">Warning: {escape(text)}</p>' for text in report.get("warnings", ())),
        _facts(report),
        "<h2>Results</h2>",
        _table(results),
        f'<p class="note">{escape(CUT_RULE)}</p>',
        f'<p class="note">{escape(SPEED_RULE)}</p>',
        *(f'<p class="note">{escape(line)}</p>' for line in [*budget_lines(report), *divergence_lines(report)]),
        render_auto(report),
        "<h2>Acceptance length by budget</h2>",
        _figure(
            plot_budgets(results),
            "DDTree, pooled mean with its 95 % bootstrap interval over prompts; dashed: the chain.",
        ),
    ]
    for benchmark, entries in by_benchmark(results).items():
        stages = plot_stages(entries, benchmark)
        parts.append(f"<h2>{escape(benchmark)}</h2>")
        parts.append('<div class="pair">')
        parts.append(_figure(plot_positions(entries, benchmark), "Acceptance per position."))
        if stages:
            parts.append(_figure(stages, "Time by stage."))
        parts.append("</div>")
    title = escape(f"{report['checkpoint']} on {report['target']}")
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _facts(report: dict[str, Any]) -> str:
    shown = {k: v for k, v in report.get("run", {}).items() if v is not None}
    pairs = "".join(f"<dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd>" for name, value in shown.items())
    return f"<dl>{pairs}</dl>" if pairs else ""


def _table(results: list[dict[str, Any]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in HEADINGS)
    rows, last = [], None
    for entry in results:
        first = entry["benchmark"] != last
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in table_row(entry, first=first))
        rows.append(f"<tr{' class=' + chr(34) + 'first' + chr(34) if first else ''}>{cells}</tr>")
        last = entry["benchmark"]
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"
