"""Exports are published on the Hugging Face Hub: `llmtrain checkpoint to-hf RUN OUT --push ORG/NAME`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from llmtrain.features import Feature

_TO_HF = "checkpoint to-hf"


class Publishing(Feature):
    def options(self, command: str, add: Callable[..., Any]) -> None:
        if command == _TO_HF:
            add("--push", metavar="ORG/NAME", help="publish the folder on the Hub (token: HF_TOKEN), privately")
            add("--public", action="store_true", help="a repository that --push makes is public")

    def before_command(self, command: str, args: argparse.Namespace) -> Callable[[Path], None] | None:
        if command != _TO_HF or not (args.push is not None or args.public):
            return None
        from llmtrain.features.publishing.push import check, push

        check(args)
        return partial(push, args)


FEATURE = Publishing()
