"""Rules of the section `balance`, which are asked where its mode is measured."""

from __future__ import annotations

from llmtrain.base.choice import Rule
from llmtrain.config.stages import StageBatch
from llmtrain.features.balance import BalanceFeature

_MEASURED = {"balance.mode": "measured"}

# fmt: off
RULES: tuple[Rule, ...] = (
    Rule(("balance.mode",),
         lambda r: any(stage.sequence_length is not None or stage.train != StageBatch() for stage in r.data.stages),
         "the speeds of ranks are measured with one batch size and sequence length, and data.stages changes "
         "these", "set it to equal",
         {**_MEASURED, "data.stages": [{"from_step": 5, "sequence_length": 64}]}),
)
OF_FORMS: tuple[Rule, ...] = (
    Rule(("train.micro_batch", "balance.mode"), lambda r: r.config.train.micro_batch == "auto",
         f"a fast rank takes up to {BalanceFeature.most_sequences} times as many sequences as the rank that was "
         "rehearsed for auto",
         "write a number for train.micro_batch, or balance.mode equal", {"train.micro_batch": "auto", **_MEASURED}),
)
OF_STEPS: tuple[Rule, ...] = (
    Rule(("pipeline.stages",), lambda r: r.mix.degrees.pipeline > 1,
         "balance.mode measured: pipeline stages exchange micro-batches, which must all have one size",
         "set balance.mode to equal, or use ZeRO instead of the pipeline", {**_MEASURED, "pipeline.stages": 2}),
    Rule(("expert_parallel.autoep_size",), lambda r: r.mix.degrees.expert > 1,
         "balance.mode measured: in every layer ranks also compute tokens of other ranks, so fewer sequences of its "
         "own would not relieve a slow rank",
         "set balance.mode to equal, or remove expert_parallel", {**_MEASURED, "expert_parallel.autoep_size": 2}),
    Rule(("model.compile_layers",), lambda r: r.config.model.compile_layers,
         "balance.mode measured: it changes the shape of micro-batches, and torch stops compiling layers after a few "
         "shapes",
         "set it to false or null, or balance.mode to equal", {**_MEASURED, "model.compile_layers": True}),
    Rule(("train.deterministic",), lambda r: r.config.train.deterministic,
         "balance.mode measured: measured speeds decide the ranks' shares, and so the order of the sums",
         "set train.deterministic to false, or balance.mode to equal", {**_MEASURED, "train.deterministic": True}),
    Rule(("train.micro_batch",), lambda r: r.mix.degrees.data > 1 and r.config.train.micro_batch == 1,
         "balance.mode measured: each micro-batch must keep a sequence, so with 1 a slow rank has none to give "
         "away",
         "set it to 4 or more and train.accumulation lower by the same factor, or balance.mode to equal",
         {**_MEASURED, "train.micro_batch": 1}),
)
# fmt: on
