"""The report of a run: report.html, which needs no other file and no network, and report.png with its curves.

python -m train.report OUT        # also of a run under way, from what it has logged
"""

import base64
import json
import os
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dflash_kit.errors import KitError, run_cli

from .counters import as_object, whole, writes
from .curves import Line, draw_curves
from .progress import speed_words
from .state import RunFolder

PAGE_NAME, PICTURE_NAME = "report.html", "report.png"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1e293b; background: #fff; max-width: 66rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } img { width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .wide { overflow-x: auto; }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #e2e8f0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; } dt { color: #64748b; }
dd { margin: 0; overflow-wrap: anywhere; } .best td { font-weight: 600; background: #fef9c3; } .note { color: #64748b; }
"""


def write_report(folder: RunFolder) -> Path:
    """Write both files into the state folder, from metrics.jsonl and run.json; returns the page.

    Raises:
        KitError: nothing was logged, a file is damaged, or they cannot be written.
    """
    lines, recorded = _logged(folder.metrics), folder.recorded()
    try:
        train = [line for line in lines if line["kind"] == "train"]
        replays = [line for line in lines if line["kind"] == "replay"]
        picture = draw_curves(train, replays)
        page = render_page(folder.out.name, facts(recorded, train, replays), replays, picture)
    except Exception as error:  # an edited file raises anything, and so does a damaged installation of matplotlib
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise KitError(
            f"nothing can be drawn from {folder.metrics} and run.json beside it ({why}); take out the lines that no "
            "training has written"
        ) from error
    with writes(folder.state / PAGE_NAME):
        for name, content in ((PICTURE_NAME, picture), (PAGE_NAME, page.encode())):
            partial = folder.state / (name + ".incomplete")
            partial.write_bytes(content)
            os.replace(partial, folder.state / name)
    return folder.state / PAGE_NAME


def _logged(metrics: Path) -> list[Line]:
    if not metrics.exists():
        raise KitError(f"{metrics} is not there: no run has logged anything at this --out")
    with whole(metrics, "only what was logged is in it: move it away to go on without its lines"):
        return [as_object(json.loads(line)) for line in metrics.read_text().split("\n")[:-1] if line]


def facts(recorded: Mapping[str, Any], train: Sequence[Line], replays: Sequence[Line]) -> dict[str, str]:
    """What the page says in words, by name."""
    found: dict[str, str] = {}
    drafter, settings = recorded.get("drafter_config") or {}, recorded.get("settings") or {}
    if drafter:
        found["drafter"] = (
            f"{drafter.get('num_hidden_layers')} layers ({', '.join(drafter.get('layer_types', []))}), "
            f"blocks of {drafter.get('block_size')}"
        )
    if recorded.get("init"):
        found["started from"] = str(recorded["init"].get("name", recorded["init"]))
    for section in ("loss", "optim", "data"):
        values = (settings.get(section) or {}).items()
        found[section] = ", ".join(f"{name} {value}" for name, value in values if value is not None)
    if train:
        last = train[-1]
        planned = recorded.get("max_steps")
        found["steps"] = f"{last['step']:,}" + (f" of {planned:,}" if planned else "")
        loss = "–" if last["loss"] is None else f"{last['loss']:.4f}"
        found["last interval"] = f"loss {loss}, {speed_words(last)}, data-wait {last['data_wait_share']:.1%}"
        found["skipped steps"] = str(last["skipped_steps"])
        found["conversations left out"] = str(last.get("unreadable_rows", 0))
    best = [line for line in replays if line["best"]]
    if best:
        lengths = best[-1]["methods"].items()
        words = (
            f"{name} τ {m['acceptance_length_pooled']:.3f}" for name, m in lengths if m["acceptance_length_pooled"]
        )
        found["best replay"] = f"step {best[-1]['step']}: {', '.join(words)}"
    return {name: text for name, text in found.items() if text}


def render_page(name: str, told: Mapping[str, str], replays: Sequence[Line], picture: bytes) -> str:
    """The page as text.

    Args:
        name: of the run.
        told: facts by name.
        replays: lines of kind ``replay``.
        picture: PNG of the curves.
    """
    pairs = "".join(f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>" for key, text in told.items())
    shown = base64.b64encode(picture).decode()
    body = [
        f"<h1>Training of {escape(name)}</h1>",
        f'<img alt="curves over the steps" src="data:image/png;base64,{shown}">',
        f"<dl>{pairs}</dl>",
        "<h2>Replayed acceptance length</h2>",
        _table(replays) if replays else '<p class="note">No row was held out, so nothing was replayed.</p>',
        '<p class="note">τ = accepted draft tokens + 1, pooled over the rounds of rows that are not trained on. The '
        "finished drafter is the one of the best chain.</p>",
    ]
    head = f'<meta charset="utf-8"><title>Training of {escape(name)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def _table(replays: Sequence[Line]) -> str:
    names = list(dict.fromkeys(name for line in replays for name in line["methods"]))
    best = max((line["step"] for line in replays if line["best"]), default=None)
    rows = []
    for line in replays:
        lengths = [line["methods"].get(name, {}).get("acceptance_length_pooled") for name in names]
        rounds = line["methods"].get("chain", {}).get("rounds", 0)
        cells = [str(line["step"]), *("–" if n is None else f"{n:.3f}" for n in lengths), str(rounds)]
        kind = ' class="best"' if line["step"] == best else ""
        rows.append(f"<tr{kind}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    head = "".join(f"<th>{escape(name)}</th>" for name in ("step", *(f"{n} τ" for n in names), "chain rounds"))
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def main(argv: list[str] | None = None) -> int:
    """The command: one argument, the run's --out."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(__doc__)
        return 0 if arguments in (["--help"], ["-h"]) else 2
    print(f"report: {write_report(RunFolder(arguments[0]))} and {PICTURE_NAME} beside it")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
