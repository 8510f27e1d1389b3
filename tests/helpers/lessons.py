"""examples/lessons.py as a module, whose source is not among those of this process."""

from __future__ import annotations

import json
import sys
from typing import Any

from llmtrain.config import plugin_import
from tests.helpers.launching import REPO

FILE = str(REPO / "examples/lessons.py")
plugin_import.use([FILE])
made: Any = sys.modules["llmtrain_plugin_lessons"]
plugin_import.use([])


def lines(kind: str, split: str) -> list[str]:
    """The records as a file of JSON lines has them."""
    return [json.dumps(record, ensure_ascii=False) for record in made.records(kind, split)]
