"""Begins a run with initial weights, or resumes it from a checkpoint and its trainer.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain import features
from llmtrain.base import units
from llmtrain.base.errors import CheckpointError
from llmtrain.base.rank.heartbeat import heart
from llmtrain.checkpoint.format import TRAINER, FrozenSource, complete_checkpoints, frozen_source
from llmtrain.checkpoint.rundir import Candidates, CheckpointFolder, RunDirectory, origin
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.config.plugins import hashes
from llmtrain.config.run import RunConfig
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.storage.addresses import is_url
from llmtrain.tracking.environment import new_run_id, versions
from llmtrain.training.step import Position

if TYPE_CHECKING:
    from llmtrain.training.setup import Setup


@dataclass(frozen=True, kw_only=True)
class Start:
    trainer: TrainerState
    """The state that stays the same during the launch; each save adds its position."""
    frozen: FrozenSource
    """Frozen parameters, which checkpoints name without their values."""
    lines: list[str]
    """Lines to log."""
    position: Position = field(default_factory=Position)
    saved_step: int | None = None
    """The step of the checkpoint in the run's folder from which this launch resumes."""
    folder: Path | None = None
    """The checkpoint from which the launch resumes all state; None: a new run, also one with resume_weights_only."""
    kept: dict[str, Any] = field(default_factory=dict)
    """Entries of the run's parts in that checkpoint, by key."""

    @property
    def run_id(self) -> str:
        """The run's id, which is the same in all of its launches."""
        assert self.trainer.run_id is not None
        return self.trainer.run_id


def resume_or_start(setup: Setup, folder: RunDirectory, checkpoints: CheckpointFolder) -> Start:
    """Give the parameters their values, from a checkpoint or section `model`. All ranks call it. Raises AgreedError."""
    config, spec, ranks = setup.run.config, setup.spec, setup.ranks
    trainer = state_before_training(setup)
    for feature in features.asked(config):
        feature.before_resume(config, checkpoints, ranks)
    with ranks.together():
        candidates = agreed_candidates(config, folder, checkpoints, ranks)
    if not candidates:
        source, checksums = setup.start()
        frozen = frozen_source(source, spec.frozen, checksums)
        return Start(trainer=trainer, frozen=frozen, lines=_frozen_lines(frozen))
    from llmtrain.checkpoint.load import resume

    with ranks.together():
        resumed = resume(setup.engine, config, candidates, checkpoints, trainer, ranks)
    frozen = resumed.frozen.only(spec.frozen)
    lines = [*resumed.lines, *_frozen_lines(frozen)]
    trainer = replace(trainer, began_from=resumed.began_from)
    if resumed.weights_only:
        return Start(trainer=trainer, frozen=frozen, lines=lines)
    saved = resumed.trainer  # a checkpoint that another tool made may lack entries
    if not trainer.sampling:  # the model's folder may be gone by now
        trainer = replace(trainer, sampling=saved.sampling or {})
    setup.course.go_on(saved.step, saved.record(setup.course.done(saved.step).data.fingerprint))
    position = Position(
        step=saved.step,
        tokens=saved.tokens,
        sample_index=setup.course.at(saved.step).index,
        skipped_steps=saved.skipped_steps,
        optimizer_step=int(setup.engine.counters().optimizer_step),
    )
    heart.at_step(position.step)
    same_run = resumed.folder.parent == checkpoints.path
    if same_run:  # several runs may branch off another one's checkpoint
        trainer = replace(trainer, run_id=saved.run_id or trainer.run_id)
    return Start(
        trainer=trainer,
        position=position,
        frozen=frozen,
        saved_step=position.step if same_run else None,
        folder=resumed.folder,
        kept=saved.entries,
        lines=lines,
    )


def state_before_training(setup: Setup) -> TrainerState:
    """Return the trainer.json of a run before its first step. All ranks call it together."""
    config, data, mix, course = setup.run.config, setup.data.first, setup.run.mix, setup.course
    state = TrainerState(
        run_id=setup.ranks.first(new_run_id),
        model_config=setup.engine.module.config.to_dict(),
        data_fingerprint=course.done(0).data.fingerprint,
        optimizer=config.optim.name,
        vocab_size=setup.spec.facts.vocab_size,
        epoch_sequences=course.data[-1].sequences_per_epoch,
        plan=[
            [stage.first_step, data.fingerprint, stage.rope, stage.batch.sequence_length]
            for stage, data in zip(course.stages, course.data, strict=True)
        ],
        orders={data.fingerprint: data.order for data in course.data if data.fingerprint != data.order},
        reference=setup.references,
        teacher=setup.teacher,
        teacher_config=setup.data.teacher_config,
        separator_id=data.separator_id,
        tokenizer_dir=str(data.tokenizer_dir.resolve()),  # to-hf may run anywhere
        tokenizer=data.manifests[0].tokenizer_fingerprint,
        sampling=_sampling(config.model.folder, data.tokenizer_dir),
        run=asdict(config),
        deepspeed=setup.run.deepspeed,
        versions=versions(),
        plugins=hashes(),
        layout={**asdict(mix.degrees), "zero_stage": mix.zero_stage, **mix.moments},
    )
    return TrainerState.from_json(json.loads(json.dumps(state.to_json())), Path(TRAINER))  # tuples become lists


