"""Checks a run without its device and its other ranks: the data, DeepSpeed's own config models, the model.

Checks that need no model, such as those of the data, come first: torch and transformers take seconds to import.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from llmtrain.base import units
from llmtrain.base.errors import ConfigError, DataError, ModelError
from llmtrain.base.imports import hide_torchao, load_late, name_cpu
from llmtrain.config import plugins
from llmtrain.config.deepspeed.read import deep_check
from llmtrain.config.on_disk import starts_from_model
from llmtrain.config.run import Run, RunConfig
from llmtrain.config.stages import Stage, Stages
from llmtrain.data.manifest import NEW_COLUMN, Manifest, check_vocabulary, other_begin
from llmtrain.data.stream.train_data import EvalSet, RunData, TrainData
from llmtrain.engine.ranks.plugin_code import called
from llmtrain.features import asked as asked_features
from llmtrain.objectives.by_token import Distill
from llmtrain.tracking.metrics import metrics

if TYPE_CHECKING:
    from llmtrain.data.stream.choices import ChoiceSet
    from llmtrain.models.spec import ModelSpec

Examined: TypeAlias = "tuple[Run, ModelSpec, RunData]"
"""(a run that has passed its checks, its model, its opened data): the arguments of `Setup`."""


def examine(run: Run) -> Examined:
    """Check a run. Returns it with notes, its model and its opened data.

    `config check` and every rank of `train` and `reference` call it, so that they refuse the same runs; `plan` checks
    the model alone.

    Raises:
        ConfigError: DeepSpeed refuses the dict, or the values do not go with the model.
        ModelError: transformers cannot build the model, or the folder's weights are not complete.
        DataError: the prepared data cannot be used for this run.
    """
    config = run.config
    _refuse_names_of_figures(config)
    data, *later = stage_data(run.stages)
    sets = {name: EvalSet(folder, config.data) for name, folder in config.eval.sets.items()}
    choices = _open_choices(run, data)
    for name, source in sets.items():
        _check_tokenizer(f"eval.sets.{name}", source.manifests[0], source.name, data)
        source.check_counted(config.eval.sequences.get(name, config.train.eval_sequences))
    for measured in (data, *later) if config.train.eval else ():
        measured.check_counted(config.train.eval_sequences)
    columns = {stage_key(stage): source for stage, source in in_stages(run.stages, (data, *later))}
    columns |= {f"eval.sets.{name}": source for name, source in sets.items()}
    references = None
    if config.objective.reference == "column":
        references = take_columns(columns, lambda source: source.take_reference(run.mix.arithmetic))
    for feature in asked_features(config):
        feature.check_data(config, data)
    name_cpu()
    hide_torchao()
    load_late()
    deep_check(run.deepspeed, config.deepspeed)
    from llmtrain.models.run.check import check_model, check_weights

    spec, notes = check_model(run)
    for manifest in (manifest for source in (data, *later) for manifest in source.manifests):
        check_vocabulary(manifest, spec.facts.vocab_size)
    compared = spec.config.to_dict() if config.objective.reference is not None else None
    if config.objective.teacher is not None:
        from llmtrain.models.skeleton import load_config
        from llmtrain.models.teacher import check_teacher, teacher_model

        teacher, shared = teacher_model(config.objective, config.model), run.mix.degrees.sequence
        check_teacher(teacher, spec, data.tokenizer_dir, run.places, sequence=shared)
        compared = load_config(teacher).to_dict()
    teachers: list[str] = []
    if isinstance(config.objective, Distill) and config.objective.top_k is not None:
        distill, words = config.objective, spec.facts.vocab_size
        teachers = take_columns(
            columns, lambda source: source.take_teacher(source.teacher_columns(distill, words, run.mix.arithmetic))
        )
    compared = config_of_columns(columns.values(), compared)
    if plugins.is_of_plugin(config.optim):
        from llmtrain.engine.deepspeed.optimizers import prove_by_element

        prove_by_element(config.optim)
    if plugins.hashes():
        _try_plugins(run)
    if starts_from_model(config):
        check_weights(spec)
        if config.adapter.start is not None:
            from llmtrain.checkpoint.hf.folder_files import MARK
            from llmtrain.checkpoint.meaning import refuse_other_base

            refuse_other_base(Path(config.adapter.start) / MARK, spec.config)
    whole = {name: config.eval.sets[name] for name, source in sets.items() if source.whole}
    of_all = "has no validation split, and all of its sequences count"
    undivided = [f"eval.sets.{name}: {folder} {of_all}" for name, folder in whole.items()]
    notes = (*notes, *_epochs(run, [data, *later]), *_too_large(run, spec), *undivided)
    run = replace(run, notes=(*run.notes, *notes, *_cut(choices, config.data.sequence_length)))
    opened = RunData(
        stages=(data, *later),
        sets=sets,
        choices=choices,
        references=references,
        teachers=teachers,
        teacher_config=None if config.objective.reference else compared,
    )
    return run, spec, opened


def _refuse_names_of_figures(config: RunConfig) -> None:
    """Raise ConfigError if a plugin's figures would have names of the run's own figures."""
    for key in metrics() if config.metrics or config.parts else ():
        name, part = key.removeprefix("eval/"), key.partition("/")[0]
        if name in config.metrics or part in config.parts:
            entry = f"metrics.{name}" if name in config.metrics else f"parts.{part}"
            raise ConfigError(
                f"{entry}: its figures would be called {key}, like the run's own; give the class another name"
            )


def _open_choices(run: Run, data: TrainData) -> dict[str, ChoiceSet]:
    """Open the sets of multiple-choice questions. `data`: the first stage's data. Raises DataError."""
    config, opened = run.config, dict[str, Any]()
    if config.eval.choices:
        from llmtrain.data.stream.choices import ChoiceSet

        length, shared, cache = config.data.sequence_length, run.mix.degrees.sequence, config.data.cache
        for name, folder in config.eval.choices.items():
            opened[name] = ChoiceSet(folder, sequence_length=length, shared=shared, cache=cache)
    for name, choices in opened.items():
        _check_tokenizer(f"eval.choices.{name}", choices.prepared.manifest, choices.prepared.name, data)
    return opened


