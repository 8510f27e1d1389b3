"""Rules of data.stages, and the view of a run that each stage is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from llmtrain.base.rule import Rule
from llmtrain.config.run import RunConfig
from llmtrain.config.stages import StageConfig, Stages, data_of
from llmtrain.optim.schedules import Schedule

KeyOf = Callable[[str], str]
"""From a key of a stage's view to the key that the user wrote."""


def key_of(number: int, name: str = "") -> str:
    """Key of a stage by its index in data.stages, or of a field of it."""
    return f"data.stages[{number}]" + (f".{name}" if name else "")


def stage_views(run: RunConfig) -> Iterator[tuple[RunConfig, KeyOf]]:
    """Each stage as a run of its own with the data that it has."""
    given: dict[str, int] = {}
    for number, data in enumerate(data_of(run.data)):
        yield replace(run, data=data), _names(dict(given))
        if number < len(run.data.stages):
            own = run.data.stages[number]
            given |= {name: number for name in ("path", "mixture", "sequence_length") if getattr(own, name) is not None}


def _names(given: dict[str, int]) -> KeyOf:
    """`given`: field of data -> the stage that gives it."""

    def name(key: str) -> str:
        section, _, inner = key.partition(".")
        number = given.get(inner.partition(".")[0]) if section == "data" else None
        return key if number is None else key_of(number, inner)

    return name


def _keys(name: str, wrong: Callable[[RunConfig, StageConfig], Any]) -> Callable[[RunConfig], list[str]]:
    """A rule for each stage: keys of this field of the stages that are wrong."""
    return lambda run: [key_of(number, name) for number, stage in enumerate(run.data.stages) if wrong(run, stage)]


def _resizes(stage: StageConfig) -> bool:
    return stage.sequence_length is not None or stage.train != type(stage.train)()


def _out_of_order(run: RunConfig) -> list[str]:
    steps = [0, *(stage.from_step for stage in run.data.stages)]
    return [key_of(number, "from_step") for number, (before, step) in enumerate(pairwise(steps)) if step <= before]


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule(("data.stages[1].from_step",), _out_of_order,
         "stages begin at step 1 or later, each after the one before it", "order them by from_step",
         {"data.stages": [{"from_step": 9, "sequence_length": 64}, {"from_step": 9, "path": "data/x"}]}, each=True),
    Rule(("data.stages[0].path",), _keys("path", lambda _, s: s.path is not None and s.mixture is not None),
         "data.path and a mixture are both given", "give one of them, or none to go on with the data before",
         {"data.stages": [{"from_step": 5, "path": "data/x", "mixture": {"data/x": 1}}]}, each=True),
    Rule(("data.stages[0].mixture",), _keys("mixture", lambda _, s: s.mixture == {}),
         "names no folder", "write lines `FOLDER: WEIGHT`, or remove it",
         {"data.stages": [{"from_step": 5, "mixture": {}}]}, each=True),
    Rule(("data.stages[0].from_step",), _keys("from_step", lambda _, s: s == StageConfig(from_step=s.from_step)),
         "changes nothing", "give path, mixture, sequence_length, train or schedule, or remove it",
         {"data.stages": [{"from_step": 5}]}, each=True),
    Rule(("data.stages[0].rope",), _keys("rope", lambda r, s: r.objective.reference == "column" and s.rope),
         lambda r, _: f"objective.name {r.objective.name} reads what its reference says with the positions that it "
                      "began with",
         "remove it, or ask the reference at each step: objective.reference online, with an adapter",
         {"objective.name": "dpo", "data.stages": [{"from_step": 5, "rope": {"rope_theta": 5.0}}]}, each=True),
    Rule(("train.balance",), lambda r: r.train.balance != "equal" and any(map(_resizes, r.data.stages)),
         "the ranks' speeds are measured for one batch and length, and data.stages changes them", "set it to equal",
         {"train.balance": "measured", "data.stages": [{"from_step": 5, "sequence_length": 64}]}),
)
# fmt: on


def _schedules(case: Any) -> Iterator[tuple[str, Schedule, int, int | None]]:
    """(key, shape, first step, end) of each schedule that stages bound."""
    stages: Stages = case.stages
    for number, stage in enumerate(stages):
        first, end = stage.first_step, stages.schedule_end(stage.first_step, case.max_steps)
        if stage.schedule_from == first and not (first == 0 and end == case.max_steps):
            yield (key_of(number - 1, "schedule") if number else "schedule"), stage.schedule, first, end


def _is_tight(shape: Schedule, steps: int) -> bool:
    return 0 < steps <= shape.warmup_steps or (steps > 0 and shape.warmup_steps + shape.decay() > steps)


def _too_long(case: Any, key: str) -> str:
    found = {f"{name}.warmup_steps": (shape, first, end) for name, shape, first, end in _schedules(case)}
    shape, first, end = found[key]
    return (
        f"warm-up {shape.warmup_steps} + decay {shape.decay()} do not fit into the schedule's {(end or first) - first} "
        f"steps, {first} to {end}"
    )


# fmt: off
SCHEDULES: tuple[Rule, ...] = (
    Rule(("data.stages[0].schedule.name",),
         lambda c: [f"{key}.name" for key, shape, _, end in _schedules(c) if end is None and shape.needs_length],
         "this shape needs the number of steps in advance",
         "set train.max_steps, train.max_tokens or train.epochs, or schedule.name: constant",
         {"train.max_steps": None, "train.max_minutes": 5, "schedule.name": "constant",
          "data.stages": [{"from_step": 5, "schedule": {"name": "linear"}}]}, each=True),
    Rule(("data.stages[0].schedule.warmup_steps",),
         lambda c: [f"{key}.warmup_steps" for key, shape, first, end in _schedules(c)
                    if end is not None and _is_tight(shape, end - first)],
         _too_long, "shorten them, or let the next schedule begin later",
         {"data.stages": [{"from_step": 90, "schedule": {"name": "linear", "warmup_steps": 12}}]}, each=True),
)
# fmt: on
"""Schedules that stages bound. The subject of `broken` is a `Case` (config/rules.py)."""


def notes_of(run: RunConfig, stages: Stages, max_steps: int | None) -> list[str]:
    """Stages that the run does not reach, learning rates that jump, and decisions on figures of other data."""
    notes = []
    same = stages.sharing(0)
    others = [stage.first_step for number, stage in enumerate(stages) if number not in same]
    other = next((step for step in others if max_steps is None or step < max_steps), None)
    deciding = {
        "checkpoint.keep_best": run.checkpoint.keep_best.metric,
        "train.stop_early": run.train.stop_early.metric,
    }
    for key, metric in deciding.items():
        stays = metric is None or metric.split("/")[1] in {*run.eval.sets, *run.eval.choices, "mean"}
        if other is not None and not stays:
            notes.append(f"{key}: {metric} is of other data from step {other} on, and compared with that before; name "
                         "a figure of eval.sets, which stay as they are")  # fmt: skip
    for number, stage in enumerate(stages):
        first = stage.first_step
        if max_steps is not None and first >= max_steps:
            notes.append(f"stage {number}, from step {first}, is not reached: the run ends at step {max_steps}")
        elif first and stage.schedule_from == first:
            last, rate = stages.factor(first - 1, max_steps), stages.factor(first, max_steps)
            if not math.isclose(last, rate, rel_tol=0.01):
                notes.append(f"the learning rate changes from {last:.3g} to {rate:.3g} of optim.lr at step {first}, "
                             f"where stage {number} begins")  # fmt: skip
    return notes
