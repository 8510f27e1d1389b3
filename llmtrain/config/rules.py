"""Rules between the settings of a run, for any number of ranks and for a form: rows of `base/choice.py`.

`refuse` reports the rules that a run breaks. `reader.py` has checked types and bounds before.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, is_dataclass, replace
from itertools import pairwise
from typing import Any

from llmtrain import features
from llmtrain.base.choice import Rule
from llmtrain.base.redact import redact_text
from llmtrain.base.units import GIB, divisors, size
from llmtrain.config.on_disk import model_config
from llmtrain.config.problems import Problems, assigned, closest
from llmtrain.config.run import (
    AdapterConfig,
    KeepBest,
    Run,
    RunConfig,
    StopEarly,
    stage_views,
)
from llmtrain.config.stages import StageConfig, Stages
from llmtrain.objectives.by_token import Distill, NextToken
from llmtrain.objectives.objective import Objective
from llmtrain.optim.schedules import Schedule
from llmtrain.storage.addresses import REVISION
from llmtrain.tracking.metrics import mode_of


def refuse(
    rules: Iterable[Rule],
    subject: Any,
    config: RunConfig,
    problems: Problems,
    *trees: Mapping[str, Any],
    key_of: Callable[[str], str] = str,
) -> None:
    """Report each rule that a subject breaks.

    A rule about a key with a problem is skipped. `trees`: DeepSpeed's JSON, for keys that are no fields of a run.
    `key_of`: translates a key of a stage's view into the key that the user wrote.
    """
    wrong = problems.keys
    for rule in rules:
        if not rule.each and any(key_of(key) in wrong for key in rule.keys):  # its condition may divide by the value
            continue
        for keys, reason, remedy in rule.breaks(subject):
            if any(key_of(key) in wrong for key in keys):
                continue
            values = {key_of(key): value_of(key, config, *trees) for key in keys}
            what = " with ".join(assigned(key, value) for key, value in values.items())
            places = dict.fromkeys(filter(None, (_place_of(key, config, problems) for key in values)))
            problems.add_text(next(iter(values)), what, reason, remedy, "; ".join(places))


def value_of(key: str, config: RunConfig, *trees: Mapping[str, Any]) -> Any:
    """Return the value at a dotted key of the run, or of the first of `trees` that has the key."""
    roots: tuple[Any, ...] = (config, *trees)
    for root in roots:
        held, rest = root, key
        while rest and held is not None:
            if isinstance(held, Mapping) and rest in held:  # the user's names may have dots
                held, rest = held[rest], ""
                continue
            name, _, rest = rest.partition(".")
            name, _, number = name.partition("[")
            held = held.get(name) if isinstance(held, Mapping) else getattr(held, name, None)
            held = held[int(number[:-1])] if number and held is not None else held
        if held is not None:
            return _plain(held)
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return redact_text(value) if isinstance(value, str) else value


def _place_of(key: str, config: RunConfig, problems: Problems) -> str | None:
    """Return where the user wrote a key, or else its section; for a key of the JSON, the JSON's path."""
    if not hasattr(config, re.split(r"[.\[]", key)[0]):
        return config.deepspeed
    while key not in problems.places and re.search(r"[.\[]", key):
        key = re.sub(r"[.\[][^.\[]*$", "", key)
    return problems.places.get(key)


def check_values(config: RunConfig, problems: Problems) -> None:
    """Check the rules between fields that hold for any number of ranks."""
    refuse((*RULES, *features.rules(config).of_values), config, config, problems)


def check_masks(run: Run, problems: Problems) -> None:
    for (view, written), stage in zip(stage_views(run.config), run.stages, strict=True):
        refuse(OF_MASKS, replace(run, config=view, stages=Stages((stage,))), view, problems, key_of=written)


def _one_of(one: str, other: str, what: str, example: Mapping[str, Any]) -> tuple[Rule, ...]:
    """Return the rules that exactly one of two fields is given. `example`: a run that breaks the first rule."""
    remedy = f"give exactly one of {one} and {other}"
    both = (one, other)
    return (
        Rule(both, lambda r: None not in (value_of(one, r), value_of(other, r)), f"{what} is given twice", remedy,
             example),
        Rule(both, lambda r: value_of(one, r) is value_of(other, r) is None, f"{what} is missing", remedy,
             dict.fromkeys(example)),
    )  # fmt: skip


