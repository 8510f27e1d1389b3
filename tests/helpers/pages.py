"""The page that `llmtrain report` writes, as a reader has it."""

from __future__ import annotations

import html.parser
import json
from pathlib import Path


class Page(html.parser.HTMLParser):
    """Its text, and its charts by title. All that it needs is in the file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text, self.scripts = "", [""]
        self.feed(path.read_text())
        assert self.open == []
        self.charts = {chart["title"]: chart for chart in json.loads(self.scripts[-1])}

    def handle_starttag(self, tag, attrs) -> None:
        assert tag != "img" and not any(name in ("src", "href") for name, _ in attrs), "all is in the file"
        if tag == "script":
            self.scripts.append("")
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts[-1] += data
        else:
            self.text += data + "\n"
