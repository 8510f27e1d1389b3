"""Parsers of commands. An unknown flag is answered with the flag that was probably meant; for commands that also take a
run's keys, `command_words` (config/load.py) does that."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from llmtrain.config.problems import COMMAND_LINE, closest, stop

_ELSEWHERE = {"input": "source", "output": "out", "output-dir": "out", "max-new-tokens": "max-tokens"}


class Parser(argparse.ArgumentParser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Raises ConfigError if a flag looks like a misspelt flag of this command."""
        known = set(re.findall(r"--([a-z][\w-]*(?:\.[\w-]+)*)", self.format_help()))
        flags = [each.partition("=")[0] for each in takewhile("--".__ne__, args or ()) if each.startswith("--")]
        for word in (each for each in flags if " " not in each):  # argparse takes words with spaces for values
            if (name := word.removeprefix("--")) not in known:
                meant = _ELSEWHERE.get(name.replace("_", "-"))
                if near := meant if meant in known else closest(name, known):
                    rule = f"is no flag of `{self.prog}`"
                    raise stop("command line", word, rule, f"did you mean --{near}?", COMMAND_LINE)
        return super().parse_known_args(args, namespace)


def add_options(parser: argparse.ArgumentParser, usual: Any) -> None:
    """Add the flags of commands that generate text. `usual`: a Sampling (checkpoint/hf/inference.py) with the
    defaults."""
    parser.add_argument(
        "folder",
        metavar="RUN_OR_FOLDER",
        help="run folder, checkpoint, Hugging Face or PEFT folder, ORG/NAME on the Hub, or a URL of one",
    )
    for name, kind, rule, right, text in (
        ("max_tokens", int, "at least 1", lambda n: n >= 1, "tokens to generate at most"),
        ("temperature", float, "at least 0", lambda t: 0 <= t < math.inf, "0: always the likeliest token"),
        ("top_k", int, "at least 0", lambda n: n >= 0, "sample among this many likeliest tokens; 0: all"),
        (
            "top_p",
            float,
            "above 0 and at most 1",
            lambda p: 0 < p <= 1,
            "sample among the likeliest tokens with this total probability; 1: all",
        ),
        ("seed", int, "from 0 to 2^63 - 1", lambda n: 0 <= n < 2**63, "seed of the sampling"),
    ):
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=_number(kind, rule, right), default=getattr(usual, name), help=text)


def _number(kind: Callable[[str], Any], rule: str, right: Callable[[Any], bool]) -> Callable[[str], Any]:
    """Return an argparse type for numbers for which `right` holds. `rule`: this condition in words."""

    def read(text: str) -> Any:
        value = kind(text)
        if not right(value):
            raise argparse.ArgumentTypeError(f"{text}: must be {rule}")
        return value

    read.__name__ = kind.__name__  # argparse's message for a text that is no number has this name
    return read
