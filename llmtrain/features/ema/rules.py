"""Rules of the section `ema`."""

from __future__ import annotations

from llmtrain.base.choice import Rule
from llmtrain.config.run import Run, RunConfig
from llmtrain.features.ema import EmaConfig


def _begins_late(run: Run) -> bool:
    section = run.config.section(EmaConfig)
    return section.decay is not None and run.max_steps is not None and section.every > run.max_steps


def _is_idle(run: RunConfig) -> bool:
    section = run.section(EmaConfig)
    return section.decay is None and section != EmaConfig()


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule(("ema.every",), _is_idle, "without ema.decay there is no average",
         "set ema.decay, 0.999 is common, or remove the section", {"ema.every": 2}),
)
OF_STEPS: tuple[Rule, ...] = (
    Rule(("ema.every",), _begins_late,
         lambda r, _: f"the run has {r.max_steps} steps, and the mean would not be updated once",
         lambda r, _: f"set it to {r.max_steps} or less", {"ema.decay": 0.9, "ema.every": 101}),
)
# fmt: on
