"""Events that a watch writes down, by a process each: neither a full disk nor W&B holds up what it does."""

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
"""That a note may take; W&B needs seconds."""


class Notes:
    """The notes of one run."""

    def __init__(self, run_dir: str, module: str) -> None:
        """`module`: the program that writes a note; it reads one JSON object from its standard input."""
        self._run_dir, self._module = run_dir, module
        self._open: list[tuple[subprocess.Popen[bytes], float]] = []

    def write(self, kind: str, event: dict[str, Any], run: dict[str, Any] | None = None) -> None:
        """Begin to write an event to events.jsonl, and with `run` (watch.folder.RUN) to tell W&B of the fault."""
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
        """End those that are done or had their time, with all that they started. Call it often."""
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
        """Wait for them, and leave none."""
        while self._open:
            self.reap()
            time.sleep(0.05)


def main() -> int:
    """Entry point of the process."""
    asked = json.load(sys.stdin)
    line = json.dumps({"time_unix_s": time.time(), "kind": asked["kind"], **redact(asked["event"])})
    with open(Path(asked["run_dir"]) / "events.jsonl", "a") as file:
        file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
