"""`llmtrain chat` as a person has it: in a pseudo-terminal, with its keys."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.helpers.launching import kill_tree
from tests.helpers.talkers import write_adapter, write_talker
from tests.runs.test_console import Terminal

pytestmark = pytest.mark.needs("peft")

CTRL_C, CTRL_D = "\x03", "\x04"


def test_keys(tmp_path: Path) -> None:
    """Ctrl-C stops the answer, which is kept, and not the program; Ctrl-D ends it. Without its adapter the model says
    "hi" for ever, with it nothing."""
    base = write_talker(tmp_path / "base", {"\n": "h", "h": "i", "i": " ", " ": "h"})
    lora = write_adapter(tmp_path / "lora", base, "\n", "<|im_end|>")
    words = ("chat", str(lora), "--max-tokens", "60000", "--temperature", "0")
    terminal = Terminal(sys.executable, "-m", "llmtrain", *words, cwd=tmp_path, term="dumb")
    try:
        assert "adapter on" in terminal.until("\n> ")
        terminal.press("/adapter\n")
        terminal.until(r"\[adapter off\][^>]*> ")
        terminal.press("go\n")
        terminal.until("hi hi hi")  # as it is generated: the answer has no end
        terminal.press(CTRL_C)
        terminal.until(r"\[stopped\][^>]*> ")
        terminal.press("half a li")
        terminal.until("half a li")
        time.sleep(0.5)  # Python notices a signal that comes between two keys with the next key only
        terminal.press(CTRL_C)
        terminal.until(r"/exit or Ctrl-D ends[^>]*> ")
        terminal.press("/adapter\n")
        terminal.until(r"\[adapter on\][^>]*> ")
        terminal.press("end\n")
        assert "cut" not in terminal.until("> ")
        terminal.press(CTRL_D)
        assert terminal.end() == 0
    finally:
        kill_tree(terminal.process)
