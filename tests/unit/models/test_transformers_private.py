"""Private names of transformers, torch and DeepSpeed: in two files of models, and nothing goes on where one is gone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import utils as inductor
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM, PreTrainedModel, masking_utils
from transformers.activations import ACT2FN

from llmtrain.models import transformers_private
from llmtrain.models.parallel import deepspeed_private
from llmtrain.models.skeleton import construct
from llmtrain.models.transformers_private import OperatorMode

SMALL = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
PLACES = torch.arange(4).unsqueeze(0)


def within(manager: Callable[[], Any]) -> Callable[[], None]:
    def enter() -> None:
        with manager():
            pass

    return enter


@pytest.mark.parametrize(
    ("owner", "name", "use"),
    [
        (masking_utils, "find_packed_sequence_indices", within(lambda: transformers_private.documents_are(None))),
        (masking_utils, "_preprocess_mask_arguments", within(lambda: transformers_private.masks_of_whole_rows(PLACES))),
        (inductor, "fresh_cache", within(transformers_private.fresh_compilation_cache)),
        (nn.Module, "register_parameter", within(transformers_private.parameters_on_meta)),
        (PreTrainedModel, "_from_config", lambda: transformers_private.build_with(LlamaForCausalLM, SMALL)),
        (PreTrainedModel, "_supports_flash_attn", lambda: transformers_private.takes_flash_attention(PreTrainedModel)),
        (PreTrainedModel, "_keys_to_ignore_on_save", lambda: transformers_private.names_not_saved(PreTrainedModel)),
        (
            PreTrainedModel,
            "_keys_to_ignore_on_load_unexpected",
            lambda: transformers_private.patterns_not_loaded(PreTrainedModel),
        ),
    ],
)
def test_a_name_that_is_gone_is_told(owner: Any, name: str, use: Callable[[], Any], monkeypatch) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises((AttributeError, ImportError), match=name):
        use()


def test_packed_rows_may_lack_their_function_in_the_oldest_transformers_only(monkeypatch) -> None:
    monkeypatch.delattr(masking_utils, "remap_positions_for_packed_sequence", raising=False)
    monkeypatch.setattr("transformers.__version__", "5.17.0")
    within(lambda: transformers_private.masks_of_whole_rows(PLACES))()
    monkeypatch.setattr("transformers.__version__", "5.23.0")
    with pytest.raises(AttributeError, match="remap_positions_for_packed_sequence"):
        within(lambda: transformers_private.masks_of_whole_rows(PLACES))()


def test_what_is_set_on_objects_must_be_there() -> None:
    bare: Any = SimpleNamespace()
    with pytest.raises(AttributeError, match="_experts_implementation"):
        transformers_private.loop_over_experts(bare)
    with pytest.raises(AttributeError, match="_attn_implementation"), transformers_private.attention_is(bare, "eager"):
        pass
    with pytest.raises(AttributeError, match="_gone"):
        deepspeed_private.overrides(nn.Linear)(_gone)


def _gone() -> None:
    pass


def test_what_is_replaced_comes_back() -> None:
    before = masking_utils.find_packed_sequence_indices, nn.Module.register_parameter
    with (
        pytest.raises(ZeroDivisionError),
        transformers_private.documents_are(None),
        transformers_private.parameters_on_meta(),
    ):
        assert nn.Linear(2, 2).weight.is_meta
        raise ZeroDivisionError
    assert (masking_utils.find_packed_sequence_indices, nn.Module.register_parameter) == before


@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast", "gelu_python_tanh"])
def test_a_gelu_of_many_operators_is_computed_by_one(name: str) -> None:
    """Value and gradient are transformers' within rounding, and a forward pass of the activation is one operator."""
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=16, vocab_size=64, activation_function=name)
    hf = construct(config, "eager", torch.float32)
    x = (torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 3).requires_grad_()
    ours, theirs = hf.transformer.h[1].mlp.act, ACT2FN[name]

    class Count(OperatorMode):
        operators = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Count.operators += 1
            return func(*args, **(kwargs or {}))

    with Count():
        value = ours(x)
    assert Count.operators == 1
    torch.testing.assert_close(value, theirs(x), rtol=0, atol=5e-7)
    [got], [want] = torch.autograd.grad(value.sum(), x), torch.autograd.grad(theirs(x).sum(), x)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
