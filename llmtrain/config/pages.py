"""`python -m llmtrain.config.pages docs` writes the generated tables into the pages of the documentation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from llmtrain.config import schema, together
from llmtrain.config.deepspeed import keys
from llmtrain.tracking import metrics

BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"
_RULES = """### Settings that do not go together

Each example is refused in a run that is right without it. The message names the lines of your values and the remedy.
"""
PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": lambda: "\n".join([schema.markdown(), _RULES, together.rules_markdown()]),
    "deepspeed.md": keys.markdown,
    "parallelism.md": together.parallelism,
    "adapters.md": together.markdown,
    "tracking.md": metrics.markdown,
}


def write_into(page: Path, generated: str) -> None:
    """Replace the text between the markers of the page."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{generated}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    for name, generated in PAGES.items():
        write_into(Path(sys.argv[1]) / name, generated())
