"""Rules of the section `recheck`."""

from __future__ import annotations

from llmtrain.base.choice import Rule
from llmtrain.config.run import Run
from llmtrain.features.recheck import RecheckConfig


def _checks(run: Run) -> bool:
    return run.config.section(RecheckConfig).every > 0


# fmt: off
OF_FORMS: tuple[Rule, ...] = tuple(
    Rule(("recheck.every", key), lambda r, wrong=wrong: _checks(r) and wrong(r.mix),  # type: ignore[misc]
         "no rank can compute a gradient alone: it lacks parameters or layers, or computes tokens of other ranks",
         "set recheck.every to 0, or use ZeRO 0 to 2", {"recheck.every": 500, key: degree})
    for key, degree, wrong in (
        ("zero_optimization.stage", 3, lambda m: m.zero_stage == 3),
        ("pipeline.stages", 2, lambda m: m.degrees.pipeline > 1),
        ("expert_parallel.autoep_size", 2, lambda m: m.degrees.expert > 1),
    )
)
# fmt: on
