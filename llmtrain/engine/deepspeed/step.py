"""One optimizer step and one evaluation, the same for every ZeRO stage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llmtrain.cluster.watch.heartbeat import heart
from llmtrain.data.loader import MicroBatch, StepBatch
from llmtrain.dist.control import Agreement
from llmtrain.dist.ranks import Ranks
from llmtrain.engine import progress
from llmtrain.engine.deepspeed.fragments import base_optimizer
from llmtrain.errors import ModelError, TrainingStopped
from llmtrain.models import varlen
from llmtrain.models.attention import gets_mask, without_cudnn
from llmtrain.models.experts import RoutingFigures
from llmtrain.models.language import compare_losses
from llmtrain.models.loss import IGNORE
from llmtrain.models.parallel.mesh import Mesh
from llmtrain.models.varlen import Documents, set_documents


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step left on the device. Reading a tensor here waits for the device: do it at log points only."""

    local_loss_sum: Tensor
    """Summed loss of this rank's tokens (nats), fp32 scalar."""
    micro_losses: list[Tensor]
    """The same for each micro-batch, to find the bad one when a step is skipped."""
    skipped: bool
    """The gradient (or the loss) was not finite: the parameters were left alone."""
    grad_norm: Tensor | float | None
    """Global gradient norm before clipping."""


