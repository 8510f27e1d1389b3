"""The fields of each objective, their defaults and their rules."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from llmtrain.config.problems import Places, Problems
from llmtrain.config.run import ObjectiveConfig, RunConfig
from llmtrain.storage.hub.names import REVISION, is_name

NEXT_TOKEN = "next_token"
DISTILL = "distill"
OBJECTIVES: dict[str, dict[str, float]] = {
    NEXT_TOKEN: {},
    DISTILL: {"beta": 0.0, "temperature": 1.0, "alpha": 0.0},
    "dpo": {"beta": 0.1, "smoothing": 0.0},
    "robust": {"beta": 0.1, "smoothing": 0.1},
    "ipo": {"beta": 0.1},
    "dpo_norm": {"beta": 5.0},
    "rpo": {"beta": 0.1, "alpha": 1.0},
    "simpo": {"beta": 2.0, "gamma": 0.5},
    "orpo": {"beta": 0.1},
    "kto": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    "reward": {"centering": 0.0},
}
"""Name -> its numbers."""
BY_TOKEN = (NEXT_TOKEN, DISTILL)
"""Objectives over texts and conversations, a mean over tokens. The others are of prepared preferences."""
UNPAIRED = ("kto",)
"""Objectives over answers judged alone. The others over answers compare a chosen one with a rejected one."""
SCORED = ("reward",)
"""Reward-model objectives (a score for an answer); they train on pairs, too."""
WITHOUT_REFERENCE = (*BY_TOKEN, "simpo", "orpo", *SCORED)
"""The others ask for the log-probabilities of a reference."""


def options(config: ObjectiveConfig) -> dict[str, float]:
    """The objective's own fields, defaults filled in."""
    given = {field: getattr(config, field) for field in OBJECTIVES[config.name]}
    return {field: OBJECTIVES[config.name][field] if value is None else value for field, value in given.items()}


def filled(config: ObjectiveConfig) -> ObjectiveConfig:
    """With its defaults."""
    return replace(config, **options(config))  # type: ignore[arg-type]  # none of them is the name


def wants_column(config: ObjectiveConfig) -> bool:
    """True if it compares with log-probabilities that the data must have."""
    return config.name not in WITHOUT_REFERENCE and config.reference == "column"


def check_objective(run: RunConfig, places: Places, problems: Problems) -> None:
    """Fields go with the name, and what is compared with is there."""
    config = run.objective
    for field in sorted({field for own in OBJECTIVES.values() for field in own}):
        if getattr(config, field) is not None and field not in OBJECTIVES[config.name]:
            owners = ", ".join(name for name, fields in OBJECTIVES.items() if field in fields)
            problems.add(f"objective.{field}", getattr(config, field), f"is not of objective.name {config.name}",
                         f"remove it, or set objective.name to one of {owners}",
                         places.get(f"objective.{field}"))  # fmt: skip
    if config.name in SCORED and run.train.sample_prompt is not None:
        problems.add("train.sample_prompt", run.train.sample_prompt, f"a model of objective.name {config.name} gives "
                     "scores and no text", "remove it", places.get("train.sample_prompt"))  # fmt: skip
    if config.reference == "online":
        _check_online(run, places, problems)
    _check_ranges(config, places, problems)
    _check_teacher(config, places, problems)
    if config.name in WITHOUT_REFERENCE:
        return
    start = f"objective.name {config.name} compares with the model that training starts from"
    if run.resume_weights_only:
        problems.add("resume_weights_only", True, f"{start}, and `llmtrain reference` reads model.pretrained",
                     "export the checkpoint (llmtrain checkpoint to-hf) and name the folder in model.pretrained",
                     places.get("resume_weights_only"))  # fmt: skip


def _check_online(run: RunConfig, places: Places, problems: Problems) -> None:
    """The base of an adapter that begins anew is what training starts from."""
    key, place = "objective.reference", places.get("objective.reference")
    if run.objective.name in WITHOUT_REFERENCE:
        rule, remedy = f"objective.name {run.objective.name} compares with no reference", "remove it"
    elif run.adapter.r is None:
        rule = "is the model with its adapter switched off, and the run has none"
        remedy = "set adapter.r; or leave it out and run `llmtrain reference RUN.yaml`"
    elif run.adapter.start:
        rule = "would be the base without the adapter of adapter.start, from which training starts"
        remedy = "leave it out and run `llmtrain reference RUN.yaml`"
    else:
        return
    problems.add(key, "online", rule, remedy, place)


