"""What each objective is told: its fields with their defaults, and what they must be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmtrain.config.problems import Places, Problems
from llmtrain.config.run import ObjectiveConfig, RunConfig
from llmtrain.topology import Degrees

NEXT_TOKEN = "next_token"
OBJECTIVES: dict[str, dict[str, float]] = {
    NEXT_TOKEN: {},
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
"""Name -> its fields. All but the first are of prepared preferences."""
UNPAIRED = ("kto",)
"""Of answers judged alone. The others, but for the first, compare a chosen answer with a rejected one."""
SCORED = ("reward",)
"""Of a model that gives a score for an answer, in place of likelihoods. It is of pairs, too."""
WITHOUT_REFERENCE = (NEXT_TOKEN, "simpo", "orpo", *SCORED)
"""The others ask for the log-probabilities of a reference."""


def options(config: ObjectiveConfig) -> dict[str, float]:
    """The objective's own fields, defaults filled in."""
    given = {field: getattr(config, field) for field in OBJECTIVES[config.name]}
    return {field: OBJECTIVES[config.name][field] if value is None else value for field, value in given.items()}


def filled(config: ObjectiveConfig) -> ObjectiveConfig:
    """With its defaults."""
    return replace(config, **options(config))  # type: ignore[arg-type]  # none of them is the name


def wants_column(config: ObjectiveConfig) -> bool:
    """Whether it compares with log-probabilities that the data has to have."""
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


def check_start(run: RunConfig, places: Places, problems: Problems) -> None:
    """What is compared with has learnt something. Not asked of a parity check, whose reference is made up."""
    name = run.objective.name
    start = f"objective.name {name} compares with the model that training starts from"
    if name not in WITHOUT_REFERENCE and run.model.config is not None:
        problems.add("objective.name", name, f"{start}, and that of model.config has learnt nothing",
                     "name a trained model: model.pretrained: FOLDER", places.get("objective.name"))  # fmt: skip


def check_form(run: RunConfig, degrees: Degrees, path: str, problems: Problems) -> None:
    """A rank can sum an answer, and has its whole score. `path`: of the DeepSpeed JSON."""
    if run.objective.name in SCORED:
        for key, degree in (("pipeline.stages", degrees.pipeline), ("tensor_parallel.autotp_size", degrees.tensor),
                            ("expert_parallel.autoep_size", degrees.expert)):  # fmt: skip
            if degree > 1:
                rule = f"objective.name {run.objective.name} has a score in place of the head that this form knows"
                problems.add(key, degree, rule, "remove the section: ZeRO 1 to 3 shard the model", path)
    if run.objective.name != NEXT_TOKEN and degrees.sequence > 1:
        problems.add("sequence_parallel_size", degrees.sequence,
                     f"objective.name {run.objective.name} sums the tokens of each answer, and the ranks of a group "
                     "would have parts of it", "use ZeRO, tensor or pipeline parallelism instead", path)  # fmt: skip


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
    return "" if name == NEXT_TOKEN else "unpaired" if name in UNPAIRED else "pairs"
