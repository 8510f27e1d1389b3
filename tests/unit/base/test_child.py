from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from llmtrain.base.child import Child


def _is_there(number: int) -> bool:
    try:
        return os.stat(f"/proc/{number}").st_uid == os.getuid() and "Z" not in _state(number)
    except FileNotFoundError:
        return False


def _state(number: int) -> str:
    with open(f"/proc/{number}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_close_ends_what_the_program_has_started() -> None:
    code = (
        "import json, subprocess, time; print(json.dumps({'pid': subprocess.Popen(['sleep', '60']).pid}), flush=True)"
    )
    child, found = Child([sys.executable, "-c", f"{code}; time.sleep(60)"]), list[dict[str, int]]()
    until_s = time.monotonic() + 20
    while not found and time.monotonic() < until_s:
        found = child.received()
        time.sleep(0.01)
    child.close()
    assert child.code == -signal.SIGKILL
    while _is_there(found[0]["pid"]) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not _is_there(found[0]["pid"])


def test_close_kills_nobody_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of a process that was waited for may be another program's by now."""
    child, killed = Child([sys.executable, "-c", ""]), list[int]()
    monkeypatch.setattr(os, "killpg", lambda number, _: killed.append(number))
    until_s = time.monotonic() + 20
    while child.code is None and time.monotonic() < until_s:
        time.sleep(0.01)
    child.close()
    assert child.code == 0 and killed == []
