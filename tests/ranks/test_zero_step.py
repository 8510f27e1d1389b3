"""What an optimizer step of ZeRO 1 and 2 costs in kernels, waits and memory, and that it is DeepSpeed's step."""

from __future__ import annotations

import contextlib
import gc
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmtrain.base.errors import ConfigError
from llmtrain.engine.deepspeed import optimizers, zero_step
from llmtrain.engine.deepspeed.optimizers import parameter_groups
from llmtrain.training.step import Session
from tests.helpers.families import FAMILIES
from tests.helpers.training import (
    LLAMA,
    Case,
    batches,
    make_engine,
    one_step,
    plain_model,
    poisoned,
    resolved_run,
    train_steps,
)

TENSORS = 290
# As many tensors as Qwen2 of 0.5B has: twelve in each of 24 layers, the embedding (tied), the last norm.
QWEN = {
    **FAMILIES["qwen2"],
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 24,
    "tie_word_embeddings": True,
}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
# As small as the model: DeepSpeed holds one or two buckets of its default size, 1 GB and more.
BUCKETS = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
_VIEWS = ("view", "_unsafe_view", "reshape", "slice", "narrow", "detach", "alias", "t", "transpose", "expand", "split",
          "unsqueeze", "squeeze", "select", "as_strided", "split_with_sizes", "unbind", "permute")  # fmt: skip
_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "set_")
_READS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero")


class Kernels(TorchDispatchMode):
    """Counts operators that a GPU would run a kernel for, and values that the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _READS:
            self.reads += 1
        elif name not in _VIEWS and name not in _ALLOCATIONS:
            self.ran[name] += 1
        return func(*args, **(kwargs or {}))


class LiveBytes(TorchDispatchMode):
    """The most bytes that all storages of this process had at one time within it, beyond those of `others`."""

    def __init__(self, others: set[int]) -> None:
        super().__init__()
        self.most = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        for storage in storages():
            if storage._cdata not in others:
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._live = {key: held for key, held in self._live.items() if not held[0].expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.most = max(self.most, self.now())
        return out

    def now(self) -> int:
        """Bytes that are there."""
        return sum(size for held, size in self._live.values() if not held.expired())


def storages() -> list[Any]:
    """Of all tensors that Python knows, each once."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor) and not thing.is_meta]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    return list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())


def update_counted(case: Case) -> tuple[int, dict[str, int], int]:
    """(tensors, kernels by name, reads) of the optimizer's part of the second step."""
    engine, ranks = make_engine(case)
    modes: list[Kernels] = []
    plain = engine.deepspeed.step

    def step() -> None:
        with Kernels() as mode:
            plain()
        modes.append(mode)  # the last one is the update's

    engine.deepspeed.step = step
    train_steps(case, engine, ranks, 0, 2)
    tensors = len(engine.module.local_parameters())
    engine.close()
    return tensors, dict(modes[-1].ran), modes[-1].reads


@pytest.mark.parametrize("sums", [{}, FP32_SUMS], ids=["bf16", "fp32"])
@pytest.mark.parametrize("stage", [1, 2])
def test_kernels_and_reads_of_a_step(pools, small_data, stage, sums, record_property):
    extra = {"zero_optimization": {"stage": stage, **BUCKETS}, **sums}
    case = Case(data=small_data, stage=stage, precision="bf16", model=QWEN, steps=2, accumulation=2, extra=extra)
    tensors, ran, reads = pools(1).run(update_counted, case)[0]
    record_property("kernels", ran)
    print(f"ZeRO {stage}: {sum(ran.values())} kernels, {reads} reads: {ran}")
    assert tensors == TENSORS
    assert sum(ran.values()) <= 400
    assert reads == 1


def python_calls(run: Callable[[], Any]) -> int:
    """Calls that Python makes while `run` runs, the hooks of a backward pass on a CPU included."""
    made = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return made


def costs(step: Callable[[], Any]) -> tuple[Counter[str], int]:
    """(kernels by name, Python's calls) of a step after the first."""
    step()
    with Kernels() as mode:
        step()
    return mode.ran, python_calls(step)


