"""The optimizer step of DeepSpeed's ZeRO 1 and 2 with few kernels, and with one wait for the device or none.

DeepSpeed 0.19.8 looks at each tensor's extremes, takes each tensor's norm in a copy, reads four numbers on the host and
multiplies every gradient by the clipping factor even if that is 1: 4,153 kernels a step for 290 tensors (measured).

- One norm over the lists of gradients replaces this: it is finite exactly if every gradient is. - On a GPU in bf16,
torch's fused AdamW takes the norm: its kernel divides by norm / clip if that is above 1, and changes nothing if the
norm is not finite, so the host goes on before the device knows. With other optimizers and with fp16's loss scale the
host waits for the norm. - DeepSpeed copies the gradients of a reduced bucket into a second set before the first is
freed, 2 bytes a parameter; here they are added to the sums directly. Adding a bf16 gradient to fp32 sums moves 10 bytes
an element on one rank (DeepSpeed: 30 to 54), and 16 plus a message on eight. - With a separate stream for reductions
(overlap_comm), DeepSpeed stops the host until the device is idle, after each micro-batch and before each reduction to
one rank; here one stream waits for the other.

The replaced methods are private to DeepSpeed. Their code, without comments, is compared by checksum: if it differs,
DeepSpeed's own step stays, which computes the same, except for Muon with fp32 sums.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import BFLOAT16, ZERO_OPTIMIZATION, DeepSpeedEngine
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.runtime.zero.utils import get_norm_dtype
from torch import Tensor

from llmtrain.base.errors import ConfigError
from llmtrain.models.transformers_private import storage_of

LARGEST_GROUP = 500_000_000
"""Most elements of a parameter group: ZeRO 1 and 2 copy the gradients of one group at a time to fp32, 4 bytes an
element. A larger tensor is a group of its own."""
WIDENED = 2**17
"""Most elements of a gradient that a CPU copies to fp64 at a time for the norm: the copy stays in its cache."""

_LONG = 1 << 20
"""Elements: a stretch of a bucket with at least this many is sent without a copy; shorter stretches share a message."""

_KNOWN = {
    # Methods that OneNormZero replaces,
    "has_overflow": "7ae18729bbefc9b8",
    "scaled_global_norm": "8615f0cb481ee131",
    "unscale_and_clip_grads": "f8c6c56c31527803",
    "copy_grads_in_partition": "ce578c65c8d0f16e",
    "get_all_grad_tensors": "4188033d2f693188",
    "independent_gradient_partition_epilogue": "21d76d2fb26e6fa8",
    "allreduce_and_copy": "83fad9bd92ec6fcf",
    "_record_gradient_stream": "d3e9b17a767e722b",
    "_get_compact_grad_partition_slice": "50b8e8cb7803bb63",
    "_add_to_grad_partition_buffer": "706c82be2f757a0e",
    "process_gradients": "e15d2fb651220cf5",
    "reduce_gradients": "2fa439c9a650c512",
    "_fill_param_grad_accum_attribute": "93f4200e1c6fcc5d",
    "_gradient_reduction_buffer_dtype": "bdaa503e288fe351",
    "allreduce_no_retain": "a43de9e7cc844ce8",
    "_get_preflattened_grad_partition": "9423353250669723",
    # and methods that call these, or that these replace in effect.
    "step": "b617531e5adc436d",
    "get_grad_norm_direct": "de88e699fe6d4178",
    "get_flat_partition": "e0f300eeb9442788",
    "_get_flat_partition_unpadded": "5d1880ef8a0d276d",
    "reduce_ipg_grads": "390788241d90c25a",
    "reduce_independent_p_g_buckets_and_remove_grads": "fe843fca00ca97c4",
    "average_tensor": "9208c5b7c05b016a",
    "allreduce_bucket": "aefc9e92600bdc13",
    "allreduce_and_copy_with_multiple_ranks": "59817aabe705c03f",
    "setup_buckets": "9823b6d95474a665",
    "flatten_dense_tensors_aligned": "aef957743682561c",
    "_get_compact_grad_partition_buffer": "b8ebde0e30418a0d",
    "_build_compact_grad_partition_buffer": "704790ecd5df04f0",
    "finalize_gradient_accumulation_boundary": "dc6ed0d1812b48bd",
    "create_gradient_handling_hooks": "062e9951e65350b9",
}
"""Method of DeepSpeed's optimizer -> checksum of its code (`_checksum`) in DeepSpeed 0.19.8."""


