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
         "the ranks' speeds are measured for one batch and length, and data.stages changes them", "set it to equal",
         {**_MEASURED, "data.stages": [{"from_step": 5, "sequence_length": 64}]}),
)
OF_FORMS: tuple[Rule, ...] = (
    Rule(("train.micro_batch", "balance.mode"), lambda r: r.config.train.micro_batch == "auto",
         f"a fast rank takes up to {BalanceFeature.most_sequences} times as many sequences as a rehearsed one",
         "write a number for train.micro_batch, or balance.mode equal", {"train.micro_batch": "auto", **_MEASURED}),
)
OF_STEPS: tuple[Rule, ...] = (
    Rule(("pipeline.stages",), lambda r: r.mix.degrees.pipeline > 1,
         "balance.mode measured: the stages of a pipeline send each other micro-batches of one size",
         "set balance.mode to equal, or use ZeRO instead of the pipeline", {**_MEASURED, "pipeline.stages": 2}),
    Rule(("expert_parallel.autoep_size",), lambda r: r.mix.degrees.expert > 1,
         "balance.mode measured: ranks compute each other's tokens in every layer, so other sequences would not "
         "change what a rank computes",
         "set balance.mode to equal, or remove expert_parallel", {**_MEASURED, "expert_parallel.autoep_size": 2}),
    Rule(("model.compile_layers",), lambda r: r.config.model.compile_layers,
         "balance.mode measured: layers are compiled for one shape of a micro-batch, and torch gives up after some "
         "others",
         "set it to false or null, or balance.mode to equal", {**_MEASURED, "model.compile_layers": True}),
    Rule(("train.deterministic",), lambda r: r.config.train.deterministic,
         "balance.mode measured: the ranks' shares depend on the clock, and with them the order of the sums",
         "set train.deterministic to false, or balance.mode to equal", {**_MEASURED, "train.deterministic": True}),
    Rule(("train.micro_batch",), lambda r: r.mix.degrees.data > 1 and r.config.train.micro_batch == 1,
         "balance.mode measured: every micro-batch of every rank has a sequence, so a slow rank would have none to "
         "give away",
         "set it to 4 or more (train.accumulation lower by as much), or balance.mode to equal",
         {**_MEASURED, "train.micro_batch": 1}),
)
# fmt: on
