"""torch.compile in tests: in a folder of its own, or with a backend that counts graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from llmtrain.data.loader import MicroBatch
from llmtrain.models import compiler
from tests.helpers.training import GLOBAL_BATCH, LENGTH, Case, make_engine, train_steps


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

    plain = nn.Module.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "compile", lambda self, **kwargs: plain(self, backend=backend, **kwargs))
        patch.setattr(compiler, "_answers", {"cpu": None, "cuda": None})
        torch._dynamo.reset()
        engine, ranks = make_engine(case)
        assert found == [], "a check before training has compiled something"
        assert any("torch.compile" in note for note in engine.module.notes)
        train_steps(case, engine, ranks, 0, 2)
        rows = 1 + GLOBAL_BATCH // case.accumulation  # another shape, from which torch would make a dynamic one
        tokens = torch.arange(rows * LENGTH).view(rows, LENGTH)
        engine.evaluate([MicroBatch(inputs=tokens, labels=tokens, sample_indices=[])] * 2)
        train_steps(case, engine, ranks, 2, 3)
        engine.close()
        torch._dynamo.reset()
    return found
