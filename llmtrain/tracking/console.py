"""Progress on the terminal: one live line on a tty, one plain line per log point elsewhere."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections import deque
from typing import Any, TextIO, cast

from llmtrain import units

_ERASE_LINE = "\r\x1b[K"
_RATE_WINDOW = 20  # log points over which the time per step is averaged for the ETA


def _number(row: dict[str, Any], key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, (int, float)) else None


class Console:
    """Prints rows of metrics. `close` (or an exit without it) leaves the terminal as it was."""

    def __init__(self, *, total_steps: int | None, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._total_steps = total_steps
        self._points: deque[tuple[float, float]] = deque(maxlen=_RATE_WINDOW)
        self._lock = threading.RLock()
        self._line = ""
        self._shown = False
        self._live = self._stream.isatty()
        self._replaced: list[tuple[str, TextIO]] = []
        if self._live and stream is None:
            # Other parts print messages; they have to appear above the live line, not within it.
            for name in ("stdout", "stderr"):
                original = getattr(sys, name)
                if original.isatty():
                    self._replaced.append((name, original))
                    setattr(sys, name, cast(TextIO, _AboveLine(original, self)))

    def update(self, row: dict[str, Any]) -> None:
        """Show a row of metrics: evaluations stay on the screen; on a tty, progress replaces itself."""
        step = _number(row, "step")
        if step is None:
            return
        if "eval/loss" in row:
            self._print(self._evaluation(step, row))
        if "loss" in row:
            self._points.append((step, time.monotonic()))
            self._line = self._progress(step, row)
            if self._live:
                self.draw()
            else:
                self._print(self._line)

    def close(self) -> None:
        """Leave the last progress line on the screen and give the streams back."""
        with self._lock:
            if self._shown:
                self._stream.write("\n")
                self._stream.flush()
            self._shown = False
            self._line = ""
        for name, original in self._replaced:
            setattr(sys, name, original)
        self._replaced = []

    def draw(self) -> None:
        """Put the progress line on the bottom line of the terminal."""
        with self._lock:
            if self._live and self._line:
                width = shutil.get_terminal_size().columns - 1
                self._stream.write(_ERASE_LINE + self._line[:width])
                self._stream.flush()
                self._shown = True

    def erase(self) -> None:
        """Take the progress line off the terminal."""
        with self._lock:
            if self._shown:
                self._stream.write(_ERASE_LINE)
                self._stream.flush()
                self._shown = False

    def _print(self, text: str) -> None:
        with self._lock:
            self.erase()
            self._stream.write(text + "\n")
            self._stream.flush()
            self.draw()

    def _step(self, step: float) -> str:
        if self._total_steps is None:
            return f"step {step:.0f}"
        return f"step {step:{len(str(self._total_steps))}.0f}/{self._total_steps}"

    def _evaluation(self, step: float, row: dict[str, Any]) -> str:
        text = f"{self._step(step)}  eval loss {row['eval/loss']:.4f}"
        perplexity = _number(row, "eval/perplexity")
        return text if perplexity is None else f"{text}  perplexity {perplexity:.2f}"

    def _progress(self, step: float, row: dict[str, Any]) -> str:
        # What matters most comes first: a narrow terminal cuts the end off.
        parts = [self._step(step), f"loss {row['loss']:.4f}"]
        if (speed := _number(row, "tokens_per_s")) is not None:
            parts.append(f"{units.count(speed)} tok/s")
        if (eta_s := self._eta_s(step)) is not None:
            parts.append(f"ETA {units.duration(eta_s)}")
        for key, form in (
            ("lr", "lr {:.1e}"),
            ("grad_norm", "grad {:.2f}"),
            ("max_memory_gib", "{:.1f} GiB"),
            ("mfu_causal", "MFU {:.1%}"),
            ("loss_scale", "scale {:g}"),
        ):
            if (value := _number(row, key)) is not None:
                parts.append(form.format(value))
        if skipped := _number(row, "skipped_steps"):
            parts.append(f"skipped {skipped:.0f}")
        return "  ".join(parts)

    def _eta_s(self, step: float) -> float | None:
        first_step, first_s = self._points[0]
        if self._total_steps is None or step <= first_step:
            return None
        per_step_s = (self._points[-1][1] - first_s) / (step - first_step)
        return max(self._total_steps - step, 0) * per_step_s


class _AboveLine:
    """A terminal stream whose text goes above the live line."""

    def __init__(self, stream: TextIO, console: Console) -> None:
        self._stream = stream
        self._console = console

    def write(self, text: str) -> int:
        self._console.erase()
        written = self._stream.write(text)
        if text.endswith("\n"):
            self._stream.flush()
            self._console.draw()
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
