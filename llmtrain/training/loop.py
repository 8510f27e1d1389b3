"""The steps of a run, and what is due between them: logs, evaluation, comparison of the ranks, checkpoints."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from llmtrain.base import log, units
from llmtrain.base.errors import TrainingStopped
from llmtrain.checkpoint.folder import CheckpointFolder
from llmtrain.checkpoint.frozen import NOWHERE, frozen_source
from llmtrain.checkpoint.hf.special_tokens import sampling_defaults
from llmtrain.checkpoint.rundir import RunDirectory
from llmtrain.cluster.watch.heartbeat import heart
from llmtrain.data.stream.loader import MicroBatch, validation_batches
from llmtrain.engine.dist.control import StopAsked, StopRequests, from_all, from_rank_0, together
from llmtrain.engine.dist.device import device_name, max_memory_gib
from llmtrain.objectives.next_token import NEXT_TOKEN
from llmtrain.objectives.objective import LooksAhead
from llmtrain.tracking.environment import new_run_id, versions
from llmtrain.tracking.metrics import Throughput, flops_per_token, peak_flops, perplexity, routing_metrics
from llmtrain.training.consistency import Consistency, DataCheck
from llmtrain.training.step import Outer, Position, Requests, Step, is_due

if TYPE_CHECKING:  # what it is handed
    from llmtrain.checkpoint.load import Resumed
    from llmtrain.models.source import ParameterSource
    from llmtrain.tracking.tracker import Tracker
    from llmtrain.training.saving import Saving
    from llmtrain.training.setup import Setup
    from llmtrain.training.shares import Shares

_AT_ONCE = 4 << 30
"""Bytes of data that a resume compares with their checksums before its first step; more beside the steps."""


class Training:
    """One launch: everything that lives between the first and the last step."""

    def __init__(
        self,
        setup: Setup,
        folder: RunDirectory,
        checkpoints: CheckpointFolder,
        requests: StopRequests,
    ) -> None:
        self.setup = setup
        self.resolved, self.run, self.spec, self.ranks = setup.resolved, setup.run, setup.spec, setup.ranks
        self.engine, self.mesh, self.data = setup.engine, setup.mesh, setup.data
        self.folder, self.checkpoints, self.requests = folder, checkpoints, requests
        self.began = True
        """False: asked to stop while it waited for the other sites, before a step that is to be saved."""
        self.model_facts = setup.spec.facts
        if self.run.train.eval:
            with together(self.ranks):
                self.evaluation_batches()  # its data must be there now, not after days of training
        self.notes: list[str] = self.engine.module.notes
        self.position = Position()
        self.wandb_id = from_rank_0(self.ranks, new_run_id)
        self.started_s = time.monotonic()
        self.skipped_in_a_row = 0
        self.saved_step: int | None = None
        self.began_from: dict[str, Any] | None = None  # the checkpoint of another run, see checkpoint/load.py
        self.frozen_source = NOWHERE
        self.resumed: Resumed | None = None
        """What the run goes on from, if with all of its state."""
        self.outer: Outer | None = None
        self.shares: Shares | None = None
        self.uncounted_steps = 0
        """Steps of the optimizer beyond those that this run's position counts: a foreign checkpoint may have some."""

    def resume_or_start(self) -> list[str]:
        """Give the parameters their values: from a checkpoint, or from the model section. Returns lines to log."""
        from llmtrain.checkpoint.load import resume

        source: ParameterSource | None = None
        if self.run.objective.reference == "online":  # its first values are read again after a resume as well
            with together(self.ranks):
                source = self.spec.initial_weights(self.run.train.seed, self.ranks.device)
            self.setup.refer_to(source)
        now = json.loads(json.dumps(self.trainer_state()))  # tuples become lists, as in the file
        with together(self.ranks):
            resumed = resume(self.engine, self.run, self.folder, self.checkpoints, now, self.ranks)
        if resumed is None:
            source = source or self.spec.initial_weights(self.run.train.seed, self.ranks.device)
            self.frozen_source = frozen_source(source, self.spec.frozen, self.setup.start_from(source))
            return self._frozen_lines()
        self.frozen_source = resumed.frozen.only(self.spec.frozen)
        self.began_from = resumed.began_from
        if not resumed.weights_only:
            self.resumed = resumed
            saved = resumed.trainer  # made by other tools, it may lack what they do not know
            if not self._settings["sampling"]:  # the folder may be gone by now
                self._settings["sampling"] = saved.get("sampling") or {}
            self.position = Position(**{key: saved.get(key) or 0 for key in asdict(self.position)})
            heart.at_step(self.position.step)
            self.wandb_id = saved.get("wandb_id") or self.wandb_id
            applied = self.position.step - self.position.skipped_steps
            self.uncounted_steps = self.engine.optimizer_step() - applied
            if resumed.folder.parent == self.checkpoints.path:
                self.saved_step = self.position.step
        return [*resumed.lines, *self._frozen_lines()]

    def _frozen_lines(self) -> list[str]:
        source = self.frozen_source
        count = units.counted(len(source.parts), "frozen parameter")
        told = f"checkpoints leave out {count}: they are read from {source.folder} again, so keep that folder as it is"
        return [told] if source.parts else []

    def trainer_state(self) -> dict[str, Any]:
        """trainer.json: what a resume needs beside the tensors, and what it compares."""
        return {
            **asdict(self.position),
            # Counted, not read from the optimizer: on a GPU its counter is a tensor, and reading it waits for the step.
            "optimizer_step": self.uncounted_steps + self.position.step - self.position.skipped_steps,
            "loss_scale": self.engine.loss_scale(),
            "wandb_id": self.wandb_id,
            "began_from": self.began_from,
            **({"outer": self.outer.to_json()} if self.outer is not None else {}),
            "shares": self.shares.to_json() if self.shares is not None else None,
            **self._settings,
        }

    @functools.cached_property
    def _settings(self) -> dict[str, Any]:
        """The part of it that does not change during a launch."""
        mix = self.resolved.mix
        return {
            "optimizer": self.run.optim.name,
            "vocab_size": self.model_facts.vocab_size,
            "data_fingerprint": self.data.fingerprint,
            "reference": self.setup.references,
            "teacher": self.setup.teacher,
            "separator_id": self.data.separator_id,
            "tokenizer_dir": str(self.data.tokenizer_dir.resolve()),  # to-hf may run anywhere
            "tokenizer": self.data.manifests[0].tokenizer_fingerprint,
            "model_config": self.engine.module.config.to_dict(),
            "sampling": sampling_defaults(self.run.model.folder),
            "run": asdict(self.run),
            "deepspeed": self.resolved.deepspeed,
            "versions": versions(),
            "layout": {**asdict(mix.degrees), "zero_stage": mix.zero_stage, **mix.moments},
        }

    def loop(self, tracker: Tracker, saving: Saving, outer: Outer | None = None) -> bool:
        """Train until the run is over (True) or someone asks to stop (False)."""
        run, ranks = self.run, self.ranks
        if outer is not None:
            self.outer = outer
            asked = lambda: self.requests.stop_reason is not None  # noqa: E731
            try:
                at = outer.begin(self.position.step, self.position.sample_index, run.fault.start_timeout_s, asked)
            except StopAsked:
                self.began = False
                return False
            self._move(*at)
        self.shares = shares = self._shares()
        self.session = self.setup.session(self.position.step, pace=shares.pace if shares else None)
        consistency = Consistency(
            run, self.resolved.deepspeed, self.resolved.degrees, self.engine, ranks, tracker, self.data.fingerprint
        )
        speed = self._throughput()
        loader = self.setup.loader(self.position.sample_index, shares.sequences if shares else None)
        goes_on = not self._complete()
        with contextlib.closing(loader), contextlib.closing(DataCheck(self.data.sums(), ranks)) as self.data_check:
            if self.resumed is not None and self.data_check.bytes <= _AT_ONCE:
                self.data_check.look(wait=True)  # what was trained belongs to what the data was
            while goes_on:
                heart.begin_step()
                before = self.position.step
                waited_s = loader.data_wait_s
                batch = next(loader)
                waited_s = loader.data_wait_s - waited_s
                done = self.session.step(batch, self._requests(saving), saving.before_update)
                self._advance(done, tracker)
                if self._has_begun(done):
                    from llmtrain.engine.moved import check_adapter

                    check_adapter(self.engine, self.ranks)
                saving.advance(done.agreed)
                comm = heart.end_step(self.position.step)
                seen = comm if self._waits_are_seen() else None
                speed.step(tokens=self.resolved.batch.tokens, data_wait_s=waited_s, comm=seen)
                if outer is not None:
                    self._move(*outer.after_update(self.position.step, complete=self._complete()))
                    self.session.step_number = self.position.step
                    loader.seek(self.position.sample_index)
                if shares is not None:
                    shares.after_step(self.position.step, done.agreed.paces, loader, tracker.event)
                steps = range(before + 1, self.position.step + 1)
                goes_on = self._after_update(done, steps, tracker, saving, consistency, speed)
                if goes_on and saving.gives_up:
                    saving.end_unsaved(self.position.step, self.trainer_state)
        return self._complete() or not done.agreed.stop

    def _shares(self) -> Shares | None:
        resolved, kept = self.resolved, self.resumed.trainer.get("shares") if self.resumed else None
        if self.run.train.balance == "equal" or resolved.batch.data_parallel == 1:
            return None
        from llmtrain.training.shares import Shares

        at_once = resolved.zero_stage >= 2
        return Shares(self.engine, self.ranks, resolved.batch, resolved.degrees, at_once=at_once, kept=kept)

    def _waits_are_seen(self) -> bool:
        """Whether the clock around collectives shows waiting: those of a device are handed over without, and those of
        another thread would be counted with the step's."""
        run, ranks = self.run, self.ranks
        behind = run.sites.name is not None and run.sites.method in ("streaming", "async")
        return ranks.world_size > 1 and ranks.device.type == "cpu" and not behind

    def _move(self, step: int, index: int) -> None:
        """Go on where other sites are: at their step, with samples that nobody else trains."""
        self.uncounted_steps -= step - self.position.step
        self.position = replace(self.position, step=step, sample_index=index)

    def _requests(self, saving: Saving) -> Requests:
        """What the ranks are to hear of this one with the next step."""
        return Requests(
            stop=self.requests.stop_reason is not None,
            time_up=self._time_is_up(),
            save=self.requests.take_save() or saving.time_is_due(),
            save_status=saving.status(),
        )

    def _after_update(
        self, done: Step, steps: range, tracker: Tracker, saving: Saving, consistency: Consistency, speed: Throughput
    ) -> bool:
        """What is due between this step and the next: logs, evaluation, comparison, checkpoint. Whether one follows.

        `steps`: this one, and those that other sites have trained beyond it.
        """
        train = self.run.train
        last = done.agreed.stop or done.agreed.time_up or self._complete()
        evaluates = train.eval and (self._complete() if last else is_due(train.eval_every, steps))
        if last or is_due(train.log_every, steps):
            self._log(tracker, speed, done, evaluates)
        if evaluates and not last:
            with speed.pause():
                self.evaluate(tracker)
        due = not last and saving.is_due(steps, done.agreed)
        if not self.data_check.settled and (due or last or is_due(train.log_every, steps)):
            self.data_check.look(wait=due or (last and not done.agreed.stop))  # who is told to stop has no time
        if consistency.is_due(steps, saving=due or last):
            with heart.during("compare"):
                consistency.check(asdict(self.position), done.batch)
        if due:
            with speed.checkpoint_stall(), heart.during("save"):
                saving.save(self.position.step, self.trainer_state)
        return not last

    def evaluation_batches(self) -> Iterator[MicroBatch]:
        """This rank's share of the validation sequences. Raises DataError when there are none."""
        return validation_batches(
            self.data,
            sequences=self.run.train.eval_sequences,
            micro_batch=self.resolved.batch.micro_batch,
            rank=self.mesh.place.data,
            data_parallel=self.resolved.batch.data_parallel,
            pin_memory=self.ranks.device.type == "cuda",
        )

    def evaluate(self, tracker: Tracker) -> float:
        """Validation loss over all ranks: nats per token, or the objective's."""
        with heart.during("evaluate"):
            if isinstance(self.setup.objective, LooksAhead):
                self.setup.objective.look(list(self.evaluation_batches()), self.engine.evaluate)
            figures, _ = self.engine.evaluate(self.evaluation_batches(), self.setup.objective)
        told = {f"eval/{name}": value for name, value in figures.items()}
        if self.setup.objective is NEXT_TOKEN:
            told["eval/perplexity"] = perplexity(figures["loss"])
        tracker.log({"step": self.position.step, **told})
        return figures["loss"]

    def _advance(self, done: Step, tracker: Tracker) -> None:
        """Count the step; report a skipped one with its samples; stop after too many in a row."""
        self.position = replace(
            self.position,
            step=self.position.step + 1,
            tokens=self.position.tokens + self.resolved.batch.tokens,
            sample_index=self.position.sample_index + self.resolved.batch.global_batch,
            skipped_steps=self.position.skipped_steps + int(done.update.skipped),
        )
        if not done.update.skipped:
            self.skipped_in_a_row = 0
            return
        bad = [
            index
            for micro, sums in zip(done.batch.micro_batches, done.sums, strict=True)
            if not math.isfinite(float(sums[0]))
            for index in micro.sample_indices
        ]
        samples = sorted(index for found in from_all(self.ranks, bad) for index in found)
        # fp16 finds its loss scale by overflowing: with a finite loss that is no fault.
        scaling = self.resolved.precision == "fp16" and not samples
        what = "gradient" if not samples else "loss"
        first, count = done.batch.first_index, self.resolved.batch.global_batch
        named = samples or list(range(first, first + count))
        tracker.event("skip", step=self.position.step, what=f"non-finite {what}", samples=named, loss_scaling=scaling)
        if scaling:
            return
        self.skipped_in_a_row += 1
        log.warn(
            f"step {self.position.step} skipped: non-finite {what}; samples {units.some(named)} "
            f"({self.skipped_in_a_row} in a row)"
        )
        if self.skipped_in_a_row >= self.run.fault.max_skipped:
            raise TrainingStopped(
                f"{self.skipped_in_a_row} steps in a row were skipped for a non-finite {what}; fault.max_skipped is "
                f"{self.run.fault.max_skipped}. Last samples: {units.some(named)}. Look at them, lower optim.lr, or "
                f"resume from an earlier checkpoint in {self.folder.checkpoints}."
            )

    def _has_begun(self, done: Step) -> bool:
        """Whether this was the first step that the optimizer took of an adapter's run."""
        taken = self.uncounted_steps + self.position.step - self.position.skipped_steps
        return self.run.adapter.r is not None and taken == 1 and not done.update.skipped and done.agreed.weight > 0

    def _log(self, tracker: Tracker, speed: Throughput, done: Step, more: bool) -> None:
        gc.collect()
        norm, scale = done.update.grad_norm, self.engine.loss_scale().get("cur_scale")
        routing = self.engine.routing()
        tracker.log(
            {
                "step": self.position.step,
                "tokens": self.position.tokens,
                **self.session.figures(done),
                "lr": self.resolved.optim.lr * done.lr_factor,
                "grad_norm": None if norm is None else float(norm),
                **({} if scale is None else {"loss_scale": scale}),
                **({} if routing is None else routing_metrics(routing.aux_loss, routing.tokens_LE)),
                "skipped_steps": self.position.skipped_steps,
                "max_memory_gib": max_memory_gib(self.ranks.device),
                **speed.take(),
            },
            more=more,
        )

    def _throughput(self) -> Throughput:
        sizes = self.model_facts
        flops = flops_per_token(
            matmul_params=sizes.matmul_parameters,
            frozen_params=sizes.frozen_matmul_parameters,
            forward_params=sizes.forward_matmul_parameters,
            layers=sizes.layers,
            forward_layers=sizes.forward_layers,
            attention_width=sizes.attention_width,
            sequence_length=self.run.data.sequence_length,
        )
        peak = peak_flops(device_name(self.ranks.device), self.resolved.precision)
        return Throughput(flops=flops, devices=self.ranks.world_size, peak=peak)

    def _complete(self) -> bool:
        limit = self.resolved.max_steps
        return limit is not None and self.position.step >= limit

    def _time_is_up(self) -> bool:
        minutes = self.run.train.max_minutes
        return minutes is not None and self.ranks.rank == 0 and time.monotonic() - self.started_s > 60 * minutes
