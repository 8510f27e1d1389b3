"""The reference of the comparison: transformers' model and logits in plain PyTorch, in one process. It shares no
engine, loss, order of rows or optimizers with a run."""

from __future__ import annotations

import math
import re
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.config.run import ModelConfig, Run
from llmtrain.config.stages import Batch
from llmtrain.features import asked
from llmtrain.models.skeleton import DTYPES, load_config
from llmtrain.models.source import ParameterSource
from llmtrain.models.spec import ModelSpec
from llmtrain.objectives.by_token import ByToken, NextToken
from llmtrain.objectives.objective import Objective
from llmtrain.optim.optimizers import AdamW, Lion, Muon, Optimizer
from llmtrain.optim.schedules import Constant, Cosine, Falling, Schedule, Wsd
from llmtrain.parity.compare import VARIANT, Trace
from llmtrain.parity.plain_maps import (
    adapt_plainly,
    base_of,
    compute_in_fp8,
    frozen_beside,
    loud_source,
    pack_plainly,
)
from llmtrain.parity.plain_objectives import PLAIN, PlainTeacher, divergence, plain_loss
from llmtrain.parity.tokens import Answers, Tokens, synthetic

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_NUDGE = 2.5e-7
"""Relative size of random changes: two units in the last place of fp32, which change a loss by about as much as another
order of summation does."""


@dataclass(frozen=True)
class Order:
    """One order of summation. All orders are mathematically equal."""

    pieces: int
    """Number of pieces, with equally many rows, in which the global batch goes through the model."""
    reverse: bool
    """Start with the last row."""
    attention: str
    """transformers' attention implementation; each rounds differently."""
    halves: bool
    """Compute each matrix product as a sum of products over two halves of the inputs."""
    nudge: int = 0
    """Above 0: before each step the weights are the masters, randomly changed by a few units in the last place."""


def nudged(known: list[Order], count: int) -> list[Order]:
    """Return more orders, with random changes of the weights, which show how rounding affects choices between nearly
    equal values."""
    return [replace(order, nudge=1 + index) for index, order in zip(range(count), cycle(known), strict=False)]


def orders(model: ModelConfig, batch: Batch) -> list[Order]:
    """Return three orders: all rows at once; one piece for each micro-batch, backwards; row by row. In fp8, and with a
    load-balancing loss, the pieces are always micro-batches."""
    other, config = model.attention, load_config(model)
    few, rows = batch.accumulation * batch.data_parallel, batch.global_batch
    if other == "auto" or other.startswith("flash"):
        family: Any = _kind(config)._model_mapping[type(config)]
        other = "sdpa" if family._supports_sdpa else "eager"
    if _balance_coefficient(config):  # the load-balancing loss is no sum over rows: pieces must be micro-batches
        count = batch.accumulation
        return [Order(count, False, "eager", False), Order(count, True, other, True), Order(count, True, other, False)]
    if model.fp8 is not None:  # each micro-batch of a rank has its own scales
        return [Order(few, False, "eager", False), Order(few, True, other, True), Order(few, True, other, False)]
    return [Order(1, False, "eager", False), Order(few, True, other, True), Order(rows, False, other, False)]


def _kind(config: PreTrainedConfig) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    scores = any("SequenceClassification" in name for name in config.architectures or [])
    return AutoModelForSequenceClassification if scores else AutoModelForCausalLM


