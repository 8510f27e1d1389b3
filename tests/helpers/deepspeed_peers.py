"""The training of helpers/training.py as DeepSpeed's users write it: transformers' model, or a pipeline."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.models.skeleton import DTYPES
from tests.helpers.plain import mean_cross_entropy
from tests.helpers.training import Case, Trace, batches, give_first_values, resolved_run


class Block(LlamaDecoderLayer):
    """A decoder layer that a pipeline can pass hidden states through."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__(config, index)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, hidden_BTH: Tensor) -> Tensor:  # type: ignore[override]
        positions = torch.arange(hidden_BTH.shape[1]).unsqueeze(0)
        return super().forward(hidden_BTH, position_embeddings=self.rotary(hidden_BTH, positions))


def adamw(module: nn.Module, case: Case, *, one_group: bool = False) -> torch.optim.AdamW:
    """As our engine has it; `one_group`: vectors decay, too."""
    groups: list[dict[str, Any]] = [{"params": [p for p in module.parameters() if p.dim() >= 2 or one_group]}]
    if not one_group:
        groups.append({"params": [p for p in module.parameters() if p.dim() < 2], "weight_decay": 0.0})
    return torch.optim.AdamW(groups, lr=case.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)


def set_rate(engine: Any, case: Case, step: int) -> None:
    schedule = resolved_run(case, 1).config.schedule
    for group in engine.optimizer.param_groups:
        group["lr"] = case.lr * schedule.factor(step, case.steps)


def make_pipeline(case: Case, ranks: Ranks) -> Any:
    """The model of the case as a PipelineModule of two stages, in DeepSpeed's engine."""
    config = LlamaConfig(**{k: v for k, v in case.model.items() if k != "model_type"})
    config._attn_implementation = "sdpa"
    size = (config.vocab_size, config.hidden_size)
    blocks = [LayerSpec(Block, config, index) for index in range(config.num_hidden_layers)]
    norm = LayerSpec(LlamaRMSNorm, config.hidden_size, eps=config.rms_norm_eps)
    if config.tie_word_embeddings:
        ends = [
            TiedLayerSpec("embed", nn.Embedding, *size),
            TiedLayerSpec("embed", nn.Embedding, *size, forward_fn=lambda m, hidden: F.linear(hidden, m.weight)),
        ]
    else:
        ends = [LayerSpec(nn.Embedding, *size), LayerSpec(nn.Linear, *size[::-1], bias=False)]
    module = PipelineModule(
        [ends[0], *blocks, norm, ends[1]],
        num_stages=2,
        loss_fn=lambda logits, labels: mean_cross_entropy(logits.float(), labels),
    )
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    homes = {"0": "model.embed_tokens.", "tied_modules.embed": "model.embed_tokens."}
    homes |= {str(index + 1): f"model.layers.{index}." for index in range(len(blocks))}
    homes |= {str(len(blocks) + 1): "model.norm.", str(len(blocks) + 2): head.removesuffix("weight")}
    named = []
    for name, parameter in module.named_parameters():
        place = next(place for place in homes if name.startswith(f"{place}."))
        named.append((homes[place] + name.removeprefix(f"{place}."), parameter))
    give_first_values(iter(named), case)
    run = dict(resolved_run(case, 1).deepspeed, train_micro_batch_size_per_gpu=12, train_batch_size=12)
    module = module.to(DTYPES[case.precision])
    engine, *_ = deepspeed.initialize(model=module, optimizer=adamw(module, case), config=run)
    return engine


def pipeline_steps(engine: Any, case: Case, first: int, last: int) -> Trace:
    """Steps of the pipeline: the whole global batch in one micro-batch."""
    trace = Trace([], [])
    source = batches(case, (0, 1), 1, first)
    for step in range(first, last):
        (micro,) = next(source).micro_batches
        set_rate(engine, case, step)
        trace.losses.append(float(engine.train_batch(iter([(micro.inputs, micro.labels)]))))
    source.close()  # type: ignore[attr-defined]
    return trace


def make_plain(case: Case, ranks: Ranks, *, universal: bool = False, one_group: bool = False) -> Any:
    """transformers' model, unwrapped, in DeepSpeed's engine: its parameters have Hugging Face names."""
    config = dict(resolved_run(case, ranks.world_size).deepspeed, checkpoint={"load_universal": universal})
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in case.model.items() if k != "model_type"}))
    give_first_values(model.named_parameters(), case)
    model = model.to(dtype=DTYPES[case.precision])  # type: ignore[call-arg]
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model, case, one_group=one_group), config=config)
    return engine


def plain_steps(engine: Any, case: Case, ranks: Ranks, first: int, last: int) -> Trace:
    """Steps with transformers' logits and the mean over all counted tokens."""
    trace = Trace([], [])
    source = batches(case, (ranks.rank, ranks.world_size), 1, first)
    for step in range(first, last):
        (micro,) = next(source).micro_batches
        set_rate(engine, case, step)
        counted = (micro.labels >= 0).sum().float()
        dist.all_reduce(counted)
        logits = engine(input_ids=micro.inputs, use_cache=False).logits.float()
        total = F.cross_entropy(logits.flatten(0, 1), micro.labels.flatten(), ignore_index=-100, reduction="sum")
        engine.backward(total * ranks.world_size / counted)
        engine.step()
        shown = total.detach().clone()
        dist.all_reduce(shown)
        trace.losses.append(float(shown / counted))
    source.close()  # type: ignore[attr-defined]
    return trace
