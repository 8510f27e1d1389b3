"""A run's small copy in two environments: `llmtrain parity RUN.yaml --against VENV`, before an upgrade."""

from __future__ import annotations

from llmtrain.features import Feature


class Environments(Feature):
    commands = (
        ("parity --against", "llmtrain.features.environments.command", "hold it against itself in another environment"),
    )


FEATURE = Environments()
