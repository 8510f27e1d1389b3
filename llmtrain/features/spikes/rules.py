"""Rules of the section `spikes`."""

from __future__ import annotations

from llmtrain.base.choice import Rule
from llmtrain.config.run import Run
from llmtrain.features.spikes import SpikesConfig
from llmtrain.optim.optimizers import norm_of


def _norm_comes_late(run: Run) -> bool:
    skips = run.config.section(SpikesConfig).skip_outliers is not None
    return skips and norm_of(run.mix.optimizer, zero=run.mix.zero_stage > 0) == "update"


# fmt: off
OF_FORMS: tuple[Rule, ...] = (
    Rule(("spikes.skip_outliers", "optim.name"), _norm_comes_late,
         "DeepSpeed's ZeRO has changed Muon's momentum by the time that the norm is known",
         "set it to null, or use adamw", {"optim.name": "muon", "spikes.skip_outliers": 6.0}),
)
# fmt: on
