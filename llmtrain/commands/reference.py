"""`llmtrain reference RUN.yaml`: writes the column that the objective compares with into the run's data. Imports no
torch before that."""

from __future__ import annotations

import os

from llmtrain.base.errors import ConfigError, number_in
from llmtrain.base.redact import redact_text
from llmtrain.commands import completion
from llmtrain.config.load import Parsed, load, parse, run_words
from llmtrain.config.resolve import resolve
from llmtrain.config.run import RunConfig
from llmtrain.data.stream.epoch import sequences_of_epoch
from llmtrain.objectives.by_token import Distill
from llmtrain.storage.addresses import is_url

USAGE = """\
usage: llmtrain reference RUN.yaml [--SECTION.FIELD VALUE ...]

Write the outputs that the run's objective needs into its data folders: for preferences the log-probability of each
answer under the initial model, for objective.name distill with objective.top_k the teacher's likeliest tokens.

It starts the ranks on this host: one for each GPU, or as few as the DeepSpeed JSON allows. For several hosts a
launcher starts the ranks: deepspeed --hostfile HOSTS --no_local_rank --module llmtrain reference RUN.yaml"""
_MOST_RANKS = 64
"""Largest number of ranks to try in the search for the fewest with which the run resolves."""


def main(argv: list[str]) -> int:
    """Raises UserError."""
    completion.offer_run()
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if "WORLD_SIZE" in os.environ:
        run = load(argv, number_in("WORLD_SIZE"), epoch=sequences_of_epoch)
        _refuse(run.config)
        from llmtrain.training.output_columns import write

        write(run)
        return 0
    words = run_words(argv)
    parsed = parse(words)
    _refuse(parsed.config)
    fewest = next((count for count in range(1, _MOST_RANKS + 1) if _goes(parsed, count)), None)
    if fewest is None:  # the error with one rank says why
        resolve(parsed.config, 1, places=parsed.places, epoch=sequences_of_epoch)
        raise AssertionError
    import torch

    from llmtrain.training.output_columns import write, write_on_ranks_here

    gpus = torch.cuda.device_count() if os.environ.get("DS_ACCELERATOR", "cuda") == "cuda" else 0
    many = next((count for count in range(gpus, fewest, -1) if _goes(parsed, count)), fewest)
    if many == 1:
        write(load(words, 1, epoch=sequences_of_epoch))
    else:
        write_on_ranks_here(words, cpu=gpus < many, count=many)
    return 0


def _goes(parsed: Parsed, ranks: int) -> bool:
    try:
        resolve(parsed.config, ranks, places=parsed.places, epoch=sequences_of_epoch)
    except ConfigError:
        return False
    return True


def _refuse(config: RunConfig) -> None:
    objective = config.objective
    if url := next(filter(is_url, [*config.data.folders, *config.eval.sets.values()]), None):
        raise ConfigError(
            f"{redact_text(url)}: is in an object store, but a column is written next to the data; name "
            "a folder of this host with the same data, and upload that with its column"
        )
    if isinstance(objective, Distill):
        if objective.top_k is None:
            raise ConfigError(
                "objective.top_k null: the run computes the teacher itself at each step; to write the "
                "teacher's likeliest tokens set top_k, or leave this command out"
            )
        if objective.teacher is None:
            raise ConfigError("objective.teacher null: names no model to take likeliest tokens from; name one")
    elif objective.reference is None:
        raise ConfigError(f"objective.name {objective.name}: needs no reference; leave this command out")
    if objective.reference == "online":
        raise ConfigError("objective.reference online: the run computes it at each step; leave this command out")