class OneNormZero(DeepSpeedZeroOptimizer):
    """DeepSpeed's optimizer of ZeRO 1 and 2 with this module's methods; `shorten_step` sets this class on a live
    one."""

    def copy_grads_in_partition(self, param: Any, group_idx: int | None = None) -> None:
        """Add a reduced gradient from its bucket to the sum; the first micro-batch's gradient is copied."""
        if self._use_compact_grad_partition_buffer(group_idx):  # with fp32 sums it has been added already
            super().copy_grads_in_partition(param, group_idx)
            return
        gradient = self.get_gradient_for_reduction(param)
        sums = self.all_grad_tensors.get(group_idx)
        if sums is None:
            gradient.data = gradient.detach().clone()
        else:
            sums[self._places[param]].add_(gradient)
            self.clear_grad_attribute(param)

    def get_all_grad_tensors(self, tensor_list: list[Any], dtype: torch.dtype) -> list[Tensor]:
        """Return a micro-batch's gradients that are not in the sums yet: all for the first micro-batch, none for the
        others. Without contiguous_gradients always all, because DeepSpeed then never calls
        `copy_grads_in_partition`."""
        index = next(i for i, parameters in enumerate(self.params_in_partition) if parameters is tensor_list)
        if self.contiguous_gradients and self.all_grad_tensors.get(index) is not None:
            return []
        found: list[Tensor] = super().get_all_grad_tensors(tensor_list, dtype)
        return found

    def _get_compact_grad_partition_slice(
        self, group_idx: int, partition_id: int, param_id: int, num_elements: int
    ) -> Tensor | bool | None:
        """Return the fp32 sums for a reduced gradient; False for a matrix of Muon, whose gradient has no such sums.
        DeepSpeed returns None for such a matrix, joins it to its predecessor in the bucket, and then loses the sums of
        that predecessor: most norms and biases of a run never trained."""
        found = super()._get_compact_grad_partition_slice(group_idx, partition_id, param_id, num_elements)
        own = partition_id == dist.get_rank(self.real_dp_process_group[group_idx])
        return False if found is None and own and self.gradient_accumulation_dtype != self.dtype else found

    def _add_to_grad_partition_buffer(self, output: Tensor | bool | None, source: Tensor) -> None:
        if isinstance(output, Tensor):
            output.add_(source, alpha=self._share)

    @functools.cached_property
    def _has_fp32_sums(self) -> bool:
        """Return True if all gradients are in half precision and summed in fp32; Muon's matrices are not."""
        muon = any(group.get("use_muon") for group in self.optimizer.param_groups)
        return self.gradient_accumulation_dtype == torch.float32 != self.dtype and not muon

    @functools.cached_property
    def _is_alone(self) -> bool:
        """True if no other rank has gradients of these parameters: they go through no bucket. A gradient that DeepSpeed
        would round to the dtype of a message goes through it on one rank, too."""
        rounded = any(torch.promote_types(kind, self.dtype) != kind for kind in self.ipg_buckets)
        exact = self._has_fp32_sums or (self.gradient_accumulation_dtype == self.dtype and not rounded)
        return exact and dist.get_world_size(self.dp_process_group) == 1

    @property
    def needs_hooks(self) -> bool:
        """False if nothing is done with a gradient before the backward pass of its micro-batch has ended."""
        early = self.partition_gradients or self.overlap_comm or self.use_grad_accum_attribute
        return self._has_fp32_sums if self._is_alone else bool(early)

    @functools.cached_property
    def _share(self) -> float:
        """Factor by which a reduced gradient is added to its sum. 1: DeepSpeed has divided it in the bucket, in an
        extra pass. A power of two is exact, so the sums equal DeepSpeed's to the last bit (fp16 would lose values below
        6e-8)."""
        ranks = dist.get_world_size(self.dp_process_group) // self.sequence_parallel_size
        buckets = self.contiguous_gradients and self.reduce_scatter and self.gradient_average
        fp32 = self.dtype == torch.bfloat16 and self.communication_data_type == torch.float32
        return 1.0 / ranks if self._has_fp32_sums and buckets and fp32 and ranks.bit_count() == 1 else 1.0

    def process_gradients(self, param: Any, i: int) -> None:
        """Take a gradient of the backward pass; on a single rank add it to fp32 sums at once."""
        if not self._is_alone:
            super().process_gradients(param, i)
        elif param.numel() and (self.use_grad_accum_attribute or getattr(param, "ds_grad_is_ready", True)):
            gradient, param.grad = param.grad, None
            sums = self._get_compact_grad_partition_slice(i, 0, self.get_param_id(param), param.numel())
            assert isinstance(sums, Tensor)
            sums, begun = sums.view_as(gradient), vars(self.averaged_gradients[i]).setdefault("begun", set())
            sums.add_(gradient) if param in begun else sums.copy_(gradient)
            begun.add(param)
            if self.use_grad_accum_attribute:  # a pipeline sums the gradients of its tied weights there
                param.grad_accum = sums

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        if self._is_alone:
            self.independent_gradient_partition_epilogue()
        else:
            self.setup_buckets()
            super().reduce_gradients(pipeline_parallel)

    def _fill_param_grad_accum_attribute(self, param: Any) -> None:
        """Add a gradient to this rank's sum in one pass; DeepSpeed widens it to fp32 in another pass first."""
        if param.grad is None or param.grad_accum is None:
            super()._fill_param_grad_accum_attribute(param)
        else:
            param.grad_accum.add_(param.grad.view(param.grad_accum.shape))
            param.grad = None

    def _gradient_reduction_buffer_dtype(self) -> torch.dtype:
        """Return the dtype of buckets: fp32 if gradients shall be widened as they are copied into the bucket."""
        return torch.float32 if self._share != 1.0 else super()._gradient_reduction_buffer_dtype()

    def allreduce_no_retain(
        self, bucket: list[Tensor], *given: Any, output_bucket: list[Any] | None = None, **named: Any
    ) -> None:
        """Reduce a bucket by stretches of neighbours; a long stretch is sent without copying it into a message."""
        outputs = output_bucket or [None] * len(bucket)
        for places in _messages(bucket):
            part, into = [bucket[place] for place in places], [outputs[place] for place in places]
            super().allreduce_no_retain(part, *given, output_bucket=into, **named)

    @functools.cached_property
    def _places(self) -> dict[Any, int]:
        """Parameter -> its index in its group's list of accumulated gradients."""
        return {parameter: place for group in self.params_in_partition for place, parameter in enumerate(group)}

    @property
    def _overlaps(self) -> bool:
        """Return True if a separate stream reduces buckets during the backward pass. Without buckets
        (contiguous_gradients false) DeepSpeed's waits stay."""
        return (
            bool(self.overlap_comm) and self.contiguous_gradients and not get_accelerator().resolves_data_dependency()
        )

    @contextlib.contextmanager
    def _on_one_stream(self) -> Iterator[None]:
        """A context in which DeepSpeed reduces on the current stream, and therefore does not wait."""
        self.overlap_comm = False
        try:
            yield
        finally:
            self.overlap_comm = True

    def independent_gradient_partition_epilogue(self) -> None:
        """End a micro-batch: the device's next work waits for the reductions, the host continues at once."""
        if self._is_alone:
            if self.is_gradient_accumulation_boundary():
                for index, parameters in () if self._has_fp32_sums else enumerate(self.params_in_partition):
                    self.all_grad_tensors[index] = self.get_all_grad_tensors(parameters, self.dtype)
                self.finalize_gradient_accumulation_boundary()
                self._clear_param_grad_only()
            self._epilogue_ran_this_backward = True
            return
        if not self._overlaps:
            super().independent_gradient_partition_epilogue()
            return
        self.reduce_ipg_grads()  # the last bucket, which super() then finds empty
        get_accelerator().current_stream().wait_stream(self.reduction_stream)
        with self._on_one_stream():
            super().independent_gradient_partition_epilogue()

    def allreduce_and_copy(self, *given: Any, **named: Any) -> None:
        """Reduce a part of a bucket to one rank or all, on the stream of reductions, which has waited for the
        bucket."""
        with self._on_one_stream() if self._overlaps else contextlib.nullcontext():
            super().allreduce_and_copy(*given, **named)

    def _record_gradient_stream(self, tensor: Tensor, stream: Any) -> None:
        """Keep the memory of a gradient that is larger than a bucket until its reduction has ended, although it is
        freed before. Buckets live until `independent_gradient_partition_epilogue`."""
        if self._overlaps and tensor.numel() > self.reduce_bucket_size:
            tensor.record_stream(stream)
        else:
            super()._record_gradient_stream(tensor, stream)

    def _get_preflattened_grad_partition(self, group_idx: int) -> Tensor | None:
        """Return a group's gradients as one tensor of the masters' dtype, or None if DeepSpeed shall join them itself.
        DeepSpeed joins gradients in half precision and then widens the result, which moves 10 bytes an element; here
        6."""
        found: Tensor | None = super()._get_preflattened_grad_partition(group_idx)
        gradients, masters = self.averaged_gradients[group_idx], self.single_partition_of_fp32_groups[group_idx]
        if found is not None or all(gradient.dtype == masters.dtype for gradient in gradients):
            return found
        flat = torch.empty(masters.numel(), dtype=masters.dtype, device=masters.device)
        *places, padding = flat.split([*(sizes := [g.numel() for g in gradients]), flat.numel() - sum(sizes)])
        torch._foreach_copy_([place.view_as(g) for place, g in zip(places, gradients, strict=True)], list(gradients))
        padding.zero_()
        return flat

    check_grad_overflow: bool
    reads_norm = False
    """True while a caller needs the norm, or the gradient, before the update: the host then waits for the norm."""

    @contextlib.contextmanager
    def reading_norm(self) -> Iterator[None]:
        """A context in which the norm is a float, and the torch optimizer never gets a gradient that is not finite."""
        self.reads_norm = True
        try:
            yield
        finally:
            self.reads_norm = False

    @functools.cached_property
    def _clips_in_kernel(self) -> bool:
        """Return True if the optimizer's kernel can divide by norm / clip, and can skip the update if the norm is not
        finite. On a CPU gradients are multiplied by the inverse instead, which differs from the division by a
        rounding."""
        fused = type(self.optimizer) is torch.optim.AdamW and all(g["fused"] for g in self.optimizer.param_groups)
        return fused and self.dtype == torch.bfloat16 and _on_gpu(self.bit16_groups_flat[0])

    def step(self, closure: Any = None) -> None:
        """Update the parameters. If the kernel clips, `_global_grad_norm` is a tensor afterwards, and `overflow` is
        False even if the update was skipped."""
        if not self._clips_in_kernel:
            super().step(closure)
            return
        checks = self.check_grad_overflow
        self.check_grad_overflow = checks and self.reads_norm  # DeepSpeed's check would wait for the norm
        try:
            super().step(closure)
        finally:
            self.check_grad_overflow = checks
            self.optimizer.grad_scale = self.optimizer.found_inf = None

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Return True if a gradient on any rank is not finite. Always False if a norm is computed, which shows it
        later."""
        return not self.compute_grad_norm and not math.isfinite(self.scaled_global_norm())

    def scaled_global_norm(self, norm_type: int = 2) -> float | Tensor:
        """Return the L2 norm of the complete gradient times the loss scale; not finite if a gradient on any rank is
        not. All ranks call it together. It waits for the device once; but if the kernel clips, it does not wait, and
        returns a tensor on the device (fp64, one element)."""
        assert norm_type == 2, norm_type
        norms: list[Tensor] = []
        for index in range(len(self.bit16_groups)):
            gradients = self._counted_gradients(index)
            if gradients:
                if not _on_gpu(gradients[0]):
                    gradients = [piece for g in gradients for piece in g.flatten().split(WIDENED)]
                found = torch._foreach_norm(gradients, 2, dtype=get_norm_dtype())
                if self._muon_update_lacks_loss_scale(index):
                    torch._foreach_mul_(found, self.loss_scale)
                norms.extend(found)
        if norms:
            square = torch.linalg.vector_norm(torch.stack(norms)).square()
        else:
            square = torch.zeros((), dtype=get_norm_dtype(), device=self.bit16_groups_flat[0].device)
        # No two ranks share a part of the gradient; shared experts are partitioned over some of the same ranks.
        for group in (self.dp_process_group, self.model_parallel_group):
            if group is not None and dist.get_world_size(group) > 1:
                dist.all_reduce(square, group=group)
        if self._clips_in_kernel:
            norm = square.sqrt()
            self.optimizer.found_inf = (~norm.isfinite()).float()
            if self.clip_grad > 0:
                self.optimizer.grad_scale = ((norm + 1e-6) / self.clip_grad).clamp_(min=1.0).float()
            if not self.reads_norm:
                return norm
        value = square.item()
        return math.sqrt(value) if math.isfinite(value) else math.inf

    def _counted_gradients(self, index: int) -> list[Tensor]:
        """Return this rank's gradients in a group that count in the norm: replicated ones count only on the first
        tensor-parallel rank, and on one of the two pipeline stages that have them."""
        gradients = [g for g in self.averaged_gradients[index] if not getattr(g, "_zero_padding", False)]
        parameters = self.params_in_partition[index]  # zip below drops padding at the end
        counts = [
            not getattr(parameter, "ds_pipe_replicated", False)
            and (self.model_parallel_rank == 0 or is_model_parallel_parameter(parameter))
            for parameter in parameters
        ]
        flat = getattr(self.averaged_gradients[index], "flat_partition", None)
        if flat is not None and all(counts):
            return [flat]  # its padding is zero
        return [gradient for gradient, wanted in zip(gradients, counts, strict=False) if wanted]

    def unscale_and_clip_grads(self, grad_groups_flat: list[Tensor], total_norm: float | None) -> None:
        """Divide the flat gradients by the loss scale, and by norm / clip_grad if that is above 1. `total_norm` still
        has the loss scale. Does nothing if the optimizer's kernel does this."""
        if self._clips_in_kernel:
            return
        factor = self.loss_scale
        if self.clip_grad > 0:
            assert total_norm is not None
            factor *= max(1.0, (total_norm / self.loss_scale + 1e-6) / self.clip_grad)
        if factor != 1.0:
            for gradient in grad_groups_flat:
                gradient.mul_(1.0 / factor)


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def shorten_step(engine: DeepSpeedEngine) -> str:
    """Give a new engine of ZeRO 1 or 2 this module's step. Other ZeRO stages and offloaded optimizers keep DeepSpeed's.

    Returns: a note for the log if DeepSpeed's own step stays because its code is not the known one; else "".

    Raises: ConfigError: DeepSpeed's own step would lose gradients next to Muon's matrices.
    """
    optimizer = engine.optimizer
    if type(optimizer) is not DeepSpeedZeroOptimizer or optimizer.cpu_offload:
        return ""
    if (note := own_step()) and _loses_sums(optimizer):
        raise ConfigError(
            f"deepspeed {deepspeed.__version__}: its {_changed()}, and llmtrain can correct its fp32 sums next to Muon "
            "(engine/deepspeed/zero_step.py) only in 0.19.8: norms and biases might not train. Install "
            "deepspeed==0.19.8, or sum gradients in bf16 (data_types.grad_accum_dtype)."
        )
    if note:
        return note
    optimizer.__class__ = OneNormZero
    optimizer.flatten = joined
    for hook in () if optimizer.needs_hooks else optimizer._grad_acc_hooks:
        hook.remove()
    if optimizer._share != 1.0:
        optimizer.gradient_average = False
    return ""