def stage_data(stages: Stages) -> list[TrainData]:
    """Open and return the data of each stage; stages with equal data share one object. Raises DataError."""
    opened: list[TrainData] = []
    for stage in stages:
        of_stage = next((data for data, other in zip(opened, stages, strict=False) if other.data == stage.data), None)
        if of_stage is None:
            with naming(stage_key(stage)):
                of_stage = TrainData(stage.data)
        opened.append(next((data for data in opened if data.fingerprint == of_stage.fingerprint), of_stage))
        for manifest, before in product(of_stage.manifests, opened):
            _check_tokenizer(stage_key(stage), manifest, of_stage.name, before)
    return opened


def stage_key(stage: Stage) -> str:
    """Return the key of a stage's data in messages; empty for the first stage, whose data is the section `data`."""
    return f"data.stages, from step {stage.first_step}" if stage.first_step else ""


def in_stages(stages: Stages, data: Sequence[TrainData]) -> list[tuple[Stage, TrainData]]:
    """Return each data set once, with its first stage. `data`: one per stage."""
    pairs = enumerate(zip(stages, data, strict=True))
    return [(stage, own_data) for number, (stage, own_data) in pairs if own_data not in data[:number]]


@contextlib.contextmanager
def naming(key: str) -> Iterator[None]:
    """A context that puts the key, if not empty, before the message of a DataError."""
    try:
        yield
    except DataError as error:
        raise (DataError(f"{key}: {error}") if key else error) from error


def take_columns(every: Mapping[str, TrainData], take: Callable[[TrainData], list[str]]) -> list[str]:
    """Return distinct hashes of the weights that computed the columns. `take`: reads the columns of one data set.
    Raises DataError, also if two columns have different weights."""
    weights: list[str] = []
    for key, data in every.items():
        with naming(key):
            of_set = sorted(set(take(data)))
            weights = weights or of_set
            if not set(of_set) <= set(weights):
                raise DataError(
                    f"its column was computed with other weights than that of the run's first data; {NEW_COLUMN}"
                )
    return weights


