"""DeepSpeed's engine behind `engine/api.py`, without a pipeline, for every ZeRO stage."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from deepspeed.utils import groups
from torch import Tensor

from llmtrain import features
from llmtrain.base.errors import ModelError, TrainingStopped
from llmtrain.base.rank.heartbeat import heart
from llmtrain.data.batches import MicroBatch
from llmtrain.engine import progress
from llmtrain.engine.api import Counters, ForwardCopy, GradientPiece, LateUpdate, StateTensor, Update
from llmtrain.engine.deepspeed.state import HalfState, PlainState, State, Zero3State, Zero12State
from llmtrain.engine.deepspeed.zero_step import OneNormZero
from llmtrain.engine.losses.function import NEXT_TOKEN, LossFunction
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.models import transformers_private
from llmtrain.models.language import LanguageModel
from llmtrain.models.parallel.mesh import Mesh
from llmtrain.models.parameters import LocalParameter
from llmtrain.models.skeleton import layer_configs

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


_WINDOWED = ("sliding", "chunked", "compressed", "window")
"""Words that mark windowed attention in the layer_types of a transformers configuration."""


# torch orders its attention kernels itself, and on Hopper and Blackwell takes cuDNN's first if its version is right
# (torch 2.11 and later, ATen/native/transformers/cuda/sdp_utils.cpp, check_prefer_cudnn_attention). We switch cuDNN off
# in one case: with a mask tensor and some lengths, its gradient of the queries is NaN (pytorch issue 196678, torch 2.11
# to 2.13).


def gets_mask(config: PreTrainedConfig, length: int, *, documents: bool) -> bool:
    """Return True if transformers passes torch's attention a mask tensor in any layer for rows of `length` tokens;
    otherwise attention is plainly causal. `documents`: rows hold several documents, and attention stays within each."""
    return documents or any(_layer_gets_mask(layer, length) for layer in layer_configs(config.get_text_config()))


def _layer_gets_mask(config: PreTrainedConfig, length: int) -> bool:
    kinds = getattr(config, "layer_types", None) or ()
    if getattr(config, "alibi", False) or "indexed_attention" in kinds:
        return True
    if kinds and not any(word in kind for word in _WINDOWED for kind in kinds):
        return False
    windows = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return any(window is not None and window <= length for window in windows)


@contextlib.contextmanager
def without_cudnn() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


_SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Fields of DeepSpeed's loss scaler; which of them exist depends on fp16.loss_scale."""


def state_of(engine: DeepSpeedEngine) -> State:
    stage, elsewhere = engine.zero_optimization_stage(), features.state(engine)
    if elsewhere is not None:
        state: State = elsewhere
        return state
    if stage > 0:
        return Zero3State(engine) if stage == 3 else Zero12State(engine)
    return HalfState(engine) if engine.bfloat16_enabled() or engine.fp16_enabled() else PlainState(engine)


@contextlib.contextmanager
def _stepping_only_if(base: Any, steps: Callable[[Any], bool]) -> Iterator[None]:
    name = "plain_step" if hasattr(base, "plain_step") else "step"  # behind the guard of ZeRO 0 in fp32 (build.py)
    plain, is_own = getattr(base, name), name in vars(base)
    setattr(base, name, lambda *given, **named: plain(*given, **named) if steps(base) else None)
    try:
        yield
    finally:
        if is_own:
            setattr(base, name, plain)
        else:
            delattr(base, name)


def _read_later(number: Tensor) -> Callable[[], float]:
    """Begin to copy a number to the host. The returned function waits for that copy only; `item` would also wait for
    later work of the device."""
    if number.device.type != "cuda":
        return number.item
    there, event = torch.zeros_like(number, device="cpu").pin_memory(), torch.cuda.Event()
    there.copy_(number, non_blocking=True)
    event.record()

    def read() -> float:
        event.synchronize()
        return there.item()

    return read


