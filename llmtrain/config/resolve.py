"""Join YAML, JSON and world size into one Run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmtrain import features
from llmtrain.config import rules
from llmtrain.config.deepspeed.join import DEGREE_KEYS, check_scheduler, join_values, read_run, with_exact_dict
from llmtrain.config.deepspeed.read import checked
from llmtrain.config.problems import Places, Problems, show
from llmtrain.config.run import Run, RunConfig, TrainConfig, stage_views
from llmtrain.config.stages import Batch, DataConfig, StageBatch, Stages, data_of, stages_of
from llmtrain.config.topology import Degrees
from llmtrain.tracking.metrics import mode_of


def resolve(
    config: RunConfig,
    world_size: int,
    world_size_source: str = "WORLD_SIZE",
    *,
    places: Places | None = None,
    notes: Sequence[str] = (),
    epoch: Callable[[DataConfig], int] | None = None,
) -> Run:
    """Return the run for this number of ranks, with every shared value and the exact DeepSpeed dict.

    `world_size_source` and `places` (dotted key -> where it was written) appear in errors only; `notes` come first
    among the run's; `epoch` counts the sequences of an epoch, which a run with train.epochs needs.
    Raises: ConfigError.
    """
    path = config.deepspeed
    problems = Problems(places)
    written = tuple(problems.places)
    tree, ignored = checked(path, problems)
    config = join_values(config, tree, problems)
    run = read_run(config, tree, problems)
    trees, of_json = (run.deepspeed, tree), run.notes
    problems.raise_if_any()
    world = f"world size {world_size} ({world_size_source})"
    run = replace(run, mix=replace(run.mix, degrees=spread(run.mix.degrees, path, world_size, world, problems)))
    declared, data_parallel = tree.get("data_parallel_size"), run.mix.degrees.data
    if declared not in (None, "auto", data_parallel):
        reason = f"the data-parallel degree is {data_parallel}: {world}"
        problems.add("data_parallel_size", declared, reason, "remove it: the launcher decides it", path)
    of_features = features.rules(config)
    rules.refuse((*rules.OF_FORMS, *of_features.of_forms), run, config, problems, *trees)
    for each, whole in stage_views(config):
        rules.refuse(rules.OF_STAGES, replace(run, config=each), each, problems, key_of=whole)
    problems.raise_if_any()

    run = with_stages(run, world, epoch, problems)
    rules.check_masks(run, problems)
    rules.refuse((*rules.OF_STEPS, *of_features.of_steps), run, run.config, problems, *trees)
    of_scheduler = check_scheduler(run.config, tree, problems)
    problems.raise_if_any()

    run, overruled = with_exact_dict(run)
    of_files = (*notes, *_undecided(run.config), *ignored, *of_json, *of_scheduler, *features.notes(run), *overruled)
    return replace(run, notes=(*of_files, *_notes_of_stages(run), *_unread(run.config, written), *_odd_values(run)))


def with_stages(run: Run, world: str, epoch: Callable[[DataConfig], int] | None, problems: Problems) -> Run:
    """Return the run with its stages, also in its config, and the number of its steps.

    Raises: DataError, where epochs are asked for and the data cannot be read.
    """
    config = run.config
    stages, train = _stages(config, run.mix.degrees, world, problems), config.train
    count = None if train.epochs is None or epoch is None else epoch(stages[len(stages) - 1].data)
    max_steps = stages.length(train.max_steps, train.max_tokens, train.epochs, count)
    stages = stages.filled(max_steps)
    staged = [
        replace(stage_config, schedule=stage_config.schedule and stage.schedule)
        for stage_config, stage in zip(config.data.stages, stages.stages[1:], strict=True)
    ]
    if train.micro_batch != "auto":
        batches = [StageBatch(**_numbers(stage.batch)) for stage in stages]
        train = replace(train, **_numbers(batches[0]))
        staged = [replace(stage_config, train=batch) for stage_config, batch in zip(staged, batches[1:], strict=True)]
    data = replace(config.data, stages=staged)
    config = _with_modes(replace(config, schedule=stages[0].schedule, train=train, data=data))
    return replace(run, config=config, stages=stages, max_steps=max_steps)


def _stages(config: RunConfig, degrees: Degrees, world: str, problems: Problems) -> Stages:
    """Return the stages. One with fewer than two batch numbers takes others from the stage before; auto counts as 1."""
    counts, data = _numbers(config.train), data_of(config.data)
    counts["micro_batch"] = 1 if counts["micro_batch"] == "auto" else counts["micro_batch"]
    batches: list[Batch] = []
    for number, (data_of_stage, stage) in enumerate(zip(data, [None, *config.data.stages], strict=True)):
        keys = [f"train.{name}" for name, count in counts.items() if count is not None]
        where = "; ".join(f"{key}: {problems.places.get(key, 'the YAML')}" for key in keys)
        if stage is not None:
            key, counts, last = f"data.stages[{number - 1}].train", _numbers(stage.train), batches[-1]
            where = f"{key}: {problems.places.get(key, 'the YAML')}"
            if counts["global_batch"] is None and counts["accumulation"] is None:
                counts["global_batch"] = last.global_batch
            if counts["micro_batch"] is None and None in (counts["global_batch"], counts["accumulation"]):
                counts["micro_batch"] = last.micro_batch
        batch = solve(counts, degrees.data, data_of_stage.sequence_length, world=world, problems=problems, place=where)
        problems.raise_if_any()
        assert batch is not None
        batches.append(batch)
    return stages_of(config.data, config.schedule, batches)


def solve(
    given: Mapping[str, int | None],
    data_parallel: int,
    sequence_length: int,
    *,
    world: str,
    place: str,
    problems: Problems,
) -> Batch | None:
    """Return the batch with missing numbers filled in; None, with a problem added, if no whole numbers fit.

    Two numbers give the third. With fewer, a missing accumulation is 1; then global_batch gives micro_batch, and
    without global_batch a missing micro_batch is 1.

    Args:
        given: global_batch, micro_batch and accumulation; None for a missing one.
        world: the world size and where it comes from, for messages.
        place: where the numbers were written.
    """
    global_batch, micro_batch, accumulation = (given[name] for name in ("global_batch", "micro_batch", "accumulation"))
    if global_batch is None or micro_batch is None:
        accumulation = accumulation or 1
    numbers = ("?" if number is None else number for number in (global_batch, micro_batch, accumulation))
    equation = "global_batch {} = micro_batch {} x accumulation {} x data-parallel {}".format(*numbers, data_parallel)

    def refuse(outcome: str, rule: str, remedy: str) -> None:
        rule, remedy = f"global_batch {rule}; {world}", f"a global_batch of {remedy}"
        problems.add_text("train.global_batch", f"{equation} -> {outcome}", rule, remedy, place)

    if global_batch is None:
        micro_batch, accumulation = micro_batch or 1, accumulation or 1
        global_batch = micro_batch * accumulation * data_parallel
    elif micro_batch is None or accumulation is None:
        unknown, other = ("micro_batch", "accumulation") if micro_batch is None else ("accumulation", "micro_batch")
        step = (micro_batch or accumulation or 1) * data_parallel
        solved, rest = divmod(global_batch, step)
        if rest:
            near = f"{solved * step} or {(solved + 1) * step}" if solved else str(step)
            refuse(
                f"{unknown} {global_batch / step:g}: not whole",
                f"must be a multiple of {step}",
                f"{near}, or another {other}",
            )
            return None
        micro_batch, accumulation = micro_batch or solved, accumulation or solved
    elif global_batch != (product := micro_batch * accumulation * data_parallel):
        refuse(
            f"{product}: not equal",
            "= micro_batch x accumulation x data-parallel ranks",
            f"{product}, or leave one of the three out",
        )
        return None
    return Batch(
        global_batch=global_batch,
        micro_batch=micro_batch,
        accumulation=accumulation,
        data_parallel=data_parallel,
        sequence_length=sequence_length,
    )


def _with_modes(config: RunConfig) -> RunConfig:
    best, early = config.checkpoint.keep_best, config.train.stop_early
    if best.metric is not None and best.mode is None:
        config = replace(
            config, checkpoint=replace(config.checkpoint, keep_best=replace(best, mode=mode_of(best.metric)))
        )
    if early.metric is not None and early.mode is None:
        config = replace(config, train=replace(config.train, stop_early=replace(early, mode=mode_of(early.metric))))
    return config


def _notes_of_stages(run: Run) -> list[str]:
    """Return notes on stages that are never reached, jumps of the learning rate, and metrics whose data changes."""
    config, stages, max_steps = run.config, run.stages, run.max_steps
    notes = []
    same = stages.sharing(0)
    others = [stage.first_step for number, stage in enumerate(stages) if number not in same]
    other = next((step for step in others if max_steps is None or step < max_steps), None)
    deciding = {
        "checkpoint.keep_best": config.checkpoint.keep_best.metric,
        "train.stop_early": config.train.stop_early.metric,
    }
    for key, metric in deciding.items():
        stays = metric is None or metric.split("/")[1] in {*config.eval.sets, *config.eval.choices, "mean"}
        if other is not None and not stays:
            notes.append(
                f"{key}: from step {other} on {metric} is measured on other data, and compared with values from "
                "before; name a figure of eval.sets, whose data stay the same"
            )
    for number, stage in enumerate(stages):
        first = stage.first_step
        if max_steps is not None and first >= max_steps:
            notes.append(f"stage {number}, from step {first}, is not reached: the run ends at step {max_steps}")
        elif first and stage.schedule_from == first:
            last, rate = stages.factor(first - 1, max_steps), stages.factor(first, max_steps)
            if not math.isclose(last, rate, rel_tol=0.01):
                notes.append(
                    f"the learning rate changes from {last:.3g} to {rate:.3g} of optim.lr at step {first}, "
                    f"where stage {number} begins"
                )
    return notes


def _unread(config: RunConfig, given: Iterable[str]) -> list[str]:
    """Return notes on keys that the user gave and that have no effect with the other settings."""
    unread = {
        **{f"{feature.key}.": not feature.asked(config) and feature.idle for feature in features.features().values()},
        "train.eval_every": not config.evaluates and "train.eval is off, and nothing else is measured",
        "checkpoint.when_busy": config.checkpoint.mode == "sync" and "in checkpoint.mode sync no save can be late",
    }
    idle = {start: sorted(key for key in given if key.startswith(start)) for start, why in unread.items() if why}
    return [f"{', '.join(keys)}: no effect: {unread[start]}" for start, keys in idle.items() if keys]


def _undecided(config: RunConfig) -> list[str]:
    """Return notes on `auto` values that no feature decides: they become the value that needs the least memory."""
    least = {"train.micro_batch": "1", "model.recompute.layers": "all"}
    asked = [key for key in least if rules.value_of(key, config) == "auto" and key not in features.decides()]
    return [
        f"{key} auto: no feature chooses a value that fits the device's memory, so it is {least[key]}" for key in asked
    ]


def _odd_values(run: Run) -> list[str]:
    config, max_steps, train, notes = run.config, run.max_steps, run.config.train, []
    if max_steps is not None and (train.eval_every or 0) > max_steps and config.evaluates:
        notes.append(
            f"train.eval_every {train.eval_every}: the run has {max_steps} steps, so it is evaluated only at its end"
        )
    lengths = {key: getattr(train, key) for key in ("max_steps", "max_tokens", "epochs")}
    ends = [f"train.{key} {show(value)}" for key, value in lengths.items() if value is not None]
    if len(ends) > 1:
        notes.append(f"{' and '.join(ends)}: the first to be reached ends the run, at step {max_steps}")
    decay = config.optim.weight_decay
    if decay is not None and decay > 1:
        notes.append(
            f"optim.weight_decay {decay:g}: 0.1 is common; a step multiplies each weight by 1 - {decay:g} x "
            "its learning rate"
        )
    return notes


def _numbers(section: TrainConfig | StageBatch | Batch) -> dict[str, Any]:
    return {name: getattr(section, name) for name in ("global_batch", "micro_batch", "accumulation")}


def spread(asked: Degrees, path: str, world_size: int, world: str, problems: Problems) -> Degrees:
    """Return the degrees with the data-parallel one filled in: the world size divided by the other degrees."""
    data, rest = divmod(world_size, asked.world_size)
    sharing = data * asked.sequence
    if not rest and sharing % asked.expert == 0:
        return replace(asked, data=data)
    set_keys = {key: getattr(asked, name) for name, key in DEGREE_KEYS.items() if getattr(asked, name) > 1}
    text = " x ".join(f"{key} {degree}" for key, degree in set_keys.items() if key != DEGREE_KEYS["expert"] or not rest)
    if rest:
        rule = f"the ranks must be a multiple of {asked.world_size}; {world}"
        remedy = f"start {asked.world_size} or a multiple of it, or lower the degree"
    else:
        rule = "data- and sequence-parallel ranks share the experts, and there are "
        rule += f"{sharing}; {world}"
        remedy = f"set expert_parallel.autoep_size to a divisor of {sharing}"
    problems.add_text(next(iter(set_keys)), text, rule, remedy, path)
    return asked
