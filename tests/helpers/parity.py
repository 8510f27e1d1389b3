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
from llmtrain.config.run import (
    AdapterConfig,
    DataConfig,
    ModelConfig,
    RecomputeConfig,
    Run,
    RunConfig,
    TrainConfig,
)
from llmtrain.config.topology import Degrees
from llmtrain.features import defaults
from llmtrain.models import neftune
from llmtrain.objectives.by_token import Distill, NextToken
from llmtrain.objectives.objective import Objective
from llmtrain.optim.optimizers import Optimizer
from llmtrain.optim.schedules import Cosine
from llmtrain.parity import plain, plain_maps
from llmtrain.parity.compare import Trace, Verdict, compare, hint
from llmtrain.parity.plain import orders, train_plainly
from llmtrain.parity.plain_objectives import small_teacher
from llmtrain.parity.small import small_model
from llmtrain.parity.small_run import resolve_in, small_run, wanted
from tests.helpers.families import FAMILIES, FROZEN, VARIANTS
from tests.helpers.processors import fp16, on_device
from tests.helpers.training import deepspeed_tree, joined


@dataclass(frozen=True)
class Form:
    """One way of training one model."""

    family: str = "llama"
    ranks: int = 2
    zero: int = 0
    offload: str = ""
    """As of a Case."""
    pipeline: int = 1
    tensor: int = 1
    sequence: int = 1
    expert: int = 1
    accumulation: int = 1
    global_batch: int | None = None
    """None: micro-batches of two rows."""
    precision: str = "fp32"
    tied: bool | None = None
    optimizer: str = "adamw"
    own: str = "{}"
    """Fields of `optim` for single parameters."""
    isolate_documents: bool = False
    device_fp16: bool = False
    """Whether the device is taken for one that has fp16: Muon's iteration is then in it, but for runs in fp32."""
    fp8: str | None = None
    steps: int = 20
    extra: str = "{}"
    """More of the DeepSpeed JSON."""
    changes: str = "{}"
    """Other fields of the model's config."""
    recompute: str = "{}"
    """The section model.recompute."""
    freeze: tuple[str, ...] = ()
    train_only: tuple[str, ...] = ()
    adapter: str = "{}"
    """The section of that name."""
    objective: str = "next_token"
    reference: str = "column"
    z_loss: float = 0.0
    ema: bool = False
    """It keeps an average of its parameters."""
    noise: float = 0.0
    """model.neftune_noise_alpha, which the command leaves out: for what `known_noise` replaces."""
    top_k: int | None = None
    """Of a distillation: from a column with so many words."""

    @property
    def name(self) -> str:
        words = {"pipeline": "pp", "tensor": "tp", "sequence": "sp", "expert": "ep"}
        parts = [f"{word}{getattr(self, key)}" for key, word in words.items() if getattr(self, key) > 1]
        parts += [f"zero{self.zero}", f"x{self.ranks}"]
        tied = {None: [], True: ["tied"], False: ["untied"]}[self.tied]
        optimizer = [self.optimizer] if self.optimizer != "adamw" else []
        objective = [self.objective] if self.objective != "next_token" else []
        objective += ["column"] if self.top_k else []
        objective += [self.fp8] if self.fp8 else []
        return "-".join([self.family, *tied, *optimizer, *objective, *parts, self.precision])


def _objective(form: Form, model: str) -> Objective:
    """As filled in by a run. `model`: fields of the student's config.json."""
    if form.objective == "next_token":
        return NextToken(z_loss=form.z_loss)
    if form.objective != "distill":
        return (Objective.of(form.objective, reference="online") if form.reference == "online"
                else Objective.of(form.objective))  # fmt: skip
    asked = Distill(beta=0.3, temperature=2.0, alpha=0.25, top_k=form.top_k)
    return asked if form.top_k else replace(asked, teacher=_teacher(model).name)


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


def resolved(form: Form) -> Run:
    """As the command resolves it."""
    model = ({**FAMILIES, **VARIANTS, **FROZEN})[form.family] | json.loads(form.changes)
    if form.tied is not None:
        model["tie_word_embeddings"] = form.tied
    degrees = Degrees(pipeline=form.pipeline, tensor=form.tensor, sequence=form.sequence, expert=form.expert)
    tree = deepspeed_tree(degrees, form.zero, form.offload, form.precision, json.loads(form.extra))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds.json"
        path.write_text(json.dumps(tree))
        config = RunConfig(
            deepspeed=str(path),
            model=ModelConfig(
                config=model,
                attention="eager" if form.family == "gemma2" else "sdpa",
                recompute=RecomputeConfig(**json.loads(form.recompute)),
                freeze=list(form.freeze),
                train_only=list(form.train_only),
                fp8=form.fp8,  # type: ignore[arg-type]
            ),
            adapter=AdapterConfig(**json.loads(form.adapter)),
            objective=_objective(form, json.dumps(model)),
            data=DataConfig(path="(none)", isolate_documents=form.isolate_documents),
            **({"ema": replace(defaults()["ema"], decay=0.999)} if form.ema else {}),
            optim=Optimizer.of(form.optimizer, **json.loads(form.own)),
            schedule=Cosine(warmup_steps=100),
            train=TrainConfig(micro_batch=2, accumulation=form.accumulation, max_steps=1000),
        )
        check_values(config, problems := Problems())
        problems.raise_if_any()
        user = wanted(config, {})
        small = json.loads(_small(json.dumps(model), config.model.attention, user.config.objective.scores))
        config = small_run(user, small, 1e-3, form.ranks, form.steps, cpu=True)
        config = replace(config, model=replace(config.model, neftune_noise_alpha=form.noise))
        if form.global_batch is not None:
            batch = {"global_batch": form.global_batch, "accumulation": form.accumulation, "micro_batch": None}
            config = replace(config, train=replace(config.train, **batch))
        return resolve_in(Path(folder), user, config, 1e-3, form.ranks, form.precision)


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


@functools.lru_cache(maxsize=4)
def references(form: Form) -> list[Trace]:
    run = resolved(form)
    with fp16(form.device_fp16):
        return [
            train_plainly(run, form.steps, order, torch.device("cpu")) for order in orders(run.config.model, run.batch)
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


def check(pools: Any, form: Form, fault: str | None = None) -> Outcome:
    """The comparison of one form."""
    from tests.helpers.faults import FAULTS

    run = resolved(form)
    trace = Trace(**pools(form.ranks).run(on_device, form.device_fp16, train_on_rank, run, form.steps, fault)[0])
    split = form.tensor > 1 or form.sequence > 1
    if fault is not None and FAULTS[fault].everywhere:
        with FAULTS[fault].seeded():
            want = references.__wrapped__(form)
    else:
        want = references(form)
    verdict = compare(trace, want, fp32=form.precision == "fp32", split=split)
    return Outcome(
        verdict,
        "" if verdict.passed else hint(trace, want[0], verdict, run.config.optim.clip_norm),
        trace,
    )
