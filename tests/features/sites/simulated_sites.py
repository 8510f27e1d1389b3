"""Sites that train one model, by the definition, in one process of plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import torch

from llmtrain.config.run import DataConfig
from llmtrain.data.stream.train_data import TrainData
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


def loss_of(model_fields: dict[str, Any], data: DataConfig, parameters: dict[str, torch.Tensor], samples: int) -> float:
    """Mean loss of a model with these parameters on the first sequences of the training data, nats a token."""
    model, sequences = _first(model_fields), [TrainData(data).sequence_at(index) for index in range(samples)]
    inputs, labels = (
        torch.stack([torch.from_numpy(getattr(w, key)) for w in sequences]) for key in ("inputs", "labels")
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name].view_as(parameter))
        return float(mean_cross_entropy(model(inputs.long()).logits, labels.long()))


def _first(model_fields: dict[str, Any]) -> torch.nn.Module:
    """With the values that a run of seed 0 begins with."""
    return plain_model(Case(data="", model=model_fields))  # type: ignore[no-any-return]


def _step(training: PlainTraining, data: TrainData, samples: range) -> None:
    sequences = [data.sequence_at(index) for index in samples]
    inputs = torch.stack([torch.from_numpy(sequence.inputs) for sequence in sequences])
    labels = torch.stack([torch.from_numpy(sequence.labels) for sequence in sequences])
    training.step(mean_cross_entropy(training.model(input_ids=inputs, use_cache=False).logits, labels))
