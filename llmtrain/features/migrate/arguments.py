"""transformers' TrainingArguments, which TRL, LLaMA-Factory and axolotl pass on: batch, length, rates, optimizer,
precision, DeepSpeed, saving, evaluation and logging."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtrain.base.errors import ConfigError
from llmtrain.base.trees import lookup
from llmtrain.config import strict_yaml
from llmtrain.config.deepspeed.read import read_json
from llmtrain.config.problems import show, stop
from llmtrain.features.migrate.draft import Draft, Given

TRANSFORMERS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "seed": 42,
    "logging_steps": 500,
    "save_steps": 500,
    "save_strategy": "steps",
    "eval_strategy": "no",
    "gradient_checkpointing": False,
    "bf16": False,
    "optim": "adamw_torch_fused",
}
"""Defaults of transformers.TrainingArguments that differ from ours, or that a run needs."""

_SHAPES = (
    "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial", "inverse_sqrt", "constant",
    "constant_with_warmup",
)  # fmt: skip
_OF_SHAPES = {"num_cycles": "cycles", "min_lr_rate": "min_ratio", "power": "power", "timescale": "timescale"}
"""Key of lr_scheduler_kwargs -> field of the schedule."""


@dataclass(frozen=True)
class Stack:
    """A stack whose configurations become runs."""

    name: str
    title: str
    classes: tuple[str, ...]
    """Its classes in rows.yaml; for an option of several classes the first class counts."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Name in transformers' TrainingArguments, or in the code of this folder -> the stack's own."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Its defaults where they are not transformers'."""
    translate: Callable[[Given, Draft, Asked], None] = lambda given, draft, asked: None
    """Answers the options that are the stack's own, before those of TrainingArguments."""

    def default(self, option: str) -> Any:
        return self.defaults.get(option, TRANSFORMERS.get(option))


@dataclass(frozen=True)
class Asked:
    """What the command line adds to the file."""

    stack: Stack
    folder: Path
    """Where the file lies: its relative paths may begin there."""
    out: Path
    """The folder of run.yaml, where its commands will run."""
    gpus: int | None
    """Ranks of the run."""
    counted_by: str = "--gpus"
    """What says how many ranks there are."""

    def path(self, written: str) -> str:
        """Return a path of the file as seen from `out`; what is not there stays as it is."""
        file = self.folder / written
        return os.path.relpath(file, self.out) if not Path(written).is_absolute() and file.exists() else written


def translate(given: Given, draft: Draft, asked: Asked) -> None:
    """Answer all options of TrainingArguments for which a row of rows.yaml is not enough."""
    for part in (_batch, _length, _optimizer, _schedule):
        part(given, draft, asked)
    mark = len(given.answered)
    _deepspeed(given, draft, asked)
    _recompute(given, draft, asked)
    draft.json_from = given.answered[mark:]
    for part in (_saving, _logging, _evaluation):
        part(given, draft, asked)
    seed = given.take("seed", asked.stack.default("seed"))
    draft.set("train.seed", seed, given.source("seed"))
    data_seed = given.take("data_seed", seed)
    draft.set("data.seed", data_seed, given.source("data_seed") if "data_seed" in given else given.source("seed"))


def _batch(given: Given, draft: Draft, asked: Asked) -> None:
    stack = asked.stack
    micro = given.take("per_device_train_batch_size", stack.default("per_device_train_batch_size"))
    steps = given.take("gradient_accumulation_steps", stack.default("gradient_accumulation_steps"))
    draft.set("train.micro_batch", micro, given.source("per_device_train_batch_size"))
    draft.set("train.accumulation", steps, given.source("gradient_accumulation_steps"))
    source = f"{given.name('per_device_train_batch_size')} x {given.name('gradient_accumulation_steps')}"
    draft.batch_of_rank = micro * steps, source


def _length(given: Given, draft: Draft, asked: Asked) -> None:
    stack = asked.stack
    steps, epochs = given.take("max_steps", -1), given.take("num_train_epochs", stack.default("num_train_epochs"))
    if steps > 0:
        draft.set("train.max_steps", steps, given.source("max_steps"))
    else:
        draft.set("train.epochs", float(epochs), given.source("num_train_epochs"))


