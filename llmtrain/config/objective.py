"""Rules of the section `objective` beside others, and of what is on disk."""

from __future__ import annotations

import os
from typing import Any

from llmtrain.base.redact import redact_text
from llmtrain.config.problems import Problems
from llmtrain.config.run import RunConfig
from llmtrain.objectives.by_token import Distill
from llmtrain.objectives.objective import Objective
from llmtrain.storage.hub.names import COMMIT, REVISION, is_remote
from llmtrain.storage.object_store import is_url, problem_of


def check_objective(run: RunConfig, problems: Problems) -> None:
    """Check that a run has what its objective needs: a model that gives text, a reference, a teacher."""
    objective = run.objective
    if objective.scores and run.metrics:
        problems.add("metrics", sorted(run.metrics), f"are made of likelihoods of tokens, and objective.name "
                     f"{objective.name} gives scores", "remove them")  # fmt: skip
    for key, given in {"train.sample_prompt": run.train.sample_prompt,
                       "train.sample_prompts": run.train.sample_prompts}.items():  # fmt: skip
        if objective.scores and given:
            problems.add(key, given, f"a model of objective.name {objective.name} gives scores and no text",
                         "remove it")  # fmt: skip
    if objective.reference == "online":
        _check_online(run, problems)
    if isinstance(objective, Distill) and objective.teacher is None and objective.top_k is None:
        problems.add("objective.teacher", None, f"objective.name {objective.name} learns from a teacher",
                     "name the Hugging Face folder of one", problems.places.get("objective.name"))  # fmt: skip
    check_revision("objective.teacher_revision", objective.teacher_revision, "objective.teacher", objective.teacher,
                   problems)  # fmt: skip
    if objective.reference is not None and run.resume_weights_only:
        problems.add("resume_weights_only", True, f"{_compares(objective)}, and `llmtrain reference` reads "
                     "model.pretrained", "export the checkpoint (llmtrain checkpoint to-hf) and name the folder in "
                     "model.pretrained")  # fmt: skip


def _compares(objective: Objective) -> str:
    return f"objective.name {objective.name} compares with the model that training starts from"


def _check_online(run: RunConfig, problems: Problems) -> None:
    """The base of an adapter that begins anew is what training starts from."""
    key = "objective.reference"
    if run.adapter.r is None:
        rule = "is the model with its adapter switched off, and the run has none"
        remedy = "set adapter.r; or leave it out and run `llmtrain reference RUN.yaml`"
    elif run.adapter.start:
        rule = "would be the base without the adapter of adapter.start, from which training starts"
        remedy = "leave it out and run `llmtrain reference RUN.yaml`"
    else:
        return
    problems.add(key, "online", rule, remedy)


def check_teacher_folder(run: RunConfig, problems: Problems) -> None:
    """Refuse a folder without the files. A repository of the Hub is examined when it has been fetched."""
    key, folder, revision = "objective.teacher", run.objective.teacher, run.objective.teacher_revision
    if folder is None or is_remote(folder):
        check_url(key, folder, revision, problems)
        return
    if not os.path.isfile(os.path.join(folder, "config.json")):
        problems.add(key, folder, f"no such folder with a config.json (looked from {os.getcwd()})",
                     "give a local Hugging Face folder, or ORG/NAME on the Hub")  # fmt: skip
    elif revision is not None:
        problems.add(f"{key}_revision", revision, f"goes with a name on the Hub, and {folder} is a folder here",
                     "remove it, or write ORG/NAME of a repository")  # fmt: skip


def check_url(key: str, given: str | None, revision: str | None, problems: Problems) -> None:
    """A URL of a model is one, and has no revision but that which a run has noted."""
    if given is None or not is_url(given):
        return
    if found := problem_of(given):
        problems.add(key, redact_text(given), *found)
    elif revision is not None and not COMMIT.fullmatch(revision):
        where = f"{key.rpartition('.')[0]}.{'teacher_' if key.endswith('teacher') else ''}revision"
        problems.add(where, revision, f"goes with a name on the Hub, and {key} is a URL", "remove it")  # fmt: skip


def check_revision(key: str, revision: str | None, goes_with: str, name: str | None, problems: Problems) -> None:
    """A revision may be one, and is of something. `goes_with`: the key of `name`, which it is a revision of."""
    if revision is not None and not REVISION.fullmatch(revision):
        problems.add(key, revision, "is no name of a branch or tag, and no commit",
                     "write it as the Hub shows it, or remove it for main")  # fmt: skip
    elif revision is not None and name is None:
        problems.add(key, revision, f"goes with {goes_with}: ORG/NAME", "remove it")


def check_start(run: RunConfig, problems: Problems) -> None:
    """Refuse a reference of random weights. Not asked of a parity check, whose reference is made up."""
    if run.objective.reference is not None and run.model.config is not None:
        problems.add("objective.name", run.objective.name, f"{_compares(run.objective)}, and that of model.config has "
                     "learnt nothing", "name a trained model: model.pretrained: FOLDER")  # fmt: skip


def check_data(run: RunConfig, key: str, path: str, manifest: dict[str, Any],
               problems: Problems) -> None:  # fmt: skip
    """A prepared folder holds what the objective is of. `key`, `path`: where the run names it."""
    chat = manifest.get("chat")
    chat = chat if isinstance(chat, dict) else {}
    if chat.get("choices"):
        problems.add(key, path, "holds multiple-choice questions, which measure a model and train none",
                     "name the folder in eval.choices")  # fmt: skip
        return
    holds = "pairs" if chat.get("pairs") else "unpaired" if chat.get("unpaired") else "texts"
    name, wants = run.objective.name, run.objective.data
    if holds == wants:
        return
    if wants == "texts":
        names = ", ".join(each for each, chosen in Objective.CHOICES.items() if chosen.data == holds)
        what = "preferences, and objective.name next_token would learn the rejected answers" if holds == "pairs" else (
            "answers that were judged, and objective.name next_token would learn the undesired ones")  # fmt: skip
        problems.add(key, path, f"holds {what}, too", f"set objective.name to one of {names}")
        return
    wanted, form = ("preferences", "preference") if wants == "pairs" else ("answers that were judged alone", "unpaired")
    problems.add(key, path, f"holds no {wanted}, which objective.name {name} compares",
                 f"prepare them with --format {form}, or remove objective.name")  # fmt: skip
