"""Compares data, batch, length, rate and RoPE of each step in a run's own objects with the rules of docs/stages.md and
docs/training.md, also after resumes. Nothing is trained."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from llmtrain.base import units
from llmtrain.base.errors import UserError
from llmtrain.config.resolve import resolve
from llmtrain.config.run import ResolvedRun, RunConfig
from llmtrain.data.stream.course import RECORD, Course
from llmtrain.data.stream.epoch import sequences_of_epoch
from llmtrain.parity.plain import rate_of_step
from llmtrain.parity.small_run import Wanted
from llmtrain.training.examine import rate_of
from llmtrain.training.stage_borders import StageBorders
from llmtrain.training.step import Position

_EACH, _RESUMES = 100_000, 25
"""Steps to compare (a longer run: those next to a border, and a sample); resumes to try."""
_LEFT_OUT = "        not trained here: stages, evaluation, saving and resume, sequences beyond the first 48 of the data"
_NAMES = ("data of stage", "sequence", "batch", "length", "rate", "rope")


def compare_course(user: Wanted, worlds: Sequence[int]) -> tuple[list[str], bool]:
    """Return (lines of the report, True if each step follows the definition). `worlds`: world sizes to resolve the run
    for; larger ones are tried if its batches need more ranks."""
    reason, resolved = "", None
    for ranks in (*worlds, *(user.degrees.world_size * 2**power for power in range(12))):
        try:
            resolved = resolved or resolve(user.run, ranks, "--ranks", epoch=sequences_of_epoch)
        except UserError as error:
            reason = reason or str(error).splitlines()[0]
    if resolved is None:
        return [f"  the course is not compared: {reason}", _LEFT_OUT], True
    plan, course, wrong = _plan(user.run, resolved), _course(resolved), list[str]()
    end = resolved.max_steps or plan[-1].first + 1000
    about = {step for edge in (*(part.first for part in plan), end) for step in range(edge - 2, edge + 3)}
    near = sorted(step for step in about if 0 < step < end)
    resumes = near[:: 1 + len(near) // _RESUMES]
    for first in (0, *resumes):
        launch, index = _course(resolved), course.at(first).index
        state = {"step": first, "sample_index": index, RECORD: course.record(first, index)}
        launch.go_on(first, json.loads(json.dumps(state)))
        steps = sorted({first, *(s for s in near if s > first), *(() if first else range(0, end, 1 + end // _EACH))})
        told = zip(steps, _by_the_run(resolved, launch, steps), strict=True)
        found = (_other(got, _by_definition(plan, step, resolved.max_steps), step, first) for step, got in told)
        wrong += list(filter(None, found))[:1]
    what = f"{units.counted(end, 'step')}, {units.counted(len(plan), 'stage')}, {len(resumes)} resumes"
    line = f"  {'FAIL' if wrong else 'PASS'}  course: {what}: data, batch, length, rate, rope by their definition"
    return [line, *(f"          {each}" for each in wrong[:3]), _LEFT_OUT], not wrong


def _other(got: tuple[Any, ...], right: tuple[Any, ...], step: int, first: int) -> str:
    for name, mine, want in zip(_NAMES, got, right, strict=True):
        if mine != want and not (name == "rate" and math.isclose(mine, want, rel_tol=1e-9, abs_tol=1e-12)):
            since = f", resumed at {first}" if first else ""
            return f"step {step + 1}{since}: {name} {mine}, by its definition {want}"
    return ""


def _plan(run: RunConfig, resolved: ResolvedRun) -> list[Any]:
    """Return the stages by their definition: a value that a stage does not name is inherited from the stage before
    it."""
    ranks, train, folders, sets, parts = resolved.batch.data_parallel, resolved.run.train, run.data.folders, [], []
    now = SimpleNamespace(first=0, length=run.data.sequence_length, micro=train.micro_batch, batch=train.global_batch,
                          schedule=resolved.run.schedule, since=0, rope={})  # fmt: skip
    for number, stage in enumerate([None, *run.data.stages]):
        if stage is not None:
            now, given = SimpleNamespace(**vars(now)), stage.train
            now.first, now.rope = stage.from_step, now.rope | (stage.rope or {})
            folders = {stage.path: 1.0} if stage.path else stage.mixture or folders
            now.length, now.micro = stage.sequence_length or now.length, given.micro_batch or now.micro
            if given.global_batch or given.accumulation:  # two numbers give the third; a lone one keeps the micro-batch
                now.batch = given.global_batch or given.accumulation * now.micro * ranks
                now.micro = now.batch // (given.accumulation * ranks) if given.accumulation else now.micro
            if stage.schedule is not None:
                now.schedule, now.since = resolved.stages[number].schedule, stage.from_step  # with its defaults
        shares = {os.path.normpath(folder): weight / sum(folders.values()) for folder, weight in folders.items()}
        sets.append((shares, now.length))
        now.data = sets.index(sets[-1])
        parts.append(now)
    return parts


def _by_definition(plan: list[Any], step: int, end: int | None) -> tuple[Any, ...]:
    """Compute a step from the stages alone. Data of an earlier stage continues where that stage ended; a schedule ends
    with the run or at the next schedule."""
    parts = [part for part in plan if part.first <= step]
    spans, part = pairwise([*parts, SimpleNamespace(first=step)]), parts[-1]
    read = sum((after.first - each.first) * each.batch for each, after in spans if each.data == part.data)
    ends = [each.since for each in plan if each.since > part.since] + ([] if end is None else [end])
    rate = rate_of_step(part.schedule, step - part.since + 1, min(ends, default=part.since) - part.since)
    return part.data, read, part.batch, part.length, rate, part.rope


class _NotingBorders(StageBorders):
    def _turn(self, stage: int) -> None:
        self.rope = self._course.stages[stage].rope

    def _tell(self, position: Position) -> None:
        pass


def _course(resolved: ResolvedRun) -> Course:
    """Return a course whose data sets have an identity and no content."""
    sharing = [resolved.stages.sharing(number)[0] for number in range(len(resolved.stages))]
    sets: Any = {first: SimpleNamespace(number=first, fingerprint=str(first)) for first in sharing}
    return Course(resolved.stages, [sets[first] for first in sharing])


def _by_the_run(resolved: ResolvedRun, course: Course, steps: list[int]) -> Iterator[tuple[Any, ...]]:
    """Yield each step as computed by a launch that starts at the first of `steps`."""
    setup = SimpleNamespace(course=course, engine=SimpleNamespace(module=None), resolved=resolved)
    launch: Any = SimpleNamespace(setup=setup, tracker=SimpleNamespace(event=lambda *_, **__: None), loader=None)
    borders, before = _NotingBorders(launch), None
    borders.begin(Position(step=steps[0], sample_index=course.at(steps[0]).index))
    for step in steps:
        at: Any = course.at(step)
        done: Any = SimpleNamespace(last=False, batch=before, position=Position(step=step, sample_index=at.index))
        if before is not None:
            borders.after_step(done)
        borders.request()
        before, rate = at, rate_of(resolved.stages, step, max_steps=resolved.max_steps)
        yield at.data.number, at.index, at.batch.global_batch, at.batch.sequence_length, rate, borders.rope
