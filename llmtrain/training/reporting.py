"""Parts that write rows of metrics: the figures of logged steps, and evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmtrain.base import log, units
from llmtrain.base.rank.heartbeat import heart
from llmtrain.checkpoint.format import step_of
from llmtrain.checkpoint.retain import Best, best_of
from llmtrain.data.batches import MicroBatch
from llmtrain.data.stream.loader import validation_batches
from llmtrain.data.stream.train_data import TrainData, counted_bytes
from llmtrain.data.tokenizer_folder import byte_lengths
from llmtrain.engine.losses.function import LooksAhead, NextTokenLoss
from llmtrain.engine.losses.with_metrics import quotients, with_metrics
from llmtrain.engine.ranks.device import device_name, max_memory_gib
from llmtrain.features import expected
from llmtrain.tracking.local import rows_after
from llmtrain.tracking.metrics import Throughput, TokenFlops, peak_flops, perplexity, routing_metrics
from llmtrain.training.examine import LITTLE_NEW, USEFUL_EPOCHS
from llmtrain.training.parts import Done, Launch, Part
from llmtrain.training.step import Position, Request, is_due

if TYPE_CHECKING:
    from llmtrain.config.run import StopEarly
    from llmtrain.data.stream.choices import ChoiceSet
    from llmtrain.training.setup import Setup


class Evaluation(Part):
    """Measures the validation sequences and the sets and questions of the section `eval` every `train.eval_every`
    steps. The figures choose the best checkpoints, and may end the run early."""

    key = "evaluation"

    def __init__(self, launch: Launch) -> None:
        """Raises AgreedError: when the tokenizer, from which the bytes of each token are counted, cannot be read."""
        setup, config = launch.setup, launch.setup.run.config
        self._setup, self._tracker, self._speed, self._parts = setup, launch.tracker, launch.speed, launch.parts
        self._stages = [
            Measured("eval", data, config.train.eval_sequences, stage.batch.micro_batch)
            for data, stage in zip(setup.course.data, setup.course.stages, strict=True)
        ]
        self._measured = self._stages[:1] if config.train.eval else []
        """What an evaluation measures; with train.eval the first is the data of the stage that was trained last."""
        for name, data in setup.data.sets.items():
            sequences = config.eval.sequences.get(name, config.train.eval_sequences)
            self._measured.append(Measured(f"eval/{name}", data, sequences, setup.run.batch.micro_batch))
        self._lengths: np.ndarray | None = None
        """Bytes of each token; None if the loss is no likelihood of text."""
        self._bytes: dict[int, int] = {}
        """Bytes of the counted tokens of a data set, by its id()."""
        if isinstance(setup.objective, NextTokenLoss) and self._measured:
            with setup.ranks.together():
                self._lengths = byte_lengths(setup.data.first.tokenizer_dir, setup.data.first.vocab_size)
                for each in self._measured:
                    self._count_bytes(each)
        self._best: BestSteps | None = None
        if (best := Best.chosen(config.checkpoint.keep_best)) is not None:
            kept = setup.ranks.first(lambda: best_of(launch.checkpoints.path, best))
            steps = {step_of(path) or 0: figure for path, figure in kept.items()}
            now = launch.start.position.step  # later checkpoints are of steps that this launch repeats
            self._best = BestSteps(best, ((step, figure) for step, figure in steps.items() if step <= now))
        self._patience = None if config.train.stop_early.metric is None else Patience(config.train.stop_early)
        self._metrics, self._start_step = launch.folder.path / "metrics.jsonl", launch.start.position.step
        self._last: tuple[int, dict[str, float]] | None = None
        """Step and figures of this launch's last evaluation."""

    def is_best(self, step: int) -> bool:
        return self._best is not None and step in self._best

    def lost(self, step: int) -> None:
        """Forget a step whose save has failed."""
        if self._best is not None:
            self._best.lost(step)

    @property
    def decides(self) -> bool:
        """True if the last evaluation must come before the last checkpoint, as it chooses the best ones."""
        return self._best is not None

    def to_json(self) -> dict[str, Any] | None:
        if self._last is None and self._patience is None:
            return None
        step, figures = self._last or (None, {})
        early = {} if self._patience is None else {"stop_early": self._patience.to_json()}
        finite = {key: value for key, value in figures.items() if math.isfinite(value)}  # JSON has no others
        return {"step": step, "figures": finite, **early}

    def restore(self, kept: Any, folder: Path) -> None:
        if self._patience is not None and isinstance(kept, dict) and (early := kept.get("stop_early")):
            self._patience.restore(early)
            self.ended = self._patience.reason

    def is_due(self, done: Done) -> bool:
        """True if an evaluation follows the step; after the last step the caller evaluates."""
        setup = self._setup
        every = setup.run.config.train.eval_every
        return setup.run.config.evaluates and (done.complete if done.last else is_due(every, done.steps))

    def after_step(self, done: Done) -> None:
        if self.is_due(done) and not done.last:
            with self._speed.pause():
                self.evaluate(done.position)

    def evaluate(self, position: Position) -> dict[str, float]:
        """Evaluate all sets on all ranks, log the figures and return them by their keys in tracking/metrics.py. A
        second call at the same step returns the first result."""
        setup = self._setup
        if self._last is not None and self._last[0] == position.step:
            return self._last[1]
        if setup.run.config.train.eval:
            self._measured[0] = self._stages[setup.course.done(position.step).stage]
        with heart.during("evaluate"):
            row = {key: value for part in self._parts for key, value in part.eval_figures(position.step).items()}
            row |= {key: value for index in range(len(self._measured)) for key, value in self._figures(index).items()}
            for name, choices in setup.data.choices.items():
                figures = choices.figures(choice_log_probs(setup, choices))
                row |= {f"eval/{name}/{figure}": value for figure, value in figures.items()}
            for part in self._parts if setup.run.config.train.eval else ():
                for name, in_place in part.variants().items():
                    with in_place():
                        figures = self._figures(0)
                    row |= {key.replace("eval/", f"eval/{name}/", 1): value for key, value in figures.items()}
        if mean := setup.run.config.eval.mean:
            weighted = sum(weight * row[f"eval/{name}/loss"] for name, weight in mean.items())
            row["eval/mean/loss"] = weighted / sum(mean.values())
        if row and not self._is_there(position.step, row):
            self._tracker.log({"step": position.step, **row})
        if lost := [key for key, value in row.items() if math.isnan(value)]:
            log.warn(f"step {position.step}: {', '.join(lost)}: not a number (NaN), which is never the best")
        self._last = (position.step, row)
        if self._best is not None or self._patience is not None:
            self._decide(position.step, self._setup.ranks.first(lambda: row))  # one decision
        return row

    def _is_there(self, step: int, row: dict[str, float]) -> bool:
        """Return True if metrics.jsonl has the figures: a launch that finds all steps done evaluates the last again."""
        rows = rows_after(self._metrics, -1, step - 1) if step == self._start_step else []
        return any(earlier["step"] == step and row.keys() <= earlier.keys() for earlier in rows)

    def _decide(self, step: int, figures: dict[str, float]) -> None:
        if self._best is not None:
            self._best.take(step, figures)
        if self._patience is not None:
            self._patience.take(step, figures)
            if (reason := self._patience.reason) and not self.ended:
                self.ended = reason
                self._tracker.event("stop_early", step=step, reason=reason)
                log.info(f"the run is complete at step {step}: {reason}")

    def _count_bytes(self, measured: Measured) -> int:
        assert self._lengths is not None
        key = id(measured.data)
        if key not in self._bytes:
            self._bytes[key] = counted_bytes(measured.data, measured.sequences, self._lengths)
        return self._bytes[key]

    def _figures(self, index: int) -> dict[str, float]:
        measured, engine = self._measured[index], self._setup.engine
        objective = with_metrics(self._setup.objective, self._setup.run.config.metrics)
        if isinstance(objective, LooksAhead):
            objective.look(list(evaluation_batches(self._setup, measured)), engine.evaluate)
        figures, weight = engine.evaluate(evaluation_batches(self._setup, measured), objective)
        if self._lengths is not None:
            bits, counted = figures["loss"] * weight / math.log(2), self._count_bytes(measured)
            figures |= {"perplexity": perplexity(figures["loss"]), "bits_per_byte": bits / (counted or math.nan)}
        return {f"{measured.prefix}/{name}": value for name, value in quotients(figures).items()}