def _optimizer(given: Given, draft: Draft, asked: Asked) -> None:
    stack = asked.stack
    kind = str(given.take("optim", stack.default("optim")))
    name = "lion" if "lion" in kind else "adamw" if re.match(r"(paged_)?adamw(_|$)", kind) else None
    if name is None or "anyprecision" in kind or "4bit" in kind or "fp8" in kind:
        draft.change(given.name("optim"), kind, "not here: optim.name has adamw, lion and muon, each with its own rate")
    draft.set("optim.name", name or "adamw", given.source("optim"))
    if "8bit" in kind or kind.startswith("paged"):
        draft.remark(
            given.name("optim"),
            kind,
            "the same formula with moments in fp32; where memory is short: "
            "bf16.bf16_optimizer_states or zero_optimization.offload_optimizer in the JSON",
        )
    rate = float(given.take("learning_rate", stack.default("learning_rate")))
    draft.set("optim.lr", rate, given.source("learning_rate"))
    betas = [float(given.take(beta, stack.default(beta))) for beta in ("adam_beta1", "adam_beta2")]
    draft.set("optim.betas", betas, f"{given.source('adam_beta1')}, {given.source('adam_beta2')}")
    epsilon = given.take("adam_epsilon", stack.default("adam_epsilon"))
    if name != "lion":
        draft.set("optim.eps", float(epsilon), given.source("adam_epsilon"))
    decay = given.take("weight_decay", stack.default("weight_decay"))
    draft.set("optim.weight_decay", float(decay), given.source("weight_decay"))
    clip = given.take("max_grad_norm", stack.default("max_grad_norm"))
    draft.set("optim.clip_norm", float(clip), given.source("max_grad_norm"))


def _schedule(given: Given, draft: Draft, asked: Asked) -> None:
    stack = asked.stack
    shape = str(given.take("lr_scheduler_type", stack.default("lr_scheduler_type")))
    source, key = given.source("lr_scheduler_type"), given.name("lr_scheduler_type")
    if shape not in _SHAPES:
        draft.change(
            key,
            shape,
            f"not here: schedule.shape has {', '.join(_SHAPES)}; schedule.name wsd and a class of yours are others",
        )
        shape = "linear"
    draft.set("schedule.name", "transformers", source)
    draft.set("schedule.shape", shape, source)
    steps, share = given.take("warmup_steps"), given.take("warmup_ratio")
    if steps is not None and 0 < steps < 1:  # transformers 5 has a share there
        steps, share = None, steps
    if shape == "constant" and (steps or share):
        draft.remark(given.name("warmup_steps"), steps or share, f"{shape} has no warm-up in transformers either")
    elif steps:
        draft.set("schedule.warmup_steps", int(steps), given.source("warmup_steps"))
    elif share:
        option = "warmup_ratio" if "warmup_ratio" in given else "warmup_steps"
        draft.set("schedule.warmup_ratio", float(share), given.source(option))
    elif steps is None and share is None and (default := stack.default("warmup_ratio")):
        draft.set("schedule.warmup_ratio", default, given.source("warmup_ratio"))
    more = given.take("lr_scheduler_kwargs", {})
    if not isinstance(more, dict):
        draft.change(given.name("lr_scheduler_kwargs"), more, "it is no map of arguments")
        more = {}
    rate = draft.yaml["optim.lr"][0]
    if shape == "polynomial":
        more = {"lr_end": 1e-7, **more}
    for name, value in more.items():
        if name in _OF_SHAPES:
            draft.set(f"schedule.{_OF_SHAPES[name]}", value, f"{given.name('lr_scheduler_kwargs')}.{name}")
        elif name in ("min_lr", "lr_end"):
            draft.set("schedule.min_ratio", float(value) / rate, f"{name} / {given.name('learning_rate')}")
        else:
            draft.change(
                f"{given.name('lr_scheduler_kwargs')}.{name}", value, f"schedule {shape} has no such field here"
            )


_BY_NAME = (("zero3", 3), ("z3", 3), ("stage3", 3), ("zero2", 2), ("z2", 2), ("stage2", 2), ("zero1", 1), ("z0", 0))
"""Part of a file's name -> ZeRO stage, for the files that axolotl and LLaMA-Factory ship."""


