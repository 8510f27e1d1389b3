"""torch.compile in tests: in a folder of its own, or with a backend that counts graphs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from llmtrain.data.batches import MicroBatch
from llmtrain.models import compiler, varlen
from llmtrain.models.skeleton import decoder_layers
from tests.helpers.training import GLOBAL_BATCH, LENGTH, Case, Trace, make_engine, train_steps


@contextlib.contextmanager
def inductor_in(folder: Path) -> Iterator[None]:
    """torch.compile with its caches in a folder of the test, no processes beside this one, and no memory of before."""
    import torch._inductor.config as settings

    with pytest.MonkeyPatch.context() as patch, settings.patch(compile_threads=1):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        yield
        torch._dynamo.reset()


def graphs_of(case: Case) -> list[tuple[bool, list[str]]]:
    """(with gradients, sizes that are symbols) of each graph that a start, training and an evaluation compile."""
    found: list[tuple[bool, list[str]]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        symbols = [str(given) for given in inputs if isinstance(given, torch.SymInt)]
        found.append((torch.is_grad_enabled(), symbols))
        return graph.forward

    with compiling_with(backend):
        engine, ranks = make_engine(case, proves=True)
        assert found == [], "a check before training has compiled something"
        assert any("torch.compile" in note for note in engine.module.notes)
        train_steps(case, engine, ranks, 0, 2)
        rows = 1 + GLOBAL_BATCH // case.accumulation  # another shape, from which torch would make a dynamic one
        tokens = torch.arange(rows * LENGTH).view(rows, LENGTH)
        engine.evaluate([MicroBatch(inputs=tokens, labels=tokens, sequences=[])] * 2)
        train_steps(case, engine, ranks, 2, 3)
        engine.close()
    return found


@contextlib.contextmanager
def compiling_with(backend: Callable[..., Any]) -> Iterator[None]:
    """torch.compile as if it worked here, with another backend than inductor, and no memory of before or after."""
    plain = torch.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **kwargs: plain(function, backend=backend, **kwargs))
        patch.setattr(compiler, "_answers", {"cpu": None, "cuda": None})
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        yield
        torch._dynamo.reset()


@dataclass(kw_only=True)
class GatheredLayers:
    """What a training under ZeRO 3 with compiled layers leaves."""

    trace: Trace
    graphs: list[bool]
    """With gradients or without, of each."""
    breaks: dict[str, int]
    alive: list[int]
    """Of each backward pass: bytes that were gathered for a layer's forward pass and are still there when it begins."""
    gathered: int
    """Bytes that the layers of a forward pass gather."""
    late: list[int]
    """Of each layer in the last forward pass: elements whose gathering has not begun when the layer does."""


def gathered_layers(case: Case) -> GatheredLayers:
    """The case's training, with inductor's choice of what is kept for the backward pass."""
    from functorch.compile import make_boxed_func
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    found = GatheredLayers(trace=Trace([], []), graphs=[], breaks={}, alive=[], gathered=0, late=[])
    now: list[StorageWeakRef] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.graphs.append(torch.is_grad_enabled())
        return aot_module_simplified(
            graph,
            inputs,
            fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
            partition_fn=min_cut_rematerialization_partition,
        )

    def before_gathering(layer: nn.Module, _: Any) -> None:
        absent = [p for p in layer.parameters() if p.ds_status.name == "NOT_AVAILABLE"]
        found.late.append(sum(p.ds_numel for p in absent))

    def gathered(layer: nn.Module, _: Any) -> None:
        storages = [p.untyped_storage() for p in layer.parameters()]
        now.extend(StorageWeakRef(storage) for storage in storages)
        found.gathered += sum(storage.nbytes() for storage in storages)

    with compiling_with(backend):
        engine, ranks = make_engine(case)
        layers = decoder_layers(engine.module.hf)
        for layer in layers:
            layer.register_forward_pre_hook(before_gathering, prepend=True)
            layer.register_forward_pre_hook(gathered)
        plain = engine.deepspeed.backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            sizes = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in now]
            found.alive.append(sum(storage.nbytes() for storage in sizes if storage is not None))
            now.clear()
            return plain(*args, **kwargs)

        engine.deepspeed.backward = backward
        found.trace = train_steps(case, engine, ranks, 0, case.steps)
        engine.close()
        found.breaks = dict(torch._dynamo.utils.counters["graph_break"])
    found.late = found.late[-len(layers) :]
    return found


