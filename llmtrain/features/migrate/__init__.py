"""From a configuration of another stack to a run: its options, what each is here, and `llmtrain init --from FILE`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from llmtrain.base.choice import Rule, Rules
from llmtrain.features import Feature
from llmtrain.features.migrate.schedule import Transformers

if TYPE_CHECKING:
    from llmtrain.config.run import RunConfig

_TITLES = {
    "transformers": "transformers",
    "trl": "TRL",
    "peft": "PEFT",
    "llamafactory": "LLaMA-Factory",
    "run_clm": "run_clm.py",
    "swift": "ms-swift",
    "megatron": "Megatron-LM",
    "others": "",
}
_NO_CONFIGURATION = "transformers.cli.chat.Chat"

_ONE_WARMUP = Rule(
    ("schedule.warmup_ratio", "schedule.warmup_steps"),
    lambda run: isinstance(run.schedule, Transformers) and run.schedule.warmup_ratio and run.schedule.warmup_steps,
    "both say how long the warm-up is",
    "remove one of the two",
    {"schedule.name": "transformers", "schedule.warmup_ratio": 0.1, "schedule.warmup_steps": 5},
)


class Migrate(Feature):
    commands = (("init --from", "llmtrain.features.migrate.command", "make a run of another stack's configuration"),)

    def asked(self, config: RunConfig) -> bool:
        return isinstance(config.schedule, Transformers)

    def rules(self) -> Rules:
        return Rules(of_values=(_ONE_WARMUP,))

    def answers(self) -> Iterable[tuple[str, str, str]]:
        from llmtrain.features.migrate.rows import tables

        for table in tables():
            if _NO_CONFIGURATION not in table.classes:
                library = table.classes[0].partition(".")[0]
                for row in table.rows:
                    for option in row.names:
                        yield _TITLES.get(library, library), option, row.answer


FEATURE = Migrate()
