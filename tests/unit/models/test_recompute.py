"""What activation checkpointing computes twice, and that the gradients stay the same to the last bit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmtrain.models.language import LanguageModel, checkpoint_activations
from tests.unit.models.test_tiled import loss_and_gradients, model_of


class Counted(TorchDispatchMode):
    """The operators that ran, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def counted(model: LanguageModel, tokens: torch.Tensor) -> tuple[float, dict[str, torch.Tensor], int, int]:
    """(loss, gradients, attention's forward kernels, matrix products)."""
    with Counted() as mode:
        loss, gradients = loss_and_gradients(model, tokens)
    kernels = [name for name in mode.ran if "scaled_dot_product" in name and "backward" not in name]
    return loss, gradients, sum(mode.ran[name] for name in kernels), mode.ran["mm"]


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2"])
def test_attention_runs_once_and_the_rest_twice(family):
    model = model_of(family)
    model.train()
    tokens = torch.randint(0, 512, (2, 22), generator=torch.Generator().manual_seed(0))
    layers = model.hf.config.num_hidden_layers
    loss, gradients, attended, products = counted(model, tokens)
    assert attended == layers
    checkpoint_activations(model.hf, {}, keep_attention=False)
    _, _, twice, more = counted(model, tokens)
    assert twice == 2 * layers and more > products
    checkpoint_activations(model.hf, {}, keep_attention=True)
    kept_loss, kept_gradients, once, as_many = counted(model, tokens)
    assert once == layers
    assert as_many == more
    assert kept_loss == loss
    assert kept_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(kept_gradients[name], gradient), name
