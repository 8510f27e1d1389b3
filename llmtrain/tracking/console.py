"""Progress on the terminal: one live line where there is one, one plain line per log point elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TextIO

from llmtrain.base import log, units, untrusted
from llmtrain.base.log import LiveLine
from llmtrain.tracking.metrics import loss_unit
from llmtrain.tracking.sink import Sink

_RATE_WINDOW = 20  # log points over which the time per step is averaged for the ETA


def _number(row: dict[str, Any], key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, (int, float)) else None


def _right(row: dict[str, Any], prefix: str = "") -> float | None:
    found = _number(row, f"{prefix}pairs/accuracy")
    return _number(row, f"{prefix}unpaired/accuracy") if found is None else found


class Console(Sink):
    """Prints rows of metrics.

    Args:
        total_steps: of the run, where that is known.
        norm: what `grad_norm` is the norm of. With Muon, DeepSpeed's ZeRO clips and measures the update.
        show: takes the progress text ("": no more) and the share that is done, for a terminal that another process
            owns. Without it a terminal at standard output gets a live line.
    """

    def __init__(
        self,
        *,
        total_steps: int | None,
        norm: str = "gradient",
        show: Callable[[str, float | None], None] | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self._stream = stream
        self._total_steps = total_steps
        self._norm = norm
        self._points: deque[tuple[float, float]] = deque(maxlen=_RATE_WINDOW)
        self._line = ""
        self._show = LiveLine().show if show is None and stream is None and sys.stdout.isatty() else show

    def log(self, row: dict[str, Any], *, more: bool = False) -> None:
        """Show a row of metrics: evaluations stay on the screen; on a terminal, progress replaces itself."""
        step = _number(row, "step")
        if step is None:
            return
        if "eval/loss" in row:
            self._print(self._evaluation(step, row))
        if "loss" in row:
            self._points.append((step, time.monotonic()))
            self._line = self._progress(step, row)
            if self._show is None:
                self._print(self._line)
            else:
                self._show(
                    self._progress(step, row, short=True),
                    None if self._total_steps is None else step / self._total_steps,
                )

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Events are not shown here."""

    def close(self, *, exit_code: int = 0) -> None:
        """Leave the last progress line on the screen."""
        self.end_steps()

    def end_steps(self) -> None:
        """Leave the last progress line on the screen. A second call does nothing."""
        if self._show is not None and self._line:
            self._show("", None)
            self._print(self._line)
        self._show = None

    def _print(self, text: str) -> None:
        if self._stream is None:
            log.put(text)
        else:
            print(untrusted.shown(text, lines=True), file=self._stream, flush=True)

    def _step(self, step: float) -> str:
        if self._total_steps is None:
            return f"step {step:.0f}"
        return f"step {step:{len(str(self._total_steps))}.0f}/{self._total_steps}"

    def _evaluation(self, step: float, row: dict[str, Any]) -> str:
        text = f"{self._step(step)}  validation loss {row['eval/loss']:.4f} {loss_unit(row)}"
        if (right := _right(row, "eval/")) is not None:
            text += f"  preferred {right:.1%}"
        perplexity = _number(row, "eval/perplexity")
        return text if perplexity is None else f"{text}  perplexity {perplexity:.2f}"

    def _progress(self, step: float, row: dict[str, Any], *, short: bool = False) -> str:
        """`short`: all of it fits beside the bar into 120 columns."""
        # What matters most comes first: a narrow terminal cuts the end off.
        parts = [self._step(step), f"loss {row['loss']:.4f}" + ("" if short else f" {loss_unit(row)}")]
        if (right := _right(row)) is not None:
            parts.append(f"preferred {right:.1%}")
        if (speed := _number(row, "tokens_per_s")) is not None:
            parts.append(f"{units.count(speed)} {'tok/s' if short else 'tokens/s'}")
        if (eta_s := self._eta_s(step)) is not None:
            parts.append(f"{units.duration(eta_s)} left")
        for key, form, brief in (
            ("lr", "learning rate {:.1e}", "lr {:.1e}"),
            ("grad_norm", self._norm + " norm {:.2f}", "norm {:.2f}"),
            ("max_memory_gib", "memory {:.1f} GiB", "{:.1f} GiB"),
            ("mfu_causal", "MFU {:.1%}", "MFU {:.1%}"),
            ("comm_share", "communication {:.0%}", "comm {:.0%}"),
            ("loss_scale", "loss scale {:g}", "scale {:g}"),
        ):
            if (value := _number(row, key)) is not None:
                parts.append((brief if short else form).format(value))
        if skipped := _number(row, "skipped_steps"):
            parts.append(f"skipped {units.counted(round(skipped), 'step')}")
        return "  ".join(parts)

    def _eta_s(self, step: float) -> float | None:
        first_step, first_s = self._points[0]
        if self._total_steps is None or step <= first_step:
            return None
        per_step_s = (self._points[-1][1] - first_s) / (step - first_step)
        return max(self._total_steps - step, 0) * per_step_s