def own_step(case: Case) -> tuple[Counter[str], int, int]:
    """`costs` of a run, and its tensors."""
    engine, ranks = make_engine(case)
    source = batches(case, (ranks.rank, ranks.world_size), case.accumulation)
    degrees = engine.mesh.degrees
    session = Session(engine, ranks, degrees, lambda step: 1.0, seed=0)
    tensors = len(engine.module.local_parameters())
    found = (*costs(lambda: session.step(next(source))), tensors)
    source.close()
    engine.close()
    return found


def plain_step(case: Case) -> tuple[Counter[str], int]:
    """`costs` of plain PyTorch: one micro-batch after another, gradients added up by autograd."""
    model = plain_model(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    source = batches(case, (0, 1), case.accumulation)

    def step() -> None:
        for micro in next(source).micro_batches:
            logits = model(input_ids=micro.inputs, use_cache=False).logits
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), micro.labels.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    found = costs(step)
    source.close()
    return found


@pytest.mark.parametrize(("stage", "accumulation"), [(1, 1), (2, 2)])
def test_a_layer_costs_what_it_costs_in_plain_pytorch(pools, small_data, stage, accumulation):
    """Operators and calls of Python that two more layers add to a step of one rank in fp32. DeepSpeed's hooks, buckets
    and copies of gradients were up to 3 operators and 115 calls for each tensor and micro-batch."""
    fewer, more = (
        Case(
            data=small_data,
            stage=stage,
            accumulation=accumulation,
            model={**FAMILIES["gpt2"], "n_layer": layers, "activation_function": "gelu_pytorch_tanh"},
            extra={"zero_optimization": {"stage": stage, **BUCKETS}},
        )
        for layers in (2, 4)
    )
    run = pools(1).run
    (few, few_calls, few_tensors), (many, many_calls, tensors) = (run(own_step, case)[0] for case in (fewer, more))
    (plain_few, plain_few_calls), (plain_many, plain_calls) = (run(plain_step, case)[0] for case in (fewer, more))
    assert many - few == plain_many - plain_few and "allreduce_" not in many, many
    calls, plain_calls = ((many_calls - few_calls), (plain_calls - plain_few_calls))
    print(f"{tensors - few_tensors} tensors: {calls} calls of Python here, {plain_calls} in plain PyTorch")
    assert calls <= plain_calls


@contextlib.contextmanager
def as_on_a_gpu(believes: bool = True) -> Iterator[None]:
    """A context in which AdamW's kernel clips, as the one of a GPU; that of a CPU can, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero_step, "_on_gpu", lambda _: believes)
        yield


def in_kernel(case: Case) -> tuple[int, dict[str, int], int]:
    with as_on_a_gpu():
        return update_counted(case)


@pytest.mark.parametrize("sums", [{}, FP32_SUMS], ids=["bf16", "fp32"])
@pytest.mark.parametrize("stage", [1, 2])
def test_an_update_on_a_gpu_reads_nothing(pools, small_data, stage, sums):
    """No number comes to the host, and no pass multiplies the gradients by the clip's factor."""
    extra = {"zero_optimization": {"stage": stage, **BUCKETS}, **sums}
    case = Case(data=small_data, stage=stage, precision="bf16", steps=2, clip=0.01, extra=extra)
    _, ran, reads = pools(1).run(in_kernel, case)[0]
    assert reads == 0 and not {"mul_", "cat", "_to_copy"} & {name for name, count in ran.items() if count > 4}, ran


def steps_and_masters(case: Case, believes: bool, clip: float) -> tuple[list[float], list[Tensor], list[Tensor]]:
    """(norms, masters, first moments) after the steps of a case."""
    with as_on_a_gpu(believes):
        engine, ranks = make_engine(case)
        optimizer = engine.deepspeed.optimizer
        assert optimizer._clips_in_kernel is believes
        optimizer.clip_grad = clip
        norms = train_steps(case, engine, ranks, 0, case.steps).norms
        masters = [flat.detach().clone() for flat in optimizer.single_partition_of_fp32_groups]
        moments = [state["exp_avg"].clone() for state in optimizer.optimizer.state.values()]
        assert optimizer.optimizer.grad_scale is None if believes else True
        engine.close()
    return norms, masters, moments