def _revision(key: str, model: str, example: Mapping[str, Any]) -> tuple[Rule, ...]:
    """Return the rules of a Hub revision. `key`: the field of the revision. `model`: the field of the model's name."""

    def is_one(config: RunConfig) -> bool:
        return bool(REVISION.fullmatch(value_of(key, config)))

    return (
        Rule((key,), lambda r: value_of(key, r) is not None and not is_one(r),
             "is no name of a branch or tag, and no commit", "write it as the Hub shows it, or remove it for main",
             {**example, key: "a..b"}),
        Rule((key,), lambda r: value_of(key, r) is not None and is_one(r) and value_of(model, r) is None,
             f"goes with {model}: ORG/NAME", "remove it", {**example, key: "main"}),
    )  # fmt: skip


def _has_length(config: RunConfig) -> bool:
    return any(each is not None for each in (config.train.max_steps, config.train.max_tokens, config.train.epochs))


def _is_model_type(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_\-]*", value) is not None


def _packed(config: RunConfig) -> bool:
    return config.adapter.r is not None and config.adapter.quantize is not None


def _starts_here(config: RunConfig) -> bool:
    return config.resume in ("auto", "none")


def _compares(config: RunConfig) -> str:
    return f"objective.name {config.objective.name} compares with the model that training starts from"


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_OF_CHOICES = ("accuracy", "accuracy_norm", "bits_per_byte")


def _taken_names() -> set[str]:
    """Return names that an evaluation set may not have, because other figures have them."""
    figures = [figure.name for objective in Objective.CHOICES.values() for figure in objective.figures]
    own = {"loss", "perplexity", "bits_per_byte", "mean", "accuracy", "accuracy_norm"}
    return {*own, *features.variants(), *(figure.partition("/")[0] for figure in figures)}


def figures_of(config: RunConfig) -> list[str]:
    """Return the keys of the figures of the run's evaluations."""
    names = ["loss", *(figure.name for figure in config.objective.reported)]
    if isinstance(config.objective, NextToken):
        names += ["perplexity", "bits_per_byte"]
    names += config.metrics
    prefixes = [*(["eval"] if config.train.eval else []), *(f"eval/{name}" for name in config.eval.sets)]
    if config.train.eval:
        prefixes += [f"eval/{name}" for feature in features.asked(config) for name in feature.variants]
    mean = ["eval/mean/loss"] if config.eval.mean else []
    answers = [f"eval/{name}/{figure}" for name in config.eval.choices for figure in _OF_CHOICES]
    return [f"{prefix}/{name}" for prefix in prefixes for name in names] + mean + answers


def _sets(wrong: Callable[[str], bool]) -> Callable[[RunConfig], list[str]]:
    def names(run: RunConfig) -> list[str]:
        keys = [f"sets.{name}" for name in run.eval.sets] + [f"choices.{name}" for name in run.eval.choices]
        return [f"eval.{key}" for key in keys if wrong(key.partition(".")[2])]

    return names


def _figure(key: str) -> str:
    """Return how the keys of a set's figures begin."""
    return f"eval/{key.split('.', 2)[2]}"


def _deciding(section: str, chosen: Callable[[RunConfig], KeepBest | StopEarly]) -> tuple[Rule, ...]:
    """Return the rules of the metric by which `section` keeps checkpoints or ends the run."""
    key, every = f"{section}.metric", {"train.eval_every": 10}

    def known(config: RunConfig) -> bool:
        return chosen(config).metric in figures_of(config)

    def directed(config: RunConfig) -> bool:
        return chosen(config).mode is not None or mode_of(str(chosen(config).metric)) is not None

    def remedy(config: RunConfig, _: str) -> str:
        figures = figures_of(config)
        near = closest(str(chosen(config).metric), figures)
        return f"did you mean {near}?" if near else f"choose one of {', '.join(figures) or 'none: there are none'}"

    # fmt: off
    return (
        Rule((key,), lambda r: chosen(r).metric is None and chosen(r) != type(chosen(r))(),
             "is missing, and without it the other keys of the section do nothing",
             "write one, such as eval/loss, or remove the section", {f"{section}.mode": "min"}),
        Rule((key,), lambda r: chosen(r).metric is not None and not known(r),
             "is not a figure of this run's evaluations", remedy, {key: "eval/los", **every}),
        Rule((f"{section}.mode",), lambda r: known(r) and not directed(r),
             lambda r, _: f"{chosen(r).metric} does not say whether less is better", "write min or max",
             {"objective.name": "distill", "objective.top_k": 7, key: "eval/distill/teacher_entropy", **every}),
        Rule((key,), lambda r: known(r) and directed(r) and r.train.eval_every is None,
             "is only measured at the end of the run", "set train.eval_every", {key: "eval/loss"}),
    )
    # fmt: on


