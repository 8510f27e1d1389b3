"""The answer of `llmtrain plan`: peaks by kind of rank, their parts, and a verdict for a device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmtrain.base.units import counted, lines_of, size
from llmtrain.features.plan.decide import on_host
from llmtrain.features.plan.device import DEVICES, MIB, Held, Machines
from llmtrain.features.plan.held import DISK
from llmtrain.features.plan.ledger import HOST
from llmtrain.features.plan.rehearsal import Rehearsed
from llmtrain.features.plan.speed import StepTime, bars
from llmtrain.features.plan.work import Operator, sent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PHASES = {"setup": "when the engine is built", "data": "between steps",
           "reference": "in the forward pass of the reference", "forward": "in the forward pass",
           "backward": "in the backward pass", "step": "in the optimizer's update",
           "save": "in a save", "evaluate": "in an evaluation"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Ranks that hold the same tensors."""

    name: str
    ranks: int
    rehearsed: Rehearsed

    @property
    def peak(self) -> int:
        return self.rehearsed.peak + self.rehearsed.ahead


@dataclass(frozen=True, kw_only=True)
class Plan:
    title: str
    machines: Machines
    kinds: list[Kind]
    checkpoint: int
    """Bytes of a checkpoint's tensors."""
    seconds: float
    """CPU-seconds that the rehearsal took."""
    time: StepTime | None = None
    """Estimated time of a step; None: no device was named, or its speeds are not known."""
    changes: dict[str, int] = field(default_factory=dict)
    """Change of the run in words -> peak memory in bytes of the fullest rank with this change."""
    chosen: dict[str, Any] | None = None
    """Values that were chosen for auto."""

    @property
    def fullest(self) -> Kind:
        return max(self.kinds, key=lambda kind: kind.peak)

    @property
    def others(self) -> list[Held]:
        return self.machines.others(self.fullest.peak)

    @property
    def on_host(self) -> int:
        return on_host(self.machines, [kind.rehearsed for kind in self.kinds])

    @property
    def fits(self) -> bool | None:
        """Whether the run fits; None: the machines are not known, or the range of estimates includes their memory."""
        host = None if self.machines.host_memory is None else self.on_host <= self.machines.host_memory
        if host is False or self.machines.memory is None:
            return host
        least, most = self.machines.room(self.fullest.peak, self.machines.memory)
        return True if least >= 0 else False if most < 0 else None

    def as_json(self) -> dict[str, Any]:
        kinds = []
        for kind in self.kinds:
            flops = sum(op.flops * count for op, count in kind.rehearsed.step.items() if isinstance(op, Operator))
            everywhere, elsewhere = sent(kind.rehearsed.step, self.machines.slots)
            step = {"flops": flops, "sent": everywhere, "sent_to_other_hosts": elsewhere}
            kinds.append(vars(kind) | {"rehearsed": vars(kind.rehearsed) | {"step": step}})
        more = {"kinds": kinds, "machines": vars(self.machines), "time": self.time and vars(self.time)}
        others = [vars(other) for other in self.others]
        return vars(self) | more | {"fits": self.fits, "peak": self.fullest.peak, "other": others}

    def text(self) -> str:
        lines = [self.title, ""]
        width = max(len(kind.name) for kind in self.kinds)
        for kind in self.kinds:
            when = _PHASES.get(kind.rehearsed.at, kind.rehearsed.at)
            peak = f"peak {size(kind.peak):>10}  {when}; {size(kind.rehearsed.kept)} between steps"
            lines.append(f"{kind.name:<{width}}  {counted(kind.ranks, 'rank'):>9}  {peak}")
        lines += ["", f"the peak of {self.fullest.name}, {size(self.fullest.peak)}:"]
        lines += bars(dict(sorted(self.parts().items(), key=lambda part: -part[1])), size)
        unmeasured = " (estimates, not measured on a GPU)" if self.machines.on_gpu else ""
        lines += ["", f"a rank takes more than tensors{unmeasured}:"]
        cells = [(f"  {o.what}", f"{size(o.low)} to {size(o.high)}", f"({o.source})") for o in self.others]
        lines += lines_of(cells)
        lines += [
            "",
            *self._verdict(),
            *self._on_host(),
            *self._on_disk(),
            f"disk: {size(self.checkpoint)} for each checkpoint",
        ]
        lines += ["", *self.time.text(), ""] if self.time else []
        lines.append(
            f"rehearsed in {self.seconds:.0f} CPU-s: two steps, a save and any evaluation by the run's own code"
        )
        return "\n".join(lines)

    def parts(self) -> dict[str, int]:
        parts, few = self.fullest.rehearsed.parts, self.fullest.peak // 200
        parts = {label: bytes_ for label, bytes_ in parts.items() if self.on_device(label)}
        rest = sum(bytes_ for bytes_ in parts.values() if bytes_ < few)
        parts = {label: bytes_ for label, bytes_ in parts.items() if bytes_ >= few}
        more = {"gathered ahead (CUDA)": self.fullest.rehearsed.ahead, "other": rest}
        return parts | {label: bytes_ for label, bytes_ in more.items() if bytes_ >= few}

    def on_device(self, label: str) -> bool:
        return not label.endswith(DISK) and not (self.machines.on_gpu and label.endswith(HOST))

    def _on_host(self) -> list[str]:
        if not self.on_host:
            return []
        room = "" if self.machines.host_memory is None else f", of {size(self.machines.host_memory)}"
        room += "; that does not fit" if room and self.on_host > (self.machines.host_memory or 0) else ""
        pinned = " (page-locked ones in blocks of powers of two)" * self.machines.on_gpu
        return [f"host: {size(self.on_host)} of tensors in the memory of each host{room}{pinned}"]

    def _on_disk(self) -> list[str]:
        most = self.machines.slots * max(kind.rehearsed.disk for kind in self.kinds)
        slow = "its time to read and write them in each step is not in the estimate"
        return [f"swap files: {size(most)} of the optimizer on a disk of each host; {slow}"] if most else []

    def _verdict(self) -> list[str]:
        memory, device = self.machines.memory, self.machines.device
        if memory is None and not self.machines.on_gpu:
            return []
        if memory is None:
            rooms = {name: self.machines.room(self.fullest.peak, mib * MIB) for name, mib in DEVICES.items()}
            fitting = ", ".join(name for name, (least, _) in rooms.items() if least >= 0)
            maybe = ", ".join(name for name, (least, most) in rooms.items() if least < 0 <= most)
            perhaps = f"; perhaps {maybe}" if maybe else ""
            return [f"fits {fitting or 'none of the devices that are known here'}{perhaps} (--device asks about one)"]
        least, most = self.machines.room(self.fullest.peak, memory)
        if least >= 0:
            left = f"{size(least)} to {size(most)}" if most > least else size(least)
            return [f"fits {device}, {size(memory)}: {left} are left ({least / memory:.0%} at least)"]
        short = f"{size(-least)} are missing" if most < 0 else f"between {size(-least)} missing and {size(most)} left"
        lines = [f"{'does not fit' if most < 0 else 'may not fit'} {device}, {size(memory)}: {short}"]
        for change, peak in self.changes.items():
            does = "fits" if self.machines.room(peak, memory)[0] >= 0 else "not enough alone"
            lines.append(f"  {change}: peak {size(peak)}, {does}")
        return lines

    def figure(self) -> Figure:
        """Bars by kind of rank, and the memory over one step."""
        from matplotlib import colormaps
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3 + 0.35 * len(self.kinds)), layout="constrained")
        peaks, step = figure.subplots(2, 1, height_ratios=[1 + len(self.kinds), 4])
        names, left = [kind.name for kind in self.kinds], [0.0] * len(self.kinds)
        peaks.set_prop_cycle(color=[colormaps["tab20"](color) for color in (*range(0, 20, 2), *range(1, 20, 2))])
        for label in dict.fromkeys(label for kind in self.kinds for label in kind.rehearsed.parts):
            if self.on_device(label):
                wide = [kind.rehearsed.parts.get(label, 0) / 2**30 for kind in self.kinds]
                peaks.barh(names, wide, left=left, label=label)
                left = [sum(both) for both in zip(left, wide, strict=True)]
        peaks.invert_yaxis()
        peaks.set_xlabel("GiB at the peak")
        figure.legend(fontsize=7, loc="outside right upper")
        for kind in self.kinds:
            step.plot([bytes_ / 2**30 for _, bytes_ in kind.rehearsed.curve], label=kind.name, linewidth=1)
        if self.machines.memory is not None:
            for line in (peaks.axvline, step.axhline):
                line(self.machines.memory / 2**30, color="black", linestyle=":")
        step.set_xlabel("operators of one step")
        step.set_ylabel("GiB")
        step.legend(fontsize=7)
        return figure


def name_of(stage: int, stages: int, pipeline: int) -> str:
    """Name the kind of the ranks in some stages of a pipeline, counted from 0."""
    if pipeline == 1:
        return "every rank"
    upto = f" to {stage + stages}" if stages > 1 else ""
    return f"stage {stage + 1}{upto} of {pipeline}"
