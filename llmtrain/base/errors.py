"""Errors that a user can fix. Any other exception is a bug and keeps its traceback."""

from __future__ import annotations

import os


class UserError(ValueError):
    """A mistake in the user's input: the command line prints the message and exits with `exit_code`.

    A message names the key (or file), the value, the rule and the remedy.
    """

    exit_code = 2
    everywhere = False
    """True if all ranks of the run raise the same error, so that only rank 0 prints it."""
    passing = False
    """True for a fault of the hosts, not of the user: the same command may succeed at another start."""
    keys: frozenset[str] = frozenset()
    """Dotted keys of the wrong settings, if the message is about settings."""


class ConfigError(UserError):
    """The YAML, the DeepSpeed JSON or the command line is wrong, or they contradict each other."""


def number_in(variable: str, default: int | None = None) -> int:
    """Return the natural number in an environment variable, or `default` if it is not set. Raises ConfigError."""
    word = os.environ.get(variable)
    if word is None and default is not None:
        return default
    if word is None or not (word.isascii() and word.isdecimal() and len(word) < 10):
        raise ConfigError(
            f"{variable} is {'not set' if word is None else ascii(word)}: it must be a whole number, as launchers set "
            "it. Start the ranks by `llmtrain launch`, deepspeed or torchrun; for one process without a launcher unset "
            "RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_SIZE, LOCAL_WORLD_SIZE and MASTER_PORT"
        )
    return int(word)


class DataError(UserError):
    """A data source, a prepared folder or a tokenizer cannot be used."""


class ModelError(UserError):
    """A model folder or a model configuration cannot be used."""


class CheckpointError(UserError):
    """A checkpoint or a run directory cannot be used."""


class TrainingStopped(UserError):
    """Training has ended itself to save time, for example after too many skipped steps in a row."""

    exit_code = 3
