"""Writes an agent's events to events.jsonl, each in a process of its own: no full disk and no W&B holds up the
agent."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from llmtrain.base.redact import redact

_WITHIN_S = 9.5
"""Limit of one process; W&B needs seconds."""


class Notes:
    """The event-writing processes of one agent."""

    def __init__(self, run_dir: str, module: str) -> None:
        """`module`: the program that writes an event; it reads one JSON object from its standard input."""
        self._run_dir, self._module = run_dir, module
        self._open: list[tuple[subprocess.Popen[bytes], float]] = []

    def write(self, kind: str, event: dict[str, Any], run: dict[str, Any] | None = None) -> None:
        """Start to write an event to events.jsonl; with `run` (base.rank.folder.RUN) W&B gets it, too."""
        if not os.path.isdir(self._run_dir):
            return
        content = {"run_dir": self._run_dir, "kind": kind, "event": event, "run": run or {}}
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            assert process.stdin is not None
            process.stdin.write(json.dumps(content).encode())
            process.stdin.close()
        except OSError:
            return
        self._open.append((process, time.monotonic()))

    def reap(self) -> None:
        """Kill those that are done or over their time, with all that they started. Call it often."""
        still = []
        for process, began_s in self._open:
            if process.poll() is None and time.monotonic() - began_s < _WITHIN_S:
                still.append((process, began_s))
                continue
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._open = still

    def finish(self) -> None:
        """Wait until all have ended."""
        while self._open:
            self.reap()
            time.sleep(0.05)


def write_event(run_dir: Path, kind: str, event: dict[str, Any]) -> None:
    """Append a line to events.jsonl of a run, without secrets. Raises OSError."""
    line = json.dumps({"time_unix_s": time.time(), "kind": kind, **redact(event)})
    with open(run_dir / "events.jsonl", "a") as file:
        file.write(line + "\n")


def main() -> int:
    """Write the event that standard input holds (`Notes.write`), for scripts that use the watch alone (script.py)."""
    asked = json.load(sys.stdin)
    write_event(Path(asked["run_dir"]), asked["kind"], asked["event"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
