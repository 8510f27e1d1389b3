"""From a configuration of another stack to a run: its options, what each is here, and `llmtrain init --from FILE`."""

from __future__ import annotations

from collections.abc import Iterable

from llmtrain.features import Feature
from llmtrain.features.migrate import schedule as schedule  # a choice is there by its definition

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


class Migrate(Feature):
    commands = (("init --from", "llmtrain.features.migrate.command", "make a run of another stack's configuration"),)

    def answers(self) -> Iterable[tuple[str, str, str]]:
        from llmtrain.features.migrate.rows import tables

        for table in tables():
            if _NO_CONFIGURATION not in table.classes:
                library = table.classes[0].partition(".")[0]
                for row in table.rows:
                    for option in row.names:
                        yield _TITLES.get(library, library), option, row.answer


FEATURE = Migrate()
