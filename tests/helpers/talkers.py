"""Models whose answers a test knows: the next token follows from the last one alone."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.helpers.chat import KINDS, Kind, write_tokenizer


def write_talker(folder: Path, after: dict[str, str], kind: Kind = KINDS["chatml"]) -> Path:
    """A Llama that says `after[token]` after `token`; both are a byte's letter or a control token of the kind."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _ids(write_tokenizer(folder, kind))
    size = len(tokenizer)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size + size % 2,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=1 << 16,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.zero_()
        model.model.embed_tokens.weight.fill_diagonal_(1.0)
        for last, following in after.items():
            model.lm_head.weight[tokenizer[following], tokenizer[last]] = 1.0
    settings = (folder / "generation_config.json").read_text()
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(settings)
    return folder


def write_adapter(folder: Path, base: Path, last: str, following: str, kind: Kind = KINDS["chatml"]) -> Path:
    """A PEFT folder by which the talker `base` says `following` after `last`."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    tokenizer = _ids(write_tokenizer(folder, kind))
    plain = AutoModelForCausalLM.from_pretrained(base)
    model = get_peft_model(plain, LoraConfig(r=1, lora_alpha=8, target_modules=["lm_head"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.zero_()
                at = tokenizer[last if "lora_A" in name else following]
                parameter.view(-1)[at] = 1.0
    model.save_pretrained(folder)
    return folder


def _ids(folder: Path) -> dict[str, int]:
    from tokenizers import Tokenizer

    known = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=True)
    return known | {" ": known["Ġ"], "\n": known["Ċ"]}
