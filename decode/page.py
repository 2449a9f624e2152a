"""The frame of every page: one file that needs no other and no network, light or dark as the reader's system is."""

from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --ink: #1b2432; --soft: #5b6675; --line: #dfe4ea; --paper: #ffffff; --panel: #f6f8fa;
  --accent: #1d63d8; --warn: #a34700; --accepted: #cdebd5; --accepted-2: #b3dfc1; --bonus: #ffe2b0; --first: #e3e7ec;
  --accepted-ink: #0d6b36; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ef; --soft: #9aa6b5; --line: #2d3643; --paper: #10151c;
  --panel: #171e27; --accent: #7ab0ff; --warn: #ffb070; --accepted: #1d4a31; --accepted-2: #27603f; --bonus: #5c431a;
  --first: #2f3845; --accepted-ink: #7fd6a2; } }
* { box-sizing: border-box; }
body { font: 15px/1.55 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: var(--ink); background: var(--paper);
  max-width: 74rem; margin: 0 auto; padding: 2.5rem 1.5rem 4rem; }
h1 { font-size: 1.65rem; line-height: 1.25; margin: 0 0 .2rem; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 3rem 0 .8rem; padding-bottom: .35rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.8rem 0 .4rem; }
p { margin: .5rem 0; max-width: 62rem; } .lead { color: var(--soft); font-size: 1rem; margin: 0 0 1.2rem; overflow-wrap: anywhere; }
.note, figcaption { color: var(--soft); font-size: .86rem; } .warning { color: var(--warn); font-weight: 600; }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; font-size: .9rem; margin: 1rem 0 0; }
nav a { color: var(--accent); text-decoration: none; }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0; }
.card { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: .7rem 1rem; min-width: 9.5rem; }
.card b { display: block; font-size: 1.45rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.card span { color: var(--soft); font-size: .82rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; width: 100%; }
th { font-weight: 600; color: var(--soft); font-size: .8rem; vertical-align: bottom; }
th, td { padding: .34rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th.text, td.text { text-align: left; } tr.first td { border-top: 2px solid var(--line); } td.text:first-child { font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; margin: .8rem 0; font-size: .9rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 1rem 0; } figure svg { display: block; width: 100%; height: auto; color: var(--ink); }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); gap: 1rem 2rem; } .grid figure { margin: 0; } .grid svg { max-width: 42rem; }
.three { grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem 1.4rem; }
.said { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: .9rem 1.1rem; overflow-wrap: anywhere;
  white-space: pre-wrap; font: .86rem/1.75 ui-monospace, "DejaVu Sans Mono", Menlo, monospace; }
.asked { color: var(--soft); white-space: pre-wrap; font-size: .88rem; border-left: 3px solid var(--line); padding-left: .8rem;
  overflow-wrap: anywhere; max-height: 9rem; overflow-y: auto; }
.a { background: var(--accepted); } .b { background: var(--accepted-2); } .n { background: var(--bonus); } .f { background: var(--first); }
.a, .b, .n, .f { border-radius: 3px; padding: .1em 0; } .key span { color: var(--ink); padding: .1em .5em; margin-right: .35rem; }
.tree { overflow-x: auto; } .tree svg { max-width: none; width: auto; }
.tree text { font: 12px ui-monospace, "DejaVu Sans Mono", Menlo, monospace; fill: var(--ink); } .tree .p { fill: var(--soft); font-size: 10px; }
.tree rect { fill: var(--panel); stroke: var(--line); } .tree .yes rect { fill: var(--accepted); stroke: var(--accepted-ink); }
.tree .root rect { fill: var(--first); } .tree .next rect { fill: var(--bonus); stroke: none; } .tree path { fill: none; stroke: var(--soft); stroke-opacity: .55; }
.tree path.yes { stroke: var(--accepted-ink); stroke-width: 2; stroke-opacity: 1; }
"""


def page(title: str, lead: str, parts: Iterable[str], sections: Sequence[tuple[str, str]] = ()) -> str:
    """The whole page.

    Args:
        title: heading, plain text.
        lead: line under it, plain text.
        parts: HTML of the body.
        sections: id and name of the parts to jump to.
    """
    links = "".join(f'<a href="#{escape(name)}">{escape(words)}</a>' for name, words in sections)
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    top = f'<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>' + (f"\n<nav>{links}</nav>" if links else "")
    body = "\n".join([top, *parts])
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def section(name: str, words: str) -> str:
    """Heading of a part that the page's links lead to."""
    return f'<h2 id="{escape(name)}">{escape(words)}</h2>'


def cards(numbers: Iterable[tuple[str, str]]) -> str:
    """The few numbers to see first: value and what it is."""
    shown = "".join(f'<div class="card"><b>{escape(v)}</b><span>{escape(w)}</span></div>' for v, w in numbers)
    return f'<div class="cards">{shown}</div>' if shown else ""


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> str:
    """A table; a row whose first cell is not empty begins a group."""

    def cells(tag: str, row: Sequence[str]) -> str:
        marks = [' class="text"' if i < text_columns else "" for i in range(len(row))]
        return "".join(f"<{tag}{mark}>{escape(cell)}</{tag}>" for mark, cell in zip(marks, row, strict=True))

    body = "".join(
        f"<tr{' class=' + chr(34) + 'first' + chr(34) if row[0] else ''}>{cells('td', row)}</tr>" for row in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{cells("th", headings)}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """Names and values, those without a value left out."""
    shown = "".join(
        f"<dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd>" for name, value in pairs if value is not None
    )
    return f"<dl>{shown}</dl>" if shown else ""


def note(text: str) -> str:
    """A remark in small print."""
    return f'<p class="note">{escape(text)}</p>'


def figure(svg: str, caption: str) -> str:
    """A plot and what it shows; nothing where there is no plot."""
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>" if svg else ""


def grid(figures: Iterable[str], *, three: bool = False) -> str:
    """Figures beside each other where there is room, two or three in a row."""
    return f'<div class="grid{" three" if three else ""}">{"".join(figures)}</div>'
