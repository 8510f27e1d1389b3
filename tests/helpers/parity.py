"""Parity checks in the tests' own ranks: the worker, the reference and the comparison, without a process start."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from llmtrain.config.problems import Problems
from llmtrain.config.rules import check_values
from llmtrain.config.run import AdapterConfig, DataConfig, ModelConfig, RecomputeConfig, Run, RunConfig, TrainConfig
from llmtrain.config.topology import Degrees
from llmtrain.features import defaults
from llmtrain.models import neftune
from llmtrain.objectives.objective import Objective
from llmtrain.optim.optimizers import Optimizer
from llmtrain.optim.schedules import Cosine
from llmtrain.parity import plain, plain_maps
from llmtrain.parity.compare import Trace, Verdict, compare, hint
from llmtrain.parity.plain import orders, train_plainly
from llmtrain.parity.plain_objectives import small_teacher
from llmtrain.parity.small import small_model
from llmtrain.parity.small_run import resolve_in, small_run, wanted
from tests.helpers.families import FAMILIES
from tests.helpers.processors import fp16, on_device
from tests.helpers.training import Case, deepspeed_tree, joined


def _objective(case: Case) -> Objective:
    """As filled in by a run."""
    fields = {"name": "next_token", **case.objective}
    if fields["name"] == "distill":
        fields = {"beta": 0.3, "temperature": 2.0, "alpha": 0.25, **fields}
        if "top_k" not in fields:
            fields["teacher"] = _teacher(json.dumps(case.model)).name
    return Objective.of(fields.pop("name"), **fields)


@functools.cache
def _teacher(model: str) -> tempfile.TemporaryDirectory[str]:
    """Where the command puts a small teacher for that student; it lives as long as this process."""
    where: tempfile.TemporaryDirectory[str] = tempfile.TemporaryDirectory()
    with tempfile.TemporaryDirectory() as users:
        fields = {**FAMILIES["llama"], "vocab_size": json.loads(model)["vocab_size"], "num_hidden_layers": 2}
        (Path(users) / "config.json").write_text(json.dumps(fields))
        small_teacher(users, json.loads(model), Path(where.name))
    return where


@functools.cache
def _small(model: str, attention: str, scores: bool) -> str:
    """The fields of the command's small model, as JSON: the family has that size already."""
    config = ModelConfig(config=json.loads(model), attention=attention)  # type: ignore[arg-type]
    small, shrunk_by = small_model(config, Degrees(), scores=scores)
    assert shrunk_by == 1.0, model
    return json.dumps(small)


def resolved(case: Case) -> Run:
    """As the command resolves it."""
    model = dict(case.model)
    degrees = Degrees(pipeline=case.pipeline, tensor=case.tensor, sequence=case.sequence, expert=case.expert)
    tree = deepspeed_tree(degrees, case.stage, case.offload, case.precision, case.extra)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds.json"
        path.write_text(json.dumps(tree))
        config = RunConfig(
            deepspeed=str(path),
            model=ModelConfig(
                config=model,
                attention="eager" if model["model_type"] == "gemma2" else "sdpa",
                recompute=RecomputeConfig(**case.recompute),
                freeze=list(case.freeze),
                train_only=list(case.train_only),
                fp8=case.fp8,  # type: ignore[arg-type]
            ),
            adapter=AdapterConfig(**case.adapter),
            objective=_objective(case),
            data=DataConfig(path="(none)", isolate_documents=case.isolate_documents),
            **({"ema": replace(defaults()["ema"], decay=0.999)} if case.ema else {}),
            optim=Optimizer.of(case.optimizer, **case.own),
            schedule=Cosine(warmup_steps=100),
            train=TrainConfig(micro_batch=2, accumulation=case.accumulation, max_steps=1000),
        )
        check_values(config, problems := Problems())
        problems.raise_if_any()
        user = wanted(config, {})
        small = json.loads(_small(json.dumps(model), config.model.attention, user.config.objective.scores))
        config = small_run(user, small, 1e-3, case.ranks, case.steps, cpu=True)
        config = replace(config, model=replace(config.model, neftune_noise_alpha=case.noise))
        if case.global_batch is not None:
            batch = {"global_batch": case.global_batch, "accumulation": case.accumulation, "micro_batch": None}
            config = replace(config, train=replace(config.train, **batch))
        return resolve_in(Path(folder), user, config, 1e-3, case.ranks, case.precision)


@contextlib.contextmanager
def known_noise(alpha: float) -> Iterator[None]:
    """NEFTune with a function of the embedding in place of random numbers, the same in every layout; a training of
    parity/plain.py has it, too, by its definition: of L tokens that go through the model together."""

    def instead(embedded: Tensor) -> Tensor:
        return torch.sin(30 * embedded.detach())

    def add(_: nn.Module, __: object, embedded: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return embedded
        return embedded + alpha / math.sqrt(embedded.shape[1] * embedded.shape[2]) * instead(embedded)

    def adapt(model: Any, *args: Any, **kwargs: Any) -> None:
        plain_maps.adapt_plainly(model, *args, **kwargs)
        if alpha:
            model.get_input_embeddings().register_forward_hook(add)

    with patch.object(neftune, "drawn", instead), patch.object(plain, "adapt_plainly", adapt):
        yield


_TRAINED: dict[str, list[Trace]] = {}
"""The last references, which tests that follow each other share."""


def references(case: Case) -> list[Trace]:
    """The case by plain PyTorch, in each order of summation."""
    key = repr(case)
    if key not in _TRAINED:
        for oldest in list(_TRAINED)[:-3]:
            del _TRAINED[oldest]
        _TRAINED[key] = trained_plainly(case)
    return _TRAINED[key]


def trained_plainly(case: Case) -> list[Trace]:
    run = resolved(case)
    with fp16(case.device_fp16):
        return [
            train_plainly(run, case.steps, order, torch.device("cpu")) for order in orders(run.config.model, run.batch)
        ]


def train_on_rank(run: Run, steps: int, fault: str | None) -> dict[str, Any] | None:
    """On a rank of a pool."""
    from llmtrain.parity.trainer import train_small
    from tests.helpers.faults import FAULTS

    with ExitStack() as stack:
        if fault is not None:
            stack.enter_context(FAULTS[fault].seeded())
        trace = train_small(run, steps, joined())
    return vars(trace) if joined().rank == 0 else None


@dataclass
class Outcome:
    verdict: Verdict
    hint: str = ""
    trace: Trace = field(default_factory=Trace)


def check(pools: Any, case: Case, fault: str | None = None) -> Outcome:
    """The comparison of a case with plain PyTorch."""
    from tests.helpers.faults import FAULTS

    run = resolved(case)
    trace = Trace(**pools(case.ranks).run(on_device, case.device_fp16, train_on_rank, run, case.steps, fault)[0])
    split = case.tensor > 1 or case.sequence > 1
    if fault is not None and FAULTS[fault].everywhere:
        with FAULTS[fault].seeded():
            want = trained_plainly(case)
    else:
        want = references(case)
    verdict = compare(trace, want, fp32=case.precision == "fp32", split=split)
    return Outcome(verdict, "" if verdict.passed else hint(trace, want[0], verdict, run.config.optim.clip_norm), trace)
