"""Errors that a user can fix. Everything else is a bug and keeps its traceback."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in the user's input: the command line prints the message and exits with `exit_code`.

    A message names the key (or file), the value, the rule and the remedy.
    """

    exit_code = 2
    everywhere = False
    """All ranks of the run raise the same error, so rank 0 alone prints it."""
    passing = False
    """A fault of the hosts, not of the user: the same command may succeed on another start."""


class ConfigError(UserError):
    """The YAML, the DeepSpeed JSON or the command line is wrong, or they contradict each other."""


class DataError(UserError):
    """A data source, a prepared folder or a tokenizer cannot be used."""


class ModelError(UserError):
    """A model folder or a model configuration cannot be used."""


class CheckpointError(UserError):
    """A checkpoint or a run directory cannot be used."""


class TrainingStopped(UserError):
    """Training ended itself, to waste no time (for example after too many skipped steps in a row)."""

    exit_code = 3
