"""Scores of lm-eval's harness for a model: found, loaded, scored, and written to the run's metrics."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain import features
from llmtrain.base import untrusted
from llmtrain.base.errors import ConfigError, UserError
from llmtrain.base.files import lock_folder
from llmtrain.checkpoint.format import complete_checkpoints
from llmtrain.checkpoint.listing import best_checkpoints, find_checkpoints
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.tracking.local import JsonLines
from llmtrain.tracking.tracker import Queued

_REMEDY = "pip install 'llmtrain[eval]'"
_TO_TRACKERS_S = 20.0


@dataclass(frozen=True)
class Target:
    """The model to score, and the run that gets the scores."""

    path: str
    """For `usable_folder`: a checkpoint, a Hugging Face folder, a name on the Hub."""
    run: Path | None = None
    """The run whose metrics get the scores."""
    checkpoint: Path | None = None


def target_of(path: str, step: int | None, *, best: bool = False) -> Target:
    """Find a run's newest checkpoint, that of `step`, or the best one. Raises CheckpointError, UserError."""
    from llmtrain.checkpoint.hf.usable import is_model

    place = Path(path)
    if is_model(place) or not place.exists():
        if step is not None or best:
            option = "--best" if best else f"--checkpoint {step}"
            raise UserError(f"{option}: {path} is no run folder. Leave it out.")
        checkpoints = [] if not place.parent.is_dir() or is_model(place) else _named(place)
        return Target(path) if not checkpoints else Target(str(checkpoints[0]), _run_of(checkpoints[0]), checkpoints[0])
    if best:
        chosen = best_checkpoints(place)[0]
        return Target(str(chosen), _run_of(chosen, place), chosen)
    checkpoints = find_checkpoints(place if step is None else place / f"step-{step}")
    newest = step is None and checkpoints[0] in complete_checkpoints(place / "checkpoints")
    # The run's export serves if it is of the newest checkpoint.
    return Target(path if newest else str(checkpoints[0]), _run_of(checkpoints[0], place), checkpoints[0])


def _named(place: Path) -> list[Path]:
    return find_checkpoints(place) if place.name.startswith("step-") else []


def _run_of(checkpoint: Path, given: Path | None = None) -> Path | None:
    places = [*([given] if given is not None else []), checkpoint.parent.parent]
    return next((place for place in places if (place / "metrics.jsonl").is_file()), None)


def need_lm_eval() -> str:
    """Return its version. Raises ConfigError: it is not installed."""
    try:
        from lm_eval import __version__
    except ImportError as error:
        raise ConfigError(
            f"llmtrain eval: the scores are lm-eval's, which is not installed here ({error}). Install it: {_REMEDY}"
        ) from error
    return str(__version__)


@contextmanager
def _model(target: Target, batch_size: int) -> Iterator[Any]:
    """Load lm-eval's model of a folder or checkpoint like `generate`. Raises CheckpointError, ModelError."""
    from lm_eval.models.huggingface import HFLM

    from llmtrain.checkpoint.hf.inference import Answerer
    from llmtrain.checkpoint.hf.usable import usable_folder

    with usable_folder(target.path, "eval") as folder:
        loaded = Answerer.load(folder)
        logging.getLogger("lm_eval.models.huggingface").setLevel(logging.ERROR)  # it warns of a model object
        yield HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, backend="causal", batch_size=batch_size)


