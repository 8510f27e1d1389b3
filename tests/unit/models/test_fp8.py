"""Linear maps in fp8: torchao's map, emulated, against its definition in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from llmtrain.base.errors import ConfigError
from llmtrain.config.run import ModelConfig
from llmtrain.models.fp8 import check_maps, line, maps_of, use_fp8, without_fp8
from llmtrain.models.skeleton import decoder_layers, load_config, skeleton

pytestmark = pytest.mark.needs("torchao")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(values: Tensor, recipe: str, dim: int, dtype: torch.dtype) -> Tensor:
    """Values [., .] as fp8 has them: times a scale that takes the largest to the format's largest, rounded, and divided
    by it again, in fp32. tensorwise: one scale. rowwise: one for all that is summed along `dim`, a power of two."""
    largest = torch.finfo(dtype).max
    if recipe == "tensorwise":
        scale = (largest / values.abs().max().double()).float()
    else:
        scale = torch.exp2(torch.floor(torch.log2((largest / values.abs().amax(dim, keepdim=True).double()).float())))
    return (values.float() * scale).clamp(-largest, largest).to(dtype).float() / scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_a_map_and_its_gradients_are_those_of_the_definition(recipe: str, dtype: torch.dtype) -> None:
    """Three products of rounded factors, in fp32, each rounded to the dtype of the map. 1e-6: another order of sums; to
    the last bit in bf16, which rounds that away but for one in a thousand."""
    torch.manual_seed(0)
    layer = nn.ModuleDict({"map": nn.Linear(64, 160)}).to(dtype)
    weight, bias = layer["map"].weight, layer["map"].bias
    x = torch.randn(3, 16, 64, dtype=dtype).mul(torch.linspace(0.1, 9, 64)).to(dtype).requires_grad_()
    gradient = torch.randn(3, 16, 160).mul(torch.linspace(1e-4, 3e-3, 160)).to(dtype)
    use_fp8([layer], recipe, emulated=True)
    assert layer["map"].weight is weight and layer["map"].bias is bias
    got = layer["map"](x)
    got.backward(gradient)

    flat, of_output = x.detach().flatten(0, 1), gradient.flatten(0, 1)
    sent = E5M2 if recipe == "tensorwise" else E4M3
    output = (rounded(flat, recipe, 1, E4M3) @ rounded(weight.detach(), recipe, 1, E4M3).t()).to(dtype)
    want = {
        "output": (got, output + bias.detach()),
        "input": (x.grad, (rounded(of_output, recipe, 1, sent) @ rounded(weight.detach(), recipe, 0, E4M3)).to(dtype)),
        "weight": (weight.grad, (rounded(of_output, recipe, 0, sent).t() @ rounded(flat, recipe, 0, E4M3)).to(dtype)),
    }
    for name, (mine, theirs) in want.items():
        theirs = theirs.view(mine.shape).float()
        apart = (mine.detach().float() - theirs).abs() / theirs.abs().max()
        assert float(apart.max()) < (1e-6 if dtype == torch.float32 else 2**-8), name
        assert float((apart > 1e-6).float().mean()) < 1e-3, name
    exact = nn.functional.linear(x, weight, bias).detach()
    with without_fp8(layer):
        assert torch.equal(layer["map"](x), exact)
    # e4m3 has 3 bits behind its first: a factor is off by at most 2^-4, both by 2^-3, and many errors cancel
    apart = (got.detach().float() - exact.float()).norm() / exact.float().norm()
    assert 0.01 < float(apart) < 2**-3, apart


@pytest.mark.parametrize(("missing", "said"), [(False, "have no linear maps"), (True, r"'llmtrain\[fp8\]'")])
def test_no_map_and_no_library_are_refused(monkeypatch: pytest.MonkeyPatch, missing: bool, said: str) -> None:
    """GPT-2's maps are Conv1D."""
    hf = skeleton(load_config(ModelConfig(config={"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4})))
    if missing:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=said):
        check_maps(hf, "rowwise", {})


def test_what_is_not_finite_stays_so() -> None:
    """A step with it is skipped: scales may not hide an infinity."""
    layer = nn.ModuleDict({"map": nn.Linear(16, 16)})
    use_fp8([layer], "rowwise", emulated=True)
    for bad in (float("inf"), float("nan")):
        x = torch.ones(2, 16)
        x[0, 3] = bad
        assert not layer["map"](x)[0].isfinite().any()


def test_maps_that_16_does_not_divide_and_those_of_a_mixture_stay() -> None:
    fields = {
        "model_type": "qwen2_moe",
        "vocab_size": 64,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 40,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    hf = skeleton(load_config(ModelConfig(config=fields)))
    chosen, others = maps_of(decoder_layers(hf)[0])
    assert sorted(chosen) == [f"self_attn.{name}_proj" for name in "koqv"]
    assert "multiples of 16" in others["mlp.shared_expert.up_proj"] and "1 x 64" in others["mlp.shared_expert_gate"]
    said = line(hf, "rowwise", emulated=True)
    assert all(words in said for words in ("8 linear maps of 2 decoder layers", "emulated", "40 x 64"))
    assert "lm_head" not in {path for path, _ in hf.named_modules() if path.endswith(tuple(chosen))}