def train_plainly(run: Run, steps: int, order: Order, device: torch.device) -> Trace:
    """Train with fp32 masters. Model and gradients have the run's precision, and autocast if the run has it."""
    config, optim = run.config, run.config.optim
    of_model = load_config(config.model)
    model = _kind(of_model).from_config(of_model, attn_implementation=order.attention, dtype=torch.float32).to(device)
    model.config.get_text_config().pad_token_id = None  # else scores skip a last token equal to the padding
    spec = ModelSpec.of(config.model, config.adapter, scores=config.objective.scores)
    source = loud_source(spec, config.train.seed)
    beside = None if config.adapter.r is None else frozen_beside(model, config.adapter)
    trainable = [n for n, p in model.named_parameters() if p.requires_grad]
    chosen = {n for n in trainable if (not _trains(n, config.model) if beside is None else n in beside)}
    for name in chosen:
        model.get_parameter(name).requires_grad_(False)
    adapt_plainly(model, config.adapter, summed=order.halves and config.model.fp8 is None)
    masters = {name: _value(source, name).to(device) for name, p in model.named_parameters() if p.requires_grad}
    model.to(DTYPES[run.mix.precision])
    # Rotary frequencies stay in fp32, as transformers keeps them when it loads a model in another precision.
    exact = dict(_kind(of_model).from_config(of_model, dtype=torch.float32).named_buffers())
    for name, buffer in model.named_buffers():
        buffer.data = exact[name].to(device)
    frozen = _frozen(model, spec.shapes)
    for name, tensor in frozen.items():  # those that the family freezes stay in fp32, as in transformers
        tensor.data = _value(source, name).to(device, DTYPES[run.mix.precision] if name in chosen else torch.float32)
    pack_plainly(model, config.adapter)
    base = base_of(model, masters) if config.objective.reference == "online" else None
    for each in (model, *([base] if base is not None else [])):
        if order.halves:
            _halve_products(each)
        compute_in_fp8(each, config.model.fp8, halves=order.halves)
        if run.mix.autocast:
            each.forward = torch.autocast(device.type, DTYPES[run.mix.products])(each.forward)
    optimizer = PlainOptimizer(
        model, masters, optim, newton_schulz_dtype(optim.name, run.mix.precision), bf16=run.mix.bf16_moments
    )
    vocabulary = of_model.get_text_config().vocab_size
    tokens = synthetic(config, vocabulary)
    teacher = PlainTeacher.of(config.objective, order.attention, DTYPES[run.mix.precision], device)
    trace = Trace(by_sign=optim.by_sign)
    plain = [each for feature in asked(config) if (each := feature.plain(config)) is not None]

    def note(step: int) -> None:
        values = masters | frozen
        for variant, own in (item for each in plain for item in each(step, masters).items()):
            values |= {VARIANT.format(variant, name): value for name, value in (own | frozen).items()}
        trace.parameters.append({name: value.detach().cpu().clone() for name, value in values.items()})

    note(0)
    for step in range(steps):
        _copy(masters, model, order.nudge and order.nudge * 1_000_003 + step)
        if isinstance(tokens, Answers):
            rows = list(range(step * run.batch.global_batch, (step + 1) * run.batch.global_batch))
            loss = _of_answers(model, config.objective, tokens, rows, order, base)
        else:
            loss = _forward_backward(model, tokens, run, step, order, teacher)
        norm = optimizer.step(rate_of_step(config.schedule, step + 1, run.max_steps or steps))
        trace.losses.append(loss)
        if not optim.norm_of_update:
            trace.norms.append(norm)
        note(step + 1)
        if step == 0:
            trace.gradients = optimizer.first_moments()
    return trace


def newton_schulz_dtype(optimizer: str, precision: str) -> torch.dtype:
    """Return the dtype of Muon's iteration: fp32 in an fp32 run, else DeepSpeed's choice for this device."""
    if optimizer != "muon" or precision == "fp32":
        return torch.float32
    from deepspeed.runtime.zero.muon.original_muon import ns_compute_dtype

    return ns_compute_dtype()


def _value(source: ParameterSource, name: str) -> Tensor:
    shape = source.shape(name)
    return source.read(name, 0, math.prod(shape)).detach().reshape(shape).clone()


def _trains(name: str, model: ModelConfig) -> bool:
    named = any(fnmatchcase(name, pattern) for pattern in model.train_only or model.freeze)
    return named == bool(model.train_only)


