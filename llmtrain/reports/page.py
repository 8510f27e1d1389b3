"""A self-contained HTML page of tables and charts, without scripts."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from llmtrain.base import untrusted
from llmtrain.reports.charts import svg

CSS = """
:root { color-scheme: light dark; --ink: #1a202c; --soft: #4a5568; --page: #f5f7fa; --card: #fff; --edge: #e2e8f0;
  --c0: #2563a8; --c1: #d9622b; --c2: #2f855a; --c3: #8b3fa8; --c4: #b7791f; --c5: #c53030; --c6: #0f8a8a; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e2e8f0; --soft: #a0aec0; --page: #12161d; --card: #1b212b; --edge: #343d4b;
    --c0: #63a4ea; --c1: #f0935f; --c2: #5fc48f; --c3: #c58be0; --c4: #e0b04f; --c5: #f28b8b; --c6: #52c5c5; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0; }
main { max-width: 62rem; margin: 0 auto; padding: 2rem 1.5rem 4rem; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.5rem 0 .75rem; }
.sub { color: var(--soft); margin: .25rem 0 1.5rem; }
figure, .wide { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; margin: 1rem 0 0; }
figure { padding: .8rem 1rem; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: system-ui, sans-serif !important; }
table { border-collapse: collapse; width: 100%; font-size: .87rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .7rem; border-bottom: 1px solid var(--edge); }
tr:last-child td { border-bottom: 0; }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; white-space: pre-wrap; }
td:first-child { color: var(--soft); min-width: 11rem; }
.differs td { font-weight: 600; }
.wide { overflow-x: auto; }
summary { cursor: pointer; margin-top: 1rem; }
"""


def escaped(text: str) -> str:
    return html.escape(untrusted.shown(text, lines=True))


def table(head: Sequence[str], rows: Sequence[tuple[str, ...]], *, mark: bool = False) -> str:
    """Return an HTML table of plain text. `mark`: highlight rows whose columns after the first differ."""
    if not rows:
        return "<p>none</p>"
    lines = []
    for row in rows:
        differs = ' class="differs"' if mark and len(set(row[1:])) > 1 else ""
        lines.append(f"<tr{differs}>" + "".join(f"<td>{escaped(text)}</td>" for text in row) + "</tr>")
    top = "".join(f"<th>{escaped(text)}</th>" for text in head)
    above = f"<thead><tr>{top}</tr></thead>" if any(head) else ""
    return f'<div class="wide"><table>{above}<tbody>{"".join(lines)}</tbody></table></div>'


def html_page(title: str, subtitle: str, tables: Sequence[tuple[str, str]], charts: Sequence[dict[str, Any]]) -> str:
    """Return the page. `tables`: (heading, HTML table); the first is above the curves, the others below."""
    figures = "".join(f'<figure id="{chart["id"]}">{svg(chart)}</figure>' for chart in charts)
    first, *others = [f"<h2>{escaped(heading)}</h2>{body}" for heading, body in tables]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)} · llmtrain report</title><style>{CSS}</style></head><body><main>"
        f'<h1>{escaped(title)}</h1><p class="sub">{escaped(subtitle)}</p>{first}<h2>Curves</h2>{figures}'
        f"{''.join(others)}</main></body></html>\n"
    )