def own_step() -> str:
    """Return "" if ZeRO 1 and 2 run this module's step; else why they run the installed DeepSpeed's, and what that
    costs."""
    if not (changed := _changed()):
        return ""
    return (
        f"deepspeed {deepspeed.__version__}: its {changed}, so DeepSpeed's own step of ZeRO 1 and 2 runs. It computes "
        "the same, but needs more memory (2 bytes a parameter), more kernels and more waits for the device than "
        "llmtrain's step with deepspeed==0.19.8"
    )


def _lies_behind(tensor: Tensor, before: Tensor) -> bool:
    """Return True if `tensor` begins in memory where `before` ends."""
    return (
        storage_of(tensor) == storage_of(before)
        and tensor.storage_offset() == before.storage_offset() + before.numel()
        and tensor.dtype == before.dtype
        and tensor.is_contiguous()
        and before.is_contiguous()
    )


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of all tensors as one flat tensor: a view if they lie one behind the other, else a copy."""
    if all(map(_lies_behind, tensors[1:], tensors)) and tensors[0].is_contiguous():
        return tensors[0].as_strided((sum(tensor.numel() for tensor in tensors),), (1,))
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _messages(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of the tensors by message: each long stretch of neighbours is one, all other tensors are
    one."""
    stretches: list[list[int]] = []
    for place, tensor in enumerate(tensors):
        if stretches and _lies_behind(tensor, tensors[place - 1]):
            stretches[-1].append(place)
        else:
            stretches.append([place])
    long = [places for places in stretches if sum(tensors[place].numel() for place in places) >= _LONG]
    rest = [place for places in stretches if places not in long for place in places]
    return [*long, rest] if rest else long


