"""The charts of the report, drawn by matplotlib: as SVG for its page, and as PNG.

matplotlib is imported at the first call, with a backend that needs no display.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


COLORS = ("#2563a8", "#d9622b", "#2f855a", "#8b3fa8", "#b7791f", "#c53030", "#0f8a8a")
"""Colors of curves. On dark screens the page replaces each by another color with the same index."""
_INK, _SOFT, _EDGE = "#1a202c", "#4a5568", "#e2e8f0"
_VARIABLES = {color: f"var(--c{index})" for index, color in enumerate(COLORS)} | {
    _INK: "var(--ink)",
    _SOFT: "var(--soft)",
    _EDGE: "var(--edge)",
}
_WIDTH, _LEFT, _RIGHT = 8.6, 0.085, 0.975
_STYLE: Any = {
    "font.size": 9,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _EDGE,
    "axes.edgecolor": _SOFT,
    "axes.labelcolor": _SOFT,
    "axes.titlecolor": _INK,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.formatter.useoffset": False,
    "text.color": _SOFT,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
    "legend.frameon": False,
}


def svg(chart: dict[str, Any]) -> str:
    """Return a chart as an SVG element in the page's colors."""
    import matplotlib

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": chart["id"]}):
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        _figure(chart).savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, variable)
    return text


def png(chart: dict[str, Any]) -> bytes:
    """Return a chart as a PNG file, 1,290 pixels wide."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        buffer = io.BytesIO()
        _figure(chart).savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _figure(chart: dict[str, Any]) -> Figure:
    from matplotlib.figure import Figure  # not pyplot: it keeps global state and may pick a backend with windows
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    named = [series for series in chart["series"] if not series.get("faint")]
    columns = 1 if max((len(series["name"]) for series in named), default=0) > 40 else 3
    legend = 0.2 * -(-len(named) // columns)  # inches
    height = 3.4 + legend
    figure = Figure(figsize=(_WIDTH, height))
    bottom = (0.5 + legend) / height
    axes = figure.add_axes((_LEFT, bottom, _RIGHT - _LEFT, 1 - bottom - 0.35 / height))
    unit = f" [{chart['unit']}]" if chart["unit"] else ""
    axes.set_title(f"{chart['title']}{unit}".replace("$", r"\$"))
    for series in chart["series"]:
        faint = series.get("faint")
        axes.plot(
            series["x"],
            series["y"],
            color=COLORS[series["color"] % len(COLORS)],
            linewidth=0.8 if faint else 1.8,
            alpha=0.35 if faint else 1.0,
            linestyle="--" if series["dash"] else "-",
            marker="o" if series.get("dots") else None,
            markersize=4,
            label="_" if faint else series["name"].replace("$", r"\$"),
        )
    for step in chart["marks"]:
        axes.axvline(step, color=_SOFT, linestyle=":", linewidth=1.0, zorder=1)
    for stage, step in chart["borders"].items():
        axes.axvline(step, color=_SOFT, linestyle="--", linewidth=1.0, zorder=1)
        above: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        axes.annotate(f"stage {stage}", xy=(step, 1.0), xytext=(3, -9), color=_SOFT, **above)
    for level in chart["levels"]:
        axes.axhline(level["y"], color=COLORS[2], linestyle="--", linewidth=1.0)
        # At the right end, where the curves should be below these baselines.
        place: Any = {"xycoords": ("axes fraction", "data"), "xytext": (-4, 3), "textcoords": "offset points"}
        axes.annotate(f"{level['name']} {level['y']:.3f}", xy=(1.0, level["y"]), ha="right", color=COLORS[2], **place)
    if chart["zero"] and axes.dataLim.y0 >= 0:
        axes.set_ylim(bottom=0.0, top=1.08 * axes.dataLim.y1 or 1.0)
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.tick_params(length=0)
    figure.legend(loc="lower left", bbox_to_anchor=(_LEFT - 0.01, 0.0), ncols=columns, borderaxespad=0.1)
    return figure
