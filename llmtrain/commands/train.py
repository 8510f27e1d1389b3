"""`llmtrain train`, which every rank of a launch runs, and `llmtrain.train` for Python."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain import features
from llmtrain.base.errors import ConfigError, number_in
from llmtrain.base.files import refuse_if_in_use, scratch_folder
from llmtrain.base.imports import let_segments_grow
from llmtrain.base.rank import messages, watch
from llmtrain.commands import completion
from llmtrain.config.load import load
from llmtrain.config.on_disk import has_checkpoints, refuse_if_preempted
from llmtrain.config.run import Run
from llmtrain.data.stream.epoch import sequences_of_epoch
from llmtrain.engine.process_memory import none_while_importing
from llmtrain.storage.addresses import is_remote, is_url

if TYPE_CHECKING:
    from llmtrain.training.parts import Part


def main(argv: list[str]) -> int:
    """Train by the command line. Returns the exit code. Raises UserError."""
    completion.offer_run()
    return _train(argv)[1]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What `llmtrain.train` returns."""

    run_dir: Path
    """The run's folder."""
    checkpoint: Path | None
    """The run's newest complete checkpoint; None: there is none."""
    export: Path | None
    """The run's Hugging Face folder; None: it has written none."""
    metrics: dict[str, Any]
    """Last value of each figure in metrics.jsonl (docs/tracking.md has names and units)."""
    history: list[dict[str, Any]]
    """Rows of metrics.jsonl in order, also those of earlier launches."""


def train(
    config: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    plugin: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    parts: Sequence[Part] = (),
) -> Result:
    """Train in this process: alone, or as one rank of a script that `deepspeed` or `torchrun` has started.

    It may be called several times; environment variables and torch's random numbers are restored afterwards.

    Args:
        config: path of a run's YAML, or its content as a dict (`train.run_dir` is then required).
        overrides: dotted key -> value, such as {"train.max_steps": 100}.
        plugin: what `--plugin` takes, once or several times.
        parts: further parts of the run, equal on all ranks.

    Raises UserError for a mistake; TrainingStopped if the run has ended itself.
    """
    plugins = [plugin] if isinstance(plugin, str | os.PathLike) else plugin
    words = [word for path in plugins for word in ("--plugin", os.fspath(path))]
    for key, value in (overrides or {}).items():
        words.append(f"--{key}={value if isinstance(value, str) else json.dumps(value)}")
    with _as_before(), _file_of(config) as path:
        run, _ = _train(["--config", path, *words], parts)
    return _result(run)


def _train(argv: list[str], parts: Sequence[Part] = ()) -> tuple[Run, int]:
    for variable in ("RANK", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        number_in(variable, 0)
    world_size = number_in("WORLD_SIZE", 1)
    source = "WORLD_SIZE, set by the launcher" if "WORLD_SIZE" in os.environ else "started without a launcher"
    with watch.outcome_reported():
        if messages.SECRETS in os.environ:
            messages.load_secrets()
        if "LOCAL_RANK" in os.environ and messages.SUPERVISED not in os.environ:  # launch has read it
            _refuse_missing_hostfile()
        run = load(argv, world_size, source, epoch=sequences_of_epoch)
        if not messages.supervised():
            refuse_if_preempted(run.config, run.places)
        refuse_if_in_use(run.run_dir)  # rank 0 locks it later, when all ranks have met
        with messages.waiting():  # before the watch, which would take a long download for a stall
            run = _with_remote_files(run)
        if parts:
            from llmtrain.config.plugin_import import check_methods

            for part in parts:
                check_methods(type(part), "parts")
            named = {getattr(part, "NAME", type(part).__name__): part for part in parts}
            run = replace(run, config=replace(run.config, parts={**run.config.parts, **named}))
        watch.begin(
            stall_timeout_s=run.config.fault.longest_s,
            start_timeout_s=run.config.fault.start_timeout_s,
            run_dir=run.run_dir,
            agent=features.agent(),
        )
        let_segments_grow()
        if run.config.train.deterministic:  # else cuBLAS may sum in any order, and torch refuses its products
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Only now torch and DeepSpeed: earlier errors are reported in a fraction of a second.
        with none_while_importing():
            from llmtrain.training.examine import examine
        with none_while_importing():
            run, spec, data = examine(run)
            gc.collect()  # before a freeze, which would keep the small copies of the model for the whole run
            from llmtrain.training.run import run_rank

        return run, run_rank(run, spec, data)


def _with_remote_files(run: Run) -> Run:
    """Download the model, teacher or checkpoint that the run names on the Hub or in a store; most runs name none."""
    names = (run.config.model.pretrained, run.config.objective.teacher)
    if any(name is not None and is_remote(name) for name in names):
        from llmtrain.config.pinned import with_base

        run = with_base(run)
    if is_url(run.config.resume) and not has_checkpoints(run.config):
        from llmtrain.checkpoint.remote import checkpoints_at

        checkpoints_at(run.config.resume)
    return run


def _refuse_missing_hostfile() -> None:
    """Raise ConfigError if `deepspeed --hostfile FILE` has started this host alone because FILE does not exist, of
    which DeepSpeed only warns."""
    import psutil

    parent = psutil.Process().parent()
    for _ in range(4):
        try:
            if parent is None:
                return
            words, folder, parent = parent.cmdline(), parent.cwd(), parent.parent()
        except (psutil.Error, OSError):  # another user's process, or it has ended
            return
        if not any(os.path.basename(word) in ("deepspeed", "ds", "deepspeed.launcher.runner") for word in words[:4]):
            continue
        flags = [at for at, word in enumerate(words) if word.partition("=")[0] in ("--hostfile", "-H")]
        for at in flags[:1]:
            path = words[at].partition("=")[2] or (words[at + 1] if at + 1 < len(words) else "")
            if path and not os.path.exists(os.path.join(folder, path)):
                raise ConfigError(
                    f"--hostfile {path}: no such file (looked from {folder}), so deepspeed has started this host "
                    "alone. Correct the path, or leave --hostfile out to train on this host"
                )


@contextlib.contextmanager
def _as_before() -> Iterator[None]:
    """A context after which environment, warnings and torch's settings are as before."""
    import torch

    environment, exact = dict(os.environ), torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(exact)
            os.environ.clear()
            os.environ.update(environment)


@contextlib.contextmanager
def _file_of(config: str | os.PathLike[str] | Mapping[str, Any]) -> Iterator[str]:
    """Yield the path of the run's YAML; a dict is first written to a temporary file."""
    if not isinstance(config, Mapping):
        yield os.fspath(config)
        return
    with scratch_folder("run") as folder:
        path = folder / "run.yaml"
        path.write_text(json.dumps(config))  # JSON is YAML
        yield str(path)


def _result(run: Run) -> Result:
    from llmtrain.checkpoint.format import complete_checkpoints
    from llmtrain.checkpoint.rundir import RunDirectory
    from llmtrain.tracking.local import read_rows

    folder = RunDirectory(run.run_dir, run.config.checkpoint.dir)
    history, _ = read_rows(folder.path / "metrics.jsonl")  # only rank 0's host has rows
    return Result(
        run_dir=folder.path,
        checkpoint=next(iter(complete_checkpoints(folder.checkpoints)), None),
        export=folder.export if folder.export.is_dir() else None,
        metrics={key: value for row in history for key, value in row.items()},
        history=history,
    )