@pytest.mark.parametrize("clip", [0.0, 1e9, 0.1])
@pytest.mark.parametrize("stage", [1, 2])
def test_adamws_kernel_clips_as_the_product_does(pools, small_data, stage, clip):
    """Equal bits without a clip and below it: the kernel divides by 1. Above it a quotient and a product with the
    inverse have two roundings each, 6e-8 of a gradient, and two more make its first moment: 3.6e-7 between them. A
    second step would round masters to bf16 first, where some take the other neighbour, so one step is compared."""
    case = Case(data=small_data, stage=stage, precision="bf16", steps=1 if clip == 0.1 else 3)
    for ours, theirs in zip(*(pools(2).run(steps_and_masters, case, gpu, clip) for gpu in (True, False)), strict=True):
        assert ours[0] == theirs[0] and all(norm > 0.1 for norm in ours[0])
        for mine, other in zip(ours[1], theirs[1], strict=True):
            # The first update is the rate times a sign, but where eps counts: one rounding of a master of 1.
            assert torch.equal(mine, other) if clip != 0.1 else float((mine - other).abs().max()) <= 1.3e-7, clip
        for mine, other in zip(ours[2], theirs[2], strict=True):
            assert mine.any() and torch.allclose(mine, other, rtol=3.6e-7 if clip == 0.1 else 0.0, atol=1e-38)


def late_and_poisoned(case: Case) -> tuple[list[bool], bool, bool]:
    with as_on_a_gpu():
        return poisoned(case, 2, 1)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_nan_on_one_rank_skips_the_kernels_update_on_all(pools, small_data, stage):
    case = Case(data=small_data, stage=stage, accumulation=3, precision="bf16")
    for skipped, finite, unchanged in pools(2).run(late_and_poisoned, case):
        assert skipped == [False, False, True, False] and finite and unchanged


def looked_at(case: Case) -> list[Any]:
    """What is looked at before an update on a GPU: [norm that a caller gets, whether the update was left out, pieces of
    a gradient that no update follows, pieces of one that is not finite, steps of the optimizer]."""
    with as_on_a_gpu():
        engine, ranks = make_engine(case)
        source, norms, found = batches(case, (ranks.rank, ranks.world_size), case.accumulation), list[float](), []
        batch = next(source)
        engine.forward_backward(batch.micro_batches, lambda: 100)
        update = engine.update(1.0, lambda norm: bool(norms.append(norm)) or True)
        found += [norms, update.left_out and not update.is_late]
        for weight in (100, math.nan):
            pieces: list[Any] = []
            engine.gradients(batch.micro_batches, weight, pieces.append)
            found.append(len(pieces))
        late = one_step(engine, batch, 100)[1]
        found += [late.is_late and not late.skipped, int(engine.counters().optimizer_step)]
        source.close()
        engine.close()
    return found


def test_who_looks_at_a_gradient_before_the_update_gets_its_norm(pools, small_data):
    """Two ranks: spikes.skip_outliers and a replay's look, beside updates that nobody waits for."""
    for norms, left_out, pieces, none, late, steps in pools(2).run(
        looked_at, Case(data=small_data, stage=2, precision="bf16", accumulation=2)
    ):
        assert len(norms) == 1 and math.isfinite(norms[0]) and left_out and late
        assert pieces > 2 and none == 0 and steps == 1


def live_bytes(case: Case, largest: int) -> tuple[int, float]:
    """(parameter groups, bytes a parameter at the peak of the second step, activations aside)."""
    others = {storage._cdata for storage in storages()}
    optimizers.LARGEST_GROUP = largest
    try:
        engine, ranks = make_engine(case)
    finally:
        optimizers.LARGEST_GROUP = zero_step.LARGEST_GROUP
    most: list[int] = []

    def watched(function: Any) -> Any:
        def watch(*args: Any, **kwargs: Any) -> Any:
            with LiveBytes(others) as mode:
                result = function(*args, **kwargs)
            most.append(mode.most)
            return result

        return watch

    train_steps(case, engine, ranks, 0, 1)
    engine.deepspeed.optimizer.step = watched(engine.deepspeed.optimizer.step)
    engine.deepspeed.optimizer.independent_gradient_partition_epilogue = watched(
        engine.deepspeed.optimizer.independent_gradient_partition_epilogue
    )
    engine.deepspeed.optimizer.reduce_gradients = watched(engine.deepspeed.optimizer.reduce_gradients)
    train_steps(case, engine, ranks, 1, 2)
    groups = len(engine.deepspeed.optimizer.param_groups)
    parameters = sum(held.parameter.numel() for held in engine.module.local_parameters())
    engine.close()
    return groups, max(most) / parameters


