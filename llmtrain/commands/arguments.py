"""The flags of a command: an unknown one is answered with the one that is meant. Next to words of a run
`command_words` (config/load.py) does it."""

from __future__ import annotations

import argparse
import re
from itertools import takewhile
from typing import Any

from llmtrain.config.problems import COMMAND_LINE, closest, stop

_ELSEWHERE = {"input": "source", "output": "out", "output-dir": "out", "max-new-tokens": "max-tokens"}


class Parser(argparse.ArgumentParser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Raises ConfigError: a flag is like one of this command."""
        known = set(re.findall(r"--([a-z][\w-]*(?:\.[\w-]+)*)", self.format_help()))
        flags = [each.partition("=")[0] for each in takewhile("--".__ne__, args or ()) if each.startswith("--")]
        for word in (each for each in flags if " " not in each):  # argparse takes others for values
            if (name := word.removeprefix("--")) not in known:
                meant = _ELSEWHERE.get(name.replace("_", "-"))
                if near := meant if meant in known else closest(name, known):
                    rule = f"is no flag of `{self.prog}`"
                    raise stop("command line", word, rule, f"did you mean --{near}?", COMMAND_LINE)
        return super().parse_known_args(args, namespace)
