"""MLPs over slices of the sequence: the same numbers, less memory. (Under ZeRO: tests/ranks/test_sequence.py.)"""

from __future__ import annotations

import pytest
import torch

from llmtrain.base.errors import ModelError
from llmtrain.config.run import ModelConfig
from llmtrain.models.language import LanguageModel
from llmtrain.models.parallel.recompute import tile_mlps
from llmtrain.models.skeleton import construct, load_config, restore_buffers, skeleton
from llmtrain.models.structure.projections import dense_mlps
from tests.helpers.families import FAMILIES, summed_loss

DENSE = [family for family in FAMILIES if family not in ("opt", "mixtral")]


def model_of(family: str, attention: str | None = None, **changes: object) -> LanguageModel:
    attention = attention or ("eager" if family == "gemma2" else "sdpa")
    given = ModelConfig(config={**FAMILIES[family], **changes}, attention=attention)  # type: ignore[arg-type]
    torch.manual_seed(1)
    hf = construct(load_config(given), given.attention, torch.float32)
    restore_buffers(hf, skeleton(load_config(given)), torch.device("cpu"))
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    return LanguageModel(hf, 16)


def loss_and_gradients(model: LanguageModel, tokens: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(7)
    model.zero_grad()
    loss = summed_loss(model, tokens, tokens.roll(-1, 1))
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.hf.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", DENSE)
def test_loss_and_gradients_are_the_same(family):
    """fp32, sums in another order: relative differences near 1e-6."""
    model = model_of(family)
    tokens = torch.randint(0, 512, (2, 22), generator=torch.Generator().manual_seed(0))
    loss, gradients = loss_and_gradients(model, tokens)
    found = dense_mlps(model.hf)
    assert len(found) == (1 if family == "qwen3_moe" else 4), found
    tile_mlps(found, 5)
    tiled_loss, tiled_gradients = loss_and_gradients(model, tokens)
    assert abs(tiled_loss - loss) < 1e-6 * abs(loss)
    assert tiled_gradients.keys() == gradients.keys()
    # Softmax hardly sees what all keys share: the gradient of their bias nearly cancels, its rounding is the terms'.
    terms = 1e-7 * max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        close = 1e-6 * float(gradient.abs().max()) + (terms if name.endswith("k_proj.bias") else 0.0)
        assert torch.allclose(tiled_gradients[name], gradient, rtol=1e-4, atol=close), name


def test_slices_are_what_the_mlp_gets():
    """The widest tensor of an MLP has as many rows as a tile."""
    model = model_of("llama")
    tile_mlps(dense_mlps(model.hf), 5)
    rows: list[int] = []
    for layer in model.hf.model.layers:
        layer.mlp.act_fn.register_forward_hook(lambda module, args, output: rows.append(output.shape[-2]))
    tokens = torch.arange(22).unsqueeze(0)
    summed_loss(model, tokens, tokens).backward()
    assert rows == 2 * 4 * [5, 5, 5, 5, 2]  # forward and backward, four layers


def test_dropout_falls_the_same_way_in_the_backward_pass():
    """The gradient of the tiled MLP is the one of its own forward pass: a numerical derivative with the same seed."""
    model = model_of("gpt2", resid_pdrop=0.5).double()
    tile_mlps(dense_mlps(model.hf), 5)
    mlp = model.hf.transformer.h[0].mlp
    torch.manual_seed(0)
    hidden, direction = torch.randn(2, 1, 12, 32, dtype=torch.float64)
    hidden.requires_grad_()

    def summed(step: float) -> torch.Tensor:
        torch.manual_seed(3)
        return mlp(hidden + step * direction).sin().sum()

    (gradient,) = torch.autograd.grad(summed(0.0), hidden)
    with torch.no_grad():
        slope = (summed(1e-6) - summed(-1e-6)) / 2e-6
    assert torch.allclose((gradient * direction).sum(), slope, rtol=1e-6)


def test_bf16_gradients_are_summed_in_fp32():
    """A hundred slices: summed in bf16, a weight's gradient would lose what is 1/256 of the sum and below."""
    model = model_of("llama")
    tokens = torch.randint(0, 512, (1, 200), generator=torch.Generator().manual_seed(0))
    _, exact = loss_and_gradients(model, tokens)
    model = model.bfloat16()
    tile_mlps(dense_mlps(model.hf), 2)
    _, tiled = loss_and_gradients(model, tokens)
    whole = model_of("llama").bfloat16()
    _, plain = loss_and_gradients(whole, tokens)
    name = "model.layers.3.mlp.down_proj.weight"

    def error(gradients: dict[str, torch.Tensor]) -> float:
        return float((gradients[name].float() - exact[name]).norm() / exact[name].norm())

    assert error(tiled) < 1.2 * error(plain)


@pytest.mark.parametrize("family", ["opt", "mixtral"])
def test_models_without_an_mlp_module_are_refused(family):
    with pytest.raises(ModelError, match="mlp_tile_tokens"):
        dense_mlps(model_of(family).hf)