def config_of_columns(every: Iterable[TrainData], config: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the configuration of the model that computed the run's columns, or `config` if there are no columns.
    `config`: of the model that the run names for this. Raises DataError: when a column has another configuration."""
    columns = [(data.name, model) for data in every for model in data.column_models]
    if columns:
        from llmtrain.checkpoint.meaning import other_meaning

        for name, model in columns:
            if differences := other_meaning(model, config):
                raise DataError(
                    f"{name}: its column was computed with another configuration of the model: "
                    f"{'; '.join(differences)}. Give config.json these values back, or {NEW_COLUMN}"
                )
            config = config or model
    return config


def _check_tokenizer(key: str, manifest: Manifest, name: str, data: TrainData) -> None:
    """Raise DataError if the set has ids of another tokenizer, or its texts begin differently. `name`: its folder."""
    if manifest.tokenizer_fingerprint != data.manifests[0].tokenizer_fingerprint:
        raise DataError(
            f"{key}: was prepared with another tokenizer than the data that the run trains on; "
            f"prepare it again with --tokenizer {data.tokenizer_dir}"
        )
    texts = next((text_manifest for text_manifest in data.manifests if text_manifest.chat is None), manifest)
    if reason := other_begin(texts, manifest, (data.name, name)):
        raise DataError(f"{key}: {reason}")


def _cut(choices: dict[str, ChoiceSet], length: int) -> list[str]:
    return [
        f"eval.choices.{name}: {questions.cut} of {questions.rows} choices with their question have more than "
        f"data.sequence_length {length} tokens; their beginning is cut off"
        for name, questions in choices.items()
        if questions.cut
    ]


def _try_plugins(run: Run) -> None:
    """Call the plugin's objective and metrics on a few numbers, and the schedules at their first steps and the run's
    last. Raises ModelError, with key, method and line."""
    import torch

    from llmtrain.engine.losses.named import sample_terms
    from llmtrain.engine.losses.with_metrics import sums_of

    config, numbers = run.config, torch.linspace(0.25, 4.0, 8)
    with torch.random.fork_rng(devices=[]):
        if plugins.is_of_plugin(config.objective):
            method, values = sample_terms(config.objective)
            if not all(map(math.isfinite, values[:4])):
                raise ModelError(
                    f"objective.name {config.objective.name}: {method} gives a loss that is not finite for ordinary "
                    "log-likelihoods (-0.25 to -4); correct the formula"
                )
        for name, metric in config.metrics.items():
            sums_of(name, metric, numbers, torch.arange(8), numbers > 1)
    for stage in run.stages:
        steps = {stage.first_step, stage.schedule_from + stage.schedule.warmup_steps, (run.max_steps or 1) - 1}
        for step in sorted(steps):
            rate_of(run.stages, step, max_steps=run.max_steps)


def rate_of(stages: Stages, step: int, *, max_steps: int | None) -> float:
    """Return the factor on the peak learning rates. Raises ModelError: when a plugin's schedule returns none."""
    schedule = stages.at(step).schedule
    key = f"schedule.name {schedule.name}"
    factor = called(schedule, key, "after_warmup", lambda: stages.factor(step, max_steps))
    if not isinstance(factor, Real) or not 0 <= factor < math.inf:
        raise ModelError(
            f"{key}: after_warmup returns {factor!r} at step {step}; it must return the factor on optim.lr, a finite "
            "number of 0 or more"
        )
    return float(factor)


_MANY_EPOCHS = 1.5
"""From this number on the start reports the epochs: a run of 96 epochs over 671 tokens looked like any other."""
USEFUL_EPOCHS = 4
"""Up to this number, repeated text teaches about as much as new text (N. Muennighoff et al., "Scaling Data-Constrained
Language Models", NeurIPS 2023)."""
LITTLE_NEW = f"beyond {USEFUL_EPOCHS} epochs text that is repeated teaches ever less (arXiv:2305.16264)"
_NO_DEVICE_BYTES = 2 << 40
"""Limit for weights, gradients and optimizer state on one rank: no accelerator or host has more for one."""


def _epochs(run: Run, data: list[TrainData]) -> list[str]:
    if run.max_steps is None:
        return []
    passes: list[tuple[str, float, int]] = []
    for first, of_stage in enumerate(data):
        sharing = [number for number, other in enumerate(data) if other is of_stage]
        if sharing[0] == first:
            passes += of_stage.epochs(run.stages.sequences(run.max_steps, sharing))
    return [
        f"{times:.3g} epochs of {folder}, whose training split has {units.count(tokens)} tokens"
        + (f"; {LITTLE_NEW}" if times > USEFUL_EPOCHS else "")
        for folder, times, tokens in passes
        if times >= _MANY_EPOCHS
    ]


def _too_large(run: Run, spec: ModelSpec) -> list[str]:
    # At least 2 bytes a weight, and 14 a trained element for gradient, master and moments, divided from ZeRO 1 on.
    degrees, stage = run.mix.degrees, run.mix.zero_stage
    parts = degrees.pipeline * degrees.tensor * degrees.expert
    shards = degrees.world_size // (degrees.pipeline * degrees.tensor)
    of_a_rank = 2 * spec.facts.parameters / (shards if stage == 3 else parts)
    of_a_rank += 14 * spec.facts.trained / (shards if stage else parts)
    if of_a_rank < _NO_DEVICE_BYTES:
        return []
    return [
        f"{units.count(spec.facts.parameters)} parameters: {units.size(of_a_rank)} of weights, gradients and optimizer "
        "state on each rank at least, which no device holds; correct the model's sizes, or use ZeRO 3 on more ranks"
    ]