def _frozen(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the saved tensors that no optimizer changes: parameters without a gradient, and buffers."""
    trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    state = model.state_dict(keep_vars=True)
    return {name: state[name] for name in names if name not in trained}


def _halve_products(model: nn.Module) -> None:
    """Compute each product in two halves, rounded before the sum, as tensor-parallel ranks and other kernels do."""
    from transformers.pytorch_utils import Conv1D

    def linear(self: Any, x: Tensor) -> Tensor:
        weight = self.weight.t() if isinstance(self, Conv1D) else self.weight
        half = weight.shape[1] // 2
        product = F.linear(x[..., :half], weight[:, :half]) + F.linear(x[..., half:], weight[:, half:])
        return product if self.bias is None else product + self.bias

    for module in model.modules():
        if type(module) in (nn.Linear, Conv1D):
            module.forward = types.MethodType(linear, module)


@torch.no_grad()
def _copy(masters: dict[str, Tensor], model: nn.Module, nudge: int) -> None:
    draw = torch.Generator().manual_seed(nudge)
    for name, parameter in model.named_parameters():
        if name not in masters:
            continue
        value = masters[name]
        if nudge:
            value = value * (1 + _NUDGE * torch.randn(value.shape, generator=draw).to(value.device))
        parameter.copy_(value)
        parameter.grad = None


def _forward_backward(
    model: Any, tokens: Tokens, plan: Run, step: int, order: Order, teacher: PlainTeacher | None
) -> float:
    """Compute the gradients of the mean loss over all counted tokens in the global batch; return that mean (nats)."""
    config, objective, count = plan.config, plan.config.objective, plan.batch.global_batch
    rows = list(range(step * count, (step + 1) * count))
    if order.reverse:
        rows.reverse()
    parts = [part.to(model.device) for part in _rows(tokens, rows)]
    counted, total = int((parts[1] >= 0).sum()), 0.0
    pieces = order.pieces
    if isinstance(objective, ByToken) and config.model.fp8 is None:  # in fp8 the scales depend on the rows of a pass
        pieces = 1  # `terms` gets the full batch at once
    for some in zip(*(part.chunk(pieces) for part in parts), strict=True):
        passes = [_losses(model, teacher, *document) for document in _documents(some, tokens)]
        losses = torch.cat([losses for losses, _, _ in passes])
        terms = objective.terms(losses) if isinstance(objective, ByToken) else losses
        loss = (terms if isinstance(terms, Tensor) else terms[0]).sum()
        part = loss / counted
        if isinstance(objective, NextToken) and objective.z_loss:
            part = part + objective.z_loss * torch.cat([log_z for _, log_z, _ in passes]).square().sum() / counted
        if coefficient := _balance_coefficient(model.config):
            part = part + coefficient * _balance(model, [routers for _, _, routers in passes]) / pieces
        part.backward()
        total += loss.item()
    return total / counted


def _of_answers(model: Any, config: Objective, answers: Answers, rows: list[int], order: Order, base: Any) -> float:
    """Compute the gradients of the mean loss over all records; return that mean."""
    if order.reverse:
        rows.reverse()
    kind = answers.kind
    z = divergence(model, answers, rows, base) if kind.mismatched else 0.0
    all_answers = sum(len(answers.rows(row)) for row in rows)
    pieces = order.pieces if config.name in PLAIN else 1  # a plugin's method gets the full batch at once
    counted, total, each = all_answers // kind.together, 0.0, len(rows) // pieces
    for first in range(0, len(rows), each):
        loss = plain_loss(model, config, answers, rows[first : first + each], z, base) / counted
        loss.backward()
        total += loss.item()
    return total


def _rows(tokens: Tokens, rows: list[int]) -> list[Tensor]:
    """Return [inputs, labels], int64 [rows, T], then a teacher's column, if any. A label is the next token; it is -100
    after the row's last counted label, and at the start of a document if these are masked."""
    inputs, labels = [], []
    for row in rows:
        ids, counted = tokens.row(row)
        text = ids.tolist()
        hidden = [tokens.mask_document_starts and before == tokens.separator_id for before in text[:-1]]
        labels.append([-100 if hide or place >= counted else text[place + 1] for place, hide in enumerate(hidden)])
        inputs.append(text[:-1])
    columns = [tokens.column(row) for row in rows] if tokens.top_k else []
    column = [torch.from_numpy(np.stack(each)) for each in zip(*columns, strict=True)]
    return [torch.tensor(inputs), torch.tensor(labels), *column]


def rate_of_step(schedule: Schedule, number: int, steps: int) -> float:
    """Return the factor on the peak learning rate at optimizer step `number` (from 1) of `steps`. In a warm-up of w
    steps, step k has k / (w + 1), and the next step has 1. From there half a cosine or a line reaches min_ratio at the
    last step; with wsd, step k of the last d steps has 1 - (1 - min_ratio) k / d."""
    if type(schedule).__module__ != Schedule.__module__:  # a plugin's schedule defines itself
        return schedule.factor(number - 1, steps)
    whole = schedule.warmup_steps + 1
    if isinstance(schedule, Wsd):
        assert schedule.decay_steps is not None, "the resolver fills it in"
        if (late := number - (steps - schedule.decay_steps)) > 0:
            return 1.0 - (1.0 - schedule.min_ratio) * late / schedule.decay_steps
    if number <= whole or isinstance(schedule, Constant | Wsd):
        return min(1.0, number / whole)
    assert isinstance(schedule, Falling)
    done = (number - whole) / (steps - whole)
    height = math.cos(math.pi / 2 * done) ** 2 if isinstance(schedule, Cosine) else 1.0 - done
    return schedule.min_ratio * (1.0 - height) + height


def _balance_coefficient(config: PreTrainedConfig) -> float:
    return config.router_aux_loss_coef if getattr(config, "output_router_logits", False) else 0.0


def _balance(model: Any, passes: list[tuple[Tensor, ...]]) -> Tensor:
    """Return transformers' load-balancing loss over all tokens of a piece."""
    layers = tuple(torch.cat(layer) for layer in zip(*passes, strict=True))
    function = sys.modules[type(model).__module__].load_balancing_loss_func
    return function(layers, model.num_experts, model.num_experts_per_tok)


def _documents(parts: tuple[Tensor, ...], tokens: Tokens) -> Iterator[tuple[Tensor, ...]]:
    """Yield the parts of `_rows` that go through the model together. With data.isolate_documents this is one document
    at a time, which needs no mask and no positions."""
    if not tokens.isolate_documents:
        yield parts
        return
    for row, *others in zip(*parts, strict=True):
        ends = [int(place) + 1 for place in (row == tokens.separator_id).nonzero()]
        begins = [0, *ends]
        for begin, end in zip(begins, [*ends, len(row)], strict=True):
            if end > begin:
                yield tuple(part[begin:end].unsqueeze(0) for part in (row, *others))


def _losses(
    model: Any, teacher: PlainTeacher | None, inputs: Tensor, labels: Tensor, *column: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return (losses of the counted tokens, or with a teacher their sum [1]; log Z of these tokens; each layer's router
    logits)."""
    out = model(input_ids=inputs, use_cache=False)
    logits = out.logits.float()
    if teacher is None:
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
        losses = each[labels.flatten() >= 0]
    else:
        losses = teacher.loss_sum(logits, inputs, labels, *column).view(1)
    log_z = logits.logsumexp(-1).flatten()[labels.flatten() >= 0]
    return losses, log_z, getattr(out, "router_logits", None) or ()


class PlainOptimizer:
    """AdamW, Lion, Muon and clipping by their definitions, on fp32 masters. A plugin's optimizer defines itself."""

    def __init__(
        self,
        model: nn.Module,
        masters: dict[str, Tensor],
        optim: Optimizer,
        newton_schulz_dtype: torch.dtype = torch.float32,
        *,
        bf16: bool = False,
    ) -> None:
        """`bf16`: round the moments to bf16 after each step."""
        self._named = dict(model.named_parameters())
        self._masters = masters
        self._optim = optim
        self._newton_schulz_dtype = newton_schulz_dtype
        self._first = {name: torch.zeros_like(value) for name, value in masters.items()}
        self._second = {name: torch.zeros_like(value) for name, value in masters.items()}
        self._kept = torch.bfloat16 if bf16 else torch.float32
        self._steps = 0
        self._muon: dict[str, bool] = {}
        """Name of a matrix that Muon updates -> True if its columns are the outputs."""
        self._own = {name: _own(model, name, value, optim) for name, value in masters.items()}
        self._of_plugin: Any = None
        if type(optim) not in (AdamW, Lion, Muon):
            self._of_plugin = optim.build(list(self._groups(model)))
        if isinstance(optim, Muon):  # the decoder layers are the list with most parameters
            lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
            layers = max(lists, key=lambda m: sum(1 for _ in m.parameters()))
            inside = dict(_maps(layers))
            self._muon = {name: inside[p] for name, p in self._named.items() if p in inside}

    def _groups(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        """Yield a group for each parameter, for a plugin's optimizer."""
        groups = self._optim.groups(types.SimpleNamespace(hf=model))
        special = {id(parameter): group for group in groups for parameter in group.parameters}
        for name, master in self._masters.items():
            (factor, decay), group = self._own[name], special.get(id(self._named[name]))
            settings = self._optim.group() if group is None else group.settings
            yield {**settings, "params": [master], "peak_lr": settings["lr"] * factor, "weight_decay": decay}

    @torch.no_grad()
    def step(self, lr_factor: float) -> float:
        """Make one update, and return the global gradient norm before clipping."""
        optim = self._optim
        grads = {
            n: torch.zeros_like(m) if (g := self._named[n].grad) is None else g.float()
            for n, m in self._masters.items()
        }
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
        if optim.clip_norm and norm > optim.clip_norm:
            grads = {name: grad * (optim.clip_norm / norm) for name, grad in grads.items()}
        self._steps += 1
        if self._of_plugin is not None:
            for name, grad in grads.items():
                self._masters[name].grad = grad
            for group in self._of_plugin.param_groups:
                group["lr"] = group["peak_lr"] * lr_factor
            self._of_plugin.step()
            return norm
        for name, grad in grads.items():
            own_factor = self._own[name][0] * lr_factor
            if name in self._muon:
                self._muon_update(name, grad, own_factor)
            elif isinstance(optim, Lion):
                self._lion_update(name, grad, optim.lr * own_factor)
            else:
                self._adamw_update(name, grad, optim.lr * own_factor)
            for moment in (self._first[name], self._second[name]):
                moment.copy_(moment.to(self._kept))
        return norm

    def first_moments(self) -> dict[str, Tensor]:
        """Return the first moments of AdamW or Lion, by name."""
        if self._of_plugin is not None:
            return {}
        return {name: moment.cpu().clone() for name, moment in self._first.items() if name not in self._muon}

    def _decay(self, name: str, lr: float) -> None:
        self._masters[name].mul_(1 - lr * self._own[name][1])

    def _adamw_update(self, name: str, grad: Tensor, lr: float) -> None:
        """The method of Loshchilov and Hutter, arXiv 1711.05101, algorithm 2."""
        assert isinstance(self._optim, AdamW)
        first_rate, second_rate = self._optim.betas
        value, first, second = self._masters[name], self._first[name], self._second[name]
        self._decay(name, lr)
        first.mul_(first_rate).add_(grad, alpha=1 - first_rate)
        second.mul_(second_rate).addcmul_(grad, grad, value=1 - second_rate)
        mean = first / (1 - first_rate**self._steps)
        root = (second / (1 - second_rate**self._steps)).sqrt()
        value.sub_(lr * mean / (root + self._optim.eps))

    def _lion_update(self, name: str, grad: Tensor, lr: float) -> None:
        """The method of Chen et al., arXiv 2302.06675, algorithm 2."""
        slow, fast = self._optim.betas
        value, moment = self._masters[name], self._first[name]
        self._decay(name, lr)
        value.sub_(lr * torch.sign(slow * moment + (1 - slow) * grad))
        moment.mul_(fast).add_(grad, alpha=1 - fast)

    def _muon_update(self, name: str, grad: Tensor, lr_factor: float) -> None:
        """Orthogonalised Nesterov momentum (https://kellerjordan.github.io/posts/muon/), scaled for tall matrices."""
        assert isinstance(self._optim, Muon)
        value, momentum, rate = self._masters[name], self._first[name], self._optim.muon_momentum
        lr = self._optim.muon_lr * lr_factor
        momentum.lerp_(grad, 1 - rate)
        update = orthogonalised(grad.lerp(momentum, rate), self._newton_schulz_dtype)
        outputs, inputs = value.mT.shape[-2:] if self._muon[name] else value.shape[-2:]
        self._decay(name, lr)
        value.sub_(lr * math.sqrt(max(1.0, outputs / inputs)) * update)


def _maps(layers: nn.Module) -> Iterator[tuple[nn.Parameter, bool]]:
    """Yield (matrix, True if y = x W) of linear layers; Conv1D and some experts have x W, the others x W^T.
    Convolutions, tables, and stacks of vectors or numbers are left out."""
    for module in layers.modules():
        for name, parameter in module.named_parameters(recurse=False):
            of = f"{type(module).__name__}.{name}"
            if parameter.dim() > 1 and not re.search(r"Conv1d|Embedding|bias|A_log|time_mix|scale|\.D$", of):
                turned = re.search(r"^Conv1D|Llama4TextExperts|Relative(Logits|PositionBias)|DbrxExpertGLU\.w2", of)
                yield parameter, turned is not None or getattr(module, "is_transposed", False)


def _own(model: nn.Module, name: str, value: Tensor, optim: Optimizer) -> tuple[float, float]:
    """Return (factor on the learning rate, weight decay) of one parameter."""
    every = dict(model.named_parameters(remove_duplicate=False))
    tied = [other for other in every if every[other] is every[name]]

    def given(values: dict[str, float], default: float) -> float:
        return next((v for pattern, v in values.items() if any(fnmatchcase(n, pattern) for n in tied)), default)

    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList)]
    layers = max(lists, key=lambda some: sum(len(list(layer.parameters())) for layer in some), default=[])
    inside = [index for index, layer in enumerate(layers) if any(p is every[name] for p in layer.parameters())]
    below = len(layers) - 1 - inside[-1] if inside else 0
    if not inside and any(isinstance(model.get_submodule(n.rpartition(".")[0]), nn.Embedding) for n in tied):
        below = len(layers)
    usual = optim.weight_decay if value.dim() >= 2 or optim.decay == "all" else 0.0
    return given(optim.lr_factor_of, 1.0) * optim.layer_decay**below, given(optim.weight_decay_of, usual)


def orthogonalised(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Apply five quintic Newton-Schulz steps, in `dtype`, to matrix = U S V^T; the result approximates U V^T."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = (matrix / (matrix.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(dtype)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.float()
