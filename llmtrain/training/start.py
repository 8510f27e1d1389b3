"""Begins a run with initial weights, or resumes it from a checkpoint and its trainer.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.base import units
from llmtrain.base.errors import CheckpointError
from llmtrain.base.rank.heartbeat import heart
from llmtrain.checkpoint.format import FrozenSource, complete_checkpoints, frozen_source, read_trainer
from llmtrain.checkpoint.rundir import Candidates, CheckpointFolder, RunDirectory, origin
from llmtrain.config.plugins import hashes
from llmtrain.config.run import RunConfig
from llmtrain.data.stream.loader import RECORD
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.storage.addresses import is_url
from llmtrain.tracking.environment import new_run_id, versions
from llmtrain.training.step import Position

if TYPE_CHECKING:
    from llmtrain.training.setup import Setup


class TrainerState:
    """trainer.json: state that a resume needs next to the tensors, and settings that it compares."""

    def __init__(self, setup: Setup) -> None:
        """All ranks call it together."""
        self._engine, self._course = setup.engine, setup.course
        self.wandb_id = setup.ranks.first(new_run_id)
        self.began_from: dict[str, Any] | None = None
        """The checkpoint of another run that this one started from, see checkpoint/load.py."""
        run, data, mix = setup.run, setup.data, setup.resolved.mix
        self.settings: dict[str, Any] = {
            "optimizer": run.optim.name,
            "vocab_size": setup.spec.facts.vocab_size,
            "epoch_sequences": setup.course.data[-1].sequences_per_epoch,
            "plan": [
                [stage.first_step, data.fingerprint, stage.rope, stage.batch.sequence_length]
                for stage, data in zip(setup.course.stages, setup.course.data, strict=True)
            ],
            "orders": {data.fingerprint: data.order for data in setup.course.data if data.fingerprint != data.order},
            "reference": setup.references,
            "teacher": setup.teacher,
            "teacher_config": setup.teacher_config,
            "separator_id": data.separator_id,
            "tokenizer_dir": str(data.tokenizer_dir.resolve()),  # to-hf may run anywhere
            "tokenizer": data.manifests[0].tokenizer_fingerprint,
            "sampling": _sampling(run.model.folder, data.tokenizer_dir),
            "run": asdict(run),
            "deepspeed": setup.resolved.deepspeed,
            "versions": versions(),
            "plugins": hashes(),
            "layout": {**asdict(mix.degrees), "zero_stage": mix.zero_stage, **mix.moments},
        }
        """The entries that do not change during a launch."""

    def to_json(self, position: Position, entries: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """`entries`: entries of the run's parts, by key."""
        return {
            **asdict(position),
            "loss_scale": self._engine.loss_scale(),
            "wandb_id": self.wandb_id,
            "began_from": self.began_from,
            "model_config": self._engine.module.config.to_dict(),  # stages change it
            "data_fingerprint": self._course.done(position.step).data.fingerprint,
            RECORD: self._course.record(position.step, position.sample_index),
            **(entries or {}),
            **self.settings,
        }


@dataclass(frozen=True, kw_only=True)
class Start:
    trainer: TrainerState
    position: Position
    frozen: FrozenSource
    """Parameters that checkpoints name without their values."""
    saved_step: int | None
    """The step whose checkpoint the run's folder holds already."""
    folder: Path | None
    """The checkpoint that the run resumes with all of its state."""
    kept: dict[str, Any]
    """trainer.json of that one."""
    lines: list[str]
    """To log."""


def resume_or_start(setup: Setup, folder: RunDirectory, checkpoints: CheckpointFolder) -> Start:
    """Give the parameters their values, from a checkpoint or from the model section. All ranks call it together.

    Raises: AgreedError.
    """
    run, spec, ranks = setup.run, setup.spec, setup.ranks
    source = None
    if run.objective.reference == "online":  # the reference reads its first values again, after a resume as well
        with ranks.together():
            source = spec.initial_weights(run.train.seed, ranks.device)
        setup.refer_to(source)
    trainer = TrainerState(setup)
    now = json.loads(json.dumps(trainer.to_json(Position())))  # tuples become lists, as in the file
    if run.checkpoint.mirror is not None:
        from llmtrain.training.mirroring import look  # most runs have none

        look(run, checkpoints, ranks)
    with ranks.together():
        candidates = agreed_candidates(run, folder, checkpoints, ranks)
    if not candidates:
        source = source or spec.initial_weights(run.train.seed, ranks.device)
        checksums = setup.start_from(source)  # a new run: its weights
        frozen = frozen_source(source, spec.frozen, checksums)
        return Start(trainer=trainer, position=Position(), frozen=frozen, saved_step=None, folder=None, kept={},
                     lines=_frozen_lines(frozen))  # fmt: skip
    from llmtrain.checkpoint.load import resume

    with ranks.together():
        resumed = resume(setup.engine, run, candidates, checkpoints, now, ranks)
    frozen = resumed.frozen.only(spec.frozen)
    lines = [*resumed.lines, *_frozen_lines(frozen)]
    trainer.began_from = resumed.began_from
    if resumed.weights_only:
        return Start(trainer=trainer, position=Position(), frozen=frozen, saved_step=None, folder=None, kept={},
                     lines=lines)  # fmt: skip
    saved = resumed.trainer  # made by other tools, it may lack what they do not know
    if not trainer.settings["sampling"]:  # the folder may be gone by now
        trainer.settings["sampling"] = saved.get("sampling") or {}
    position = Position(**{key: saved.get(key) or 0 for key in asdict(Position())})
    setup.course.go_on(position.step, saved)
    position = replace(position, sample_index=setup.course.at(position.step).index,
                       optimizer_step=setup.engine.optimizer_step())  # fmt: skip
    heart.at_step(position.step)
    own = resumed.folder.parent == checkpoints.path
    if own:  # several runs may branch off another one's checkpoint
        trainer.wandb_id = saved.get("wandb_id") or trainer.wandb_id
    return Start(trainer=trainer, position=position, frozen=frozen, saved_step=position.step if own else None,
                 folder=resumed.folder, kept=saved, lines=lines)  # fmt: skip