class BestSteps:
    """The best evaluated steps among checkpoints that exist or are being saved."""

    def __init__(self, best: Best, there: Iterable[tuple[int, float]]) -> None:
        """`there`: (step, figure) of existing checkpoints."""
        self._best, self._steps = best, dict(best.first(there))

    def __contains__(self, step: int) -> bool:
        return step in self._steps

    def take(self, step: int, figures: Mapping[str, float]) -> None:
        """Add the evaluation after `step`. A figure that is not finite is never among the best."""
        value = figures.get(self._best.metric, math.nan)  # a plugin's metric is missing if all its weights are 0
        if math.isfinite(value):
            others = ((other_step, figure) for other_step, figure in self._steps.items() if other_step != step)
            self._steps = dict(self._best.first([*others, (step, value)]))

    def lost(self, step: int) -> None:
        self._steps.pop(step, None)


class Patience:
    """Counts evaluations without improvement: `train.stop_early`."""

    def __init__(self, settings: StopEarly) -> None:
        self._settings = settings
        self._best: float | None = None
        self._newest: float | None = None
        self._best_step = self._waited = 0

    def take(self, step: int, figures: Mapping[str, float]) -> None:
        value = figures.get(str(self._settings.metric), math.nan)
        self._newest = value if math.isfinite(value) else None
        sign = -1 if self._settings.mode == "max" else 1
        better = self._best is None or sign * (self._best - value) > self._settings.min_delta
        if better and math.isfinite(value):
            self._best, self._best_step, self._waited = value, step, 0
        else:
            self._waited += 1

    @property
    def reason(self) -> str:
        """Reason for ending the run; empty: none."""
        if self._waited < self._settings.patience:
            return ""
        newest, was = "not finite" if self._newest is None else f"{self._newest:.4f}", "none was finite"
        if self._best is not None:
            was = f"it is {newest}, and was {self._best:.4f} at step {self._best_step}"
        by = f" by more than min_delta {self._settings.min_delta:g}" if self._settings.min_delta else ""
        how = f"has not become better{by} in {self._waited} evaluations"
        return f"{self._settings.metric} {how} ({was}; train.stop_early)"

    def to_json(self) -> dict[str, Any]:
        return {"best": self._best, "best_step": self._best_step, "waited": self._waited, "newest": self._newest}

    def restore(self, kept: Mapping[str, Any]) -> None:
        self._best, self._best_step, self._waited = kept["best"], kept["best_step"], kept["waited"]
        self._newest = kept.get("newest")


