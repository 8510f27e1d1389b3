"""`llmtrain chat` as a person has it: in a pseudo-terminal, with its keys."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.helpers.launching import kill_tree
from tests.helpers.talkers import write_talker
from tests.runs.test_console import Terminal


def test_a_line_is_answered_as_it_is_generated_and_ctrl_d_ends(tmp_path: Path) -> None:
    """The model says "hi" for ever: the answer is seen before its end."""
    model = write_talker(tmp_path / "model", {"\n": "h", "h": "i", "i": " ", " ": "h"})
    words = ("chat", str(model), "--max-tokens", "2000", "--temperature", "0")
    terminal = Terminal(sys.executable, "-m", "llmtrain", *words, cwd=tmp_path, term="dumb")
    try:
        terminal.until("> ")
        terminal.press("go\n")
        assert "cut" not in terminal.until("hi hi hi")
        assert "2000" in terminal.until(r"\][^>]*> ")
        terminal.press("\x04")
        assert terminal.end() == 0
    finally:
        kill_tree(terminal.process)
