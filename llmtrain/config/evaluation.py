"""Rules of the section `eval` beside others, and of the folders that it names."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from llmtrain.config.problems import Problems, closest
from llmtrain.config.run import KeepBest, RunConfig, StopEarly
from llmtrain.objectives.by_token import NextToken
from llmtrain.objectives.objective import Objective
from llmtrain.tracking.metrics import mode_of

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_OF_CHOICES = ("accuracy", "accuracy_norm", "bits_per_byte")


def taken_names() -> set[str]:
    """Names that no set can have: the figures of the validation set and the mean stand there."""
    figures = [figure.name for objective in Objective.CHOICES.values() for figure in objective.figures]
    own = {"loss", "perplexity", "bits_per_byte", "mean", "ema", "accuracy", "accuracy_norm"}
    return {*own, *(figure.partition("/")[0] for figure in figures)}


def figures_of(run: RunConfig) -> list[str]:
    """Keys of the figures that each evaluation of the run gives."""
    names = ["loss", *(figure.name for figure in run.objective.reported)]
    if isinstance(run.objective, NextToken):
        names += ["perplexity", "bits_per_byte"]
    names += run.metrics
    prefixes = [*(["eval"] if run.train.eval else []), *(f"eval/{name}" for name in run.eval.sets)]
    prefixes += ["eval/ema"] if run.train.eval and run.ema.decay is not None else []
    mean = ["eval/mean/loss"] if run.eval.mean else []
    answers = [f"eval/{name}/{figure}" for name in run.eval.choices for figure in _OF_CHOICES]
    return [f"{prefix}/{name}" for prefix in prefixes for name in names] + mean + answers


def filled(run: RunConfig) -> RunConfig:
    """The run with the directions of its metrics filled in."""
    best, early = run.checkpoint.keep_best, run.train.stop_early
    if best.metric is not None and best.mode is None:
        run = replace(run, checkpoint=replace(run.checkpoint, keep_best=replace(best, mode=mode_of(best.metric))))
    if early.metric is not None and early.mode is None:
        run = replace(run, train=replace(run.train, stop_early=replace(early, mode=mode_of(early.metric))))
    return run


def _check_metrics(run: RunConfig, problems: Problems) -> None:
    """Check that the metrics that keep checkpoints or end the run are figures of its evaluations."""
    asked: dict[str, KeepBest | StopEarly] = {"checkpoint.keep_best": run.checkpoint.keep_best,
                                              "train.stop_early": run.train.stop_early}  # fmt: skip
    for section, chosen in asked.items():
        key, known = f"{section}.metric", figures_of(run)
        if chosen.metric is None:
            if chosen != type(chosen)():
                problems.add(
                    key,
                    None,
                    "other keys of the section are given, and without a metric it does nothing",
                    "write one, such as eval/loss, or remove the section",
                    problems.places.get(section),
                )
        elif chosen.metric not in known:
            near = closest(chosen.metric, known)
            remedy = f"did you mean {near}?" if near else f"choose one of {', '.join(known) or 'none: there are none'}"
            problems.add(key, chosen.metric, "is no figure of this run's evaluations", remedy)
        elif chosen.mode is None and mode_of(chosen.metric) is None:
            problems.add(f"{section}.mode", None, f"{chosen.metric} does not tell whether less is better",
                         "write min or max", problems.places.get(key))  # fmt: skip
        elif run.train.eval_every is None:
            problems.add(key, chosen.metric, "is measured at the end of the run only", "set train.eval_every")
    early = run.train.stop_early.metric
    if early is not None and run.sites.name is not None:
        problems.add("train.stop_early.metric", early, "would end each site at a step of its own, and the others would "
                     "wait for it", "remove it")  # fmt: skip


def check_evaluation(run: RunConfig, problems: Problems) -> None:
    """Names of sets, the maps that belong to them, and the figures that decide on the run."""
    sets, choices = run.eval.sets, run.eval.choices
    named = [(f"eval.sets.{name}", name, folder) for name, folder in sets.items()]
    for key, name, folder in (*named, *((f"eval.choices.{name}", name, folder) for name, folder in choices.items())):
        if key.startswith("eval.choices.") and name in sets:
            problems.add(key, folder, f"eval/{name} is of eval.sets.{name}", "give one of the two another name")
        if name in taken_names():
            problems.add(key, folder, f"eval/{name} is the name of other figures", "give the set another name")
        elif not _NAME.fullmatch(name):
            problems.add(key, folder, "a name of a set has letters, digits, - and _ alone: eval/NAME/loss is a figure",
                         "give the set another name")  # fmt: skip
    if choices and run.objective.scores:
        rule = (
            f"a model of objective.name {run.objective.name} gives scores, and choices are measured by their likelihood"
        )
        problems.add("eval.choices", choices, rule, "remove eval.choices")
    of_sets: dict[str, dict[str, Any]] = {"sequences": run.eval.sequences, "mean": run.eval.mean}
    for field, given in of_sets.items():
        for name, value in given.items():
            key = f"eval.{field}.{name}"
            if name not in sets:
                names = ", ".join(sets) or "none"
                problems.add(key, value, f"is of no set in eval.sets, which has {names}", "correct the name")
    _check_metrics(run, problems)


def check_set(key: str, path: str, manifest: dict[str, Any], run: RunConfig, tokenizer: str | None,
              problems: Problems) -> None:  # fmt: skip
    """A set has the tokenizer of the run's data, and fills a sequence. `tokenizer`: fingerprint of that of the data."""
    _check_tokenizer(key, path, manifest, run, tokenizer, problems)
    tokens = manifest.get("tokens")
    length = run.data.sequence_length
    least = 1 if isinstance(manifest.get("chat"), dict) else length + 1
    found = [each for each in tokens.values() if isinstance(each, int)] if isinstance(tokens, dict) else []
    if found and max(found) < least:
        problems.add(key, path, f"neither of its splits ({' and '.join(map(str, found))} tokens) fills one sequence of "
                     f"data.sequence_length {length}", "prepare more text, or lower data.sequence_length")  # fmt: skip


def check_choices(key: str, path: str, manifest: dict[str, Any], run: RunConfig, tokenizer: str | None,
                  problems: Problems) -> None:  # fmt: skip
    """The folder has multiple-choice questions, with the tokenizer of the run's data."""
    chat = manifest.get("chat")
    if not (isinstance(chat, dict) and chat.get("choices")):
        problems.add(key, path, "holds no multiple-choice questions", "prepare them with --format choices, or name the "
                     "folder in eval.sets")  # fmt: skip
    else:
        _check_tokenizer(key, path, manifest, run, tokenizer, problems)


def _check_tokenizer(key: str, path: str, manifest: dict[str, Any], run: RunConfig, tokenizer: str | None,
                     problems: Problems) -> None:  # fmt: skip
    if tokenizer is not None and manifest.get("tokenizer_fingerprint") != tokenizer:
        data = next(iter(run.data.mixture or {}), run.data.path)
        problems.add(key, path, f"was prepared with another tokenizer than {data}, which the run trains on",
                     f"prepare it again with --tokenizer {data}/tokenizer")  # fmt: skip
