"""The state from which a launch goes on: initial weights or a checkpoint, and trainer.json beside its tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.base import units
from llmtrain.checkpoint.folder import CheckpointFolder
from llmtrain.checkpoint.frozen import FrozenSource, frozen_source
from llmtrain.checkpoint.hf.special_tokens import sampling_defaults
from llmtrain.checkpoint.load import resume
from llmtrain.checkpoint.rundir import RunDirectory
from llmtrain.cluster.watch.heartbeat import heart
from llmtrain.config.plugins import hashes
from llmtrain.engine.dist.control import from_rank_0, together
from llmtrain.tracking.environment import new_run_id, versions
from llmtrain.training.step import Position

if TYPE_CHECKING:
    from llmtrain.training.setup import Setup


class TrainerState:
    """trainer.json: what a resume needs beside the tensors, and what it compares."""

    def __init__(self, setup: Setup) -> None:
        """All ranks call it together."""
        self._engine = setup.engine
        self.wandb_id = from_rank_0(setup.ranks, new_run_id)
        self.began_from: dict[str, Any] | None = None
        """The checkpoint of another run that this one began from, see checkpoint/load.py."""
        run, data, mix = setup.run, setup.data, setup.resolved.mix
        self.settings: dict[str, Any] = {
            "optimizer": run.optim.name,
            "vocab_size": setup.spec.facts.vocab_size,
            "data_fingerprint": data.fingerprint,
            "reference": setup.references,
            "teacher": setup.teacher,
            "separator_id": data.separator_id,
            "tokenizer_dir": str(data.tokenizer_dir.resolve()),  # to-hf may run anywhere
            "tokenizer": data.manifests[0].tokenizer_fingerprint,
            "model_config": setup.engine.module.config.to_dict(),
            "sampling": sampling_defaults(run.model.folder),
            "run": asdict(run),
            "deepspeed": setup.resolved.deepspeed,
            "versions": versions(),
            "plugins": hashes(),
            "layout": {**asdict(mix.degrees), "zero_stage": mix.zero_stage, **mix.moments},
        }
        """The entries that do not change during a launch."""

    def to_json(self, position: Position, entries: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the file's content. `entries`: of the run's parts, by their keys."""
        return {
            **asdict(position),
            "loss_scale": self._engine.loss_scale(),
            "wandb_id": self.wandb_id,
            "began_from": self.began_from,
            **(entries or {}),
            **self.settings,
        }


@dataclass(frozen=True, kw_only=True)
class Start:
    """The state from which a launch goes on."""

    trainer: TrainerState
    position: Position
    frozen: FrozenSource
    """Parameters that checkpoints name and do not hold."""
    saved_step: int | None
    """The step whose checkpoint the run's folder holds already."""
    folder: Path | None
    """The checkpoint that the run resumes with all of its state."""
    kept: dict[str, Any]
    """trainer.json of that one."""
    lines: list[str]
    """To log."""


def resume_or_start(setup: Setup, folder: RunDirectory, checkpoints: CheckpointFolder) -> Start:
    """Give the parameters their values: from a checkpoint, or from the model section. All ranks call it together.

    Raises: AgreedError.
    """
    run, spec, ranks = setup.run, setup.spec, setup.ranks
    source = None
    if run.objective.reference == "online":  # the reference reads its first values again, after a resume as well
        with together(ranks):
            source = spec.initial_weights(run.train.seed, ranks.device)
        setup.refer_to(source)
    trainer = TrainerState(setup)
    now = json.loads(json.dumps(trainer.to_json(Position())))  # tuples become lists, as in the file
    with together(ranks):
        resumed = resume(setup.engine, run, folder, checkpoints, now, ranks)
    if resumed is None:
        source = source or spec.initial_weights(run.train.seed, ranks.device)
        frozen = frozen_source(source, spec.frozen, setup.start_from(source))
        return Start(trainer=trainer, position=Position(), frozen=frozen, saved_step=None, folder=None, kept={},
                     lines=_frozen_lines(frozen))  # fmt: skip
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
    position = replace(position, optimizer_step=setup.engine.optimizer_step())
    heart.at_step(position.step)
    trainer.wandb_id = saved.get("wandb_id") or trainer.wandb_id
    own = resumed.folder.parent == checkpoints.path
    return Start(trainer=trainer, position=position, frozen=frozen, saved_step=position.step if own else None,
                 folder=resumed.folder, kept=saved, lines=lines)  # fmt: skip


def _frozen_lines(source: FrozenSource) -> list[str]:
    count = units.counted(len(source.parts), "frozen parameter")
    line = f"checkpoints leave out {count}: they are read from {source.folder} again, so keep that folder as it is"
    return [line] if source.parts else []