def _tasks(names: list[str], include: list[str]) -> Any:
    """Return lm-eval's manager with the tasks loaded. Raises UserError: there is none, or its data is missing."""
    from lm_eval.tasks import TaskManager

    from llmtrain.config.problems import closest

    if missing := [path for path in include if not Path(path).is_dir()]:
        raise UserError(f"--include-path {missing[0]}: is no folder. Give a folder with the YAML files of tasks.")
    manager = TaskManager(include_path=include or None)
    for name in names:
        if not manager.match_tasks([name]):
            near = closest(name, manager.task_index)
            remedy = f"did you mean {near}?" if near else "`lm-eval ls tasks` lists those that lm-eval has."
            raise UserError(f"--tasks {name}: there is no such task; {remedy} --include-path FOLDER takes your own.")
    try:
        loaded = manager.load(names)
    except Exception as error:  # datasets, the Hub, a YAML file or the code of a task may raise anything
        reason = untrusted.first_line(error, 300)
        raise UserError(
            f"--tasks {','.join(names)}: cannot be loaded ({reason}). Without a network, give tasks whose data is "
            "here, with --include-path FOLDER."
        ) from error
    manager.load = lambda _: loaded  # simple_evaluate would read all data again
    return manager


def score(
    target: Target, tasks: list[str], include: list[str], *, batch_size: int, **asked: int | None
) -> dict[str, dict[str, float]]:
    """Return task or group -> metric -> value. `asked`: num_fewshot and limit. Raises CheckpointError, ModelError,
    UserError."""
    manager = _tasks(tasks, include)
    from lm_eval import evaluator, simple_evaluate

    evaluator.get_git_commit_hash = lambda: None  # git would say on the terminal that there is no repository
    with _model(target, batch_size) as model:
        results = simple_evaluate(model=model, tasks=tasks, task_manager=manager, log_samples=False, **asked)
    assert results is not None  # None is for ranks other than 0
    return _scores_of(results)


def _scores_of(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return task or group -> metric -> value. lm-eval names a metric with its filter: `acc,none`,
    `exact_match,strict`."""
    scores: dict[str, dict[str, float]] = {}
    for task, measured in {**results["results"], **results.get("groups", {})}.items():
        for key, value in measured.items():
            metric, _, kind = key.partition(",")
            if isinstance(value, (int, float)) and not isinstance(value, bool) and kind:
                scores.setdefault(task, {})[metric if kind == "none" else f"{metric}_{kind}"] = float(value)
    return scores


def record(target: Target, scores: dict[str, dict[str, float]], about: dict[str, Any]) -> str:
    """Write the scores to the run's metrics and trackers, at the checkpoint's step. Returns a summary."""
    assert target.run is not None and target.checkpoint is not None
    trainer, now = TrainerState.read(target.checkpoint), time.time()
    scored = {f"tasks/{task}/{metric}": value for task, metrics in scores.items() for metric, value in metrics.items()}
    row = {"step": trainer.step, **scored, "time_unix_s": now}
    files = JsonLines(target.run / "metrics.jsonl"), JsonLines(target.run / "events.jsonl")
    files[0].write(row)
    files[1].write({"time_unix_s": now, "kind": "tasks", "step": trainer.step, **about})
    for file in files:
        file.close()
    return f"{target.run / 'metrics.jsonl'}, step {trainer.step}{_to_trackers(target.run, trainer, row)}"


def _to_trackers(run: Path, trainer: TrainerState, row: dict[str, Any]) -> str:
    """Give the trackers of the run a row of an earlier step. Returns the end of a sentence about it."""
    try:
        sinks = features.trackers(trainer.run or {})
    except TypeError:
        return ""
    if not sinks or not trainer.run_id:
        return ""
    names = " and ".join(sink.title or type(sink).__name__ for sink in sinks.values())
    try:
        os.close(lock_folder(run))
    except OSError:  # two processes cannot write to one run of a tracker
        return f"; not to {names}, which the run that is under way writes to"
    queued = []
    for key, sink in sinks.items():
        sink.late = True
        queued.append(Queued(key, sink, lambda _: ""))
        queued[-1].call("open", run, trainer.run_id, {}, 0)
        queued[-1].call("log", row, more=False)
        queued[-1].end(0)
    until_s = time.monotonic() + _TO_TRACKERS_S
    for tracker in queued:
        tracker.join(until_s)
    return f", and to {names}"