def _check_ranges(config: ObjectiveConfig, places: Places, problems: Problems) -> None:
    """Rules of fields that mean another thing to another objective."""
    share = config.name == DISTILL
    for field, above in (("beta", not share), ("alpha", False)):
        value, key = getattr(config, field), f"objective.{field}"
        if value is None or field not in OBJECTIVES[config.name]:
            continue
        if share and not 0 <= value <= 1:
            problems.add(key, value, f"must be from 0 to 1 of objective.name {DISTILL}", "0 is the default",
                         places.get(key))  # fmt: skip
        elif value < 0 or (above and value == 0):
            rule = "must be greater than 0" if above else "must be 0 or greater"
            problems.add(key, value, rule, "leave it out for the objective's default", places.get(key))


def _check_teacher(config: ObjectiveConfig, places: Places, problems: Problems) -> None:
    """It is there for a distillation, and for nothing else."""
    key, folder = "objective.teacher", config.teacher
    if config.name == DISTILL and folder is None and config.top_k is None:
        problems.add(key, None, f"objective.name {DISTILL} learns from a teacher",
                     "name the Hugging Face folder of one", places.get("objective.name"))  # fmt: skip
    elif config.name != DISTILL and folder is not None:
        problems.add(key, folder, f"is not of objective.name {config.name}",
                     f"remove it, or set objective.name to {DISTILL}", places.get(key))  # fmt: skip
    check_revision(f"{key}_revision", config.teacher_revision, key, folder, places, problems)
    key, top_k = "objective.top_k", config.top_k
    if top_k is not None and config.name != DISTILL:
        problems.add(key, top_k, f"is not of objective.name {config.name}",
                     f"remove it, or set objective.name to {DISTILL}", places.get(key))  # fmt: skip
    elif top_k is not None and top_k < 1:
        problems.add(key, top_k, "must be 1 or more", "64 is a good one; leave it out for the whole distribution",
                     places.get(key))  # fmt: skip


def check_teacher_folder(run: RunConfig, places: Places, problems: Problems) -> None:
    """Refuse a folder without the files. A repository of the Hub is examined when it has been fetched."""
    key, folder, revision = "objective.teacher", run.objective.teacher, run.objective.teacher_revision
    if folder is None or is_name(folder):
        return
    if not os.path.isfile(os.path.join(folder, "config.json")):
        problems.add(key, folder, f"no such folder with a config.json (looked from {os.getcwd()})",
                     "give a local Hugging Face folder, or ORG/NAME on the Hub", places.get(key))  # fmt: skip
    elif revision is not None:
        problems.add(f"{key}_revision", revision, f"goes with a name on the Hub, and {folder} is a folder here",
                     "remove it, or write ORG/NAME of a repository", places.get(f"{key}_revision"))  # fmt: skip


def check_revision(
    key: str, revision: str | None, goes_with: str, name: str | None, places: Places, problems: Problems
) -> None:
    """A revision may be one, and is of something. `goes_with`: the key of `name`, which it is a revision of."""
    if revision is not None and not REVISION.fullmatch(revision):
        problems.add(key, revision, "is no name of a branch or tag, and no commit",
                     "write it as the Hub shows it, or remove it for main", places.get(key))  # fmt: skip
    elif revision is not None and name is None:
        problems.add(key, revision, f"goes with {goes_with}: ORG/NAME", "remove it", places.get(key))


def check_start(run: RunConfig, places: Places, problems: Problems) -> None:
    """Refuse a reference of random weights. Not asked of a parity check, whose reference is made up."""
    name = run.objective.name
    start = f"objective.name {name} compares with the model that training starts from"
    if name not in WITHOUT_REFERENCE and run.model.config is not None:
        problems.add("objective.name", name, f"{start}, and that of model.config has learnt nothing",
                     "name a trained model: model.pretrained: FOLDER", places.get("objective.name"))  # fmt: skip


def check_data(run: RunConfig, key: str, path: str, manifest: dict[str, Any], place: str | None,
               problems: Problems) -> None:  # fmt: skip
    """A prepared folder holds what the objective is of. `key`, `path`: where the run names it."""
    chat = manifest.get("chat")
    chat = chat if isinstance(chat, dict) else {}
    holds = "pairs" if chat.get("pairs") else "unpaired" if chat.get("unpaired") else ""
    name = run.objective.name
    wants = _kind(name)
    if holds == wants:
        return
    if not wants:
        names = ", ".join(each for each in OBJECTIVES if _kind(each) == holds)
        what = "preferences, and objective.name next_token would learn the rejected answers" if holds == "pairs" else (
            "answers that were judged, and objective.name next_token would learn the undesired ones")  # fmt: skip
        problems.add(key, path, f"holds {what}, too", f"set objective.name to one of {names}", place)
        return
    wanted, form = ("preferences", "preference") if wants == "pairs" else ("answers that were judged alone", "unpaired")
    problems.add(key, path, f"holds no {wanted}, which objective.name {name} compares",
                 f"prepare them with --format {form}, or remove objective.name", place)  # fmt: skip


def _kind(name: str) -> str:
    return "" if name in BY_TOKEN else "unpaired" if name in UNPAIRED else "pairs"