@pytest.mark.parametrize(
    ("stage", "sums", "most"),
    [(1, {}, 17.0), (2, FP32_SUMS, 19.0)],
    ids=["1-bf16", "2-fp32"],
)
def test_live_bytes_of_a_step(pools, small_data, stage, sums, most, record_property):
    """2 for the parameter, 12 for the optimizer, 2 or 4 for the gradient, and for a group in many what a step adds."""
    extra = {"zero_optimization": {"stage": stage, **BUCKETS}, **sums}
    case = Case(data=small_data, stage=stage, precision="bf16", model=QWEN, steps=2, accumulation=2, extra=extra)
    groups, bytes_each = pools(1).run(live_bytes, case, 50_000)[0]
    record_property("bytes", bytes_each)
    print(f"ZeRO {stage}: {groups} groups, {bytes_each:.2f} bytes a parameter")
    assert groups >= 16
    assert bytes_each <= most


FORMS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero1": (2, {"stage": 1}),
    "fp32-sums": (2, {"stage": 1, "precision": "bf16", "accumulation": 3, "extra": FP32_SUMS}),
    "tp2-dp2": (4, {"stage": 2, "tensor": 2}),
    "pp2-tied": (2, {"stage": 1, "pipeline": 2, "accumulation": 3, "model": {**LLAMA, "tie_word_embeddings": True}}),
    "pp2-tp2": (4, {"stage": 1, "pipeline": 2, "tensor": 2, "accumulation": 3}),
    "ep2": (2, {"stage": 2, "expert": 2, "model": FAMILIES["mixtral"]}),
    "muon": (2, {"stage": 1, "optimizer": "muon"}),
}


def both_norms(case: Case, largest: int) -> list[tuple[float, float]]:
    """(our norm, DeepSpeed's) before each update, with many small groups of parameters."""
    optimizers.LARGEST_GROUP = largest
    try:
        engine, ranks = make_engine(case)
    finally:
        optimizers.LARGEST_GROUP = zero_step.LARGEST_GROUP
    found: list[tuple[float, float]] = []

    def look() -> None:
        optimizer = engine.deepspeed.optimizer
        theirs = DeepSpeedZeroOptimizer.scaled_global_norm(optimizer)
        found.append((optimizer.scaled_global_norm(), float(theirs)))
        assert type(optimizer) is zero_step.OneNormZero and len(optimizer.param_groups) > 2

    train_steps(case, engine, ranks, 0, 2, look)
    engine.close()
    return found


@pytest.mark.parametrize("form", FORMS)
def test_the_norm_is_deepspeeds(pools, small_data, form):
    """Squares are summed in fp64 by both, in another order; DeepSpeed rounds to fp32 on the way."""
    world_size, fields = FORMS[form]
    # Its norm takes the groups one by one: on the stages of a pipeline there must be equally many.
    largest = 20_000 if "pipeline" not in fields else 30_000 if "tensor" in fields else 60_000
    for norms in pools(world_size).run(both_norms, Case(data=small_data, steps=2, **fields), largest):
        for ours, theirs in norms:
            assert ours == pytest.approx(theirs, rel=3e-7)


def widened_by_the_norm(case: Case, piece: int) -> tuple[int, int]:
    """(elements of the largest gradient, of the largest tensor that the norm copies to another dtype)"""
    before, zero_step.WIDENED = zero_step.WIDENED, piece
    engine, ranks = make_engine(case)
    copied: list[int] = []

    def look() -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            engine.deepspeed.optimizer.scaled_global_norm()
        copied.extend(math.prod(e.input_shapes[0]) for e in profile.events() if e.name == "aten::_to_copy")

    train_steps(case, engine, ranks, 0, 1, look)
    largest = max(parameter.numel() for parameter in engine.module.parameters())
    engine.close()
    zero_step.WIDENED = before
    return largest, max(copied)