@dataclass(frozen=True)
class Measured:
    """A data set whose loss an evaluation measures."""

    prefix: str
    """Beginning of the keys of its figures."""
    data: TrainData
    """The data set with the validation sequences."""
    sequences: int
    """Number of validation sequences to measure at most."""
    micro_batch: int
    """Sequences of a forward pass of one rank."""


def evaluation_batches(setup: Setup, measured: Measured) -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches of the sequences to measure. Raises DataError: when there are no sequences."""
    return validation_batches(
        measured.data,
        sequences=measured.sequences,
        micro_batch=measured.micro_batch,
        rank=setup.mesh.place.data,
        data_parallel=setup.run.batch.data_parallel,
        pin_memory=setup.ranks.device.type == "cuda",
    )


def choice_log_probs(setup: Setup, choices: ChoiceSet) -> np.ndarray:
    """Return the log-probability of each choice in nats, fp32 [rows], on all ranks. All ranks call it together."""
    from llmtrain.engine.losses.answers import LogProbs  # most runs have no questions

    batch, collect = setup.run.batch, LogProbs()
    dealt = (batch.micro_batch * batch.sequence_length, setup.mesh.place.data, batch.data_parallel)
    for micros in choices.batches(*dealt, pin_memory=setup.ranks.device.type == "cuda"):
        setup.engine.evaluate(micros, collect)
    return collect.of_all(setup.ranks, choices.rows)


class Logging(Part):
    """Writes a row of metrics every `train.log_every` steps, and for the last step."""

    def __init__(self, launch: Launch) -> None:
        self._launch, setup = launch, launch.setup
        self._setup, self._speed = setup, launch.speed
        # The clock around collectives sees no waiting on a device that queues them, and cannot tell the step's
        # collectives from those of another thread.
        beside, ranks = any(part.communicates_beside for part in launch.parts), setup.ranks
        self._counts_comm = ranks.world_size > 1 and ranks.device.type == "cpu" and not beside
        known = expected(setup.run, on_gpu=ranks.device.type == "cuda")
        if known is not None and known.step_s:
            launch.tracker.event("planned", step_s=known.step_s)

    def after_step(self, done: Done) -> None:
        comm = (done.step_s, done.comm_s) if self._counts_comm else None
        if self._setup.course.stages[done.batch.stage].first_step == done.position.step - 1:
            self._speed.flops = flops_of(self._setup, done.batch.stage)
        self._speed.step(tokens=done.batch.tokens, data_wait_s=done.data_wait_s, comm=comm)
        if done.last or is_due(self._setup.run.config.train.log_every, done.steps):
            self._log(done)

    def _log(self, done: Done) -> None:
        scale = self._setup.engine.counters().loss_scale.get("cur_scale")
        norm, routing = done.update.grad_norm, self._launch.session.routing()
        read, data = done.batch.first_index + done.batch.sequences, self._setup.course.data[done.batch.stage]
        epoch = read / data.sequences_per_epoch
        if self._setup.run.max_steps is None and epoch > USEFUL_EPOCHS and self._setup.ranks.rank == 0:
            log.warn_once(f"the run goes over its data for the {int(epoch) + 1}th time: {LITTLE_NEW}")
        row = {
            "step": done.position.step,
            "tokens": done.position.tokens,
            "epoch": round(epoch, 6),
            **self._launch.session.figures(done),
            "lr": self._setup.run.config.optim.lr * done.lr_factor,
            "grad_norm": None if norm is None else float(norm),
            **({} if scale is None else {"loss_scale": scale}),
            **({} if routing is None else routing_metrics(routing.aux_loss, routing.tokens_LE)),
            "max_memory_gib": max_memory_gib(self._setup.ranks.device),
            **self._speed.take(),
        }
        for part in self._launch.parts:
            row |= part.figures(done)
        self._launch.tracker.log(row, more=self._launch.part(Evaluation).is_due(done))


def flops_of(setup: Setup, stage: int) -> TokenFlops:
    """Return the FLOPs per token in sequences of the stage's length."""
    return setup.spec.facts.flops(setup.run.stages[stage].batch.sequence_length)


