"""`profile.steps`: traces of torch's profiler for each rank, memory over time, and a summary page."""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from llmtrain.base import log, units
from llmtrain.base.files import replace_file
from llmtrain.base.rank.heartbeat import heart
from llmtrain.features.profile import ProfileConfig
from llmtrain.optim.optimizers import PARAM
from llmtrain.training.parts import Done, Launch, Part
from llmtrain.training.step import Position

_SHOWN = 15
"""Operators on the page."""
_PHASES = ("data wait", "forward", "backward", "optimizer", "rest")
_ON_A_GPU = (
    " On a GPU these are the host's times: it fills the device's queue and continues, and a phase that waits for the "
    "device includes the device's work before."
)


class Profile(Part):
    def __init__(self, launch: Launch) -> None:
        self._setup, self._speed = launch.setup, launch.speed
        self._folder = launch.folder.path / "profile"
        self._first, self._last = launch.setup.run.config.section(ProfileConfig).range()
        self._open: contextlib.ExitStack | None = None
        self._spent = dict.fromkeys([*_PHASES, "collectives"], 0.0)
        self._steps, self._began_s, self._gradients = 0, 0.0, 0

    def begin(self, position: Position) -> None:
        self._start_profile(position.step + 1)

    def before_update(self) -> None:
        if self._open is not None:
            gradients = [p.grad for p in self._setup.engine.module.parameters() if p.grad is not None]
            self._gradients = max(self._gradients, sum(g.numel() * g.element_size() for g in gradients))

    def after_step(self, done: Done) -> None:
        step = done.position.step
        if self._open is not None:
            self._steps += 1
            self._spent["data wait"] += done.data_wait_s
            self._spent["collectives"] += done.comm_s
            if step >= self._last or done.last:
                self._write_profile(step)
        elif not done.last:
            self._start_profile(step + 1)

    def close(self, error: BaseException | None) -> None:
        if self._open is not None:
            self._open.close()

    def _start_profile(self, step: int) -> None:
        if not self._first <= step <= self._last:
            return
        from torch.profiler import ProfilerActivity, profile

        cuda = self._setup.ranks.device.type == "cuda"
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._profiler = profile(activities=kinds, profile_memory=True)
        self._from, engine = step, self._setup.engine
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._time_function(engine, "forward_backward", "forward"))
            stack.enter_context(self._time_function(torch.autograd, "backward", "backward"))
            stack.enter_context(self._time_function(engine, "update", "optimizer"))
            stack.enter_context(self._profiler)
            self._open = stack.pop_all()
        self._began_s = time.perf_counter()

    @contextlib.contextmanager
    def _time_function(self, holder: Any, name: str, phase: str) -> Iterator[None]:
        """Measure the time of a function, and name it in the trace."""
        function: Callable[..., Any] = getattr(holder, name)
        of_instance, inside = name in vars(holder), [0]

        def timed(*words: Any, **options: Any) -> Any:
            if inside[0]:  # recomputed activations have a backward pass within the other
                return function(*words, **options)
            inside[0], began_s = 1, time.perf_counter()
            try:
                with torch.profiler.record_function(f"llmtrain: {name}"):
                    return function(*words, **options)
            finally:
                inside[0] = 0
                self._spent[phase] += time.perf_counter() - began_s

        setattr(holder, name, timed)
        try:
            yield
        finally:
            setattr(holder, name, function) if of_instance else delattr(holder, name)

    def _write_profile(self, step: int) -> None:
        """Write the files. A failed write is a warning."""
        took_s, ranks = time.perf_counter() - self._began_s, self._setup.ranks
        assert self._open is not None
        with self._speed.pause(), heart.during("save"):
            self._open.close()
            self._open = None
            spent = self._spent
            spent["forward"] -= spent["backward"]
            spent["rest"] = took_s - sum(spent[phase] for phase in _PHASES if phase != "rest")
            mine: dict[str, Any] = {"step_s": took_s / self._steps, "state": self._state()}
            mine |= {phase: seconds / self._steps for phase, seconds in spent.items()}
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                trace = self._folder / f"trace-rank{ranks.rank}.json.gz"
                self._profiler.export_chrome_trace(str(trace))
                timeline = memory_timeline(trace, self._setup.ranks.device.type)
                with open(self._folder / f"memory-rank{ranks.rank}.csv", "w", newline="") as file:
                    csv.writer(file).writerows([("ms", "allocated_bytes"), *timeline])
                sizes = [size for _, size in timeline]
                mine["peak"] = max(sizes, default=0) - (sizes[0] if sizes else 0)
            except OSError as error:
                log.warn(f"the profile of rank {ranks.rank} cannot be written: {error}")
            everyone = ranks.gather(mine)
            if ranks.rank == 0:
                steps = range(self._from, step + 1)
                page = page_of(steps, everyone, self._operators(), self._setup.ranks.device.type)
                try:
                    replace_file(self._folder / "profile.md", page.encode())
                    log.info(f"profile of the steps {steps[0]} to {steps[-1]}: {self._folder / 'profile.md'}")
                except OSError as error:
                    log.warn(f"{self._folder / 'profile.md'} cannot be written: {error}")

    def _state(self) -> dict[str, int]:
        """Bytes that this rank holds between steps, by kind."""
        engine, bytes_of = self._setup.engine, {"parameters (forward copies)": 0}
        for copy in engine.copies():
            bytes_of["parameters (forward copies)"] += copy.values.numel() * copy.values.element_size()
        for piece in engine.state():
            kind = "optimizer: master parameters" if piece.kind == PARAM else f"optimizer: {piece.kind}"
            bytes_of[kind] = bytes_of.get(kind, 0) + piece.region.numel * piece.dtype.itemsize
        return {**bytes_of, "gradients (in .grad before the update)": self._gradients}

    def _operators(self) -> list[tuple[str, int, float]]:
        """(name, calls, own ms in a step), the most costly first."""
        cuda = self._setup.ranks.device.type == "cuda"
        events = [event for event in self._profiler.key_averages() if not event.key.startswith("llmtrain: ")]
        rows = [
            (event.key, event.count, (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e3)
            for event in events
        ]
        ordered = sorted(rows, key=lambda row: -row[2])[:_SHOWN]
        return [(name, count, ms / self._steps) for name, count, ms in ordered]


def memory_timeline(trace: Path, device: str) -> list[tuple[float, int]]:
    """Return (ms since the first event, allocated bytes) for each memory event of a trace, in order."""
    wanted = 1 if device == "cuda" else 0  # torch's numbers of device types
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    points = sorted(
        (event["ts"], int(event["args"]["Total Allocated"]))
        for event in events
        if event.get("name") == "[memory]" and event["args"].get("Device Type") == wanted
    )
    return [(round((at - points[0][0]) / 1e3, 3), size) for at, size in points]


def page_of(steps: range, everyone: list[dict[str, Any]], operators: list[tuple[str, int, float]], device: str) -> str:
    """Return the page in Markdown. `everyone`: seconds of a step and bytes, for each rank; `operators`: rank 0's."""
    slowest = max(range(len(everyone)), key=lambda rank: everyone[rank]["step_s"])
    keys = ("step_s", "collectives", *_PHASES)
    mean = {key: sum(figures[key] for figures in everyone) / len(everyone) for key in keys}
    first, *others = sorted(_PHASES, key=lambda phase: -mean[phase])

    def share(phase: str) -> str:
        return f"{phase} {mean[phase] / mean['step_s']:.0%}"

    lines = [
        f"# Profile of the steps {steps[0]} to {steps[-1]}",
        "",
        f"A step takes {mean['step_s'] * 1e3:.1f} ms in the mean over {units.counted(len(everyone), 'rank')}, with the "
        f"profiler, which slows it down. Most of it is {share(first)}; then {', '.join(map(share, others))}. "
        f"Inside collectives, which belong to these, ranks spend {mean['collectives'] / mean['step_s']:.0%}."
        + (f" The slowest is rank {slowest}." if len(everyone) > 1 else ""),
        "",
        "Forward: the forward and backward passes without autograd's backward, in a pipeline with the waits for other "
        "stages. Rest: what the host does between these: logging, agreement of the ranks, checkpoints."
        + (_ON_A_GPU if device == "cuda" else ""),
        "",
        f"| rank | step, ms | {', ms | '.join(_PHASES)}, ms | collectives, ms |",
        "|" + "---|" * (len(_PHASES) + 3),
    ]
    for rank, figures in enumerate(everyone):
        times = [figures[key] * 1e3 for key in ("step_s", *_PHASES, "collectives")]
        lines.append(f"| {rank} | {' | '.join(f'{ms:.1f}' for ms in times)} |")
    lines += ["", "## Memory", ""]
    kinds = list(everyone[0]["state"])
    lines += [
        "Held from step to step, and the most that a step adds: activations, gradients that it makes and temporary "
        "tensors, such as DeepSpeed's reduce bucket (`memory-rankN.csv` has it over time)."
        + (
            ""
            if device == "cuda"
            else " On a CPU a tensor counts from its creation; pages that are never written take no memory."
        ),
        "",
        f"| rank | {' | '.join(kinds)} | a step adds |",
        "|" + "---|" * (len(kinds) + 2),
    ]
    for rank, figures in enumerate(everyone):
        cells = " | ".join(units.size(figures["state"].get(kind, 0)) for kind in kinds)
        lines.append(f"| {rank} | {cells} | {units.size(figures['peak']) if 'peak' in figures else 'not known'} |")
    where = "the device" if device == "cuda" else "the CPU"
    lines += [
        "",
        f"## Operators of rank 0, by their own time on {where}",
        "",
        "| operator | calls | ms a step | of the step |",
        "|---|---|---|---|",
        *(
            f"| `{name[:80].replace('|', '/')}` | {count} | {ms:.2f} | {ms / 1e3 / everyone[0]['step_s']:.0%} |"
            for name, count, ms in operators
        ),
        "",
        "`trace-rankN.json.gz` opens in https://ui.perfetto.dev or chrome://tracing.",
    ]
    return "\n".join(lines) + "\n"
