"""The plots of a report. matplotlib loads on the first call, with a backend that needs no display."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from llmtrain.tracking.metrics import loss_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _ORANGE, _GREEN, _GREY = "#2563a8", "#d9622b", "#2f855a", "#718096"
MARKED_BELOW = 10
"""Points of a curve that is too short for an average: each gets a mark."""
_STYLE: Any = {
    "figure.dpi": 150,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e9ef",
    "axes.edgecolor": "#a0aec0",
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "legend.frameon": False,
}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Finite values of one metric over steps, in order."""

    steps: Sequence[float] = ()
    values: Sequence[float] = ()

    def __bool__(self) -> bool:
        return bool(self.steps)


@dataclass(frozen=True, kw_only=True)
class Curves:
    """What the plots show: curves by metric name, resume points (steps), baselines (name -> nats/token)."""

    by_name: dict[str, Curve]
    resumes: Sequence[float] = ()
    baselines: dict[str, float] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        """Of the loss."""
        return loss_unit(self.by_name)

    def __getitem__(self, name: str) -> Curve:
        return self.by_name.get(name, Curve())


def smooth(values: Sequence[float]) -> list[float]:
    """Mean over a centred window of about a fiftieth of the curve (at least 5 points).

    Centred, because a running average lags behind a loss that falls fast. Within half a window of an end there is no
    centred one: there stands the straight line through the last whole window (as Savitzky and Golay's filter does it),
    so that the curve does not end on the raw last value.
    """
    reach = max(2, len(values) // 100)
    width = 2 * reach + 1
    if len(values) < width:
        return list(values)
    sums = [0.0, *accumulate(values)]
    means = [(sums[start + width] - sums[start]) / width for start in range(len(values) - width + 1)]
    squares = reach * (reach + 1) * width / 3  # of the distances from the middle

    def line(window: Sequence[float], mean: float, distances: range) -> list[float]:
        slope = sum((index - reach) * value for index, value in enumerate(window)) / squares
        return [mean + slope * distance for distance in distances]

    head = line(values[:width], means[0], range(-reach, 0))
    return [*head, *means, *line(values[-width:], means[-1], range(1, reach + 1))]


def draw(curves: Curves, *, norm: str = "gradient") -> dict[str, bytes]:
    """PNG files by name (loss, throughput, memory, learning_rate); a plot without any data is left out.

    `norm`: what `grad_norm` is the norm of.
    """
    import matplotlib

    pictures = {}
    painters: dict[str, tuple[Callable[[Curves], Figure], tuple[str, ...]]] = {
        "loss": (_loss, ("loss", "eval/loss")),
        "throughput": (_throughput, ("tokens_per_s",)),
        "memory": (_memory, ("max_memory_gib",)),
        "learning_rate": (partial(_learning_rate, norm=norm), ("lr", "grad_norm")),
    }
    with matplotlib.rc_context(_STYLE):
        for name, (paint, needs) in painters.items():
            if any(curves[need] for need in needs):
                pictures[name] = _png(paint(curves))
    return pictures


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _figure(rows: int) -> tuple[Figure, list[Axes]]:
    # Not pyplot: it keeps global state and may pick a backend with windows.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 1.6 + 2.4 * rows), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    return figure, list(axes)


def _line(axes: Axes, curve: Curve, *, color: str, label: str) -> None:
    """The raw values, light, under their average; few points get no average but marks."""
    if len(curve.steps) < MARKED_BELOW:
        axes.plot(curve.steps, curve.values, color=color, marker="o", markersize=4, label=label)
        return
    axes.plot(curve.steps, curve.values, color=color, alpha=0.3, linewidth=0.8)
    axes.plot(curve.steps, smooth(curve.values), color=color, linewidth=1.8, label=f"{label} (smoothed)")


def _finish(axes: Sequence[Axes], curves: Curves) -> None:
    from matplotlib.ticker import MaxNLocator

    for index, part in enumerate(axes):
        for number, step in enumerate(curves.resumes):
            label = "resume" if number == 0 and index == 0 else None
            part.axvline(step, color=_GREY, linestyle=":", linewidth=1.2, label=label, zorder=1)
    axes[-1].set_xlabel("optimizer step")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, _ = axes[0].get_legend_handles_labels()
    if len(handles) > 1:
        axes[0].legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(handles), borderaxespad=0.2)


def _counts(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter

    from llmtrain.base import units

    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: units.count(float(value))))


def _loss(curves: Curves) -> Figure:
    figure, (axes,) = _figure(1)
    figure.set_size_inches(8.0, 4.8)
    axes.set_title("Loss")
    axes.set_ylabel(f"loss [{curves.unit}]")
    if train := curves["loss"]:
        _line(axes, train, color=_BLUE, label="training")
    if evaluation := curves["eval/loss"]:
        axes.plot(evaluation.steps, evaluation.values, color=_ORANGE, marker="o", markersize=4, label="validation")
    _finish([axes], curves)
    for name, value in curves.baselines.items():
        axes.axhline(value, color=_GREEN, linestyle="--", linewidth=1.0)
        axes.annotate(
            f"{name} model {value:.3f}",
            # At the right end, where the curves lie below the baselines that they are meant to beat.
            xy=(1.0, value),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            color=_GREEN,
            fontsize=9,
        )
    return figure


def _throughput(curves: Curves) -> Figure:
    causal = curves["mfu_causal"]
    figure, axes = _figure(2 if causal else 1)
    axes[0].set_title("Throughput")
    axes[0].set_ylabel("tokens/s, all devices")
    _line(axes[0], curves["tokens_per_s"], color=_BLUE, label="tokens/s")
    axes[0].set_ylim(bottom=0)
    _counts(axes[0])
    if causal:
        noncausal = curves["mfu_noncausal"]
        for curve, color, label in ((noncausal, _ORANGE, "non-causal"), (causal, _BLUE, "causal")):
            if curve:
                percent = Curve(steps=curve.steps, values=[100 * value for value in curve.values])
                _line(axes[1], percent, color=color, label=label)
        axes[1].set_ylabel("MFU [%]")
        axes[1].set_ylim(bottom=0)
        axes[1].legend(loc="lower right")
    _finish(axes, curves)
    return figure


def _memory(curves: Curves) -> Figure:
    figure, (axes,) = _figure(1)
    axes.set_title("Peak memory")
    axes.set_ylabel("rank 0 [GiB]")
    curve = curves["max_memory_gib"]
    axes.plot(curve.steps, curve.values, color=_BLUE, linewidth=1.8, label="peak memory")
    axes.set_ylim(bottom=0, top=max(curve.values) * 1.15 or 1.0)
    _finish([axes], curves)
    return figure


def _learning_rate(curves: Curves, norm: str) -> Figure:
    parts = [name for name in ("lr", "grad_norm") if curves[name]]
    figure, axes = _figure(len(parts))
    for part, name in zip(axes, parts, strict=True):
        if name == "lr":
            part.plot(curves["lr"].steps, curves["lr"].values, color=_BLUE, linewidth=1.8, label="learning rate")
            part.set_ylabel("learning rate")
            part.set_ylim(bottom=0)
            part.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
        else:
            _line(part, curves["grad_norm"], color=_GREEN, label=f"{norm} norm")
            part.set_ylabel(f"{norm} norm")
    axes[0].set_title(" and ".join({"lr": "Learning rate", "grad_norm": f"{norm} norm"}[n] for n in parts))
    _finish(axes, curves)
    return figure
