"""The HTML page of a report: one file with its data, styles and script in it, for light and dark screens."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

_CSS = """
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
figure { padding: .8rem 1rem; position: relative; }
figcaption { font-weight: 600; }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 11px; fill: var(--soft); }
svg .grid { stroke: var(--edge); }
.key { font-size: .8rem; color: var(--soft); margin-right: 1rem; white-space: nowrap; }
.key i { display: inline-block; width: 1.2em; border-top: 3px solid; vertical-align: middle; margin-right: .4em; }
.tip { position: absolute; pointer-events: none; background: var(--page); border: 1px solid var(--edge);
  border-radius: 6px; padding: .3rem .6rem; font-size: .8rem; font-variant-numeric: tabular-nums; white-space: pre; }
table { border-collapse: collapse; width: 100%; font-size: .87rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .7rem; border-bottom: 1px solid var(--edge); }
tr:last-child td { border-bottom: 0; }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
td:first-child { color: var(--soft); min-width: 11rem; }
.differs td { font-weight: 600; }
.wide { overflow-x: auto; }
summary { cursor: pointer; margin-top: 1rem; }
"""

# Each chart: title, unit, series {name, color, x, y, faint, dots}, levels {name, y}, marks [x].
_JS = """
const NS = 'http://www.w3.org/2000/svg', W = 860, H = 300, L = 62, R = 24, T = 10, B = 34;
const num = v => v !== 0 && (Math.abs(v) >= 1e5 || Math.abs(v) < 1e-3) ? v.toExponential(2) : String(+v.toPrecision(5));
const ticks = (a, b) => { const raw = (b - a) / 5 || 1, p = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(m => m * p).find(s => s >= raw), out = [];
  for (let v = Math.ceil(a / step) * step; v <= b + step / 1e6; v += step) out.push(+v.toPrecision(12)); return out; };