# fmt: off
_OF_EVALUATION: tuple[Rule, ...] = (
    Rule(("eval.choices.NAME",), lambda r: [f"eval.choices.{name}" for name in r.eval.choices if name in r.eval.sets],
         lambda _, key: f"{_figure(key)} is of eval.sets.{key.split('.', 2)[2]}", "give one of the two another name",
         {"eval.sets.NAME": "data/x", "eval.choices.NAME": "data/x"}, each=True),
    Rule(("eval.sets.pairs",), _sets(lambda name: name in _taken_names()),
         lambda _, key: f"{_figure(key)} is the name of other figures", "give the set another name",
         {"eval.sets.pairs": "data/x"}, each=True),
    Rule(("eval.sets.a/b",), _sets(lambda name: name not in _taken_names() and not _NAME.fullmatch(name)),
         "the name of a set has only letters, digits, - and _, because it is in keys such as "
         "eval/NAME/loss", "give the set another name",
         {"eval.sets.a/b": "data/x"}, each=True),
    Rule(("eval.choices",), lambda r: r.eval.choices and r.objective.scores,
         lambda r, _: f"a model of objective.name {r.objective.name} gives scores, and choices are measured by their "
                      "likelihood",
         "remove eval.choices", {"objective.name": "reward", "eval.choices.NAME": "data/x"}),
    *(Rule((f"eval.{field}.NAME",),
           lambda r, field=field: [f"eval.{field}.{name}" for name in getattr(r.eval, field)  # type: ignore[misc]
                                   if name not in r.eval.sets],
           lambda r, _: f"is of no set in eval.sets, which has {', '.join(r.eval.sets) or 'none'}", "correct the name",
           {f"eval.{field}.NAME": 5}, each=True)
      for field in ("sequences", "mean")),
    *_deciding("checkpoint.keep_best", lambda run: run.checkpoint.keep_best),
    *_deciding("train.stop_early", lambda run: run.train.stop_early),
)
# fmt: on
"""Rules of the section `eval`, and of figures that keep checkpoints or end the run."""


def _in_stages(name: str, wrong: Callable[[RunConfig, StageConfig], Any]) -> Callable[[RunConfig], list[str]]:
    return lambda r: [f"data.stages[{n}].{name}" for n, stage in enumerate(r.data.stages) if wrong(r, stage)]


def _out_of_order(config: RunConfig) -> list[str]:
    steps = [0, *(stage.from_step for stage in config.data.stages)]
    return [f"data.stages[{n}].from_step" for n, (before, step) in enumerate(pairwise(steps)) if step <= before]


# fmt: off
_OF_DATA_STAGES: tuple[Rule, ...] = (
    Rule(("data.stages[1].from_step",), _out_of_order,
         "stages begin at step 1 or later, each after the one before it", "order them by from_step",
         {"data.stages": [{"from_step": 9, "sequence_length": 64}, {"from_step": 9, "path": "data/x"}]}, each=True),
    Rule(("data.stages[0].path",), _in_stages("path", lambda _, s: s.path is not None and s.mixture is not None),
         "data.path and a mixture are both given", "give one of them, or none to continue with the previous data",
         {"data.stages": [{"from_step": 5, "path": "data/x", "mixture": {"data/x": 1}}]}, each=True),
    Rule(("data.stages[0].mixture",), _in_stages("mixture", lambda _, s: s.mixture == {}),
         "names no folder", "write lines `FOLDER: WEIGHT`, or remove it",
         {"data.stages": [{"from_step": 5, "mixture": {}}]}, each=True),
    Rule(("data.stages[0].from_step",), _in_stages("from_step", lambda _, s: s == StageConfig(from_step=s.from_step)),
         "changes nothing", "give path, mixture, sequence_length, train or schedule, or remove it",
         {"data.stages": [{"from_step": 5}]}, each=True),
    Rule(("data.stages[0].rope",), _in_stages("rope", lambda r, s: r.objective.reference == "column" and s.rope),
         lambda r, _: f"objective.name {r.objective.name} compares with log-probabilities of the reference that were "
                      "computed with the rope_parameters of the run's beginning",
         "remove it, or ask the reference at each step: objective.reference online, with an adapter",
         {"objective.name": "dpo", "data.stages": [{"from_step": 5, "rope": {"rope_theta": 5.0}}]}, each=True),
)
# fmt: on
"""Rules of data.stages."""


_FP8_TOKENS = 16
"""Divisor of the token count in an fp8 product."""
_FP8, _LORA, _NF4 = {"model.fp8": "rowwise"}, {"adapter.r": 8}, {"adapter.r": 8, "adapter.quantize": "nf4"}

