"""The figures of a run's evaluations, and the rules of the section `eval` and of what its figures decide."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from llmtrain.base.rule import Rule
from llmtrain.config.problems import closest
from llmtrain.config.run import KeepBest, RunConfig, StopEarly
from llmtrain.objectives.by_token import NextToken
from llmtrain.objectives.objective import Objective
from llmtrain.tracking.metrics import mode_of

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_OF_CHOICES = ("accuracy", "accuracy_norm", "bits_per_byte")


def _taken_names() -> set[str]:
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


def _sets(wrong: Callable[[str], bool]) -> Callable[[RunConfig], list[str]]:
    """A rule for the name of each set and of each folder of choices."""
    return lambda run: [f"eval.{field}.{name}" for field, names in (("sets", run.eval.sets),
                        ("choices", run.eval.choices)) for name in names if wrong(name)]  # fmt: skip


def _figure(key: str) -> str:
    """The first part of the figures of a set."""
    return f"eval/{key.split('.', 2)[2]}"


def _deciding(section: str, chosen: Callable[[RunConfig], KeepBest | StopEarly]) -> tuple[Rule, ...]:
    """The rules of a metric that keeps checkpoints or ends the run: it is a figure of the run's evaluations."""
    key, every = f"{section}.metric", {"train.eval_every": 10}

    def known(run: RunConfig) -> bool:
        return chosen(run).metric in figures_of(run)

    def directed(run: RunConfig) -> bool:
        return chosen(run).mode is not None or mode_of(str(chosen(run).metric)) is not None

    def remedy(run: RunConfig, _: str) -> str:
        figures = figures_of(run)
        near = closest(str(chosen(run).metric), figures)
        return f"did you mean {near}?" if near else f"choose one of {', '.join(figures) or 'none: there are none'}"

    # fmt: off
    return (
        Rule((key,), lambda r: chosen(r).metric is None and chosen(r) != type(chosen(r))(),
             "other keys of the section are given, and without a metric it does nothing",
             "write one, such as eval/loss, or remove the section", {f"{section}.mode": "min"}),
        Rule((key,), lambda r: chosen(r).metric is not None and not known(r),
             "is no figure of this run's evaluations", remedy, {key: "eval/los", **every}),
        Rule((f"{section}.mode",), lambda r: known(r) and not directed(r),
             lambda r, _: f"{chosen(r).metric} does not tell whether less is better", "write min or max",
             {"objective.name": "distill", "objective.top_k": 7, key: "eval/distill/teacher_entropy", **every}),
        Rule((key,), lambda r: known(r) and directed(r) and r.train.eval_every is None,
             "is measured at the end of the run only", "set train.eval_every", {key: "eval/loss"}),
    )
    # fmt: on


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule(("eval.choices.NAME",), lambda r: [f"eval.choices.{name}" for name in r.eval.choices if name in r.eval.sets],
         lambda _, key: f"{_figure(key)} is of eval.sets.{key.split('.', 2)[2]}", "give one of the two another name",
         {"eval.sets.NAME": "data/x", "eval.choices.NAME": "data/x"}, each=True),
    Rule(("eval.sets.pairs",), _sets(lambda name: name in _taken_names()),
         lambda _, key: f"{_figure(key)} is the name of other figures", "give the set another name",
         {"eval.sets.pairs": "data/x"}, each=True),
    Rule(("eval.sets.a/b",), _sets(lambda name: name not in _taken_names() and not _NAME.fullmatch(name)),
         "a name of a set has letters, digits, - and _ alone: eval/NAME/loss is a figure", "give the set another name",
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