def _sampling(folder: Path | None, tokenizer: Path) -> dict[str, Any]:
    if folder is None:
        return {}
    from llmtrain.checkpoint.hf.serving import sampling_defaults

    return sampling_defaults(folder, tokenizer)


def _frozen_lines(source: FrozenSource) -> list[str]:
    count = units.counted(len(source.parts), "frozen parameter")
    line = f"checkpoints leave out {count}, which a resume reads from {source.folder}: keep that folder as it is"
    return [line] if source.parts else []


def agreed_candidates(config: RunConfig, folder: RunDirectory, where: CheckpointFolder, ranks: Ranks) -> Candidates:
    """Return the checkpoints that the leaders see, the same list on every rank: if each rank looked for itself on a
    shared file system, ranks could see different newest checkpoints."""
    mine, refusal = Candidates(paths=[], own=False), None
    if where.leads:
        try:
            mine = candidates_of(config, folder)
        except CheckpointError as error:
            refusal = str(error)
    shares = ranks.gather((mine, refusal))
    if refused := next((message for _, message in shares if message), None):
        raise CheckpointError(refused)
    if not where.split:
        return shares[0][0]
    any_own = any(share.own for share, _ in shares)
    from llmtrain.checkpoint.host_files import whole  # for hosts with folders of their own

    paths, incomplete = whole(mine.paths if mine.own == any_own else [], where, ranks)
    return Candidates(paths=paths, own=any_own, incomplete=incomplete)


def candidates_of(config: RunConfig, folder: RunDirectory) -> Candidates:
    """Return the checkpoints from which this rank could resume. If `resume` is a path, checkpoints in the run folder
    are taken instead if their run began from that path. Raises CheckpointError: when `resume` contradicts them."""
    present = Candidates(paths=complete_checkpoints(folder.checkpoints), own=True)
    if config.resume == "none":
        folder.refuse_old_checkpoints()
        return Candidates(paths=[], own=True)
    if config.resume == "auto":
        return present
    meant = Path(config.resume).resolve()
    if meant in (folder.path.resolve(), folder.checkpoints.resolve()) and not config.resume_weights_only and present:
        return present  # the run's own folder: as auto
    if meant.parent == folder.checkpoints.resolve():
        if config.resume_weights_only:
            raise CheckpointError(
                f"resume: {config.resume} with resume_weights_only begins a new run, but the checkpoint is in the run "
                f"folder {folder.path} itself. Give the new run a train.run_dir of its own."
            )
        folder.refuse_going_back(config.resume)
        return Candidates(paths=[Path(config.resume)], own=True)
    if not present:
        return Candidates(paths=_named(config.resume), own=False)
    began, meant_origin = _began_from(present.paths) or {}, origin(config)
    if {key: began.get(key) for key in meant_origin} != meant_origin:
        raise CheckpointError(
            f"resume: {config.resume}, but {folder.path} holds {present.paths[0].name} of a run that did not begin "
            "there. Use --resume auto to continue that run, or give the new one a train.run_dir of its own."
        )
    return present


def _named(given: str) -> list[Path]:
    """Return the checkpoints at a path or URL, newest first: all complete ones in a run folder; only the newest of a
    URL, after downloading it."""
    from llmtrain.checkpoint.listing import find_checkpoints

    if is_url(given):
        from llmtrain.checkpoint.remote import checkpoints_at  # most runs do not begin from a URL

        return checkpoints_at(given)
    try:
        return find_checkpoints(Path(given))
    except CheckpointError:  # opening it says what it lacks
        return [Path(given)]


def _began_from(own: list[Path]) -> dict[str, Any] | None:
    for folder in own:
        try:
            return TrainerState.read(folder).began_from
        except CheckpointError:  # damaged: opening it will say so
            continue
    return None
