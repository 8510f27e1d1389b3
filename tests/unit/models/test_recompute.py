"""What activation checkpointing computes twice, and that the gradients stay the same to the last bit."""

from __future__ import annotations

import copy
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from llmtrain.config.run import ModelConfig, RecomputeConfig
from llmtrain.config.topology import Mix
from llmtrain.models import varlen
from llmtrain.models.language import LanguageModel
from llmtrain.models.parallel import recompute
from llmtrain.models.parallel.layers import set_up_layers
from llmtrain.models.skeleton import decoder_layers
from tests.helpers.marks import slow
from tests.unit.models.test_experts import Launches
from tests.unit.models.test_tiled import loss_and_gradients, model_of

TOKENS = torch.randint(0, 512, (2, 22), generator=torch.Generator().manual_seed(0))


def counted(model: LanguageModel) -> tuple[float, dict[str, torch.Tensor], int, int]:
    """(loss, gradients, attention's forward kernels, matrix products)."""
    with Launches() as mode:
        loss, gradients = loss_and_gradients(model, TOKENS)
    attention = ("scaled_dot_product", "within_documents")
    kernels = [name for name in mode.ran if any(part in name for part in attention) and "backward" not in name]
    return loss, gradients, sum(mode.ran[name] for name in kernels), mode.ran["mm"]


def recomputing(
    model: LanguageModel, layers: int | Literal["all"] | None, keep: Literal["attention"] | None, *, on_host: bool
) -> LanguageModel:
    """The model with these layers recomputed."""
    given = ModelConfig(recompute=RecomputeConfig(layers=layers, keep=keep))
    mix = Mix(recomputes=layers is not None, keep_attention=keep is not None, layer_inputs_on_host=on_host)
    set_up_layers(model.hf, list(decoder_layers(model.hf)), given, mix)
    return model


class Dropping(nn.Module):
    """A layer with an attention that draws random numbers, as GPUs' kernels do for its dropout, and more dropout after
    it. (On a CPU torch computes such an attention by operators that are recomputed.)"""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended, _ = torch.native_dropout(self.map(x), 0.5, True)
        return F.dropout(self.map(attended), 0.5)


@pytest.mark.parametrize("keep", [False, True])
def test_dropout_after_attention_is_the_same_when_attention_is_kept(
    keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompute, "ATTENTION", (torch.ops.aten.native_dropout.default,))
    torch.manual_seed(0)
    plain, x = Dropping(), torch.randn(4, 8)
    again = copy.deepcopy(plain)
    recompute.recompute([again], keep_attention=keep, on_host=False, compiled=False)
    for layer in (plain, again):
        torch.manual_seed(1)
        layer(x).square().sum().backward()
    assert torch.equal(again.map.weight.grad, plain.map.weight.grad)


@pytest.mark.parametrize(
    ("layers", "keep", "on_host"),
    [
        (1, None, False),
        (2, None, True),
        ("all", None, False),
        (2, "attention", False),
        ("all", "attention", False),
        ("all", "attention", True),
    ],
)
@pytest.mark.parametrize("family", ["llama", slow("gemma3"), slow("gpt2"), "varlen"])
def test_the_first_layers_run_twice_but_for_what_they_keep(family, layers, keep, on_host):
    attention = family if family == "varlen" else "sdpa"
    model = model_of("llama" if family == "varlen" else family, attention=attention)
    varlen.set_documents(None)
    model.train()
    of_model = model.hf.config.num_hidden_layers
    loss, gradients, attended, products = counted(model)
    assert attended == of_model
    again = of_model if layers == "all" else layers
    recomputing(model, layers, keep, on_host=on_host)
    other_loss, other_gradients, other_attended, other_products = counted(model)
    assert other_attended == of_model + (again if keep is None else 0)
    _, _, _, all_products = counted(recomputing(model, "all", None, on_host=False))
    assert other_products - products == (all_products - products) * again // of_model
    assert all_products > products or family == "gpt2"  # whose maps are addmm
    assert other_loss == loss
    assert other_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(other_gradients[name], gradient), name


@pytest.mark.parametrize("keep", [None, "attention"])
def test_what_is_kept_waits_on_the_host(keep, monkeypatch):
    """The hidden state that enters each layer; with `keep`, attention's output and the sums of its softmax, too."""
    shapes = []
    put = recompute.to_host
    monkeypatch.setattr(recompute, "to_host", lambda tensor: shapes.append(tuple(tensor.shape)) or put(tensor))
    model = recomputing(model_of("llama"), "all", keep, on_host=True).train()
    loss_and_gradients(model, TOKENS)
    inputs = [shape for shape in shapes if shape == (2, 22, 32)]
    outputs = [shape for shape in shapes if shape == (2, 4, 22, 8)]
    assert (len(inputs), len(outputs)) == (4, 0 if keep is None else 4)
