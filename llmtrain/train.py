"""`llmtrain train`, and what launch/train.py runs on every rank."""

from __future__ import annotations

import os

from llmtrain.config.load import load


def main(argv: list[str]) -> int:
    """Train as the command line says. Returns the exit code; raises UserError."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    source = "WORLD_SIZE, set by the launcher" if "WORLD_SIZE" in os.environ else "started without a launcher"
    resolved = load(argv, world_size, source)
    # Only now torch and DeepSpeed: a mistake in the configuration is answered in a fraction of a second.
    from llmtrain.loop import train

    return train(resolved)
