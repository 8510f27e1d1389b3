"""The model on the Hub that a run begins with: which commit of it, and its files on this host."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from llmtrain.config import strict_yaml
from llmtrain.config.problems import stop
from llmtrain.config.rules import starts_from_model
from llmtrain.config.run import ResolvedRun, RunConfig
from llmtrain.errors import ConfigError, ModelError
from llmtrain.hub.fetch import fetch
from llmtrain.hub.model import settings, weights
from llmtrain.hub.names import COMMIT, Repository, endpoint, is_name


def with_base(resolved: ResolvedRun) -> ResolvedRun:
    """The run with the commit in `model.revision`, once what it reads of the repository is on this host.

    A run whose model is a folder here, or random, stays as it is. Ranks may call it before they have met: one of a host
    asks and fetches. Raises: ConfigError, ModelError.
    """
    run = resolved.run
    frozen = run.model.freeze or run.model.train_only or run.adapter.r is not None
    reads_weights = starts_from_model(run) or bool(frozen)
    run, notes = fetched(run, resolved.places.get("model.revision"), weights_too=reads_weights)
    return replace(resolved, run=run, notes=(*resolved.notes, *notes))


def fetched(
    run: RunConfig, place: str | None = None, *, weights_too: bool = False
) -> tuple[RunConfig, tuple[str, ...]]:
    """`with_base` for a run that no JSON has been joined with, and a note. `place`: where `model.revision` stands."""
    name = run.model.pretrained
    if name is None or not is_name(name):
        return run, ()
    repository, began_with = Repository(kind="model", name=name), _began_with(run)
    asked = run.model.revision
    if began_with and asked is not None and COMMIT.fullmatch(asked) and asked != began_with:
        rule = f"the run in {run.train.run_dir} began with commit {began_with} of {name}"
        raise stop("model.revision", asked, rule, "remove it, or give the run a train.run_dir of its own", place)

    def wrong(text: str) -> ModelError:
        error = ModelError(f"model.pretrained: {name}: {text.rstrip('.')}.")
        error.passing = getattr(text, "unreachable", False)
        return error

    choices = [settings, weights(wrong)] if weights_too else [settings]
    snapshot = fetch(repository, began_with or asked, choices, wrong)
    if not (snapshot.folder / "config.json").is_file():
        raise wrong("the repository has no config.json, so it is no model of transformers. Name another one")
    which = "with which the run began" if began_with else "as asked" if asked == snapshot.commit else asked or "main"
    note = (
        f"model.pretrained: {name} is no folder here, so it is that of {endpoint()}: commit {snapshot.commit} ({which})"
    )
    return replace(run, model=replace(run.model, revision=snapshot.commit)), (note,)


def _began_with(run: RunConfig) -> str | None:
    """The commit that the run's folder has on record, or the folder of the run that `resume` names."""
    if run.resume == "none":
        return None
    folders = [Path(str(run.train.run_dir))]
    folders += [] if run.resume == "auto" else [Path(run.resume).absolute().parent.parent]
    for folder in folders:
        with contextlib.suppress(OSError, ValueError, ConfigError, AttributeError, TypeError):
            path = folder / "config.yaml"
            model = strict_yaml.parse(path.read_text(encoding="utf-8"), str(path)).tree["model"]
            commit = model["revision"] or ""
            if model["pretrained"] == run.model.pretrained and COMMIT.fullmatch(commit):
                return str(commit)
    return None
