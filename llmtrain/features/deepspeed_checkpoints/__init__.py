"""DeepSpeed's own checkpoints, imported and written, without DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmtrain.features import Feature


class DeepSpeedCheckpoints(Feature):
    def subcommands(self, command: str, add: Callable[..., Any]) -> None:
        if command == "checkpoint":
            from llmtrain.features.deepspeed_checkpoints.command import add_commands

            add_commands(add)


FEATURE = DeepSpeedCheckpoints()
