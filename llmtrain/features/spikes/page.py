"""Show the answer of a replay, as lines of text and as an HTML page."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from llmtrain.base import units
from llmtrain.reports.page import html_page, table


def lines_for(answer: dict[str, Any]) -> Iterator[str]:
    steps, rows = answer["steps"], answer["rows"]
    worst = max((row["apart"] for row in steps if not math.isnan(row["apart"])), default=0.0)
    how = "to the bit" if answer["exact"] else f"within {answer['bound']:.1e} ({answer['why']})"
    if answer["equal"]:
        yield f"the steps are equal to the run's record {how}"
    else:
        first = next((row["step"] for row in steps if not row["equal"]), None)
        difference = f"first at step {first}, largest relative difference {worst:.1e}"
        yield f"the steps are not equal to the run's record {how}: {difference}"
        until = max((row["step"] for row in steps if row["equal"]), default=0)
        odd = [row["step"] for row in steps if not row["equal"] and row["step"] < until]
        if odd and answer["exact"]:  # another update there would have changed every later step
            damage = f"steps.bin is damaged, or has no row, at the steps {units.spans(odd)}"
            yield f"later steps are equal to the bit, up to step {until}: the replay repeats the run, and {damage}"
    for checkpoint in answer["checkpoints"]:
        yield f"checkpoint of step {checkpoint['step']}: " + ("; ".join(checkpoint["lines"]) or "equal")
    yield from units.lines_of(_steps(answer))
    for module in answer["modules"]:
        values = f"{module['value']:.3g}, at most {module['others']:.3g} in the other steps"
        yield f"step {module['step']}: {module['what']} of {module['module']} is {values}"
    yield f"rows by {_order(rows)}:"
    for row in worst_rows(rows, 10):
        norm = "" if row.get("norm") is None else f", norm {row['norm']:.3g}, share {float(row['share']):.1%}"
        yield f"step {row['step']} sequence {row['sequence']}: loss {float(row['loss']):.4f}{norm}"
        yield from (f"  {text}" for text in row.get("documents", [])[:4])


def worst_rows(rows: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Return the first `most` rows and the row with the largest loss, which may be NaN."""
    largest = max(rows, key=lambda row: (math.isnan(float(row["loss"])), float(row["loss"])), default=None)
    return [row for place, row in enumerate(rows) if place < most or row is largest]


def _order(rows: list[dict[str, Any]]) -> str:
    has_norms = any(row.get("norm") is not None for row in rows)
    return "the norm of their gradient, and its share of the step's" if has_norms else "their loss"


def _steps(answer: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of the steps, its heading first."""
    return [
        ("STEP", "LOSS", "NORM", "RATE", "STAGE", "RECORD"),
        *((str(row["step"]), f"{row['loss']:.4f}", f"{row['norm']:.4g}", f"{row['lr'] or 0:.3g}",
           str(row.get("data/stage", 0)), "equal" if row["equal"] else f"differs by {row['apart']:.1e}")
          for row in answer["steps"]),
    ]  # fmt: skip


def page_of(answer: dict[str, Any]) -> str:
    """Return the answer as HTML without scripts."""
    rows = [
        (
            str(row["step"]),
            str(row["sequence"]),
            f"{float(row['loss']):.4f}",
            *(("", "") if row.get("norm") is None else (f"{row['norm']:.3g}", f"{float(row['share']):.1%}")),
            "\n".join(row.get("documents", [])),
        )
        for row in answer["rows"]
    ]
    modules = [
        (str(row["step"]), row["module"], row["what"], f"{row['value']:.3g}", f"{row['others']:.3g}")
        for row in answer["modules"]
    ]
    head, *steps = _steps(answer)
    tables = [
        (f"Rows by {_order(answer['rows'])}", table(("STEP", "SEQUENCE", "LOSS", "NORM", "SHARE", "DOCUMENTS"), rows)),
        ("Modules out of their range", table(("STEP", "MODULE", "WHAT", "LARGEST", "IN OTHER STEPS"), modules)),
        ("Steps", table(head, steps)),
    ]
    charts = [_chart(answer["steps"], key, name) for key, name in (("loss", "Loss"), ("norm", "Gradient norm"))]
    title = f"Steps {answer['first']} to {answer['last']} of {answer['run']}"
    return html_page(title, next(lines_for(answer)), tables, [chart for chart in charts if chart["series"]])


def _chart(steps: list[dict[str, Any]], key: str, title: str) -> dict[str, Any]:
    shown = [row for row in steps if math.isfinite(row[key])]
    x, y = [row["step"] for row in shown], [row[key] for row in shown]
    series = {"name": title, "color": 0, "x": x, "y": y, "dash": False, "dots": True}
    empty: dict[str, Any] = {"unit": "", "zero": False, "levels": [], "marks": [], "borders": {}}
    return {"id": key, "file": key, "title": title, "series": [series] if shown else [], **empty}