for (const chart of JSON.parse(document.getElementById('data').textContent)) {
  const figure = document.getElementById(chart.id), svg = document.createElementNS(NS, 'svg');
  svg.setAttribute('viewBox', `0 0 ${W} ${H}`);
  const add = (tag, attributes, text) => { const e = document.createElementNS(NS, tag);
    for (const k in attributes) e.setAttribute(k, attributes[k]);
    if (text !== undefined) e.textContent = text; svg.append(e); return e; };
  const xs = chart.series.flatMap(s => s.x), ys = chart.series.flatMap(s => s.y).concat(chart.levels.map(l => l.y));
  let x0 = Math.min(...xs), x1 = Math.max(...xs), y0 = Math.min(...ys), y1 = Math.max(...ys);
  if (chart.zero) y0 = Math.min(0, y0);
  if (x0 === x1) { x0 -= 1; x1 += 1; }
  const room = (y1 - y0 || Math.abs(y1) || 1) * .05; y1 += room; if (y0 !== 0) y0 -= room;
  const px = x => L + (x - x0) / (x1 - x0) * (W - L - R), py = y => H - B - (y - y0) / (y1 - y0) * (H - T - B);
  for (const v of ticks(y0, y1)) { add('line', {x1: L, x2: W - R, y1: py(v), y2: py(v), class: 'grid'});
    add('text', {x: L - 6, y: py(v) + 4, 'text-anchor': 'end'}, num(v)); }
  for (const v of ticks(x0, x1)) if (Number.isInteger(v))
    add('text', {x: px(v), y: H - B + 16, 'text-anchor': 'middle'}, v.toLocaleString('en'));
  add('text', {x: (L + W) / 2, y: H - 3, 'text-anchor': 'middle'}, 'optimizer step');
  for (const x of chart.marks)
    add('line', {x1: px(x), x2: px(x), y1: T, y2: H - B, stroke: 'var(--soft)', 'stroke-dasharray': '2 3'});
  for (const l of chart.levels) {
    add('line', {x1: L, x2: W - R, y1: py(l.y), y2: py(l.y), stroke: 'var(--c2)', 'stroke-dasharray': '6 4'});
    add('text', {x: W - R - 4, y: py(l.y) - 4, 'text-anchor': 'end'}, `${l.name} ${num(l.y)}`); }
  for (const s of chart.series) { const color = `var(--c${s.color % 7})`;
    add('path', {d: s.x.map((x, i) => `${i ? 'L' : 'M'}${px(x).toFixed(1)} ${py(s.y[i]).toFixed(1)}`).join(''),
      fill: 'none', stroke: color, 'stroke-width': s.faint ? .8 : 1.8, opacity: s.faint ? .35 : 1,
      'stroke-dasharray': s.dash ? '5 3' : 'none'});
    if (s.dots) s.x.forEach((x, i) => add('circle', {cx: px(x), cy: py(s.y[i]), r: 2.5, fill: color})); }
  const cross = add('line', {y1: T, y2: H - B, stroke: 'var(--soft)', visibility: 'hidden'});
  const tip = document.createElement('div'); tip.className = 'tip'; tip.hidden = true;
  svg.addEventListener('pointerleave', () => { tip.hidden = true; cross.setAttribute('visibility', 'hidden'); });
  svg.addEventListener('pointermove', event => { const box = svg.getBoundingClientRect();
    const x = x0 + ((event.clientX - box.left) / box.width * W - L) / (W - L - R) * (x1 - x0);
    const near = s => s.x.reduce((best, v, i) => Math.abs(v - x) < Math.abs(s.x[best] - x) ? i : best, 0);
    const at = chart.series[0].x[near(chart.series[0])];
    tip.textContent = `step ${at.toLocaleString('en')}\\n` + chart.series.map(s => [s, near(s)])
      .map(([s, i]) => `${s.name} ${num(s.y[i])} ${chart.unit}${s.x[i] === at ? '' : ` (step ${s.x[i]})`}`).join('\\n');
    for (const k of ['x1', 'x2']) cross.setAttribute(k, px(at));
    cross.setAttribute('visibility', 'visible'); tip.hidden = false;
    const left = event.clientX - figure.getBoundingClientRect().left;
    tip.style.left = `${Math.min(left + 16, figure.clientWidth - tip.offsetWidth - 8)}px`; tip.style.top = '3rem'; });
  for (const s of chart.series) if (!s.faint) { const key = document.createElement('span'); key.className = 'key';
    const line = document.createElement('i'); line.style.borderColor = `var(--c${s.color % 7})`;
    line.style.borderTopStyle = s.dash ? 'dashed' : 'solid'; key.append(line, s.name); figure.append(key); }
  figure.append(svg, tip);
}
"""


def table(head: Sequence[str], rows: Sequence[tuple[str, ...]], *, mark: bool = False) -> str:
    """An HTML table of plain text. `mark`: rows whose columns after the first differ stand out."""
    lines = []
    for row in rows:
        differs = ' class="differs"' if mark and len(set(row[1:])) > 1 else ""
        lines.append(f"<tr{differs}>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>")
    top = "".join(f"<th>{html.escape(text)}</th>" for text in head)
    above = f"<thead><tr>{top}</tr></thead>" if any(head) else ""
    return f'<div class="wide"><table>{above}<tbody>{"".join(lines)}</tbody></table></div>'


def page(title: str, subtitle: str, tables: Sequence[tuple[str, str]], charts: Sequence[dict[str, Any]]) -> str:
    """The whole page. `tables`: headings and what `table` made; the first stands above the curves, the others below."""
    figures = "".join(
        f'<figure id="{chart["id"]}"><figcaption>{html.escape(chart["title"])} [{html.escape(chart["unit"])}]'
        "</figcaption></figure>"
        for chart in charts
    )
    first, *others = [f"<h2>{html.escape(heading)}</h2>{body}" for heading, body in tables]
    data = json.dumps(charts, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)} · llmtrain report</title><style>{_CSS}</style></head><body><main>"
        f'<h1>{html.escape(title)}</h1><p class="sub">{html.escape(subtitle)}</p>{first}<h2>Curves</h2>{figures}'
        f'{"".join(others)}<script id="data" type="application/json">{data}</script><script>{_JS}</script>'
        "</main></body></html>\n"
    )
