"""A decoder that no table of names knows: Llama with other names and other fused layouts, and its faulty kin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)


class Look(nn.Module):
    """Attention; its one fused map gives for each key/value head the queries, the key and the value."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.size = config.hidden_size // config.num_attention_heads
        self.mix = nn.Linear(
            config.hidden_size, config.num_key_value_heads * (self.num_key_value_groups + 2) * self.size
        )
        self.back = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], mask: Any) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = x.shape
        groups = self.num_key_value_groups
        mixed = self.mix(x).view(batch, length, -1, groups + 2, self.size)
        query = mixed[..., :groups, :].flatten(2, 3).transpose(1, 2)
        key, value = mixed[..., groups, :].transpose(1, 2), mixed[..., groups + 1, :].transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *turn)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        seen, _ = attend(self, query, key, value, mask, scaling=self.size**-0.5)
        return self.back(seen.reshape(batch, length, -1)), key, value


class Step(nn.Module):
    """A decoder layer; the gate and the rest of its fused map alternate."""

    def __init__(self, config: LlamaConfig, index: int, past: list[Tensor] | None) -> None:
        super().__init__()
        self.index, self.past = index, past
        self.one, self.two = LlamaRMSNorm(config.hidden_size), LlamaRMSNorm(config.hidden_size)
        self.look = Look(config)
        self.wide = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.narrow = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], mask: Any, more: Tensor | None = None) -> Tensor:
        seen, _, value = self.look(self.one(x), turn, mask)
        x = x + seen
        if more is not None:
            x = x + more
        if self.past is not None:  # what another layer computed
            if self.past and self.index == 2:
                x = x + self.past[0].mean()
            self.past.append(value)
        wide = self.wide(self.two(x))
        return x + self.narrow(nn.functional.silu(wide[..., ::2]) * wide[..., 1::2])


class Body(PreTrainedModel):
    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.turn = LlamaRotaryEmbedding(config)
        fault = getattr(config, "fault", "")
        self.past: list[Tensor] | None = [] if fault == "leak" else None
        self.steps = nn.ModuleList(Step(config, index, self.past) for index in range(config.num_hidden_layers))
        self.last = LlamaRMSNorm(config.hidden_size)
        if fault == "two_lists":
            self.more = nn.ModuleList([nn.Linear(config.hidden_size, config.hidden_size)])
        if fault == "between":
            self.middle = nn.Linear(config.hidden_size, config.hidden_size)
        if fault == "loose":
            self.loose = nn.Parameter(torch.ones(config.hidden_size))
        if fault == "shared_layer":
            self.steps[1].narrow = self.steps[0].narrow
        self.post_init()

    def forward(self, input_ids: Tensor, use_cache: bool = False, position_ids: Any = None) -> Any:
        x = self.words(input_ids)
        positions = torch.arange(x.shape[1]).unsqueeze(0) if position_ids is None else position_ids
        mask = create_causal_mask(self.config, x, None, None, position_ids=positions)
        turn = self.turn(x, positions)
        fault = getattr(self.config, "fault", "")
        if self.past is not None:
            self.past.clear()
        for index, step in enumerate(self.steps):
            if fault == "between" and index == 1:
                x = self.middle(x)
            if fault == "skip" and index == 1:
                x = x + self.words(input_ids)
            x = step(x, turn, mask, self.words(input_ids) if fault == "argument" else None)
        return BaseModelOutputWithPast(last_hidden_state=self.last(x) * getattr(self, "loose", 1.0))


class Renamed(PreTrainedModel):
    config_class = LlamaConfig
    base_model_prefix = "body"

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.body = Body(config)
        self.say = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.say.weight = self.body.words.weight
        self.post_init()

    def forward(self, input_ids: Tensor, use_cache: bool = False, position_ids: Any = None) -> Any:
        logits = self.say(self.body(input_ids, position_ids=position_ids).last_hidden_state)
        return CausalLMOutputWithPast(logits=logits * (2.0 if getattr(self.config, "fault", "") == "louder" else 1.0))


def renamed(fault: str = "", **fields: Any) -> Renamed:
    """A tiny one, with uninitialised meaning but real parameters."""
    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 80, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**{**sizes, **heads, "pad_token_id": None, **fields})
    config.fault = fault
    return Renamed._from_config(config, attn_implementation="eager", dtype=torch.float32)
