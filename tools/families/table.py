"""docs/developers/families.md from the results of a job."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from tools.families.cell import FORMS
from tools.families.configs import families

Rows = dict[tuple[str, str, str], dict[str, Any]]
_TITLES = {"zero3": "ZeRO 3", "pp2": "PP 2", "tp2": "TP 2", "sp2": "SP 2", "ep2": "EP 2"}
_INTRO = """\
# Model families

Each causal language model that transformers registers, as a tiny model with random weights on two CPU ranks: ten steps
of `llmtrain train` with a save, an evaluation and an export, and five steps of `llmtrain parity`.
`python -m tools.families` runs them (two hours, or in pieces) and writes [families.jsonl](families.jsonl), with the
date, the versions and the reason of each outcome; `python -m tools.families --table` makes this page.
"""
_LEGEND = """\
yes: both commands pass; with a name: with that `expert_parallel.preset_model`. A number: refused for the reason below.
not run: no result yet. -: a model without experts. An outcome in **bold** is a fault.
"""


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a results file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_page(results: Path, page: Path) -> None:
    """The page says what the results say, and no more."""
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    page.write_text(text_of({(row["family"], row["form"], row["command"]): row for row in rows}))


def text_of(rows: Rows) -> str:
    """The whole page."""
    reasons: dict[str, int] = {}
    alike: dict[str, list[str]] = {}
    for family in families():
        mine = {key: row for key, row in rows.items() if key[0] == family}
        alike.setdefault(" | ".join(_cell(mine, family, form, reasons) for form in _TITLES), []).append(family)
    lines = [f"| {', '.join(names)} | {cells} |" for cells, names in alike.items()]
    dates = sorted({row["date"] for row in rows.values()})
    versions = sorted({" ".join(f"{n} {v}" for n, v in row["versions"].items()) for row in rows.values()})
    ran = f"Run on {', '.join(dates)} with {'; '.join(versions)}. {_counts(rows)}"
    head = ["| families | " + " | ".join(_TITLES.values()) + " |", "|---" * (len(_TITLES) + 1) + "|"]
    told = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([_INTRO, ran, "", _LEGEND, *head, *lines, "", "## Reasons", "", *told, ""])


def _counts(rows: Rows) -> str:
    """How many cells ended how."""
    outcomes: Counter[str] = Counter()
    for family, form in {key[:2] for key in rows}:
        both = {rows.get((family, form, command), {}).get("outcome", "half run") for command in ("train", "parity")}
        outcomes[both.pop() if len(both) == 1 else "other"] += 1
    clear = {key: outcomes.pop(key, 0) for key in ("passes", "refused", "no tiny model")}
    told = sum(clear.values()) + outcomes.total()
    missing = len(families()) * (len(FORMS) - 1) - len({key[:2] for key in rows if key[1] != "ep2"})
    return (
        f"Of {told} cells with a result, both commands pass in {clear['passes']} and refuse in {clear['refused']}; for "
        f"{clear['no tiny model']} no tiny model could be made; {outcomes.total()} ended otherwise. {missing} cells "
        "were not run."
    )


def _cell(rows: Rows, family: str, form: str, reasons: dict[str, int]) -> str:
    found = {command: rows[family, form, command] for command in ("train", "parity") if (family, form, command) in rows}
    if not found:
        others = {key[1] for key in rows}
        return "-" if form == "ep2" and others - {"ep2"} else "not run"
    words = {command: _word(row, reasons) for command, row in found.items()}
    words |= {command: "not run" for command in ("train", "parity") if command not in found}
    if words["train"] == words["parity"]:
        return words["train"]
    return f"train: {words['train']}; parity: {words['parity']}"


def _word(row: dict[str, Any], reasons: dict[str, int]) -> str:
    if row["outcome"] == "passes":
        return f"yes (`{row['preset']}`)" if row.get("preset") else "yes"
    reason = _general(row)
    number = f"({reasons.setdefault(reason, len(reasons) + 1)})"
    return number if row["outcome"] in ("refused", "no tiny model") else f"**{row['outcome']}** {number}"


def _general(row: dict[str, Any]) -> str:
    """The reason without what differs from family to family: one line of the list serves them all."""
    text = " ".join(row["reason"].split())
    text = re.sub(r"^rank \d+( of \d+)?: ", "", text)
    text = re.sub(
        r"\b[A-Z]\w+(ForCausalLM|LMHeadModel|ForConditionalGeneration|LMHead|Decoder|ForCausal)\b", "MODEL", text
    )
    text = re.sub(r"\b(an?|of a) [\w-]+ (model|config)\b", r"\1 MODEL \2", text)
    text = re.sub(r"(wraps a text model together with others|several lists of layers) \([^)]*\)", r"\1", text)
    text = re.sub(r"[\w-]+ is a text model together .*? \([\w-]+\)", "MODEL is a text model together with others", text)
    text = re.sub(r"initialise its parameter \S+\.", "initialise all of its parameters.", text)
    text = re.sub(r"(transformers (?:makes|does not make) the file's) \S+", r"\1 tensors", text)
    text = re.sub(r"/tmp/\S*/(?=\w+\.(json|yaml))", "", text)
    text = re.sub(r"(same MoE module\(s\)).*", r"\1", text)
    text = re.sub(
        r"(?<=loss of MODEL computed in chunks is )\d+\.\d+, from its own logits \d+\.\d+", "N, from its own M", text
    )
    text = re.sub(r"(size|layers?[ .])\d+", r"\1N", text)
    text = re.sub(r"^(pipeline|tensor_parallel)\.\S+ \d+: .*stands in the way: ", "ranks cannot divide MODEL: ", text)
    text = re.sub(r"(?<=: )MODEL cannot be divided into layers: ", "", text)
    text = re.sub(r" (To go on, r|R)emove the section: .*", "", text)
    text = re.sub(r".*(wraps a|is a) MODEL model together with others.*", "it wraps a text model with others.", text)
    if row["outcome"] == "FAIL":
        text = re.sub(r" FAIL$", "", text)
    return text[:420].replace("|", "/").replace("<", "&lt;") or row["outcome"]