def _loses_sums(optimizer: DeepSpeedZeroOptimizer) -> bool:
    """Return True if gradients are summed in fp32 next to Muon's matrices, see `_get_compact_grad_partition_slice`."""
    muon = any(group.get("use_muon") for group in optimizer.optimizer.param_groups)
    return muon and optimizer.gradient_accumulation_dtype != optimizer.dtype


def _changed() -> str:
    """Return how the code of this DeepSpeed's optimizer differs from the known one; "" if it does not."""
    owner = DeepSpeedZeroOptimizer
    if missing := [name for name in _KNOWN if not hasattr(owner, name)]:
        return f"{owner.__name__} has no {', '.join(missing)}"
    different = [name for name, known in _KNOWN.items() if _checksum(getattr(owner, name)) != known]
    return f"{owner.__name__} has different code in {', '.join(different)}" if different else ""


def _checksum(function: Callable[..., Any]) -> str:
    code = _code(textwrap.dedent(inspect.getsource(function)))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def _code(source: str) -> str:
    """Return a function's syntax tree as text, without comments, docstrings and formatting; equal in all versions of
    Python."""

    def told(node: object) -> str:
        if isinstance(node, list):
            return f"[{' '.join(map(told, node))}]"
        if not isinstance(node, ast.AST):
            return repr(node)
        skipped = ("type_comment", "type_params", "kind", "ctx")
        parts = (told(value) for name, value in ast.iter_fields(node) if name not in skipped)
        return f"({type(node).__name__} {' '.join(parts)})"

    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return told(tree)


@contextlib.contextmanager
def choosing_optimizers() -> Iterator[None]:
    """A context in which DeepSpeed uses its optimizer of ZeRO 1 and 2 also for ZeRO 1 in bf16 with fp32 gradients (its
    BF16_Optimizer takes 2 more bytes a parameter), and accepts shared experts that do not train."""
    theirs = DeepSpeedEngine._do_optimizer_sanity_check

    def choose(engine: DeepSpeedEngine, basic_optimizer: Any) -> Any:
        trains_experts = any(group.get("moe") for group in basic_optimizer.param_groups)
        if not trains_experts and not engine.zero_optimization_partition_weights():
            engine.has_moe_layers = False
        chosen = theirs(engine, basic_optimizer)
        return ZERO_OPTIMIZATION if chosen == BFLOAT16 and engine.zero_optimization() else chosen

    DeepSpeedEngine._do_optimizer_sanity_check = choose
    try:
        yield
    finally:
        DeepSpeedEngine._do_optimizer_sanity_check = theirs
