"""DeepSpeed's pipeline engine behind `engine/api.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import OptimizerStep, ReduceTiedGrads
from torch import Tensor

from llmtrain.base.errors import ModelError
from llmtrain.base.rank.heartbeat import heart
from llmtrain.data.batches import MicroBatch
from llmtrain.engine import progress
from llmtrain.engine.deepspeed.engine import ZeroEngine
from llmtrain.engine.deepspeed.state import base_optimizer
from llmtrain.engine.losses.function import NEXT_TOKEN, LossFunction
from llmtrain.engine.ranks.ranks import AgreedError, Ranks
from llmtrain.models.parallel.mesh import Mesh
from llmtrain.models.parallel.pipeline import PipelineLanguageModel


class PipelineZeroEngine(ZeroEngine):
    """Runs DeepSpeed's 1F1B schedule. Only the last pipeline stage computes the loss; the others report zeros."""

    is_pipeline = True

    def __init__(self, deepspeed: PipelineEngine, ranks: Ranks, mesh: Mesh, layout_keys: tuple[str, ...]) -> None:
        super().__init__(deepspeed, ranks, mesh, layout_keys)
        self._pipeline: PipelineLanguageModel = deepspeed.module
        self._shape: torch.Size | None = None
        """Shape of the micro-batches that stages of the pipeline expect from each other."""
        self.first: MicroBatch
        """The first micro-batch of the schedule that is running."""
        _check_groups(deepspeed, ranks)
        # DeepSpeed looks up the method for each instruction of its schedule here. `update` runs the optimizer step.
        ours = {ReduceTiedGrads: _reduce_tied, OptimizerStep: lambda engine, **_: None}
        deepspeed._INSTRUCTION_MAP = {**deepspeed._INSTRUCTION_MAP, **ours}
        deepspeed._compute_loss = False  # the last stage's output is the loss already

    def forward_backward(
        self, micros: Sequence[MicroBatch], weight: Callable[[], int], objective: LossFunction = NEXT_TOKEN
    ) -> list[Tensor]:
        """Compute the gradient of a step without train_batch(), which would wait for the device and broadcast the
        loss."""
        engine, module = self.deepspeed, self._pipeline
        self._accumulate(len(micros))
        if micros[0].inputs.shape != self._shape:
            engine.reset_activation_shape()
            self._shape = micros[0].inputs.shape
        equal_shares = engine.gradient_accumulation_steps() * engine.dp_world_size
        module.factor = lambda: equal_shares / weight()
        module.train()
        heart.phase("forward")
        return self._run(list(micros), engine._train_schedule(), objective)

    def _optimizer_step(self) -> None:
        PipelineEngine._exec_optimizer_step(self.deepspeed)

    def _run(self, micros: list[MicroBatch], schedule: Any, objective: LossFunction) -> list[Tensor]:
        """Run a pipeline schedule. Returns each micro-batch's sums of figures on the last pipeline stage, zeros on the
        others."""
        engine, module = self.deepspeed, self._pipeline
        self.first = micros[0]
        module.sums = []
        module.losses.clear()
        engine.total_loss = None
        engine.set_dataiterator(self._inputs(micros, objective))
        with self._attention(micros):
            engine._exec_schedule(schedule)
        progress.mark()
        sums, module.sums = module.sums, []
        return sums or [torch.zeros(len(objective.figures), device=self._ranks.device) for _ in micros]

    def _inputs(self, micros: list[MicroBatch], objective: LossFunction) -> Iterator[tuple[Any, None]]:
        """Yield (inputs of the first pipeline stage, None for the labels, which the last stage has in `losses`)."""
        for micro in micros:
            heart.beat()
            progress.mark()  # after the work of earlier micro-batches in the device's queue
            there = self._on_device(micro)
            if self.deepspeed.is_last_stage():  # its next forward pass is this micro-batch's
                self._pipeline.losses.append(functools.partial(objective.sums, micro=there))
            yield (there.inputs if there.positions is None else (there.inputs, there.positions)), None

    @torch.no_grad()
    def evaluate(
        self, batches: Iterable[MicroBatch], objective: LossFunction = NEXT_TOKEN
    ) -> tuple[dict[str, float], int]:
        engine, module = self.deepspeed, self._pipeline
        micros = list(batches)
        module.eval()
        # The first message of a call carries the shape for all its micro-batches: with a shape in every message, a
        # pipeline stage would wait for its device each time.
        assert len({micro.inputs.shape for micro in micros}) == 1
        engine.reset_activation_shape()
        try:
            sums = self._run(micros, engine._inference_schedule(len(micros)), objective)
        finally:
            engine.reset_activation_shape()
            module.train()
        weight = sum(map(objective.weight, micros)) if engine.is_last_stage() else 0
        return self._figures(objective, torch.stack(sums).double().sum(0), weight)


def _reduce_tied(engine: PipelineEngine) -> None:
    """Sum the gradient of a tied weight over the two pipeline stages that hold it. DeepSpeed's _exec_reduce_tied_grads
    reads only `weight.grad`, which is None if ZeRO accumulates in another precision (data_types.grad_accum_dtype)."""
    for weight, group in engine.module.get_tied_weights_and_groups():
        if weight.requires_grad:
            dist.all_reduce(engine.optimizer.get_param_gradient_attribute(weight), group=group)


def _check_groups(engine: PipelineEngine, ranks: Ranks) -> None:
    """Refuse pipeline stages with different numbers of parameter groups: with an offloaded optimizer DeepSpeed sums the
    gradient norm over the stages group by group, and would wait for ever for a stage with fewer groups. Raises
    AgreedError: on every rank."""
    if not engine.optimizer.cpu_offload:
        return  # one sum over all groups: engine/deepspeed/zero_step.py
    counts = ranks.gather(len(base_optimizer(engine).param_groups))
    if len(set(counts)) > 1:
        raise AgreedError(
            "pipeline.stages: some pipeline stages of this model have only matrices or only vectors, others both, but "
            "with zero_optimization.offload_optimizer DeepSpeed's gradient norm needs equally many parameter groups on "
            "all. Remove offload_optimizer, or use ZeRO without a pipeline.",
            ModelError.exit_code,
        )
