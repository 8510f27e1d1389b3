from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from llmtrain.base.child import Child, of_module
from llmtrain.data.kinds import RowKind
from llmtrain.data.prepare.worker import WorkerSettings


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


def to_the_end(words: Sequence[str], message: Any) -> tuple[list[dict[str, Any]], int | None, str]:
    """Messages, exit code and standard error of a program that ends by itself, its input open."""
    child, messages, until_s = Child(words, stderr=subprocess.PIPE), list[dict[str, Any]](), time.monotonic() + 60
    try:
        child.send(message)
        while not child.is_closed and time.monotonic() < until_s:
            messages += child.received()
            time.sleep(0.01)
        assert child._process.stderr is not None
        said = child._process.stderr.read().decode()
        return messages, child._process.wait(60), said
    finally:
        child.close()


def test_a_program_that_listens_ends_without_a_word(tmp_path: Path) -> None:
    """A thread that waits in sys.stdin.buffer aborts the interpreter as it ends (SIGABRT)."""
    code = "from llmtrain.base.child import Parent; p = Parent(); p.listen(); p.tell({'heard': p.asked()})"
    assert to_the_end([sys.executable, "-c", code], "finish") == ([{"heard": "finish"}], 0, "")
    nothing = {"folder": str(tmp_path / "cache"), "gib": 1, "shards": []}
    assert to_the_end(of_module("llmtrain.data.download"), nothing) == ([], 0, "")
    settings = dict.fromkeys(field.name for field in fields(WorkerSettings)) | {
        "plugins": [],
        "fields": {},
        "kind": asdict(RowKind.of("text")),
        "dtype": "uint16",
    }
    messages, ended, said = to_the_end(of_module("llmtrain.data.prepare.worker"), settings | {"here": str(tmp_path)})
    assert [list(each) for each in messages] == [["error"]] and (ended, said) == (0, "")
