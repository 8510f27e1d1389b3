"""Join YAML, JSON and world size into one ResolvedRun."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from llmtrain.config import ds_json, rules
from llmtrain.config.batch import Batch, solve, steps_of_epochs
from llmtrain.config.deepspeed import DEGREE_KEYS, exact_dict, read_facts
from llmtrain.config.evaluation import filled
from llmtrain.config.join import SHARED, check_scheduler, join_values
from llmtrain.config.problems import Places, Problems
from llmtrain.config.rules import check_adapter_form, check_balance
from llmtrain.config.run import DataConfig, ResolvedRun, RunConfig
from llmtrain.config.sites_rules import check_sites
from llmtrain.config.topology import Degrees


def resolve(
    run: RunConfig,
    world_size: int,
    world_size_source: str = "WORLD_SIZE",
    *,
    places: Places | None = None,
    notes: Sequence[str] = (),
    epoch: Callable[[DataConfig], int] | None = None,
) -> ResolvedRun:
    """The run for this number of ranks: every shared value filled in, the exact DeepSpeed dict made.

    `world_size_source` and `places` (dotted key -> where it was written) appear in errors only; `notes` come first
    among the run's; `epoch` counts the sequences of an epoch, which a run with train.epochs needs.
    Raises: ConfigError.
    """
    places = places or {}
    path = run.deepspeed
    problems = Problems()
    tree, ignored = ds_json.checked(path)
    run, optim, origin = join_values(run, tree, places, problems)
    places = {**places, **origin}
    rules.check_values(run, places, problems)
    facts = read_facts(tree, path, run, optim, problems)
    problems.raise_if_any()
    world = _world(world_size, world_size_source)
    degrees = _spread(facts.mix.degrees, path, world_size, world, problems)
    _check_declared_ranks(tree, path, degrees.data, world, problems)
    rules.check_shared_heads(run, degrees, path, places, problems)
    rules.check_shared_rows(run, degrees, path, places, problems)
    check_adapter_form(run, degrees, facts.mix.zero_stage, path, places, problems)
    rules.check_frozen(run, facts.tree.get("zero_optimization") or {}, path, places, problems)
    check_sites(run, places, problems)
    problems.raise_if_any()

    batch = _batch(run, degrees, world, places, problems)
    max_steps = total_steps(run, batch, epoch)
    run = _fill_in(run, batch, max_steps)
    rules.check_mask(run, batch, degrees, places, problems)
    rules.check_schedule(run, max_steps, batch.tokens, places, problems)
    balance_notes = check_balance(run, batch, degrees, path, places, problems)
    of_scheduler = check_scheduler(run, tree, max_steps, places, problems)
    problems.raise_if_any()

    exact, more_notes = exact_dict(facts, path, batch, optim.clip_norm)
    return ResolvedRun(
        run=run,
        batch=batch,
        mix=replace(facts.mix, degrees=degrees),
        deepspeed=exact,
        pipeline_partition=facts.pipeline_partition,
        expert_parallel=dict(facts.tree.get("expert_parallel") or {}),
        max_steps=max_steps,
        places=dict(places),
        notes=(*notes, *ignored, *facts.notes, *balance_notes, *of_scheduler, *more_notes),
    )


def _batch(run: RunConfig, degrees: Degrees, world: str, places: Places, problems: Problems) -> Batch:
    batch = solve(
        global_batch=run.train.global_batch,
        micro_batch=run.train.micro_batch,
        accumulation=run.train.accumulation,
        data_parallel=degrees.data,
        sequence_length=run.data.sequence_length,
        world=world,
        problems=problems,
        place=_batch_places(run, places),
    )
    problems.raise_if_any()
    assert batch is not None
    return batch


def total_steps(run: RunConfig, batch: Batch, epoch: Callable[[DataConfig], int] | None) -> int | None:
    """Optimizer steps of the whole run: the smallest of max_steps, and of max_tokens and epochs in steps, rounded up.

    Raises: DataError, where epochs are asked for and the data cannot be read.
    """
    limits = [] if run.train.max_steps is None else [run.train.max_steps]
    if run.train.max_tokens is not None:
        limits.append(-(-run.train.max_tokens // batch.tokens))
    if run.train.epochs is not None:
        assert epoch is not None, "who resolves a run with its data counts them"
        limits.append(steps_of_epochs(run.train.epochs, epoch(run.data), batch.global_batch))
    return min(limits, default=None)


def _fill_in(run: RunConfig, batch: Batch, max_steps: int | None) -> RunConfig:
    train = replace(
        run.train,
        global_batch=batch.global_batch,
        micro_batch=batch.micro_batch,
        accumulation=batch.accumulation,
    )
    return filled(replace(run, schedule=run.schedule.filled(max_steps), train=train))


def _spread(asked: Degrees, path: str, world_size: int, world: str, problems: Problems) -> Degrees:
    """The degrees with the data-parallel one: the ranks that are left."""
    data, rest = divmod(world_size, asked.world_size)
    alike = data * asked.sequence
    if not rest and alike % asked.expert == 0:
        return replace(asked, data=data)
    set_keys = {key: getattr(asked, name) for name, key in DEGREE_KEYS.items() if getattr(asked, name) > 1}
    text = " x ".join(f"{key} {degree}" for key, degree in set_keys.items() if key != DEGREE_KEYS["expert"] or not rest)
    if rest:
        rule = f"the ranks must be a multiple of {asked.world_size}; {world}"
        remedy = f"start {asked.world_size} or a multiple of it, or lower the degree"
    else:
        rule = "experts are shared by the ranks that have all else alike (data and sequence parallel), and there are "
        rule += f"{alike}; {world}"
        remedy = f"set expert_parallel.autoep_size to a divisor of {alike}"
    problems.add_text(next(iter(set_keys)), text, rule, remedy, path)
    return asked


def _check_declared_ranks(tree: dict[str, Any], path: str, data_parallel: int, world: str, problems: Problems) -> None:
    if (declared := tree.get("data_parallel_size")) not in (None, "auto", data_parallel):
        rule = f"the data-parallel degree is {data_parallel}: {world}"
        problems.add("data_parallel_size", declared, rule, "remove it: the launcher decides it", path)


def _world(world_size: int, source: str) -> str:
    return f"world size {world_size} ({source})"


def _batch_places(run: RunConfig, places: Places) -> str:
    """The places of the batch sizes, for an equation that has no solution."""
    named = [
        f"{key}: {places.get(key, 'the YAML')}"
        for key in list(SHARED)[:3]
        if getattr(run.train, key.split(".")[1]) is not None
    ]
    return "; ".join(named)