def _sampling(folder: Path | None, tokenizer: Path) -> dict[str, Any]:
    if folder is None:
        return {}
    from llmtrain.checkpoint.hf.serving import sampling_defaults

    return sampling_defaults(folder, tokenizer)


def _frozen_lines(source: FrozenSource) -> list[str]:
    count = units.counted(len(source.parts), "frozen parameter")
    line = f"checkpoints leave out {count}: they are read from {source.folder} again, so keep that folder as it is"
    return [line] if source.parts else []


def agreed_candidates(run: RunConfig, folder: RunDirectory, where: CheckpointFolder, ranks: Ranks) -> Candidates:
    """Return the leaders' candidates, the same on every rank: on a shared file system, ranks that look alone could see
    different newest checkpoints."""
    mine, refusal = Candidates(paths=[], own=False), None
    if where.leads:
        try:
            mine = candidates_of(run, folder)
        except CheckpointError as error:
            refusal = str(error)
    shares = ranks.gather((mine, refusal))
    if refused := next((message for _, message in shares if message), None):
        raise CheckpointError(refused)
    if not where.split:
        return shares[0][0]
    own = any(share.own for share, _ in shares)
    from llmtrain.checkpoint.host_files import whole  # for hosts with folders of their own

    paths, incomplete = whole(mine.paths if mine.own == own else [], where, ranks)
    return Candidates(paths=paths, own=own, incomplete=incomplete)


def candidates_of(run: RunConfig, folder: RunDirectory) -> Candidates:
    """The checkpoints in this rank's view. With a path in `resume`, the run folder's own checkpoints win if they began
    from that path. Raises CheckpointError: they began elsewhere."""
    own = Candidates(paths=complete_checkpoints(folder.checkpoints), own=True)
    if run.resume == "none":
        folder.refuse_old_checkpoints()
        return Candidates(paths=[], own=True)
    if run.resume == "auto":
        return own
    meant = Path(run.resume).resolve()
    if meant in (folder.path.resolve(), folder.checkpoints.resolve()) and not run.resume_weights_only and own:
        return own  # the run's own folder: as auto
    if meant.parent == folder.checkpoints.resolve():
        if run.resume_weights_only:
            raise CheckpointError(
                f"resume: {run.resume} with resume_weights_only begins a new run, but the checkpoint is in the run "
                f"folder {folder.path} itself. Give the new run a train.run_dir of its own."
            )
        folder.refuse_going_back(run.resume)
        return Candidates(paths=[Path(run.resume)], own=True)
    if not own:
        return Candidates(paths=_named(run.resume), own=False)
    began, meant_origin = _began_from(own.paths) or {}, origin(run)
    if {key: began.get(key) for key in meant_origin} != meant_origin:
        raise CheckpointError(
            f"resume: {run.resume}, but {folder.path} holds {own.paths[0].name} of a run that did not begin there. Use "
            "--resume auto to continue that run, or give the new one a train.run_dir of its own."
        )
    return own


def _named(given: str) -> list[Path]:
    """Return the checkpoints of a path or URL, newest first: all complete ones in a run's folder, as in other commands;
    the newest of a URL, fetched."""
    from llmtrain.checkpoint.listing import find_checkpoints

    if is_url(given):
        from llmtrain.checkpoint.remote import checkpoints_at  # most runs begin elsewhere

        return checkpoints_at(given)
    try:
        return find_checkpoints(Path(given))
    except CheckpointError:  # what it lacks is said when it is opened
        return [Path(given)]


def _began_from(own: list[Path]) -> dict[str, Any] | None:
    for folder in own:
        try:
            return read_trainer(folder).get("began_from")
        except CheckpointError:  # damaged; it will be said when it is looked at
            continue
    return None
