"""Fetch the models that a run names on the Hub or in a store, and record the commit of each."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llmtrain.base.errors import ConfigError, ModelError
from llmtrain.config import strict_yaml
from llmtrain.config.on_disk import check_tokenizer, reads_weights
from llmtrain.config.problems import Places, Problems, stop
from llmtrain.config.run import Run, RunConfig
from llmtrain.objectives.by_token import Distill
from llmtrain.storage.addresses import COMMIT, endpoint, is_remote, is_url


def with_base(run: Run) -> Run:
    """Fetch the files of the model and the teacher, and return the run with their commits.

    A run with local folders or random weights stays unchanged. Ranks may call this before the process group exists:
    one rank of each host asks and fetches. Raises: ConfigError, ModelError.
    """
    config = run.config
    config, notes = fetched(config, run.places, weights_too=reads_weights(config))
    return replace(run, config=config, notes=(*run.notes, *notes))


def fetched(
    config: RunConfig, places: Places | None = None, *, weights_too: bool = False
) -> tuple[RunConfig, tuple[str, ...]]:
    """Do the work of `with_base` for a run without its JSON. Returns the run and notes for the user."""
    places, notes = places or {}, list[str]()
    model, objective = config.model, config.objective
    if (name := model.pretrained) is not None and is_remote(name):
        commit = _commit(config, _MODEL, places, notes, weights_too=weights_too)
        config = replace(config, model=replace(model, revision=commit))
    if isinstance(objective, Distill) and (name := objective.teacher) is not None and is_remote(name):
        commit = _commit(config, _TEACHER, places, notes, weights_too=True)
        config = replace(config, objective=replace(objective, teacher_revision=commit))
    return config, tuple(notes)


_Keys = tuple[str, str, str]
"""Section, key of the name, key of its revision."""
_MODEL: _Keys = ("model", "pretrained", "revision")
_TEACHER: _Keys = ("objective", "teacher", "teacher_revision")


def _commit(config: RunConfig, keys: _Keys, places: Places, notes: list[str], *, weights_too: bool) -> str:
    """Fetch a repository, weights last, so that a wrong tokenizer is refused early. Returns the commit."""
    from llmtrain.storage.hub import (  # a run without a name on the Hub reads none of it
        fetch_model,
        settings,
        weights,
    )

    section, key, revision = keys
    name, asked = getattr(getattr(config, section), key), getattr(getattr(config, section), revision)
    recorded = _recorded_commit(config, keys, name)
    if recorded and asked is not None and COMMIT.fullmatch(asked) and asked != recorded:
        where = f"{section}.{revision}"
        rule = f"the run in {config.train.run_dir} began with commit {recorded} of {name}"
        raise stop(where, asked, rule, "remove it, or give the run a train.run_dir of its own", places.get(where))

    def wrong(text: str) -> ModelError:
        error = ModelError(f"{section}.{key}: {name}: {text.rstrip('.')}.")
        error.passing = getattr(text, "unreachable", False)
        return error

    def fits(_: Sequence[str], folder: Path) -> list[str]:
        problems = Problems(places)
        check_tokenizer(config, f"{section}.{key}", name, folder, problems)
        problems.raise_if_any()
        notes.extend(problems.notes)
        return []

    choices = [settings, fits, *([weights(wrong)] if weights_too else [])]
    snapshot = fetch_model(name, recorded or asked, choices, wrong)
    if not (snapshot.folder / "config.json").is_file():
        raise wrong("it has no config.json, so it is no model of transformers. Name another one")
    which = (
        "the one that the run began with" if recorded else "as asked" if asked == snapshot.commit else asked or "main"
    )
    where = f"is not a folder here, so it is taken from {endpoint()}: commit {snapshot.commit} ({which})"
    notes.append(f"{section}.{key}: {name} {f'is in {snapshot.folder}' if is_url(name) else where}")
    return snapshot.commit


def _recorded_commit(config: RunConfig, keys: _Keys, name: str) -> str | None:
    """Return the commit recorded by this run, or by the run that `resume` names; None: there is none."""
    if config.resume == "none":
        return None
    section, key, revision = keys
    folders = [Path(str(config.train.run_dir))]
    folders += [] if config.resume == "auto" else [Path(config.resume).absolute().parent.parent]
    for folder in folders:
        with contextlib.suppress(OSError, ValueError, ConfigError, AttributeError, TypeError, KeyError):
            path = folder / "config.yaml"
            recorded = strict_yaml.parse(path.read_text(encoding="utf-8"), str(path)).tree[section]
            commit = recorded[revision] or ""
            if recorded[key] == name and COMMIT.fullmatch(commit):
                return str(commit)
    return None
