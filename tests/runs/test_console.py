"""What a user sees of a run: on a terminal that is a real one, from the command that `make train` gives."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import time
from pathlib import Path

from llmtrain.checkpoint.format import complete_checkpoints
from tests.helpers.launching import REPO, environment, kill_tree, write_recipe

_SEES_S = 400.0


def _take_terminal() -> None:
    """Ctrl-C reaches the command; a shell has it ignored by what it runs in the background (this test, perhaps)."""
    os.close(os.open(os.ttyname(0), os.O_RDWR))
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *words: str, cwd: Path, term: str = "xterm") -> None:
        self._ours, theirs = pty.openpty()
        os.set_blocking(self._ours, False)
        self.process = subprocess.Popen(
            words,
            cwd=cwd,
            env=environment(TERM=term, COLUMNS="160", WANDB_MODE="disabled", PYTHONPATH=str(REPO)),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)
        self.text, self._seen = "", 0

    def read(self) -> bool:
        """What has come since; whether there may come more."""
        try:
            self.text += os.read(self._ours, 1 << 16).decode(errors="replace")
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:  # the other end is closed
            return False
        return True

    def until(self, pattern: str) -> str:
        """Wait for the pattern after the one before; return the text up to its end."""
        began = time.monotonic()
        while not (found := re.search(pattern, self.text[self._seen :])):
            assert self.read() and time.monotonic() - began < _SEES_S, (pattern, self.text)
        said = self.text[self._seen : self._seen + found.end()]
        self._seen += found.end()
        return said

    def press(self, key: str) -> None:
        os.write(self._ours, key.encode())

    def end(self) -> int:
        """Read to the end; the exit code."""
        began = time.monotonic()
        while self.read():
            assert time.monotonic() - began < _SEES_S, self.text
        return self.process.wait(_SEES_S)


def test_ctrl_c_is_acknowledged_once_and_the_last_line_tells_what_was_saved(small_data: str, tmp_path: Path) -> None:
    """A live line, no line of DeepSpeed's launcher, one acknowledgement, and the last line is the last."""
    recipe = write_recipe(tmp_path, small_data)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    steps = ("--train.max_steps", "100000", "--schedule.name", "constant")
    screen = Terminal("llmtrain", "launch", "--hostfile", "hosts", "--", str(recipe), *steps, cwd=tmp_path)
    try:
        screen.until(r"━.* step +[2-9]/100000  loss \d\.\d+  ")
        screen.press("\x03")
        screen.until("2 ranks are asked to save and leave; Ctrl-C again ends it at once")
        code = screen.end()
    finally:
        kill_tree(screen.process)
    assert code == 130
    plain = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", screen.text).replace("\r", "\n")
    lines = [line.strip() for line in plain.split("\n") if line.strip() and "━" not in line]  # live ones are erased
    newest = complete_checkpoints(tmp_path / "run/checkpoints")[0]
    step = int(newest.name[5:])
    assert lines[-1] == f"stopped (Ctrl-C) at step {step}, saved in {newest}; the same command continues", screen.text
    assert lines[-2].startswith(f"step {step:>6}/100000  loss") and "gradient norm" in lines[-2]
    assert sum("asked" in line or "Ctrl-C:" in line for line in lines) == 1
    assert "[INFO]" not in plain and "Traceback" not in plain
