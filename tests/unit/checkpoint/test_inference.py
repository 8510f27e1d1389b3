"""What `llmtrain.load`, generate and chat load is what peft loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import llmtrain
from tests.helpers.chat import KINDS, write_tokenizer


@pytest.mark.needs("peft")
def test_the_lengths_of_dora_are_loaded(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes))
    base.save_pretrained(tmp_path / "base")
    write_tokenizer(tmp_path / "base", KINDS["chatml"])
    base.name_or_path = str(tmp_path / "base")
    trained = get_peft_model(base, LoraConfig(r=2, use_dora=True, target_modules=["q_proj", "up_proj"]))
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.rand_like(parameter))
    trained.save_pretrained(tmp_path / "adapter")
    write_tokenizer(tmp_path / "adapter", KINDS["chatml"])
    loaded, _ = llmtrain.load(tmp_path / "adapter", device="cpu")
    tokens = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, trained.eval()(tokens).logits)
