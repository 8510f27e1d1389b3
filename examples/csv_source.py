"""A source: the rows of CSV files (`llmtrain prepare --plugin examples/csv_source.py --source csv:'tables/*.csv'`)."""

from __future__ import annotations

import csv
import glob
from collections.abc import Iterator
from dataclasses import dataclass

from llmtrain import Source


@dataclass(kw_only=True)
class Csv(Source, entry="csv"):
    """Rows with a header, as maps from column to text; `--field` names the column of the documents."""

    delimiter: str = ","
    """Character between two columns."""

    def parts(self, words: str) -> list[str]:
        return sorted(glob.glob(words))

    def records(self, part: str) -> Iterator[dict[str, str]]:
        with open(part, newline="", encoding="utf-8") as file:
            yield from csv.DictReader(file, delimiter=self.delimiter)