def _deepspeed(given: Given, draft: Draft, asked: Asked) -> None:
    """Their JSON, or one of ours. Raises ConfigError: their JSON contradicts the arguments."""
    written, name = given.take("deepspeed"), given.name("deepspeed")
    sharded = given.take("fsdp") or given.take("fsdp_config")
    place = name
    if isinstance(written, dict):
        draft.json = dict(written)
    elif written and (path := _found(str(written), asked.folder)):
        place, draft.json = str(path), read_json(str(path))
    else:
        stage = 3 if sharded else 2
        if written:
            stage = next((number for part, number in _BY_NAME if part in Path(written).name.lower()), -1)
            if stage < 0:
                raise ConfigError(
                    f"{name}: {written}: there is no such file beside the configuration or in this "
                    "folder, and its name tells no ZeRO stage. Copy it beside the configuration."
                )
            draft.remark(name, written, f"there is no such file here: the JSON has ZeRO {stage}, as its name says")
        if stage == 3 and (given.values.get("load_in_4bit") or "adapter.quantize" in draft.yaml):
            stage = 2
            draft.remark(
                "", None, "ZeRO 2 in place of 3: each rank keeps all maps of 4 bits, and ZeRO 3 would share them"
            )
        draft.json = {
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
            "zero_optimization": {"stage": stage, "overlap_comm": True, "contiguous_gradients": True},
        }
        if written and "offload" in written:
            draft.set_json("zero_optimization.offload_optimizer", {"device": "cpu", "pin_memory": True})
    half = _precision(given, draft, asked.stack, place)
    for kind in _HALVES:
        section = draft.json.get(kind)
        draft.set_json(kind, {**(section if isinstance(section, dict) else {}), "enabled": half == kind})
    _refuse_two_values(given, draft, asked, place)
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        draft.json[key] = "auto"
    draft.json["gradient_clipping"] = "auto"
    _their_optimizer(draft)
    scheduler = draft.json.pop("scheduler", None)
    if scheduler and scheduler.get("type"):
        parameters = scheduler.get("params") or {}
        warm = draft.yaml.get("schedule.warmup_steps") or draft.yaml.get("schedule.warmup_ratio")
        if (least := parameters.get("warmup_min_lr", 0)) not in (0, "auto"):
            draft.change("scheduler.params.warmup_min_lr", least, "the warm-up begins at a rate of 0 here")
        line = {"WarmupDecayLR": "linear", "WarmupLR": "constant_with_warmup"}.get(scheduler["type"])
        if line and (parameters.get("warmup_type") == "linear" or not warm):
            draft.set("schedule.shape", line, f"scheduler {scheduler['type']} of the JSON")
        else:
            draft.change(
                "scheduler",
                scheduler["type"],
                "DeepSpeed's schedule, which transformers takes in place of its "
                "own: its warm-up is logarithmic, here it is a line",
            )


def _their_optimizer(draft: Draft) -> None:
    """Values of the JSON's optimizer, which transformers takes in place of its own."""
    section = draft.json.pop("optimizer", None) or {}
    if section.get("type") not in (None, "Adam", "AdamW", "auto"):
        draft.change("optimizer.type", section["type"], "not here: optim.name has adamw, lion and muon")
    for name, value in (section.get("params") or {}).items():
        key = f"optim.{name}"
        if value == "auto" or name in ("torch_adam", "fused", "adam_w_mode", "bias_correction", "amsgrad"):
            if (name, value) in (("adam_w_mode", False), ("bias_correction", False), ("amsgrad", True)):
                draft.change(
                    f"optimizer.params.{name}", value, "AdamW decays apart from the gradient, corrects its bias"
                )
        elif key in draft.yaml:
            draft.set(key, value, f"optimizer.params.{name} of the JSON")
        else:
            draft.change(f"optimizer.params.{name}", value, "not here")


_HALVES = {"bf16": "bfloat16", "fp16": "float16"}
"""Argument for half precision -> axolotl's second name for it."""


