"""Parts that write rows of metrics: the figures of the steps that are logged, and evaluation."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from llmtrain.cluster.watch.heartbeat import heart
from llmtrain.data.stream.loader import MicroBatch, validation_batches
from llmtrain.engine.dist.device import device_name, max_memory_gib
from llmtrain.engine.losses.function import LooksAhead
from llmtrain.engine.losses.next_token import NEXT_TOKEN
from llmtrain.tracking.metrics import Throughput, flops_per_token, peak_flops, perplexity, routing_metrics
from llmtrain.training.parts import Done, Part
from llmtrain.training.step import Position, Session, is_due

if TYPE_CHECKING:
    from llmtrain.tracking.tracker import Tracker
    from llmtrain.training.setup import Setup


class Evaluation(Part):
    """The loss on validation sequences, every `train.eval_every` steps; the run's end asks for the last one."""

    def __init__(self, setup: Setup, tracker: Tracker, speed: Throughput) -> None:
        self._setup, self._tracker, self._speed = setup, tracker, speed

    def is_due(self, done: Done) -> bool:
        """True if the step is followed by an evaluation; after the last step of a run the caller asks for it."""
        train = self._setup.run.train
        return train.eval and (done.complete if done.last else is_due(train.eval_every, done.steps))

    def after_step(self, done: Done) -> None:
        """Evaluate if it is due and more steps follow."""
        if self.is_due(done) and not done.last:
            with self._speed.pause():
                self.evaluate(done.position)

    def evaluate(self, position: Position) -> float:
        """Write the validation figures over all ranks. Returns the loss: nats per token, or the objective's."""
        setup, objective = self._setup, self._setup.objective
        with heart.during("evaluate"):
            if isinstance(objective, LooksAhead):
                objective.look(list(evaluation_batches(setup)), setup.engine.evaluate)
            figures, _ = setup.engine.evaluate(evaluation_batches(setup), objective)
        row = {f"eval/{name}": value for name, value in figures.items()}
        if objective is NEXT_TOKEN:
            row["eval/perplexity"] = perplexity(figures["loss"])
        self._tracker.log({"step": position.step, **row})
        return figures["loss"]


def evaluation_batches(setup: Setup) -> Iterator[MicroBatch]:
    """This rank's share of the validation sequences. Raises DataError when there are none."""
    return validation_batches(
        setup.data,
        sequences=setup.run.train.eval_sequences,
        micro_batch=setup.resolved.batch.micro_batch,
        rank=setup.mesh.place.data,
        data_parallel=setup.resolved.batch.data_parallel,
        pin_memory=setup.ranks.device.type == "cuda",
    )


class Logging(Part):
    """A row of metrics every `train.log_every` steps, and of the last step."""

    def __init__(
        self, setup: Setup, session: Session, tracker: Tracker, speed: Throughput, parts: Sequence[Part],
        evaluation: Evaluation,
    ) -> None:  # fmt: skip
        """`parts`: of the run, for their figures."""
        self._setup, self._session, self._tracker = setup, session, tracker
        self._speed, self._parts, self._evaluation = speed, parts, evaluation
        # The clock around collectives shows no waiting where a device takes them from a queue, and counts those of
        # another thread, in which sites exchange, with the step's.
        background = setup.run.sites.name is not None and setup.run.sites.overlaps
        ranks = setup.ranks
        self._counts_comm = ranks.world_size > 1 and ranks.device.type == "cpu" and not background

    def after_step(self, done: Done) -> None:
        """Count the step, and log it if it is due."""
        comm = (done.step_s, done.comm_s) if self._counts_comm else None
        self._speed.step(tokens=self._setup.resolved.batch.tokens, data_wait_s=done.data_wait_s, comm=comm)
        if done.last or is_due(self._setup.run.train.log_every, done.steps):
            gc.collect()
            self._log(done)

    def _log(self, done: Done) -> None:
        engine = self._setup.engine
        norm, scale, routing = done.update.grad_norm, engine.loss_scale().get("cur_scale"), engine.routing()
        row = {
            "step": done.position.step,
            "tokens": done.position.tokens,
            **self._session.figures(done),
            "lr": self._setup.resolved.optim.lr * done.lr_factor,
            "grad_norm": None if norm is None else float(norm),
            **({} if scale is None else {"loss_scale": scale}),
            **({} if routing is None else routing_metrics(routing.aux_loss, routing.tokens_LE)),
            "max_memory_gib": max_memory_gib(self._setup.ranks.device),
            **self._speed.take(),
        }
        for part in self._parts:
            row |= part.figures(done)
        self._tracker.log(row, more=self._evaluation.is_due(done))


def throughput_of(setup: Setup) -> Throughput:
    """The speed of the run between two log points."""
    sizes = setup.spec.facts
    flops = flops_per_token(
        matmul_params=sizes.matmul_parameters,
        frozen_params=sizes.frozen_matmul_parameters,
        forward_params=sizes.forward_matmul_parameters,
        layers=sizes.layers,
        forward_layers=sizes.forward_layers,
        attention_width=sizes.attention_width,
        sequence_length=setup.run.data.sequence_length,
    )
    peak = peak_flops(device_name(setup.ranks.device), setup.resolved.precision)
    return Throughput(flops=flops, devices=setup.ranks.world_size, peak=peak)
