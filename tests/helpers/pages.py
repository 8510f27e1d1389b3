"""The page that `llmtrain report` writes, as a reader has it."""

from __future__ import annotations

import html.parser
from pathlib import Path


class Page(html.parser.HTMLParser):
    """Its text, that of the charts included. All that it needs is in the file, and it runs no script."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.feed(path.read_text())
        assert self.open == []

    def handle_starttag(self, tag, attrs) -> None:
        assert tag not in ("img", "script") and not any(name in ("src", "href") for name, _ in attrs), tag
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.text += data + "\n"
