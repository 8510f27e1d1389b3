"""What a terminal shows in the end, with a live line that comes and goes while another thread writes."""

from __future__ import annotations

import io
import re
import sys
import threading
import time

import pytest

from llmtrain.base import log


class Slow(io.StringIO):
    """A terminal on which every write gives other threads their turn."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        time.sleep(0.0005)
        return super().write(text)


def screen(written: str) -> list[str]:
    """The lines that are there when all was drawn."""
    lines, row, column = [""], 0, 0
    for control, parameter, letter, text in re.findall(r"(\x1b\[([?\d;]*)([a-zA-Z])|\r|\n)|([^\x1b\r\n]+)", written):
        if text:
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
            column += len(text)
        elif control == "\r":
            column = 0
        elif control == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif letter == "A":
            row -= int(parameter or 1)
        elif letter == "K":
            lines[row] = ""
    return [line.rstrip() for line in lines if line.strip()]


def test_no_line_of_another_thread_is_lost_while_the_live_line_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TERM", "xterm"), ("COLUMNS", "100")):
        monkeypatch.setenv(name, value)
    terminal = Slow()
    monkeypatch.setattr(sys, "stdout", terminal)
    told = [f"rank 1: line {number}" for number in range(150)]
    failed: list[BaseException] = []

    def read() -> None:
        try:
            for line in told:
                log.pass_on(f"{line}\n")
        except BaseException as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    live = log.LiveLine()
    turns = 0
    while reader.is_alive() or turns < 20:
        live.show(f"turn {turns}", None)
        live.show("", None)
        turns += 1
    reader.join()
    assert not failed and turns >= 20
    assert "turn" in terminal.getvalue()
    assert screen(terminal.getvalue()) == told
