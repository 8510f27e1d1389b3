"""The page of a replay: HTML without scripts, its charts drawn by matplotlib, all text of the data escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from llmtrain.base import untrusted
from llmtrain.commands.report import CSS
from llmtrain.tracking.charts import svg


def page_of(answer: dict[str, Any]) -> str:
    steps, title = answer["steps"], f"Steps {answer['first']} to {answer['last']} of {answer['run']}"
    how = "to the bit" if answer["exact"] else f"within {answer['bound']:.1e}, as {answer['why']}"
    verdict = f"{'Equal' if answer['equal'] else 'Not equal'} to the run's record {how}."
    charts = "".join(_chart(steps, key, name) for key, name in (("loss", "Loss"), ("norm", "Gradient norm")))
    rows = [
        (
            row["step"], row["sequence"], f"{float(row['loss']):.4f}",
            "" if row.get("norm") is None else f"{row['norm']:.3g}",
            "" if row.get("share") is None else f"{float(row['share']):.1%}",
            "\n".join(row.get("documents", [])),
        )
        for row in answer["rows"]
    ]  # fmt: skip
    modules = [(each["step"], each["module"], each["what"], f"{each['value']:.3g}", f"{each['others']:.3g}")
               for each in answer["modules"]]  # fmt: skip
    compared = [(each["step"], f"{each['loss']:.6f}", f"{each['norm']:.6g}", "equal" if each["equal"] else "differs")
                for each in steps]  # fmt: skip
    body = (
        f"<h1>{_text(title)}</h1><p>{_text(verdict)}</p>{charts}"
        f"<h2>Rows by the norm of their gradient</h2>"
        f"{_table(('Step', 'Sequence', 'Loss', 'Norm', 'Share', 'Documents'), rows)}"
        f"<h2>Modules out of the range of the other steps</h2>"
        f"{_table(('Step', 'Module', 'What', 'Largest', 'In other steps'), modules)}"
        f"<h2>Steps</h2>{_table(('Step', 'Loss', 'Norm', 'Record'), compared)}"
    )
    head = f"<title>{_text(title)}</title><style>{CSS}td {{ white-space: pre-wrap; }}</style>"
    page = f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">{head}</head>'
    return f"{page}<body><main>{body}</main></body></html>\n"


def _text(value: Any) -> str:
    return html.escape(untrusted.shown(str(value), lines=True))


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return "<p>none</p>"
    head = "".join(f"<th>{_text(each)}</th>" for each in heads)
    body = "".join("<tr>" + "".join(f"<td>{_text(each)}</td>" for each in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _chart(steps: list[dict[str, Any]], key: str, title: str) -> str:
    points = [(each["step"], each[key]) for each in steps if abs(each[key]) < float("inf")]
    if not points:
        return ""
    x, y = (list(column) for column in zip(*points, strict=True))
    series = {"name": title, "color": 0, "x": x, "y": y, "dash": False, "dots": True}
    return svg({"id": key, "file": key, "title": title, "unit": "", "zero": False, "series": [series], "levels": [],
                "marks": [], "borders": {}})  # fmt: skip
