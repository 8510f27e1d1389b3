"""Rules of the section `profile`."""

from __future__ import annotations

from llmtrain.base.choice import Rule
from llmtrain.config.run import RunConfig
from llmtrain.features.profile import ProfileConfig


def _last(config: RunConfig) -> int | None:
    try:
        return config.section(ProfileConfig).range()[1]
    except ValueError:
        return None


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule(("profile.steps",), lambda r: r.section(ProfileConfig).steps is not None and _last(r) is None,
         "must be FIRST:LAST, steps from 1 on, at most 20 of them", "write it as 20:23", {"profile.steps": "20"}),
)
OF_STEPS: tuple[Rule, ...] = (
    Rule(("profile.steps",), lambda r: r.max_steps is not None and (_last(r.config) or 0) > r.max_steps,
         lambda r, _: f"the run has {r.max_steps} steps", lambda r, _: f"let it end at {r.max_steps}",
         {"profile.steps": "100:101"}),
)
# fmt: on