def varlen_as_on_cuda(case: Case, compiled_by: str = "aot_eager") -> tuple[int, Trace]:
    """(graphs of training, what it left) of compiled layers with CUDA's attention, played by `flash_on_cpu`.

    `compiled_by`: the backend of torch.compile, "eager" to count graphs alone.
    """
    found: list[bool] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(torch.is_grad_enabled())
        return torch._dynamo.lookup_backend(compiled_by)(graph, inputs)

    flash_on_cpu()
    with compiling_with(backend), pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "_kernels", lambda device: (varlen._flash, varlen._flash_backward))
        engine, ranks = make_engine(case)
        trace = train_steps(case, engine, ranks, 0, case.steps)
        engine.close()
    return len(found), trace


@functools.cache
def flash_on_cpu() -> None:
    """Let torch's attention of documents compute on the CPU, with and without gradients, as its definition says."""
    from torch.nn.attention import varlen as torchs

    def probabilities(q: Any, k: Any, bounds: Any, scale: float, window: list[int], lse: Any = None) -> Any:
        """[heads, tokens, tokens], and the logarithm of what they were divided by."""
        assert bounds.dtype == torch.int32 and (bounds.diff() > 0).all(), "an empty document costs a GPU blocks"
        of = torch.bucketize(torch.arange(len(q)), bounds[1:], right=True)
        behind = torch.arange(len(q))[:, None] - torch.arange(len(q))
        seen = (of[:, None] == of) & (behind >= 0) & ((behind <= window[0]) | (window[0] < 0))
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~seen, -torch.inf)
        lse = scores.logsumexp(-1) if lse is None else lse
        return (scores - lse.unsqueeze(-1)).exp(), lse

    def forward(
        q: Any,
        k: Any,
        v: Any,
        bounds: Any,
        _key_bounds: Any,
        longest: int,
        _longest: int,
        is_causal: bool = False,
        scale: Any = None,
        window_size: Any = None,
        enable_gqa: bool = False,
        *_: Any,
    ) -> Any:
        assert longest == int(bounds.diff().max()) and window_size[1] == 0
        assert (enable_gqa or q.shape[1] == k.shape[1]) and is_causal == (window_size[0] < 0)
        chosen, lse = probabilities(q, k, bounds, scale, window_size)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        return torch.einsum("hqk,khd->qhd", chosen, v).contiguous(), lse, torch.zeros(2, dtype=torch.uint64)

    def backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, bounds: Any, _key_bounds: Any, _longest: int,
                 _key_longest: int, _causal: bool, _random: Any, scale: Any = None,
                 window_size: Any = None) -> Any:  # fmt: skip
        chosen, _ = probabilities(q, k, bounds, scale, window_size, lse)
        shared = q.shape[1] // k.shape[1]
        k, v = (each.repeat_interleave(shared, 1) for each in (k, v))
        of_chosen = torch.einsum("qhd,khd->hqk", grad, v)
        of_scores = chosen * (of_chosen - (grad * out).sum(-1).T.unsqueeze(-1)) * scale
        of_k, of_v = torch.einsum("hqk,qhd->khd", of_scores, q), torch.einsum("hqk,qhd->khd", chosen, grad)
        of_k, of_v = (each.unflatten(1, (-1, shared)).sum(2) for each in (of_k, of_v))
        return torch.einsum("hqk,khd->qhd", of_scores, k).contiguous(), of_k, of_v

    assert torchs.varlen_attn
    torch.library.register_kernel("torch_attn::_varlen_attn", "cpu", forward)
    torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu", backward)
