"""The part of a run that knows in which stage it is."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from llmtrain.base import log, units
from llmtrain.training.parts import Done, Launch, Part
from llmtrain.training.step import Position, Request


class StageBorders(Part):
    """Reports the stage of a run at its start and at each change, and sets the model's rotary positions for it."""

    def __init__(self, launch: Launch) -> None:
        setup, self._tracker, self._loader = launch.setup, launch.tracker, launch.loader
        self._course, self._module = setup.course, setup.engine.module
        self._degrees = asdict(setup.run.mix.degrees)
        self._several = len(self._course.stages) > 1 or self._course.first_number > 0
        self._step = 0
        self._turned = 0
        """Changes of the rotary positions that were applied to the model."""

    def begin(self, position: Position) -> None:
        """An evaluation or a save before the first step uses the stage of the step before."""
        self._step = position.step
        self._turn(self._course.done(position.step).stage)
        self._tell(position)

    def request(self) -> Request:
        """Change the rotary positions before the first step of a stage; evaluations and saves until here use the old
        ones."""
        self._turn(self._course.at(self._step).stage)
        return Request()

    def after_step(self, done: Done) -> None:
        trained, self._step, index = self._step + 1, done.position.step, done.position.sample_index
        if not done.last and self._course.at(self._step).stage != done.batch.stage:
            self._tell(done.position)
        elif (trained, self._course.at(trained).index) != (self._step, index):
            self._tracker.event("reads", step=self._step, next=index, trained=trained)

    def figures(self, done: Done) -> dict[str, Any]:
        return {"data/stage": self._course.first_number + done.batch.stage} if self._several else {}

    def _turn(self, stage: int) -> None:
        """Apply the rotary positions of the earlier stages and of this one to the model, in order."""
        if self._course.stages[stage].rope:
            from llmtrain.models.rope import set_rope, turns  # most runs have none

            plan = [(each.rope, each.batch.sequence_length) for each in self._course.stages.stages[: stage + 1]]
            for rope, length in turns(plan)[self._turned :]:
                set_rope(self._module, rope, length)
                self._turned += 1

    def _tell(self, position: Position) -> None:
        """Record the data read from here on, for `llmtrain data where`; with several stages log the new one."""
        stage = self._course.at(position.step).stage
        of, data = self._course.stages[stage], self._course.data[stage]
        self._tracker.event(
            "reads", step=position.step, next=position.sample_index, data=asdict(of.data), fingerprint=data.fingerprint,
            global_batch=of.batch.global_batch, accumulation=of.batch.accumulation, degrees=self._degrees,
            shares=self._loader.shares,
        )  # fmt: skip
        if not self._several:
            return
        what, tokens = self._course.describe(stage), self._course.stages[stage].batch.tokens
        self._tracker.event("stage", step=position.step, next=position.sample_index, **what)
        log.info(
            f"stage {what['stage']} at step {position.step}: {', '.join(what['folders'])} from sequence "
            f"{position.sample_index}, {units.count(tokens)} tokens a step ({what['global_batch']} sequences of "
            f"{what['sequence_length']})" + (f", rope {json.dumps(what['rope'])}" if "rope" in what else "")
        )
