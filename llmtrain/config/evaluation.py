"""Rules of the section `eval` beside others, and of the folders that it names."""

from __future__ import annotations

import math
import re
from typing import Any

from llmtrain.config.problems import Places, Problems
from llmtrain.config.run import RunConfig
from llmtrain.objectives.objective import Objective

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def taken_names() -> set[str]:
    """Names that no set can have: the figures of the validation set and the mean stand there."""
    figures = [figure.name for objective in Objective.CHOICES.values() for figure in objective.figures]
    own = {"loss", "perplexity", "bits_per_byte", "mean", "accuracy", "accuracy_norm"}
    return {*own, *(figure.partition("/")[0] for figure in figures)}


def check_evaluation(run: RunConfig, places: Places, problems: Problems) -> None:
    """Names of sets, and the maps that belong to them."""
    sets, choices = run.eval.sets, run.eval.choices
    named = [(f"eval.sets.{name}", name, folder) for name, folder in sets.items()]
    for key, name, folder in (*named, *((f"eval.choices.{name}", name, folder) for name, folder in choices.items())):
        if key.startswith("eval.choices.") and name in sets:
            problems.add(key, folder, f"eval/{name} is of eval.sets.{name}", "give one of the two another name",
                         places.get(key))  # fmt: skip
        if name in taken_names():
            problems.add(key, folder, f"eval/{name} is the name of other figures", "give the set another name",
                         places.get(key))  # fmt: skip
        elif not _NAME.fullmatch(name):
            problems.add(key, folder, "a name of a set has letters, digits, - and _ alone: eval/NAME/loss is a figure",
                         "give the set another name", places.get(key))  # fmt: skip
    if choices and run.objective.scores:
        rule = (
            f"a model of objective.name {run.objective.name} gives scores, and choices are measured by their likelihood"
        )
        problems.add("eval.choices", choices, rule, "remove eval.choices", places.get("eval.choices"))
    of_sets: dict[str, dict[str, Any]] = {"sequences": run.eval.sequences, "mean": run.eval.mean}
    for field, given in of_sets.items():
        for name, value in given.items():
            key = f"eval.{field}.{name}"
            if name not in sets:
                names = ", ".join(sets) or "none"
                problems.add(key, value, f"is of no set in eval.sets, which has {names}", "correct the name",
                             places.get(key))  # fmt: skip
            elif not (math.isfinite(value) and value > 0):
                problems.add(key, value, "must be greater than 0", "remove the line", places.get(key))


def check_set(key: str, path: str, manifest: dict[str, Any], run: RunConfig, tokenizer: str | None, place: str | None,
              problems: Problems) -> None:  # fmt: skip
    """A set has the tokenizer of the run's data, and fills a sequence. `tokenizer`: fingerprint of that of the data."""
    _check_tokenizer(key, path, manifest, run, tokenizer, place, problems)
    tokens = manifest.get("tokens")
    length = run.data.sequence_length
    least = 1 if isinstance(manifest.get("chat"), dict) else length + 1
    found = [each for each in tokens.values() if isinstance(each, int)] if isinstance(tokens, dict) else []
    if found and max(found) < least:
        problems.add(key, path, f"neither of its splits ({' and '.join(map(str, found))} tokens) fills one sequence of "
                     f"data.sequence_length {length}", "prepare more text, or lower data.sequence_length",
                     place)  # fmt: skip


def check_choices(key: str, path: str, manifest: dict[str, Any], run: RunConfig, tokenizer: str | None,
                  place: str | None, problems: Problems) -> None:  # fmt: skip
    """The folder has multiple-choice questions, with the tokenizer of the run's data."""
    chat = manifest.get("chat")
    if not (isinstance(chat, dict) and chat.get("choices")):
        problems.add(key, path, "holds no multiple-choice questions", "prepare them with --format choices, or name the "
                     "folder in eval.sets", place)  # fmt: skip
    else:
        _check_tokenizer(key, path, manifest, run, tokenizer, place, problems)


def _check_tokenizer(key: str, path: str, manifest: dict[str, Any], run: RunConfig, tokenizer: str | None,
                     place: str | None, problems: Problems) -> None:  # fmt: skip
    if tokenizer is not None and manifest.get("tokenizer_fingerprint") != tokenizer:
        data = next(iter(run.data.mixture or {}), run.data.path)
        problems.add(key, path, f"was prepared with another tokenizer than {data}, which the run trains on",
                     f"prepare it again with --tokenizer {data}/tokenizer", place)  # fmt: skip
