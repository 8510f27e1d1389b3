"""Continuations in every form are those of transformers in one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from llmtrain.config.run import ModelConfig
from llmtrain.features.samples.continuing import Prompts, continuations
from llmtrain.models.spec import ModelSpec
from tests.helpers.training import LLAMA, Case, make_setup

TOKENS = 6
PROMPTS = ["abc d", "a", "j jj fade bed"]


def continued(case: Case) -> list[str]:
    """By the initial weights, on this rank."""
    setup = make_setup(case)
    found = continuations(setup, Prompts.of(PROMPTS, TOKENS, setup.data.first))
    setup.engine.close()
    return found


@functools.cache
def _plain(folder: str) -> list[str]:
    from tokenizers import Tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(LLAMA)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields)).eval()
    source = ModelSpec.of(ModelConfig(config=dict(LLAMA))).initial_weights(0, torch.device("cpu"))
    tokenizer, texts = Tokenizer.from_file(f"{folder}/tokenizer/tokenizer.json"), []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source.read(name, 0, parameter.numel()).view_as(parameter))
        for prompt in PROMPTS:
            ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False).ids])
            new = model.generate(ids, do_sample=False, max_new_tokens=TOKENS, pad_token_id=0, eos_token_id=0)[0]
            texts.append(tokenizer.decode(new[ids.shape[1] :].tolist()))
    return texts


@pytest.mark.parametrize(
    ("ranks", "form"),
    [
        (1, {"stage": 0}),
        (2, {"stage": 3}),
        (2, {"stage": 1, "pipeline": 2}),
        (2, {"stage": 1, "tensor": 2}),
        (2, {"stage": 2, "sequence": 2}),
        (2, {"stage": 3, "isolate_documents": True}),
    ],
    ids=lambda form: "-".join(f"{key}-{value}" for key, value in form.items()) if isinstance(form, dict) else str(form),
)
def test_continuations_are_those_of_one_process(pools: Any, small_data: str, ranks: int, form: dict[str, Any]) -> None:
    texts = _plain(small_data)
    assert all(texts)
    assert all(found == texts for found in pools(ranks).run(continued, Case(data=small_data, **form)))
