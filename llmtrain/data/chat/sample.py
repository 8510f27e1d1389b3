"""The first conversations of a prepared folder with their rows, kept for the proof that a server makes the same ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.base import untrusted
from llmtrain.base.errors import DataError
from llmtrain.base.files import replace_file
from llmtrain.data.chat.encoder import Row

NAME = "conversations.jsonl"
"""In the prepared folder, one object a line: `record` (its JSON), `row` (its first one of train), `rows` (how many)."""
CONVERSATIONS = 100
"""So many are kept at most."""
_LONGEST = 16 << 10
"""Characters of a record that is kept."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A record, and where its rows are in the train split."""

    record: str
    row: int
    rows: int


def kept(text: str, rows: list[Row], first: int) -> dict[str, Any] | None:
    """The entry of a record whose rows are the shard's from `first` on; None where it is long, or its rows were."""
    if len(text) > _LONGEST or not all(row.whole for row in rows):
        return None
    return {"record": text, "row": first, "rows": len(rows)}


def write_sample(folder: Path, records: list[dict[str, Any]]) -> None:
    """Gather what the units' records hold. `records`: of all units, in order."""
    found: list[dict[str, Any]] = []
    before = 0
    for record in records:
        found += [{**entry, "row": entry["row"] + before} for entry in record.get("sample", [])]
        before += (record["shards"]["train"] or {"documents": 0})["documents"]
    lines = (json.dumps(entry, ensure_ascii=False) + "\n" for entry in found[:CONVERSATIONS])
    replace_file(folder / NAME, "".join(lines).encode())


def read_sample(folder: Path) -> Iterator[Kept]:
    """What `write_sample` wrote. Raises DataError: it is something else."""
    path = folder / NAME
    try:
        for line in path.read_text().splitlines():
            entry = untrusted.loads(line)
            if not (isinstance(entry["record"], str) and type(entry["row"]) is int and type(entry["rows"]) is int):
                raise ValueError("record, row and rows are not a text and two numbers")
            yield Kept(entry["record"], entry["row"], entry["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: cannot be read ({error!r}); delete {folder} and prepare it again") from error
