"""`llmtrain chat` as a person has it: in a pseudo-terminal, with its keys."""

from __future__ import annotations

import os
import pty
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.launching import environment
from tests.helpers.talkers import write_adapter, write_talker

pytestmark = pytest.mark.needs("peft")

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """A process with a terminal of its own."""

    def __init__(self, words: list[str]) -> None:
        self.child, self._end = pty.fork()
        if not self.child:
            os.execvpe(words[0], words, environment(PYTHONPATH=str(ROOT), TERM="dumb"))
        self.seen = ""

    def type(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def wait_for(self, text: str) -> str:
        """What is printed until `text` comes, with it."""
        until = time.monotonic() + LIMIT_S
        while text not in self.seen:
            assert select.select([self._end], [], [], max(0.0, until - time.monotonic()))[0], self.seen
            try:
                read = os.read(self._end, 1 << 16)
            except OSError:  # the child has closed its side
                read = b""
            assert read, self.seen
            self.seen += read.decode()
        before, found, self.seen = self.seen.partition(text)
        return before + found

    def exit_code(self) -> int:
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            child, status = os.waitpid(self.child, os.WNOHANG)
            if child:
                self.child = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        raise AssertionError(f"it goes on: {self.seen}")

    def close(self) -> None:
        if self.child:
            os.kill(self.child, 9)
            os.waitpid(self.child, 0)
        os.close(self._end)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """Without its adapter the model says "hi" for ever, with it nothing."""
    base = write_talker(tmp_path / "base", {"\n": "h", "h": "i", "i": " ", " ": "h"})
    lora = write_adapter(tmp_path / "lora", base, "\n", "<|im_end|>")
    words = [sys.executable, "-m", "llmtrain", "chat", str(lora), "--max-tokens", "60000", "--temperature", "0"]
    terminal = Terminal(words)
    yield terminal
    terminal.close()


def test_keys(terminal: Terminal) -> None:
    """Ctrl-C stops the answer, which is kept, and not the program; Ctrl-D ends it."""
    assert "adapter on" in terminal.wait_for("\n> ")
    terminal.type("/adapter\n")
    terminal.wait_for("[adapter off]")
    terminal.wait_for("> ")
    terminal.type("go\n")
    terminal.wait_for("hi hi hi")  # as it is generated: the answer has no end
    terminal.type(CTRL_C)
    terminal.wait_for("[stopped]")
    terminal.wait_for("> ")
    terminal.type("half a li")
    terminal.wait_for("half a li")
    time.sleep(0.5)  # Python notices a signal that comes between two keys with the next key only
    terminal.type(CTRL_C)
    terminal.wait_for("/exit or Ctrl-D ends")
    terminal.wait_for("> ")
    terminal.type("/adapter\n")
    terminal.wait_for("[adapter on]")
    terminal.wait_for("> ")
    terminal.type("end\n")
    assert "cut" not in terminal.wait_for("> ")
    terminal.type(CTRL_D)
    assert terminal.exit_code() == 0
