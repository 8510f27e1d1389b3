"""Rules for the value auto of a micro-batch and of recomputed layers."""

from __future__ import annotations

from llmtrain.base.choice import Rule
from llmtrain.config.rules import value_of
from llmtrain.features.plan import PlanFeature

# fmt: off
OF_FORMS: tuple[Rule, ...] = (
    *(Rule((key, form), lambda r, key=key, axis=axis: value_of(key, r.config) == "auto"  # type: ignore[misc]
                                                      and getattr(r.mix.degrees, axis) > 1,
           reason, f"write a number for {key}", {key: "auto", form: 2})
      for key in PlanFeature.decides
      for form, axis, reason in (
          ("pipeline.stages", "pipeline",
           "auto needs the memory of one rank, but pipeline stages hold different numbers of micro-batches, and wait "
           "if a step has few"),
          ("expert_parallel.autoep_size", "expert",
           "auto needs the memory of a rehearsed step, but only the router decides how many tokens a rank's experts get"
           ))),
    Rule(("train.micro_batch",), lambda r: r.config.train.micro_batch == "auto" and r.config.train.global_batch is None,
         "without train.global_batch the device's memory would decide how many sequences a step trains",
         "write train.global_batch",
         {"train.micro_batch": "auto", "train.global_batch": None}),
    Rule(("train.accumulation", "train.micro_batch"),
         lambda r: r.config.train.micro_batch == "auto" and r.config.train.accumulation is not None,
         "with auto, the accumulation follows from train.global_batch and the micro-batch that fits",
         "remove train.accumulation, or write a number for train.micro_batch",
         {"train.micro_batch": "auto", "train.accumulation": 2}),
    Rule(("data.stages[0].train.accumulation", "train.micro_batch"),
         lambda r: [(f"data.stages[{number}].train.accumulation", "train.micro_batch")
                    for number, stage in enumerate(r.config.data.stages)
                    if r.config.train.micro_batch == "auto" and stage.train.accumulation is not None
                    and stage.train.global_batch is stage.train.micro_batch is None],
         "with accumulation alone the device's memory would decide how many sequences a step trains",
         "write global_batch instead of the stage's accumulation",
         {"train.micro_batch": "auto", "data.stages": [{"from_step": 5, "train": {"accumulation": 2}}]}, each=True),
)
# fmt: on