class Stepper:
    """Runs micro-batches through the DeepSpeed engine with the loss weighted by tokens of the global batch."""

    def __init__(self, engine: Any, ranks: Ranks, mesh: Mesh) -> None:
        self.engine = engine
        self._ranks = ranks
        self._mesh = mesh
        self._own_tokens = int(mesh.place.tensor == 0)  # the ranks of a tensor-parallel group have the same loss
        self._varlen = engine.module.config._attn_implementation == varlen.NAME
        self._must_look = engine.zero_optimization_stage() == 3
        """Whether it is not yet known that ZeRO 3 takes every gradient."""

    def forward_backward(self, micro: MicroBatch, agreement: Callable[[], Agreement]) -> Tensor:
        """One micro-batch of a global batch whose counted tokens all ranks agree on. The agreement is asked for after
        the forward pass, so that it overlaps with the computation.

        Returns the summed loss of the micro-batch. DeepSpeed divides by the accumulation steps and averages
        over the ranks with other tokens, as if all held equally many; the factor undoes both.
        """
        engine = self.engine
        equal_shares = engine.gradient_accumulation_steps() * engine.seq_dp_world_size
        heart.phase("forward")
        with self._attention([micro]):
            loss_sum = engine(*self._tensors(micro))
            part = loss_sum / max(1, agreement().counted_tokens)
            if engine.module.balance is not None:  # its parts add up over the ranks, and each micro-batch has its own
                part = part + engine.module.balance / engine.gradient_accumulation_steps()
            heart.phase("backward")
            engine.backward(part * equal_shares)
        progress.mark()
        return loss_sum.detach()

    def step(
        self,
        batch: StepBatch,
        agreement: Callable[[], Agreement],
        lr_factor: float,
        before_update: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """All micro-batches of one optimizer step, then the update with peak learning rates x `lr_factor`.

        `before_update` is called when the gradients are there and the optimizer has not written yet.
        """
        losses = []
        for micro in batch.micro_batches:
            losses.append(self.forward_backward(micro, agreement))
            if len(losses) < len(batch.micro_batches):
                self.engine.step()  # counts the micro-batch; updates nothing before the last one
        for group in base_optimizer(self.engine).param_groups:
            group["lr"] = group["peak_lr"] * lr_factor
        before_update()
        heart.phase("step")
        self._update()
        progress.mark()
        return StepResult(
            local_loss_sum=torch.stack(losses).sum(),
            micro_losses=losses,
            skipped=bool(getattr(self.engine.optimizer, "overflow", False)),
            grad_norm=self._grad_norm(),
        )

    def routing(self) -> RoutingFigures | None:
        """What the routers of a mixture of experts did since the last call; every rank calls it, at log points."""
        routing = getattr(self.engine.module, "routing", None)
        if routing is None:
            return None
        return routing.take(self._ranks.control, counts=self._mesh.place.tensor == 0)

    def _update(self) -> None:
        """DeepSpeed's step."""
        if self._must_look:
            self._refuse_lost_gradients()
            self._must_look = False
        self._guarded(self.engine.step)

    def _refuse_lost_gradients(self) -> None:
        """ZeRO 3 takes a gradient where the module of the parameter is called, and drops what else there is of one.

        Raises: ModelError, on all ranks alike.
        """
        lost = [name for name, parameter in self.engine.module.named_parameters() if parameter.grad is not None]
        if lost:
            raise ModelError(
                f"model: ZeRO 3 would drop the gradients of {len(lost)} parameters in silence, first of {lost[0]}: "
                "other code than the forward method of its module uses it. Set zero_optimization.stage to 2 or less."
            )

    def _guarded(self, step: Callable[[], Any]) -> None:
        """Raises TrainingStopped, on all ranks alike, when fp16 has no smaller loss scale left."""
        try:
            step()
        except Exception as error:  # DeepSpeed raises no class of its own here (fp16/loss_scaler.py)
            if "loss scale already at minimum" not in str(error):
                raise
            raise TrainingStopped(
                "fp16: the gradient is not finite at the smallest loss scale (fp16.min_loss_scale). Lower optim.lr, "
                "or train in bf16."
            ) from error

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> tuple[float, int]:
        """(mean loss in nats, counted tokens) over all ranks. Every rank must get equally many micro-batches."""
        module = self.engine.module
        module.eval()
        loss = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        counted = 0
        try:
            for micro in batches:
                heart.beat()
                with self._attention([micro]):
                    loss_sum = self.engine(*self._tensors(micro))
                progress.mark()
                loss += loss_sum.double()
                if self._mesh.place.sequence == 0:
                    counted += int((micro.labels >= 0).sum())  # of host memory: the device is not waited for
        finally:
            module.train()
        total = torch.tensor([float(loss), counted], dtype=torch.float64) * self._own_tokens
        dist.all_reduce(total, group=self._ranks.control)
        return float(total[0] / total[1].clamp(min=1)), int(total[1])

    def global_loss(self, local_loss_sum: Tensor, counted_tokens: int) -> float:
        """Mean loss of a step over the global batch (nats). Waits for the device; every rank must call it."""
        total = local_loss_sum.double().cpu() * self._own_tokens
        dist.all_reduce(total, group=self._ranks.control)
        return float(total) / max(1, counted_tokens)

    @torch.no_grad()
    def check_head(self, inputs: Tensor) -> None:
        """Compare our loss on `inputs` [1, T] with the one of transformers' own logits.

        A head that scales or caps its logits in a way that we do not know would train on a wrong loss in silence.

        Raises:
            ModelError: they differ by more than rounding.
        """
        module = self.engine.module
        inputs = self._shareable(inputs)
        labels = inputs.roll(-1, dims=1)
        ours, _ = self.evaluate([MicroBatch(inputs=inputs, labels=labels, sample_indices=[])])
        module.eval()
        logits = module.logits(self._move(inputs)).float()
        labels = self._move(labels)
        module.train()
        theirs = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
        self._compare_losses(ours, theirs)

    def _compare_losses(self, ours: float, theirs: float) -> None:
        """Raises ModelError when the loss in chunks is not the one of transformers' logits."""
        compare_losses(self.engine.module.hf, ours, theirs)

    def check_isolation(self, inputs: Tensor) -> None:
        """Prove on `inputs` [1, T], as two documents in a row, that nothing of the first reaches the second.

        Raises:
            ModelError: the model attends across documents in spite of data.isolate_documents.
        """
        inputs = self._shareable(inputs)
        half = inputs.shape[1] // 2
        positions = torch.arange(inputs.shape[1]).remainder(half).unsqueeze(0)
        labels = inputs.roll(-1, dims=1)
        labels[:, :half] = IGNORE
        other = inputs.clone()
        other[:, :half] = inputs[:, :half].flip(1).roll(1, dims=1)
        losses = []
        for tokens in (inputs, other):
            micro = MicroBatch(inputs=tokens, labels=labels, sample_indices=[], positions=positions)
            losses.append(self.evaluate([micro])[0])
        if not abs(losses[0] - losses[1]) <= 1e-5 * max(1.0, abs(losses[0])):
            raise ModelError(
                "data.isolate_documents: with other tokens in a row's first document the loss of its second changes "
                f"from {losses[0]:.6f} to {losses[1]:.6f}. This model makes its attention mask without positions; set "
                "data.isolate_documents to false."
            )

    def _attention(self, micros: list[MicroBatch]) -> AbstractContextManager[None]:
        """In which these are computed, forward and backward: without cuDNN where attention gets a mask tensor."""
        masked = self._ranks.device.type == "cuda" and any(
            gets_mask(self.engine.module.config, micro.inputs.shape[1], documents=micro.positions is not None)
            for micro in micros
        )
        return without_cudnn() if masked else contextlib.nullcontext()

    def _shareable(self, inputs: Tensor) -> Tensor:
        """As many columns as the ranks of a row can share."""
        return inputs[:, : inputs.shape[1] // self._mesh.degrees.sequence * self._mesh.degrees.sequence]

    def _tensors(self, micro: MicroBatch) -> tuple[Tensor | None, ...]:
        """What the module's forward takes."""
        if self._varlen:
            set_documents(None if micro.positions is None else Documents.of(micro.positions, self._ranks.device))
        positions = None if micro.positions is None else self._move(micro.positions)
        return self._move(micro.inputs), self._move(micro.labels), positions

    def _move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._ranks.device, non_blocking=True)

    def _grad_norm(self) -> Tensor | float | None:
        return getattr(self.engine.optimizer, "_global_grad_norm", None)
