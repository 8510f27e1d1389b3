"""Completion of commands, flags and values in the shell: eval "$(register-python-argcomplete llmtrain)".

The shell calls `llmtrain` with the line in the environment, and each command offers its own parser.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable

ASKED = "_ARGCOMPLETE"
"""Variable that argcomplete's shell function sets."""


def command_of_line(commands: Iterable[str]) -> str | None:
    """Take the command out of the line to complete, and return it; its parser gets the rest. None: the cursor is in the
    command's name, which has been completed."""
    line, point = os.environ["COMP_LINE"], int(os.environ["COMP_POINT"])
    program, _, rest = line.partition(" ")
    command, space, after = rest.lstrip().partition(" ")
    cut = len(line) - len(after)
    if not space or point < cut:
        top = argparse.ArgumentParser(prog="llmtrain")
        top.add_argument("command", choices=list(commands))
        offer(top)
        return None
    os.environ["COMP_LINE"] = f"{program} {after}"
    os.environ["COMP_POINT"] = str(point - cut + len(program) + 1)
    return command


def offer(parser: argparse.ArgumentParser) -> None:
    """If the shell asks for completions, answer from this parser and end the process; else return at once."""
    if ASKED in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser, always_complete_options=False)


def offer_run(parser: argparse.ArgumentParser | None = None) -> None:
    """Complete a flag for every field of a run, by an argparse parser: argcomplete 3.7 fails with jsonargparse 4.53."""
    if ASKED not in os.environ:
        return
    from typing import Literal, get_args, get_origin

    from llmtrain.config.schema import schema

    if parser is None:
        parser = argparse.ArgumentParser(prog="llmtrain")
        parser.add_argument("--config")
    for key, kind in schema().items():
        kinds = [k for k in (kind, *get_args(kind)) if get_origin(k) is Literal]
        choices = [str(value) for k in kinds for value in get_args(k)]
        parser.add_argument(f"--{key}", choices=choices or (["true", "false"] if kind is bool else None))
    offer(parser)