class ZeroEngine:
    """Runs micro-batches through DeepSpeed's engine; the loss is divided by the weight of the global batch."""

    is_pipeline = False

    def __init__(self, deepspeed: DeepSpeedEngine, ranks: Ranks, mesh: Mesh, layout_keys: tuple[str, ...]) -> None:
        self.layout_keys = layout_keys
        self.deepspeed = deepspeed
        """DeepSpeed's engine: for tests and benchmarks, and for this package."""
        self.module: LanguageModel = deepspeed.module
        self.device = ranks.device
        self.forward_dtype = torch.float32
        if deepspeed.bfloat16_enabled() or deepspeed.fp16_enabled():
            self.forward_dtype = torch.bfloat16 if deepspeed.bfloat16_enabled() else torch.float16
        self.mesh = mesh
        self._ranks = ranks
        self._state = state_of(deepspeed)
        self._own_sums = int(mesh.place.tensor == 0)  # the ranks of a tensor-parallel group have the same loss
        self._varlen = transformers_private.attention_of(self.module.config) == transformers_private.VARLEN
        self.partitions_parameters = self._state.partitions_parameters
        self._must_look = self.partitions_parameters
        """True until a check has shown that ZeRO 3 takes every gradient."""

    def forward_backward(
        self, micros: Sequence[MicroBatch], weight: Callable[[], int], objective: LossFunction = NEXT_TOKEN
    ) -> list[Tensor]:
        self._accumulate(len(micros))
        sums: list[Tensor] = []
        for micro in micros:
            sums.append(self.micro_step(micro, weight, objective))
            if len(sums) < len(micros):
                self.deepspeed.step()  # counts the micro-batch; updates nothing before the last one
        return sums

    def _accumulate(self, steps: int) -> None:
        """Set the number of micro-batches in the next optimizer step; the stages of a run may differ in it."""
        engine = self.deepspeed
        if steps != engine.gradient_accumulation_steps():
            engine.set_train_batch_size(steps * engine.train_micro_batch_size_per_gpu() * engine.dp_world_size)
            engine.micro_steps = 0  # DeepSpeed recognises a step's last micro-batch by micro_steps modulo this number

    def micro_step(self, micro: MicroBatch, weight: Callable[[], int], objective: LossFunction) -> Tensor:
        """Run the forward and backward pass of one micro-batch, and return the sums of the objective's figures, fp32
        [figures]. DeepSpeed divides by the accumulation steps and averages over the data-parallel ranks, as if all
        micro-batches counted equally many tokens; the factor `equal_shares` undoes both."""
        engine = self.deepspeed
        equal_shares = engine.gradient_accumulation_steps() * engine.seq_dp_world_size
        heart.phase("forward")
        with self._attention([micro]):
            sums = self._sums(micro, objective)
            part = sums[0] / weight()
            # The parts of the balancing loss add up over the ranks, and each micro-batch has its own.
            if self.module.balance is not None:
                part = part + self.module.balance / engine.gradient_accumulation_steps()
            heart.phase("backward")
            engine.backward(part * equal_shares)
        progress.mark()
        return sums.detach()

    def update(self, lr_factor: float, leave_out: Callable[[float], bool] | None = None) -> Update:
        for group in self._state.base.param_groups:
            group["lr"] = group["peak_lr"] * lr_factor
        heart.phase("step")
        if self._must_look:  # ZeRO 3 takes gradients only of parameters used inside their own module's call
            lost = [name for name, parameter in self.module.named_parameters() if parameter.grad is not None]
            if lost:
                raise ModelError(
                    f"model: ZeRO 3 would drop the gradients of {len(lost)} parameters, the first {lost[0]}: code "
                    "outside the forward method of its module uses it. Set zero_optimization.stage to 2 or less."
                )
            self._must_look = False
        optimizer, left_out = self.deepspeed.optimizer, list[bool]()

        def steps(_: Any) -> bool:
            if not left_out and leave_out is not None:
                left_out.append(leave_out(float(optimizer._global_grad_norm)))
            return not any(left_out)

        try:
            with (
                self._scale_of_the_gradients(),
                contextlib.nullcontext() if leave_out is None else self._only_if(steps),
            ):
                self._optimizer_step()
        except Exception as error:  # DeepSpeed raises no class of its own here (fp16/loss_scaler.py)
            if "loss scale already at minimum" not in str(error):
                raise
            raise TrainingStopped(
                "fp16: the gradient is not finite at the smallest loss scale (fp16.min_loss_scale). Lower optim.lr, "
                "or train in bf16."
            ) from error
        progress.mark()
        if isinstance(optimizer, OneNormZero) and isinstance(optimizer._global_grad_norm, Tensor):
            return LateUpdate(_read_later(optimizer._global_grad_norm))
        skipped = bool(optimizer.overflow) or any(left_out)
        return Update(skipped=skipped, grad_norm=optimizer._global_grad_norm, left_out=any(left_out))

    @contextlib.contextmanager
    def _only_if(self, steps: Callable[[Any], bool]) -> Iterator[None]:
        """A context in which the torch optimizer steps only if `steps` returns True. DeepSpeed has computed the norm by
        then, and frees the gradients afterwards in both cases."""
        with contextlib.ExitStack() as stack:
            if isinstance(self.deepspeed.optimizer, OneNormZero):
                stack.enter_context(self.deepspeed.optimizer.reading_norm())
            for base in (self._state.base, getattr(self._state.optimizer, "backup_optimizer", None)):
                if base is not None:
                    stack.enter_context(_stepping_only_if(base, steps))
            yield

    def gradients(
        self,
        micros: Sequence[MicroBatch],
        weight: int,
        take: Callable[[GradientPiece], None],
        objective: LossFunction = NEXT_TOKEN,
        *,
        alone: bool = False,
    ) -> list[Tensor]:
        if alone:
            return [self._own_gradient(micro, weight, take, objective) for micro in micros]
        pieces_at: dict[int, list[tuple[StateTensor, slice]]] = {}
        for home in self._state.homes():
            piece = home.tensor("gradient", home.flat)
            place = slice(home.offset + piece.own.start, home.offset + piece.own.stop)
            pieces_at.setdefault(id(home.flat), []).append((piece, place))

        def look(base: Any) -> bool:
            for flat in (flat for group in base.param_groups for flat in group["params"] if flat.grad is not None):
                for piece, place in pieces_at.get(id(flat), ()):
                    values = flat.grad.detach().reshape(-1)[place]
                    take(GradientPiece(name=piece.name, region=piece.own_region, values=values))
            return False

        optimizer, scale = self.deepspeed.optimizer, self._loss_scale()
        sums = self.forward_backward(micros, lambda: weight, objective)
        clip, optimizer.clip_grad = optimizer.clip_grad, 0.0
        with self._only_if(look):
            self._optimizer_step()
        optimizer.clip_grad = clip
        self._set_loss_scale(scale)
        return sums

    def _own_gradient(
        self, micro: MicroBatch, weight: int, take: Callable[[GradientPiece], None], objective: LossFunction
    ) -> Tensor:
        trained = [parameter_here for parameter_here in self._state.local_parameters() if parameter_here.trains]

        def took(parameter_here: LocalParameter, gradient: Tensor) -> Tensor:
            take(GradientPiece(name=parameter_here.name, region=parameter_here.region, values=gradient.reshape(-1)))
            return gradient.new_zeros(()).expand_as(gradient)  # keeping the complete gradients would take memory

        with contextlib.ExitStack() as stack:
            stack.enter_context(self._attention([micro]))
            stack.enter_context(autocast_if_enabled(self.deepspeed))
            for parameter_here in trained:
                stack.enter_context(parameter_here.parameter.register_hook(functools.partial(took, parameter_here)))
            # Call the module: after DeepSpeed's forward pass its hooks would take these gradients.
            sums = self._sums(micro, objective, self.module)
            loss = sums[0] / weight * self._loss_scale().get("cur_scale", 1.0)
            torch.autograd.grad(loss, [parameter_here.parameter for parameter_here in trained], allow_unused=True)
            return sums.detach()

    @contextlib.contextmanager
    def _scale_of_the_gradients(self) -> Iterator[None]:
        """A context at whose end, not earlier, a dynamic loss scale grows (fp16). DeepSpeed 0.19.8 raises the scale
        before it divides the gradients by it (step in zero/stage_1_and_2.py and stage3.py): after `loss_scale_window`
        good steps, one step used half of its gradient."""
        scaler = self._scaler()
        if scaler is None:
            yield
            return
        update_scale, grown = scaler.update_scale, []
        scaler.update_scale = lambda overflow: update_scale(overflow) if overflow else grown.append(overflow)
        try:
            yield
        finally:
            del scaler.update_scale
        for overflow in grown:
            update_scale(overflow)

    def _optimizer_step(self) -> None:
        self.deepspeed.step()  # of ZeRO 1 and 2: OneNormZero (zero_step.py)

    @torch.no_grad()
    def evaluate(
        self, micros: Iterable[MicroBatch], objective: LossFunction = NEXT_TOKEN
    ) -> tuple[dict[str, float], int]:
        module = self.module
        module.eval()
        sums = torch.zeros(len(objective.figures), dtype=torch.float64, device=self._ranks.device)
        weight = 0
        try:
            for micro in micros:
                heart.beat()
                with self._attention([micro]):
                    sums += self._sums(micro, objective).double()
                progress.mark()
                if self.mesh.place.sequence == 0:
                    weight += objective.weight(micro)  # reads host memory, so it does not wait for the device
        finally:
            module.train()
        return self._figures(objective, sums, weight)

    def _figures(self, objective: LossFunction, sums: Tensor, weight: int) -> tuple[dict[str, float], int]:
        message = torch.cat([sums.cpu(), torch.tensor([weight], dtype=torch.float64)])
        *totals, counted = self._ranks.sum(message * self._own_sums).tolist()
        means = (total / (counted or torch.nan) for total in totals)
        return dict(zip(objective.figures, means, strict=True)), int(counted)

    def _attention(self, micros: list[MicroBatch]) -> AbstractContextManager[None]:
        masked = self._ranks.device.type == "cuda" and any(
            gets_mask(self.module.config, micro.inputs.shape[1], documents=micro.positions is not None)
            for micro in micros
        )
        return without_cudnn() if masked else contextlib.nullcontext()

    def _sums(self, micro: MicroBatch, objective: LossFunction, forward: Callable[..., Any] | None = None) -> Tensor:
        """Run the forward pass (models/language.py), whose head (models/head.py) calls the objective; return the
        sums."""
        on_device = self._on_device(micro)
        sums: Tensor = (forward or self.deepspeed)(
            on_device.inputs, functools.partial(objective.sums, micro=on_device), on_device.positions
        )
        return sums

    def _on_device(self, micro: MicroBatch) -> MicroBatch:
        if self._varlen:
            from llmtrain.models.varlen import Documents, set_documents

            set_documents(None if micro.positions is None else Documents.of(micro.positions, self._ranks.device))
        return micro.to(self._ranks.device)

    # State

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.module.shapes()

    def state(self) -> list[StateTensor]:
        return self._state.tensors()

    def copies(self) -> Iterator[ForwardCopy]:
        return self._state.copies()

    def reading_instead(
        self, names: Collection[str], values: Callable[[ForwardCopy], Tensor]
    ) -> AbstractContextManager[None]:
        return self._state.reading_instead(names, values)

    def refresh(self) -> None:
        self._state.refresh()

    def counters(self) -> Counters:
        step = next((state["step"] for state in self._state.base.state.values() if "step" in state), 0)
        return Counters(optimizer_step=step, loss_scale=self._loss_scale())

    def set_counters(self, counters: Counters) -> None:
        for state in self._state.base.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"].fill_(counters.optimizer_step)
            elif "step" in state:
                state["step"] = counters.optimizer_step
        self._set_loss_scale(counters.loss_scale)

    def _loss_scale(self) -> dict[str, float]:
        scaler = self._scaler()
        return {} if scaler is None else {key: getattr(scaler, key) for key in _SCALER_KEYS if hasattr(scaler, key)}

    def _set_loss_scale(self, numbers: dict[str, float]) -> None:
        for key, value in numbers.items() if self.deepspeed.fp16_enabled() else ():
            setattr(self._scaler(), key, value)

    def _scaler(self) -> Any:
        return self.deepspeed.optimizer.loss_scaler if self.deepspeed.fp16_enabled() else None

    def close(self) -> None:
        self.deepspeed.destroy()
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # DeepSpeed refuses to make a second one (hpZ)