def _precision(given: Given, draft: Draft, stack: Stack, place: str) -> str:
    """Return bf16, fp16 or fp32: that of the arguments, or of the JSON where these leave it open.

    Raises: ConfigError if the two contradict: transformers refuses them, too.
    """
    flags: dict[str, tuple[str, bool]] = {}  # kind -> (the option that decides it, its value)
    for kind, other in _HALVES.items():
        for option in (kind, other):
            value = given.take(option)
            value = strict_yaml.plain_scalar(value) if isinstance(value, str) else value
            if value not in (None, "auto"):
                flags.setdefault(kind, (option, bool(value)))
    on = next((kind for kind, (_, flag) in flags.items() if flag), None)
    theirs = {kind: lookup(draft.json, f"{kind}.enabled") for kind in _HALVES}
    for kind, value in theirs.items():
        decides = kind if kind in flags else on  # a kind that is on turns the other one off
        if decides is not None and isinstance(value, bool) and value != (kind == on):
            option, flag = flags[decides]
            raise _two_values(f"{kind}.enabled", value, f"{option} = {show(flag)}", option, place)
    usual = next((kind for kind in _HALVES if kind not in flags and stack.default(kind)), None)
    if on is None and (on := next((kind for kind in _HALVES if theirs[kind] is True), None)):
        if usual not in (None, on):
            draft.remark(f"{on}.enabled", True, f"of the JSON; {stack.title} computes in {usual} by itself")
    elif on is None and usual is not None and theirs[usual] is not False:
        on = usual
    return on or "fp32"


_IN_BOTH = {
    "train_micro_batch_size_per_gpu": (("per_device_train_batch_size",), "train.micro_batch"),
    "gradient_accumulation_steps": (("gradient_accumulation_steps",), "train.accumulation"),
    "gradient_clipping": (("max_grad_norm",), "optim.clip_norm"),
    "optimizer.params.lr": (("learning_rate",), "optim.lr"),
    "optimizer.params.betas": (("adam_beta1", "adam_beta2"), "optim.betas"),
    "optimizer.params.eps": (("adam_epsilon",), "optim.eps"),
    "optimizer.params.weight_decay": (("weight_decay",), "optim.weight_decay"),
    "scheduler.params.warmup_max_lr": (("learning_rate",), "optim.lr"),
    "scheduler.params.warmup_num_steps": (("warmup_steps", "warmup_ratio"), "schedule.warmup_steps"),
}
"""Key of a JSON -> (the arguments that must say the same, the YAML's key for it): transformers' fill_match."""


def _refuse_two_values(given: Given, draft: Draft, asked: Asked, place: str) -> None:
    """Take over what their JSON alone says. Raises ConfigError: it and an argument differ."""
    for key, (options, ours) in _IN_BOTH.items():
        theirs, value = lookup(draft.json, key), draft.yaml.get(ours, (None,))[0]
        if theirs in (None, "auto", value):
            continue
        if option := next((given.name(name) for name in options if name in given), None):
            raise _two_values(key, theirs, f"{option} = {show(given.values[option])}", option, place)
        draft.set(ours, theirs, f"{key} of the JSON")
    whole = draft.json.get("train_batch_size")
    if draft.batch_of_rank is None or whole in (None, "auto"):
        return
    of_rank, source = draft.yaml["train.micro_batch"][0] * draft.yaml["train.accumulation"][0], draft.batch_of_rank[1]
    draft.batch_of_rank = of_rank, source
    if asked.gpus is None:
        draft.yaml.pop("train.accumulation")
        draft.set("train.global_batch", whole, "train_batch_size of the JSON")
        draft.batch_of_rank = None
    elif whole != of_rank * asked.gpus:
        says = f"{source} x {asked.counted_by} = {of_rank * asked.gpus}"
        raise _two_values("train_batch_size", whole, says, source.partition(" ")[0], place)


def _two_values(key: str, value: Any, says: str, option: str, place: str) -> ConfigError:
    rule = f"{says} contradicts it, and transformers refuses the two together"
    return stop(key, value, rule, f'write "auto" for {key} in the JSON, or change {option}', place)


def _found(path: str, folder: Path) -> Path | None:
    return next((file for file in (folder / path, Path(path)) if file.is_file()), None)


def _recompute(given: Given, draft: Draft, asked: Asked) -> None:
    stack = asked.stack
    wanted = given.take("gradient_checkpointing", stack.default("gradient_checkpointing"))
    wanted = given.take("activation_checkpointing", wanted)
    if given.take("disable_gradient_checkpointing"):
        wanted = False
    if wanted:
        draft.json.setdefault("activation_checkpointing", {})
    if wanted in ("offload", "offload_disk") or given.take("activation_offloading"):
        draft.set_json("activation_checkpointing.cpu_checkpointing", True)
    given.take("gradient_checkpointing_kwargs")