# fmt: off
RULES: tuple[Rule, ...] = (
    *_one_of("model.pretrained", "model.config", "the model",
             {"model.pretrained": "data/x", "model.config": {"model_type": "llama"}}),
    Rule(("data.mixture",), lambda r: r.data.mixture == {},
         "names no folder", "write `FOLDER: WEIGHT` lines, or use data.path", {"data.path": None, "data.mixture": {}}),
    *_one_of("data.path", "data.mixture", "the data", {"data.path": "data/x", "data.mixture": {"data/x": 1}}),
    Rule(("train.max_steps",), lambda r: not _has_length(r) and r.train.max_minutes is None,
         "nothing says when the run ends",
         "set train.max_steps, train.max_tokens, train.epochs or train.max_minutes", {"train.max_steps": None}),
    Rule(("schedule.name",),
         lambda r: r.schedule.needs_length and r.train.max_minutes is not None and not _has_length(r)
                   and all(stage.schedule is None for stage in r.data.stages),
         "this schedule needs to know the number of steps in advance",
         "set train.max_steps, train.max_tokens or train.epochs, or schedule.name: constant",
         {"train.max_steps": None, "train.max_minutes": 5}),
    Rule(("train.export_to",), lambda r: r.train.export_to is not None and not r.train.export,
         "is the place of the export, but train.export is false", "remove one of them",
         {"train.export_to": "s3://store/run", "train.export": False}),
    # the model
    Rule(("model.config.model_type",),
         lambda r: isinstance(r.model.config, dict) and not _is_model_type(r.model.config.get("model_type")),
         "a Hugging Face model type is required, such as llama or qwen3",
         "write `model_type: llama` under model.config",
         {"model.config.model_type": None}),
    Rule(("model.vocabulary",), lambda r: r.model.vocabulary is not None and r.model.config is not None,
         "is only for models with weights (model.pretrained)", "write model.config.vocab_size",
         {"model.vocabulary": 600}),
    *_revision("model.revision", "model.pretrained", {}),
    Rule(("data.isolate_documents",), lambda r: r.data.isolate_documents and r.model.attention.startswith("flash"),
         lambda r, _: f"model.attention {r.model.attention} cannot keep documents apart: it takes no "
                      "mask", "set model.attention to varlen or sdpa",
         {"data.isolate_documents": True, "model.attention": "flash_attention_2"}),
    Rule(("model.attention",), lambda r: r.model.attention == "varlen" and not r.data.isolate_documents,
         "is for isolated documents, and data.isolate_documents is false", "set data.isolate_documents to true, or "
                                                                           "model.attention to sdpa",
         {"model.attention": "varlen"}),
    Rule(("model.recompute.keep",),
         lambda r: r.model.recompute.keep is not None and r.model.attention not in ("auto", "sdpa", "varlen"),
         lambda r, _: f"model.attention {r.model.attention} is not a single operator of torch, so recomputation "
                      "cannot keep its output",
         "set model.attention to sdpa, or remove it",
         {"model.attention": "eager", "model.recompute.layers": "all", "model.recompute.keep": "attention"}),
    Rule(("model.train_only",), lambda r: r.model.freeze and r.model.train_only,
         "cannot be combined with model.freeze: one names what is trained, the other what is not", "keep one of them",
         {"model.freeze": ["model.*"], "model.train_only": ["lm_head.*"]}),
    Rule(("model.mlp_tile_tokens",), lambda r: r.model.fp8 and (r.model.mlp_tile_tokens or 0) % _FP8_TOKENS,
         lambda r, _: f"matrix products in fp8 (model.fp8 {r.model.fp8}) need multiples of {_FP8_TOKENS} tokens",
         lambda r, _: f"set it to {_up(r.model.mlp_tile_tokens, _FP8_TOKENS)}, or model.fp8 to null",
         {**_FP8, "model.mlp_tile_tokens": 100}),
    Rule(("model.fp8",), lambda r: r.model.fp8 and r.adapter.quantize,
         "adapter.quantize packs the maps with an adapter into 4 bits, and such maps cannot multiply in fp8",
         "remove one of them", {**_FP8, **_NF4}),
    Rule(("model.fp8",), lambda r: r.model.fp8 and r.adapter.dora,
         "DoRA (adapter.dora) uses the lengths of a map's exact rows, but in fp8 the map computes with rounded ones",
         "remove one of them", {**_FP8, **_LORA, "adapter.dora": True}),
    Rule(("model.fp8",), lambda r: r.model.fp8 and (r.objective.data, r.objective.top_k, r.objective.teacher) != (
             "text", None, None),
         lambda r, _: f"objective.name {r.objective.name} compares models, which has not been tested in fp8",
         "set it to null, or objective.name to next_token", {**_FP8, "objective.name": "dpo"}),
    # the adapter
    Rule(("adapter.r",), lambda r: r.adapter.r is None and r.adapter != AdapterConfig(),
         "is missing, and without it there is no adapter, whatever the other keys of the section are",
         "write a rank, 16 is common, or remove the section", {"adapter.alpha": 8.0}),
    *(Rule((key,), lambda r, key=key: r.adapter.r is not None and value_of(key, r),  # type: ignore[misc]
           "with an adapter (adapter.r) all parameters of the model are frozen", "remove it",
           {**_LORA, key: ["lm_head.*"]})
      for key in ("model.freeze", "model.train_only")),
    Rule(("adapter.targets",), lambda r: r.adapter.r is not None and not r.adapter.targets,
         "names no module", 'write ["all-linear"]', {**_LORA, "adapter.targets": []}),
    Rule(("adapter.quantize",), lambda r: _packed(r) and r.adapter.dora,
         "DoRA (adapter.dora) starts with the lengths of the folder's rows, and packed rows have other lengths",
         "remove one of them", {**_NF4, "adapter.dora": True}),
    Rule(("adapter.quantize",), lambda r: _packed(r) and r.model.compile_layers,
         "model.compile_layers cannot compile the maps of bitsandbytes", "remove one of them",
         {**_NF4, "model.compile_layers": True}),
    Rule(("adapter.quantize",), lambda r: _packed(r) and r.objective.reference == "column",
         "`llmtrain reference` computes log-probabilities with weights that are not packed",
         "set objective.reference to online, which uses the packed model without the "
         "adapter", {**_NF4, "objective.name": "dpo"}),
    # the objective
    Rule(("metrics.NAME",), lambda r: [f"metrics.{name}" for name in sorted(r.metrics)] if r.objective.scores else [],
         lambda r, _: f"are computed from likelihoods of tokens, but objective.name {r.objective.name} trains a "
                      "model that gives scores",
         "remove them", {"objective.name": "reward", "metrics.NAME": {}}, each=True),
    Rule(("train.sample_prompt",), lambda r: r.objective.scores and r.train.sample_prompt,
         lambda r, _: f"objective.name {r.objective.name} trains a model that gives scores and cannot write "
                      "text", "remove it",
         {"objective.name": "reward", "train.sample_prompt": "a"}),
    Rule(("objective.reference",), lambda r: r.objective.reference == "online" and r.adapter.r is None,
         "takes the model without its adapter as the reference, but the run has no adapter",
         "set adapter.r; or leave it out and run `llmtrain reference RUN.yaml`",
         {"objective.name": "dpo", "objective.reference": "online"}),
    Rule(("objective.reference",),
         lambda r: r.objective.reference == "online" and r.adapter.r is not None and r.adapter.start,
         "would take the base model as the reference, but training starts from the adapter of adapter.start",
         "leave it out and run `llmtrain reference RUN.yaml`",
         {"objective.name": "dpo", "objective.reference": "online", **_LORA, "adapter.start": "data"}),
    Rule(("objective.teacher",),
         lambda r: isinstance(r.objective, Distill) and r.objective.teacher is None and r.objective.top_k is None,
         lambda r, _: f"objective.name {r.objective.name} learns from a teacher, and none is given",
         "name the Hugging Face folder of a model", {"objective.name": "distill"}),
    *_revision("objective.teacher_revision", "objective.teacher", {"objective.name": "distill", "objective.top_k": 7}),
    Rule(("resume_weights_only",), lambda r: r.objective.reference is not None and r.resume_weights_only,
         lambda r, _: f"{_compares(r)}, but `llmtrain reference` reads model.pretrained and not the checkpoint",
         "export the checkpoint (llmtrain checkpoint to-hf) and name the folder in model.pretrained",
         {"objective.name": "dpo", "resume_weights_only": True, "resume": "runs/other"}),
    # a run that continues from another one's checkpoint
    Rule(("resume_data",), lambda r: r.resume_data == "new" and _starts_here(r),
         "resumes a checkpoint with other data, and no checkpoint is "
         "named", "name it: resume: PATH", {"resume_data": "new"}),
    Rule(("resume_data",), lambda r: r.resume_data == "new" and not _starts_here(r) and r.resume_weights_only,
         "with resume_weights_only the data starts again anyway", "remove one of the two",
         {"resume_data": "new", "resume_weights_only": True, "resume": "runs/other"}),
    Rule(("resume_model",), lambda r: r.resume_model == "new" and _starts_here(r),
         "gives another model the parameters of a checkpoint, and no checkpoint is "
         "named", "name it: resume: PATH", {"resume_model": "new"}),
    Rule(("resume_weights_only",), lambda r: r.resume_weights_only and _starts_here(r),
         "begins a new run from the parameters of a checkpoint, and no checkpoint is named", "name it: resume: PATH",
         {"resume_weights_only": True}),
    *_OF_EVALUATION, *_OF_DATA_STAGES,
)
"""Rules between the fields of a run. Features have more (llmtrain/features)."""

