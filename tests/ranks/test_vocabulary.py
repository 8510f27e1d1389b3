"""More tokens than the folder's: new rows begin as the mean, train beside an adapter, and are exported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.base.errors import ConfigError
from llmtrain.checkpoint.hf.exporting import export_hf
from llmtrain.checkpoint.hf.inference import _rows
from llmtrain.config.run import AdapterConfig, ModelConfig
from llmtrain.models.spec import ModelSpec
from llmtrain.models.vocabulary import check_growth
from llmtrain.optim.optimizers import PARAM
from tests.helpers.adapters import plain_adapted
from tests.helpers.training import LLAMA, Case, Trace, largest_difference, plain_pytorch
from tests.ranks.test_adapter import LORA, LR, resumed, same, saved, trained, written

pytestmark = pytest.mark.needs("peft")

FEW, ALL = 480, 512
"""Tokens of the folder's model, and of the data."""
WHOLE: dict[str, Any] = LORA | {"modules_to_save": ["model.embed_tokens", "lm_head"]}


def case_of(folder: Path, data: str, *, tied: bool, **form: Any) -> Case:
    base = written(folder / "hf", LLAMA | {"vocab_size": FEW, "tie_word_embeddings": tied})
    model = LLAMA | {"vocab_size": ALL, "tie_word_embeddings": tied}
    return Case(data=data, model=model, pretrained=base, vocabulary=ALL, adapter=WHOLE, lr=LR, **form)


def grown(case: Case) -> Any:
    """transformers' model, its embeddings resized by transformers, each new row the mean of the old ones."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(case.pretrained, dtype=torch.float32)
    few = model.config.vocab_size
    model.resize_token_embeddings(case.vocabulary, mean_resizing=False)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.weight.data[few:] = module.weight.data[:few].mean(0)
    return model


def reference(case: Case) -> Trace:
    plain = plain_adapted(replace(case, pipeline=1, tensor=1))
    first = dict(grown(case).named_parameters())
    plain.load_state_dict(first, strict=False)
    return plain_pytorch(replace(case, pipeline=1, tensor=1), model=plain)


@pytest.mark.parametrize(
    ("tied", "form"),
    [
        (False, {"stage": 2}),
        (True, {"stage": 3}),
    ],
    ids=str,
)
def test_new_tokens_train_as_in_plain_pytorch(pools, small_data, tmp_path, tied, form):
    case = case_of(tmp_path, small_data, tied=tied, **form)
    want = reference(case)
    got, _ = pools(2).run(trained, case)[0]
    assert max(abs(a - b) for a, b in zip(got.losses, want.losses, strict=True)) < 2e-6
    # 1 % of a step: a lora_A has hardly a gradient while B is nearly 0, and Adam divides by its size. One element is
    # 1.2e-5 off (tied, ZeRO 3); plain PyTorch in fp32 is 5e-6 off its own fp64 in the same tensors, 1e-6 elsewhere.
    assert largest_difference(got.parameters, want.parameters) < 0.01 * LR
    assert got.parameters["model.embed_tokens.weight"].shape[0] == ALL


def test_new_tokens_are_saved_resumed_exported_and_merged(pools, small_data, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    case = case_of(tmp_path, small_data, tied=True, stage=2)
    want = pools(2).run(saved, case, str(tmp_path / "run"))[0]
    (path,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert same(pools(2).run(resumed, replace(case, stage=3), str(tmp_path / "run"))[0], want)
    export_hf(path, tmp_path / "peft")
    export_hf(path, tmp_path / "merged", merge=True)
    tokens = torch.arange(ALL).view(16, 32)
    base = AutoModelForCausalLM.from_pretrained(case.pretrained, dtype=torch.float32)
    assert _rows(tmp_path / "peft", base) == ALL
    base.resize_token_embeddings(ALL, mean_resizing=False)
    plain = plain_adapted(case)
    values = dict(want[PARAM])
    plain.load_state_dict(values | {"lm_head.weight": values["model.embed_tokens.weight"]})
    with torch.no_grad():
        logits = plain(tokens).logits
        adapted = PeftModel.from_pretrained(base, str(tmp_path / "peft"))
        assert float((adapted(tokens).logits - logits).abs().max()) < 1e-5
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        assert merged.config.vocab_size == ALL
        assert float((merged(tokens).logits - logits).abs().max()) < 1e-5


def test_rows_that_would_never_train_and_fewer_tokens_are_refused(tmp_path):
    base = written(tmp_path / "hf", LLAMA | {"vocab_size": FEW})
    for adapter, vocabulary, says in (
        (AdapterConfig(r=4), ALL, r"(?s)model.vocabulary = 512.*lm_head.weight would never train.*modules_to_save"),
        (AdapterConfig(r=4, modules_to_save=["lm_head"]), ALL, r"(?s)let model.embed_tokens .*train"),
        (AdapterConfig(), FEW - 1, "has 480 tokens"),
    ):
        model = ModelConfig(pretrained=base, vocabulary=vocabulary)
        spec = ModelSpec.of(model, adapter)
        with pytest.raises(ConfigError, match=says):
            check_growth(spec.skeleton, model, spec.frozen, "adapter.modules_to_save")
    spec = ModelSpec.of(ModelConfig(pretrained=base, vocabulary=ALL))
    check_growth(spec.skeleton, spec.model, spec.frozen, "model.freeze")
