"""One rank of a comparison of two environments.

`python -m llmtrain.features.environments.trainer FOLDER`, like parity/trainer.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from llmtrain.config.run import Run
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.features import parts_of
from llmtrain.features.environments.comparison import FIRST, summary, values_of, watched
from llmtrain.models.adapter import AdaptedSource
from llmtrain.parity.plain_maps import loud_source
from llmtrain.parity.trainer import main, set_up, spec_of, train_steps, whole_tensors


def train_all(folder: Path, ranks: Ranks, plans: dict[str, Run], steps: int, seeds: int) -> None:
    """Train the small run of each precision from each seed's first values. Raises UserError, on all ranks."""
    for name, seed in ((name, seed) for name in plans for seed in range(seeds)):
        train_watched(plans[name], steps, ranks, folder / f"{name}-{seed}")


def train_watched(run: Run, steps: int, ranks: Ranks, start: Path) -> None:
    """Train from the first values in the file `start`, and keep all values of each step on each rank.

    Raises: UserError, on all ranks.
    """
    spec = spec_of(run.config)
    source = loud_source(spec, run.config.train.seed)
    if ranks.rank == 0:
        torch.save({name: summary(value) for name, value in values_of(source).items()}, start.parent / FIRST)
    setup = set_up(run, ranks, AdaptedSource(source, {}, 0, torch.load(start, weights_only=True)))
    setup.write()
    parts = parts_of(setup)
    for step in range(steps):
        with watched(setup.engine.module.hf) as kept:
            trace = train_steps(setup, step, step + 1, parts)
        moments = whole_tensors(setup.engine, ranks, "exp_avg")
        if ranks.rank == 0:
            before, after = trace.parameters
            kept["loss", "", 0] = "the objective", summary(torch.tensor(trace.losses))
            for name, moment in moments.items():
                kept["first moment", name, 0] = "reduction, clipping or betas", summary(moment)
            kept["gradient norm", "", 0] = "the engine", summary(torch.tensor(trace.norms))
            for name, value in after.items():
                kept["update", name, 0] = "the optimizer", summary(value - before[name])
        torch.save(kept, f"{start}.{step + 1}.{ranks.rank}")
    setup.engine.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], train_all))
