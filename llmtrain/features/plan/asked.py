"""Resolve the run that a plan is asked for, without its data and its machines."""

from __future__ import annotations

from llmtrain.config.load import parse
from llmtrain.config.on_disk import check_teacher_folder, model_config
from llmtrain.config.pinned import fetched
from llmtrain.config.problems import Problems
from llmtrain.config.resolve import resolve
from llmtrain.config.run import Run


def resolved(words: list[str], world_size: int) -> Run:
    """Resolve the run. `words`: its YAMLs and overrides, as on a command line. Raises UserError."""
    parsed = parse(words, check_paths=False)
    run = fetched(parsed.config, parsed.places)[0]
    problems = Problems(parsed.places)
    check_teacher_folder(run, problems)
    model_config(run, problems)
    problems.raise_if_any()
    # The number of sequences in an epoch has no influence on memory and a step's time.
    return resolve(run, world_size, "--hosts and --slots", places=parsed.places, epoch=lambda _: 1 << 30)