def throughput_of(setup: Setup, step: int = 0) -> Throughput:
    """Return the clock of a launch that continues from `step`."""
    flops = flops_of(setup, setup.run.stages.number(step))
    peak = peak_flops(device_name(setup.ranks.device), setup.run.mix.products)
    return Throughput(flops=flops, devices=setup.ranks.world_size, peak=peak)


class StageBorders(Part):
    """Reports the stage of a run at its start and at each change, and sets the model's rotary positions for it."""

    def __init__(self, launch: Launch) -> None:
        setup, self._tracker, self._loader = launch.setup, launch.tracker, launch.loader
        self._course, self._module = setup.course, setup.engine.module
        self._degrees = asdict(setup.run.mix.degrees)
        self._several = len(self._course.stages) > 1 or self._course.first_number > 0
        self._step = 0
        self._turned = 0
        """Number of changes of the rotary positions that the model has had."""

    def begin(self, position: Position) -> None:
        """Set the stage of the previous step, for an evaluation or a save before the first step."""
        self._step = position.step
        self._turn(self._course.done(position.step).stage)
        self._tell(position)

    def request(self) -> Request:
        """Change the rotary positions before a stage's first step; evaluations and saves before use the old ones."""
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
        """Apply the rotary positions of the stages up to this one to the model, in order."""
        if self._course.stages[stage].rope:
            from llmtrain.models.rope import set_rope, turns  # most runs have none

            plan = [(passed.rope, passed.batch.sequence_length) for passed in self._course.stages.stages[: stage + 1]]
            for rope, length in turns(plan)[self._turned :]:
                set_rope(self._module, rope, length)
                self._turned += 1

    def _tell(self, position: Position) -> None:
        """Write an event with the data, batch and order that the run reads from `position` on, for `llmtrain data
        where`. In a run with several stages also log the stage that begins."""
        stage = self._course.at(position.step).stage
        of, data = self._course.stages[stage], self._course.data[stage]
        self._tracker.event(
            "reads",
            step=position.step,
            next=position.sample_index,
            data=asdict(of.data),
            fingerprint=data.fingerprint,
            global_batch=of.batch.global_batch,
            accumulation=of.batch.accumulation,
            degrees=self._degrees,
            shares=self._loader.shares,
        )
        if not self._several:
            return
        what, tokens = self._course.describe(stage), self._course.stages[stage].batch.tokens
        self._tracker.event("stage", step=position.step, next=position.sample_index, **what)
        log.info(
            f"stage {what['stage']} at step {position.step}: {', '.join(what['folders'])} from sequence "
            f"{position.sample_index}, {units.count(tokens)} tokens a step ({what['global_batch']} sequences of "
            f"{what['sequence_length']})" + (f", rope {json.dumps(what['rope'])}" if "rope" in what else "")
        )
