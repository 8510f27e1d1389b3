"""Sites that train one model, by the definition, in one process of plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import torch

from llmtrain.config.run import DataConfig
from llmtrain.data.stream.loader import TrainData
from llmtrain.sites.sample_ledger import Ledger, Request, steps_of
from tests.helpers.plain import PlainTraining, mean_cross_entropy
from tests.helpers.training import Case, plain_model


def simulated(
    model_fields: dict[str, Any],
    data: DataConfig,
    *,
    sites: int,
    batch: int,
    steps: int,
    sync_every: int,
    lr: float,
    outer_lr: float | None,
    outer_momentum: float = 0.0,
) -> dict[str, torch.Tensor]:
    """The parameters after `steps` steps of every site, by name (local SGD, DiLoCo).

    Site i of a round of n = sync_every steps takes the i-th n x batch sequences of it. AdamW with the defaults of
    `Optimizer`, which each site keeps for itself. `outer_lr` None: the sites' parameters are averaged (local SGD).
    Otherwise torch.optim.SGD with Nesterov's momentum takes (common - average) as its gradient (DiLoCo).
    """
    common = _first(model_fields)
    models = [copy.deepcopy(common) for _ in range(sites)]
    trainings = [PlainTraining(model, lr=lr) for model in models]
    outer = None
    if outer_lr is not None:
        outer = torch.optim.SGD(common.parameters(), lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0)
    read = TrainData(data)
    for first in range(0, steps, sync_every):
        for index, training in enumerate(trainings):
            begin = (first * sites + index * sync_every) * batch
            for step in range(sync_every):
                _step(training, read, range(begin + step * batch, begin + (step + 1) * batch))
        with torch.no_grad():
            for each, *theirs in zip(common.parameters(), *(model.parameters() for model in models), strict=True):
                mean = torch.stack([other.double() for other in theirs]).mean(0)
                if outer is None:
                    each.copy_(mean)
                else:
                    each.grad = (each.double() - mean).float()
            if outer is not None:
                outer.step()
            for model in models:
                for mine, each in zip(model.parameters(), common.parameters(), strict=True):
                    mine.copy_(each)
    return {name: parameter.detach().clone() for name, parameter in common.named_parameters()}


def streamed(
    model_fields: dict[str, Any],
    data: DataConfig,
    *,
    sites: int,
    batch: int,
    steps: int,
    every: int,
    overlap: int,
    fragment: dict[str, int],
    reserve: int,
    lr: float,
    outer_lr: float,
    outer_momentum: float,
) -> dict[str, torch.Tensor]:
    """The same for streaming DiLoCo.

    Round r (from 1, each `every` steps) is about the parameters whose `fragment` is r modulo their number: their mean
    is taken then, and arrives `overlap` steps later; what each has trained since is added. Samples are dealt by the
    Ledger.
    """
    common = _first(model_fields)
    models = [copy.deepcopy(common) for _ in range(sites)]
    trainings = [PlainTraining(model, lr=lr) for model in models]
    shared = {name: parameter.detach().double() for name, parameter in common.named_parameters()}
    momentum = {name: torch.zeros_like(value) for name, value in shared.items()}
    requests = [Request(site=str(site), batch=batch, steps=every, reserve=reserve) for site in range(sites)]
    ledger, read = Ledger(next=0).settled({}, requests), TrainData(data)
    starts = [list(steps_of(ledger.dealt[str(site)], batch)) for site in range(sites)]
    round_, since, trained_before, flight = 1, 0, 0, None

    def send() -> list[dict[str, torch.Tensor]]:
        turn = round_ % (max(fragment.values()) + 1)
        return [
            {n: p.detach().double() for n, p in model.named_parameters() if fragment[n] == turn} for model in models
        ]

    def arrive(sent: list[dict[str, torch.Tensor]]) -> None:
        for name in sent[0]:
            value = torch.stack([each[name] for each in sent]).mean(0)
            gradient = shared[name] - value
            momentum[name] = outer_momentum * momentum[name] + gradient
            shared[name] = shared[name] - outer_lr * (gradient + outer_momentum * momentum[name])
            for model, own in zip(models, sent, strict=True):
                live = model.get_parameter(name)
                live.data.copy_(shared[name] + (live.detach().double() - own[name]))

    for step in range(1, steps + 1):
        for training, mine in zip(trainings, starts, strict=True):
            first = mine.pop(0)
            _step(training, read, range(first, first + batch))
        since += 1
        if flight is not None and since == every + overlap:
            arrive(flight)
            ledger = ledger.settled({str(site): since * batch - trained_before for site in range(sites)}, requests)
            starts = [list(steps_of(ledger.dealt[str(site)], batch)) for site in range(sites)]
            trained_before, round_, since, flight = overlap * batch, round_ + 1, overlap, None
        if step == steps:
            for _ in range(max(fragment.values()) + 1):
                arrive(send())
                round_ += 1
        elif flight is None and since == every:
            flight = send()
    return {name: value.float() for name, value in shared.items()}


def loss_of(model_fields: dict[str, Any], data: DataConfig, parameters: dict[str, torch.Tensor], samples: int) -> float:
    """Mean loss of a model with these parameters on the first sequences of the training data, nats a token."""
    model, windows = _first(model_fields), [TrainData(data).window_at(index) for index in range(samples)]
    inputs, labels = (torch.stack([torch.from_numpy(getattr(w, key)) for w in windows]) for key in ("inputs", "labels"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name].view_as(parameter))
        return float(mean_cross_entropy(model(inputs.long()).logits, labels.long()))


def _first(model_fields: dict[str, Any]) -> torch.nn.Module:
    """With the values that a run of seed 0 begins with."""
    return plain_model(Case(data="", model=model_fields))  # type: ignore[no-any-return]


def _step(training: PlainTraining, data: TrainData, samples: range) -> None:
    windows = [data.window_at(index) for index in samples]
    inputs = torch.stack([torch.from_numpy(window.inputs) for window in windows])
    labels = torch.stack([torch.from_numpy(window.labels) for window in windows])
    training.step(mean_cross_entropy(training.model(input_ids=inputs, use_cache=False).logits, labels))