def _saving(given: Given, draft: Draft, asked: Asked) -> None:
    stack = asked.stack
    strategy = str(given.take("save_strategy", stack.default("save_strategy")))
    every = given.take("save_steps", stack.default("save_steps"))
    steps = draft.yaml.get("train.max_steps", (0,))[0]
    if 0 < every < 1:
        every = max(1, int(every * steps)) if steps else TRANSFORMERS["save_steps"]
    if strategy == "steps" and "saves_per_epoch" not in given:
        draft.set("checkpoint.every_steps", int(every), given.source("save_steps"))
    elif strategy != "no":
        name = "saves_per_epoch" if "saves_per_epoch" in given else "save_strategy"
        draft.set("checkpoint.every_minutes", 30.0, f"in place of {given.name(name)}")
        draft.remark(
            given.name(name),
            given.values.get(given.name(name)),
            "checkpoints go by steps or minutes here, and one is at the end",
        )
        given.take("saves_per_epoch")
    keep = given.take("save_total_limit")
    if keep:
        draft.set("checkpoint.keep", int(keep), given.source("save_total_limit"))
    best, metric = given.take("load_best_model_at_end"), given.take("metric_for_best_model")
    given.take("greater_is_better")
    if best and metric in (None, "loss", "eval_loss"):
        draft.set("checkpoint.keep_best.metric", "eval/loss", given.source("load_best_model_at_end"))
        draft.remark(
            given.name("load_best_model_at_end"), best, "`llmtrain checkpoint to-hf RUN OUT --best` at the end"
        )
    elif metric:
        draft.remark(given.name("metric_for_best_model"), metric, "checkpoint.keep_best.metric: such as eval/loss")


def _evaluation(given: Given, draft: Draft, asked: Asked) -> None:
    stack = asked.stack
    strategy = str(given.take("eval_strategy", given.take("evaluation_strategy", stack.default("eval_strategy"))))
    every = given.take("eval_steps")
    validates = "--validation-source" in draft.prepare or not _is_zero(draft.prepare, "--validation-fraction")
    if not validates:
        draft.set("train.eval", False, "no validation data")
    elif every and every >= 1 and "evals_per_epoch" not in given:
        draft.set("train.eval_every", int(every), given.source("eval_steps"))
    elif strategy == "steps" and "evals_per_epoch" not in given:
        draft.set(
            "train.eval_every",
            draft.yaml["train.log_every"][0] if "train.log_every" in draft.yaml else 500,
            given.source("eval_steps"),
        )
    elif strategy == "epoch" or "evals_per_epoch" in given:
        name = "evals_per_epoch" if "evals_per_epoch" in given else "eval_strategy"
        draft.remark(
            given.name(name),
            given.values.get(given.name(name)),
            "train.eval_every counts steps; without it the validation loss is measured at the end",
        )
    given.take("evals_per_epoch")
    if patience := given.take("early_stopping_patience"):
        draft.set("train.stop_early.metric", "eval/loss", given.source("early_stopping_patience"))
        draft.set("train.stop_early.patience", patience, given.source("early_stopping_patience"))


def unpacked(draft: Draft, option: str) -> None:
    """Set data.pack to false."""
    draft.set("data.pack", False, option)


def _is_zero(words: list[str], flag: str) -> bool:
    return flag in words and float(words[words.index(flag) + 1]) == 0


def _logging(given: Given, draft: Draft, asked: Asked) -> None:
    stack = asked.stack
    every = given.take("logging_steps", stack.default("logging_steps"))
    steps = draft.yaml.get("train.max_steps", (0,))[0]
    if 0 < every < 1:
        every = max(1, int(every * steps)) if steps else 10
    draft.set("train.log_every", max(1, int(every)), given.source("logging_steps"))
    report = given.take("report_to", [])
    reports = [report] if isinstance(report, str) else list(report or ())
    if "report_to" in given and not {"wandb", "all"} & set(reports):
        draft.set("tracking.wandb", "disabled", given.source("report_to"))
    for name in ("tensorboard", "mlflow"):
        if name in reports or given.take(f"use_{name}"):
            draft.set(f"trackers.{name}", None, given.source("report_to" if name in reports else f"use_{name}"))
    if other := set(reports) - {"wandb", "all", "none", "tensorboard", "mlflow"}:
        draft.remark(
            given.name("report_to"), sorted(other), "not here; metrics.jsonl and llmtrain report are always there"
        )