def test_a_cpu_widens_a_gradient_for_the_norm_by_pieces(pools, small_data):
    """torch copies the complete tensor to fp64 first: 18 CPU-ms for two layers of 64 experts, by pieces 8."""
    largest, copied = pools(1).run(widened_by_the_norm, Case(data=small_data, steps=1, stage=1), 3000)[0]
    assert largest > 3000 >= copied


def groups_of(case: Case, largest: float) -> list[tuple[str, int]]:
    """(name, elements) of the parameter groups."""
    engine, ranks = make_engine(case)
    groups = parameter_groups(engine.module, resolved_run(case, ranks.world_size).config.optim, {}, largest)
    engine.close()
    return [(group["name"], sum(p.numel() for p in group["params"])) for group in groups]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_groups_are_cut(pools, small_data, optimizer):
    case = Case(data=small_data, stage=1, optimizer=optimizer)
    whole = pools(1).run(groups_of, case, math.inf)[0]
    cut = pools(1).run(groups_of, case, 20_000)[0]
    assert len({name for name, _ in whole}) == len(whole)
    assert {name: sum(n for other, n in cut if other == name) for name, _ in whole} == dict(whole)
    assert len(cut) > 2 * len(whole)
    # The embedding and the head have more elements than a group may have: each is alone.
    assert sorted(n for _, n in cut)[-2:] == [512 * 64, 512 * 64]
    assert all(n <= 20_000 for _, n in cut if n != 512 * 64)


ANOTHER = {**zero_step._KNOWN, "step": "another", "average_tensor": "another"}


def trained(case: Case, known: dict[str, str]) -> tuple[list[float], list[float], list[str], type]:
    """(losses, norms, notes of the engine, class of its optimizer) with a DeepSpeed of these checksums."""
    before, zero_step._KNOWN = zero_step._KNOWN, known
    try:
        engine, ranks = make_engine(case)
        trace = train_steps(case, engine, ranks, 0, 2)
        notes, kind = engine.module.notes, type(engine.deepspeed.optimizer)
        engine.close()
    finally:
        zero_step._KNOWN = before
    return trace.losses, trace.norms, notes, kind


@pytest.mark.parametrize("form", ["zero1", "fp32-sums", "tp2-dp2"])
def test_another_deepspeed_trains_with_its_own_step(pools, small_data, form):
    """Equal but for the order of sums in the norm."""
    world_size, fields = FORMS[form]
    case = Case(data=small_data, steps=2, **fields)
    ours, theirs = (pools(world_size).run(trained, case, known)[0] for known in (zero_step._KNOWN, ANOTHER))
    assert ours[3] is zero_step.OneNormZero and theirs[3] is DeepSpeedZeroOptimizer
    assert theirs[0] == pytest.approx(ours[0], rel=1e-6) and theirs[1] == pytest.approx(ours[1], rel=1e-6)
    (note,) = set(theirs[2]) - set(ours[2])
    assert re.match(r"deepspeed 0\.\d+\.\d+: .*DeepSpeedZeroOptimizer .* step, average_tensor.*ZeRO 1 and 2", note)


def refused(case: Case) -> str:
    try:
        trained(case, ANOTHER)
    except ConfigError as error:
        return str(error)
    return ""


def test_another_deepspeed_with_fp32_sums_next_to_muon_is_refused(pools, small_data):
    case = Case(data=small_data, steps=2, stage=2, optimizer="muon", precision="bf16", extra=FP32_SUMS)
    assert "deepspeed==0.19.8" in pools(1).run(refused, case)[0]


def test_a_missing_method_is_named(monkeypatch):
    monkeypatch.delattr(DeepSpeedZeroOptimizer, "has_overflow")
    assert zero_step._changed() == "DeepSpeedZeroOptimizer has no has_overflow"


def test_comments_and_docstrings_are_no_other_code():
    code = 'def f(self, x):\n    """{}"""\n    return self.g(x, y={})  # {}\n'
    assert zero_step._code(code.format("a", 1, "b")) == zero_step._code(code.format("c\nd", 1, "e"))
    assert zero_step._code(code.format("a", 1, "b")) != zero_step._code(code.format("a", 2, "b"))
