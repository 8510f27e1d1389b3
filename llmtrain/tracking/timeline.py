"""The timeline of sites in a report: when each was computing, waited for the others, or was away."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmtrain.base import units

COMPUTING, WAITING, AWAY = "computing", "waiting", "away"
_COLORS = {COMPUTING: "var(--c2)", WAITING: "var(--c1)", AWAY: "var(--edge)"}
_WIDTH, _LEFT, _BAR, _ROW = 860, 110, 18, 30
_SHOWN = 2000
"""Spans of a bar; beyond them the narrowest are left out."""

Span = tuple[float, float, str]
"""(from, to, state), Unix seconds."""


@dataclass(kw_only=True)
class Seen:
    """Timeline of a site and its peers, read from the site's run folder."""

    name: str
    own: list[Span] = field(default_factory=list)
    met: list[tuple[float, frozenset[str]]] = field(default_factory=list)
    """(when, names of the sites of a synchronisation), in order."""


def launches(name: str | None, rows: Iterable[dict[str, Any]], events: Iterable[dict[str, Any]]) -> Seen | None:
    """Timeline from a run folder's metrics and events. None: it is not the folder of a site."""
    ordered = sorted((each for each in [*rows, *events] if _time(each) is not None), key=lambda each: _time(each) or 0)
    if name is None or not any(each.get("kind") == "synchronise" for each in ordered):
        return None
    seen, last = Seen(name=name), None
    for each in ordered:
        now, kind = float(each["time_unix_s"]), each.get("kind")
        if kind in ("launch", "restart"):  # of the command that starts the ranks: they do not work yet
            continue
        if last is not None and kind in ("start", "resume"):
            seen.own.append((last, now, AWAY))
        elif kind in ("synchronise", "synchronise_failed"):
            began = max(now - _number(each.get("stood_s", each.get("seconds"))), now if last is None else last)
            if last is not None:
                seen.own.append((last, began, COMPUTING))
            seen.own.append((began, now, WAITING))
            sites = each.get("sites")
            if kind == "synchronise" and isinstance(sites, list):
                seen.met.append((now, frozenset(map(str, sites))))
        elif last is not None:
            seen.own.append((last, now, COMPUTING))
        last = now
    seen.own = _joined(seen.own)
    return seen


def others_of(seen: Seen, known: Iterable[str]) -> dict[str, list[Span]]:
    """The sites without a folder of their own in the report, as one that has met them saw them: there (computing, as
    nobody sees it wait), or away from the last synchronisation with them on."""
    names = sorted({name for _, sites in seen.met for name in sites} - set(known))
    end = max((span[1] for span in seen.own), default=0.0)
    found = {}
    for name in names:
        spans = []
        for index, (at, sites) in enumerate(seen.met):
            until = seen.met[index + 1][0] if index + 1 < len(seen.met) else end
            there = name in sites and (index + 1 == len(seen.met) or name in seen.met[index + 1][1])
            spans.append((at, until, COMPUTING if there else AWAY))
        found[name] = _joined(spans)
    return found


def timeline(found: Sequence[Seen | None]) -> str | None:
    """A chart as HTML, one bar for each site; None without sites."""
    known = [seen for seen in found if seen is not None]
    if not known:
        return None
    bars: dict[str, list[Span]] = {}
    for seen in known:
        bars[seen.name] = _joined(sorted([*bars.get(seen.name, []), *seen.own]))
    for seen in known:
        for name, spans in others_of(seen, [each.name for each in known]).items():
            bars.setdefault(name, spans)
    bars = {name: spans for name, spans in bars.items() if spans}
    if not bars:
        return None
    begin = min(spans[0][0] for spans in bars.values())
    end = max(spans[-1][1] for spans in bars.values())
    height = _ROW * len(bars) + 26
    parts = [_bar(name, bars[name], number, begin, end) for number, name in enumerate(sorted(bars))]
    parts.append(_axis(begin, end, height))
    key = "".join(
        f'<span class="key"><i style="border-color:{_COLORS[state]};border-top-width:9px"></i>{state}</span>'
        for state in (COMPUTING, WAITING, AWAY)
    )
    guests = sorted(set(bars) - {seen.name for seen in known})
    note = f"{', '.join(guests)}: as the others saw them; `llmtrain report` of their folders too shows when they wait."
    told = f'<p class="sub">{html.escape(note)}</p>' if guests else ""
    return f'<figure>{key}<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(parts)}</svg></figure>{told}'


def site_facts(done: list[dict[str, Any]], failed: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The synchronisations of a run in figures: pairs of label and text. Takes the events."""
    if not done and not failed:
        return []
    received, sent = (sum(_number(each.get(f"{way}_bytes")) for each in done) for way in ("received", "sent"))
    stood_s = sum(_number(each.get("stood_s", each.get("seconds"))) for each in (*done, *failed))
    alone = [each for each in done if each.get("participants") == 1]
    apart = [each for each in failed if "this site is alone" in str(each.get("reason"))]
    steps = [round(_number(each.get("step"))) for each in (*alone, *apart)]
    words = f"{len(alone)} of {len(done)}" + (f", and failed {len(apart)}" if apart else "")
    return [
        *([("Without another site", f"{words}; steps {min(steps)} to {max(steps)}")] if steps else []),
        ("Synchronisations of sites", f"{len(done)}, failed {len(failed)}"),
        ("Received from other sites", units.size(round(received))),
        ("Sent to other sites", units.size(round(sent))),
        ("Waiting for other sites, sum", units.duration(stood_s)),
    ]


def _bar(name: str, spans: list[Span], row: int, begin: float, end: float) -> str:
    top, scale = 4 + row * _ROW, (_WIDTH - _LEFT - 24) / max(end - begin, 1e-9)
    shown = sorted(sorted(spans, key=lambda span: span[0] - span[1])[:_SHOWN])
    label = f'<text x="{_LEFT - 8}" y="{top + 13}" text-anchor="end">{html.escape(name[:16])}</text>'
    # A wait is often narrower than a pixel: a line of one shows that it was there.
    return label + "".join(
        f'<rect x="{_LEFT + (low - begin) * scale:.2f}" y="{top}" '
        f'width="{max((high - low) * scale, 1.0 if state == WAITING else 0.0):.2f}" height="{_BAR}" '
        f'fill="{_COLORS[state]}"><title>{html.escape(name)}: {state}, {units.duration(high - low)}</title></rect>'
        for low, high, state in sorted(shown, key=lambda span: span[2] == WAITING)
    )


def _axis(begin: float, end: float, height: int) -> str:
    texts = []
    for number in range(5):
        x = _LEFT + (_WIDTH - _LEFT - 24) * number / 4
        at = units.duration((end - begin) * number / 4)
        texts.append(f'<text x="{x:.0f}" y="{height - 6}" text-anchor="middle">{at}</text>')
    return "".join(texts)


def _joined(spans: list[Span]) -> list[Span]:
    """Neighbours of one state as one; empty ones left out."""
    out: list[Span] = []
    for low, high, state in spans:
        if out and out[-1][2] == state and out[-1][1] >= low:
            out[-1] = (out[-1][0], max(high, out[-1][1]), state)
        elif high > low:
            out.append((low, high, state))
    return out


def _time(row: dict[str, Any]) -> float | None:
    value = row.get("time_unix_s")
    return float(value) if isinstance(value, (int, float)) and 0 < value < 1e11 else None


def _number(value: Any) -> float:
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e18
    return float(value) if known else 0.0
