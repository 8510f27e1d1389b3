"""Rules of data.stages, and the view of a run that each stage is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from llmtrain.config.problems import Places, Problems, Within
from llmtrain.config.run import RunConfig
from llmtrain.config.stages import StageConfig, Stages, data_of


def key_of(number: int, name: str = "") -> str:
    """Key of a stage by its index in data.stages, or of a field of it."""
    return f"data.stages[{number}]" + (f".{name}" if name else "")


def stage_runs(run: RunConfig, problems: Problems) -> Iterator[tuple[RunConfig, Problems]]:
    """Each stage as a run of its own with the data that it has, and the mistakes of the complete run, which name a
    value that a stage has given by the stage's key."""
    given: dict[str, int] = {}
    places: Places = problems.places
    for number, data in enumerate(data_of(run.data)):
        yield replace(run, data=data), Within(problems, partial(_in_whole, dict(given)), places)
        if number < len(run.data.stages):
            prefix = f"{key_of(number)}."
            own = {key.removeprefix(prefix): place for key, place in places.items() if key.startswith(prefix)}
            places = {**places, **{f"data.{key}": place for key, place in own.items()}}
            given |= {name: number for name in _OF_DATA if getattr(run.data.stages[number], name) is not None}


_OF_DATA = ("path", "mixture", "sequence_length")
"""Fields of a stage that are fields of data, too."""


def _in_whole(given: Mapping[str, int], key: str) -> str:
    """The key in the whole run of a key in a stage's view of it. `given`: by field, the stage that it is of."""
    inner = key.removeprefix("data.") if key.startswith("data.") else ""
    number = given.get(inner.partition(".")[0])
    return key if number is None else key_of(number, inner)


def check_stages(run: RunConfig, problems: Problems) -> None:
    """Values of the stages, and what they do not go with."""
    before = 0
    for number, stage in enumerate(run.data.stages):
        if stage.from_step <= before:
            problems.add(
                key_of(number, "from_step"),
                stage.from_step,
                "stages begin at step 1 or later, each after the one before it",
                "order them by from_step",
                problems.places.get(key_of(number, "from_step")),
            )
        before = stage.from_step
        if stage.path is not None and stage.mixture is not None:
            problems.add(key_of(number, "path"), stage.path, "data.path and a mixture are both given",
                         "give one of them, or none to go on with the data before")  # fmt: skip
        if stage.mixture == {}:
            problems.add(key_of(number, "mixture"), {}, "names no folder", "write lines `FOLDER: WEIGHT`, or remove it")
        if stage == StageConfig(from_step=stage.from_step):
            problems.add(key_of(number), stage.from_step, "changes nothing",
                         "give path, mixture, sequence_length, train or schedule, or remove it",
                         problems.places.get(key_of(number, "from_step")))  # fmt: skip
    if run.data.stages:
        _check_beside(run, problems)
    if run.resume_data == "new" and run.sites.name is not None:
        problems.add("resume_data", "new", "sites (sites.name) share the order of one data set",
                     "remove it, or begin new sites from the parameters: resume_weights_only")  # fmt: skip


def _check_beside(run: RunConfig, problems: Problems) -> None:
    """Settings that a run with stages cannot have."""
    count, resized = len(run.data.stages) + 1, any(map(_resizes, run.data.stages))
    if run.sites.name is not None:
        problems.add("data.stages", count, "sites (sites.name) deal out the sequences of one data set",
                     "remove one of the two")  # fmt: skip
    if run.objective.reference == "column":
        for number, stage in enumerate(run.data.stages):
            if stage.rope:
                problems.add(key_of(number, "rope"), stage.rope, f"objective.name {run.objective.name} reads what its "
                             "reference says with the positions that it began with", "remove it, or ask the reference "
                             "at each step: objective.reference online, with an adapter")  # fmt: skip
    if resized and run.train.balance != "equal":
        problems.add("train.balance", run.train.balance, "the ranks' speeds are measured for one batch and length, and "
                     "data.stages changes them", "set it to equal")  # fmt: skip


def _resizes(stage: StageConfig) -> bool:
    return stage.sequence_length is not None or stage.train != type(stage.train)()


def check_lengths(run: RunConfig, stages: Stages, max_steps: int | None, problems: Problems) -> None:
    """Warm-up and decay of a schedule fit into its steps, if stages bound it; it has an end if it needs one."""
    for number, stage in enumerate(stages):
        first, end, shape = stage.first_step, stages.schedule_end(stage.first_step, max_steps), stage.schedule
        if stage.schedule_from != first or (first == 0 and end == max_steps):  # `check_schedule` knows the run's own
            continue
        key = key_of(number - 1, "schedule") if number else "schedule"
        place = problems.places.get(key, problems.places.get(f"{key}.warmup_steps"))
        if end is None:
            if shape.needs_length:
                problems.add(f"{key}.name", shape.name, "this shape needs the number of steps in advance",
                             "set train.max_steps, train.max_tokens or train.epochs, or schedule.name: constant",
                             place)  # fmt: skip
            continue
        warmup, decay, length = shape.warmup_steps, shape.decay(), end - first
        if length > 0 and (warmup >= length or warmup + decay > length):
            rule = f"warm-up {warmup} + decay {decay} do not fit into the schedule's {length} steps, {first} to {end}"
            problems.add(
                f"{key}.warmup_steps", warmup, rule, "shorten them, or let the next schedule begin later", place
            )


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