OF_STARTS: tuple[Rule, ...] = (
    Rule(("objective.name",), lambda r: r.objective.reference is not None and r.model.config is not None,
         lambda r, _: f"{_compares(r)}, but a model of model.config is untrained",
         "name a trained model: model.pretrained: FOLDER", {"objective.name": "dpo"}),
    Rule(("adapter.r",), lambda r: r.adapter.r is not None and r.model.pretrained is None,
         "an adapter needs a trained model, but the weights of a model.config are random",
         "name a folder with weights: model.pretrained", _LORA),
)
# fmt: on
"""Rules of the weights that a run starts from. A parity check skips them, because it uses random weights."""


_MASK_BYTES = 4 * GIB
"""Largest attention mask in bytes. Every forward pass makes one, and some kernels copy it in the scores' precision."""
_ZERO, _PIPELINE = "zero_optimization.stage", "pipeline.stages"
_TENSOR, _SEQUENCE = "tensor_parallel.autotp_size", "sequence_parallel_size"
_EXPERT = "expert_parallel.autoep_size"


def _up(number: int | None, step: int) -> int:
    """Round up to a multiple of `step`."""
    return -(-(number or 0) // step) * step


def _heads(run: Run) -> dict[str, int]:
    """Return the model's numbers of heads, by their fields in config.json."""
    model = model_config(run.config, Problems()) or {}  # `check_on_disk` reports what is wrong with it
    given = {key: model.get(key) for key in ("num_attention_heads", "n_head", "num_key_value_heads")}
    return {key: count for key, count in given.items() if isinstance(count, int) and count > 0}


def _local_heads(run: Run) -> int:
    """Return the attention heads of one tensor-parallel rank; 0 if that is unknown or no whole number."""
    heads, tensor = _heads(run), run.mix.degrees.tensor
    count = heads.get("num_attention_heads", heads.get("n_head"))
    return count // tensor if count and count % tensor == 0 else 0


def _split(run: Run) -> str | None:
    """Return `key = degree` of a degree that splits sequences or layers over ranks; None: there is none."""
    degrees = run.mix.degrees
    shares = {"pipeline.stages": degrees.pipeline, "sequence_parallel_size": degrees.sequence}
    return next((f"{key} = {degree}" for key, degree in shares.items() if degree > 1), None)


def _sequences(run: Run) -> int:
    """Return the largest number of sequences in a forward pass."""
    return run.batch.micro_batch * features.most_sequences(run.config)


def _mask_bytes(run: Run) -> int:
    """Return the bytes of the attention mask for isolated documents."""
    return _sequences(run) * run.config.data.sequence_length**2


def _limit(run: Run) -> tuple[str, float]:
    """Return the field that limits the run's length, and how many of its units a step has."""
    assert run.max_steps is not None
    train, tokens = run.config.train, run.batch.tokens
    if train.max_tokens is not None and -(-train.max_tokens // tokens) == run.max_steps != train.max_steps:
        return "train.max_tokens", float(tokens)
    if train.epochs is not None and train.max_steps != run.max_steps:
        return "train.epochs", train.epochs / run.max_steps
    return "train.max_steps", 1.0


def _has_one_schedule(run: Run) -> bool:
    """Return True if the run has one schedule, which ends with the run at a known step."""
    return run.max_steps is not None and run.stages.schedule_end(0, run.max_steps) == run.max_steps


def _shared_length(run: Run, step: int = 1) -> tuple[int, int]:
    """Return the tokens of a sequence, and the number that must divide them: `step` for each rank that shares it."""
    return run.config.data.sequence_length, step * run.mix.degrees.sequence


def _other_lengths(run: Run, _: str) -> str:
    length, step = _shared_length(run)
    return f"set it to {max(step, _up(length, step) - step)} or {_up(length, step)}, or change the degree"


# fmt: off
OF_STAGES: tuple[Rule, ...] = (
    Rule(("data.sequence_length",), lambda r: operator.mod(*_shared_length(r)),
         lambda r, _: f"must be a multiple of sequence_parallel_size = {r.mix.degrees.sequence} ({r.config.deepspeed})"
                      ": the ranks share each sequence",
         _other_lengths,
         {"data.sequence_length": 129, _SEQUENCE: 2}),
    Rule(("data.sequence_length",),
         lambda r: r.config.model.fp8 and operator.mod(*_shared_length(r, _FP8_TOKENS)),
         lambda r, _: f"matrix products in fp8 (model.fp8 {r.config.model.fp8}) need multiples of {_FP8_TOKENS} "
                      "tokens" + (
             f" on each of the {r.mix.degrees.sequence} ranks that share a sequence" * (r.mix.degrees.sequence > 1)),
         lambda r, _: f"set it to {_up(*_shared_length(r, _FP8_TOKENS))}, or model.fp8 to null",
         {**_FP8, "data.sequence_length": 120}),
)
"""Rules between each stage's data and the run's `Mix`."""

OF_FORMS: tuple[Rule, ...] = (
    Rule((_SEQUENCE,), lambda r: r.mix.degrees.sequence > 1 and _local_heads(r) % r.mix.degrees.sequence,
         lambda r, _: f"in attention each rank computes the same number of heads, and the model has "
                      f"{_local_heads(r) * r.mix.degrees.tensor}"
                      + f" on {r.mix.degrees.tensor} tensor-parallel ranks" * (r.mix.degrees.tensor > 1),
         lambda r, _: f"set it to one of {divisors(_local_heads(r))}",
         {"model.config.num_attention_heads": 3, "data.sequence_length": 128, _SEQUENCE: 2}),
    Rule((_TENSOR,), lambda r: r.mix.degrees.tensor > 1 and math.gcd(*_heads(r).values()) % r.mix.degrees.tensor,
         lambda r, _: "in attention each rank computes the same number of heads, and "
                      + next(f"{key} is {count}" for key, count in _heads(r).items() if count % r.mix.degrees.tensor),
         lambda r, _: f"set it to one of {divisors(math.gcd(*_heads(r).values()))}; other ranks can work "
                      "data-parallel, with ZeRO 3, or in a pipeline",
         {"model.config.num_attention_heads": 6, "model.config.num_key_value_heads": 3, _TENSOR: 2}),
    *(Rule(("adapter.quantize", key), lambda r, wrong=wrong: _packed(r.config) and wrong(r.mix),  # type: ignore[misc]
           "adapter.quantize needs whole maps on each rank",
           "remove one of them: bf16 weights that are divided over the ranks may need as little "
           "memory", {**_NF4, key: degree})
      for key, degree, wrong in ((_ZERO, 3, lambda m: m.zero_stage == 3),
                                 (_TENSOR, 2, lambda m: m.degrees.tensor > 1),
                                 (_PIPELINE, 2, lambda m: m.degrees.pipeline > 1))),
    Rule(("model.attention", "torch_autocast.enabled"),
         lambda r: r.config.model.attention == "varlen" and r.mix.autocast,
         "varlen's operator is llmtrain's, and autocast does not know it: queries would be fp32 and values bf16",
         "set model.attention to sdpa, or use the bf16 section",
         {"data.isolate_documents": True, "model.attention": "varlen", "torch_autocast.enabled": True,
          "bf16.enabled": False}),
    Rule(("adapter.quantize", "torch_autocast.enabled"), lambda r: _packed(r.config) and r.mix.autocast,
         "packed maps are unpacked to the parameters' precision in a backward pass of their own, outside of autocast",
         "use the bf16 section", {**_NF4, "torch_autocast.enabled": True, "bf16.enabled": False}),
    *(Rule((key, _TENSOR),
           lambda r, key=key: r.config.adapter.r is not None and value_of(key, r.config)  # type: ignore[misc]
                              and r.mix.degrees.tensor > 1,
           "needs whole maps on each rank",
           "remove one of them: ZeRO 3, sequence parallelism and pipelines keep maps whole",
           {**_LORA, key: value, _TENSOR: 2})
      for key, value in (("adapter.dora", True), ("adapter.dropout", 0.1))),
    *(Rule((key, "zero_optimization.zero_hpz_partition_size"),
           lambda r, key=key: r.mix.hpz and value_of(key, r.config),  # type: ignore[misc]
           "ZeRO 3 never updates its second copies (zero_hpz_partition_size) of frozen parameters, and they would be "
           "wrong",
           "remove zero_hpz_partition_size",
           {key: value, _ZERO: 3, "zero_optimization.zero_hpz_partition_size": 2})
      for key, value in (("adapter.r", 8), ("model.train_only", ["lm_head.*"]), ("model.freeze", ["lm_head.*"]))),
)
"""Rules of a run with its `Mix`."""

OF_MASKS: tuple[Rule, ...] = (
    Rule(("model.attention",), lambda r: r.config.model.attention == "varlen" and _split(r),
         lambda r, _: f"needs whole sequences and all layers on each rank, which excludes {_split(r)}",
         "set model.attention to sdpa, or use ZeRO or tensor parallelism instead",
         {"data.isolate_documents": True, "model.attention": "varlen", _SEQUENCE: 2}),
    # Where auto becomes sdpa, the start asks again (training/setup.py with_attention).
    Rule(("data.sequence_length",),
         lambda r: r.config.data.isolate_documents and r.config.model.attention != "varlen"
                   and (r.config.model.attention != "auto" or _split(r)) and _mask_bytes(r) > _MASK_BYTES,
         lambda r, _: f"with data.isolate_documents, model.attention {r.config.model.attention} makes a mask of "
                      f"{size(_mask_bytes(r))} ({_sequences(r)} sequences x length x length bytes) in each forward "
                      f"pass; at most {size(_MASK_BYTES)} are allowed",
         lambda r, _: "shorten it" if _split(r) else "set model.attention to varlen, which needs none",
         {"data.isolate_documents": True, "model.attention": "sdpa", "data.sequence_length": 2**17}),
)
"""Rules of isolated documents in each stage: an attention mask must fit into memory, and attention without a mask needs
the documents' bounds, which only one pipeline stage gets."""
# fmt: on


def _schedules(run: Run) -> Iterator[tuple[str, Schedule, int, int | None]]:
    """Yield (key, schedule, first step, end) of each schedule that begins or ends with a stage."""
    stages = run.stages
    for number, stage in enumerate(stages):
        first, end = stage.first_step, stages.schedule_end(stage.first_step, run.max_steps)
        if stage.schedule_from == first and not (first == 0 and end == run.max_steps):
            yield f"data.stages[{number - 1}].schedule" if number else "schedule", stage.schedule, first, end


def _too_long(run: Run, key: str) -> str:
    found = {f"{name}.warmup_steps": (shape, first, end) for name, shape, first, end in _schedules(run)}
    shape, first, end = found[key]
    return (
        f"warm-up {shape.warmup_steps} + decay {shape.decay()} do not fit into the schedule's {(end or first) - first} "
        f"steps, {first} to {end}"
    )


# fmt: off
_OF_SCHEDULES: tuple[Rule, ...] = (
    Rule(("data.stages[0].schedule.name",),
         lambda r: [f"{key}.name" for key, shape, _, end in _schedules(r) if end is None and shape.needs_length],
         "this shape needs the number of steps in advance",
         "set train.max_steps, train.max_tokens or train.epochs, or schedule.name: constant",
         {"train.max_steps": None, "train.max_minutes": 5, "schedule.name": "constant",
          "data.stages": [{"from_step": 5, "schedule": {"name": "linear"}}]}, each=True),
    Rule(("data.stages[0].schedule.warmup_steps",),
         lambda r: [f"{key}.warmup_steps" for key, shape, first, end in _schedules(r)
                    if end is not None and first < end < first + shape.warmup_steps + max(1, shape.decay())],
         _too_long, "shorten them, or let the next schedule begin later",
         {"data.stages": [{"from_step": 90, "schedule": {"name": "linear", "warmup_steps": 12}}]}, each=True),
)
# fmt: on
"""Rules of schedules that begin or end with a stage."""


# fmt: off
OF_STEPS: tuple[Rule, ...] = (
    Rule(("schedule.warmup_steps", "train.max_steps"),
         lambda r: [("schedule.warmup_steps", _limit(r)[0])]
                   if _has_one_schedule(r) and r.config.schedule.warmup_steps >= r.max_steps else [],
         lambda r, _: f"schedule.warmup_steps must be less than the run's {r.max_steps} steps",
         lambda r, _: f"set schedule.warmup_steps to {r.max_steps - 1} or less (0: none), or {_limit(r)[0]} to more "
                      f"than {r.config.schedule.warmup_steps * _limit(r)[1]:.15g}",
         {"schedule.warmup_steps": 100}, each=True),
    Rule(("schedule.decay_steps", "train.max_steps"),
         lambda r: [("schedule.decay_steps", _limit(r)[0])] if _has_one_schedule(r) and r.config.schedule.warmup_steps
                   < r.max_steps < r.config.schedule.warmup_steps + r.config.schedule.decay() else [],
         lambda r, _: f"warm-up {r.config.schedule.warmup_steps} + decay {r.config.schedule.decay()} exceed the run's "
                      f"{r.max_steps} steps",
         lambda r, _: f"set schedule.decay_steps to {r.max_steps - r.config.schedule.warmup_steps} or less, or shorten "
                      "the warm-up",
         {"schedule.name": "wsd", "schedule.warmup_steps": 90, "schedule.decay_steps": 20}, each=True),
    *_OF_SCHEDULES,
)
# fmt: on
"""Rules of a run whose batch and number of steps are known."""
