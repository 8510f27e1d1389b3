"""One rank of a comparison: engine, loader and step of a real run, with a small model.

`python -m llmtrain.parity.trainer FOLDER` runs it in a launcher's environment. FOLDER holds the plan and receives the
traces.
"""

from __future__ import annotations

import math
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from llmtrain.config.plugin_import import use
from llmtrain.config.run import Run, RunConfig
from llmtrain.data.stream.train_data import RunData
from llmtrain.engine.api import Engine
from llmtrain.engine.deepspeed.build import join_process_group
from llmtrain.engine.ranks.local_ranks import failure_reported
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.features import parts_of
from llmtrain.models.source import ParameterSource
from llmtrain.models.spec import ModelSpec
from llmtrain.optim.optimizers import PARAM
from llmtrain.parity.compare import VARIANT, Trace
from llmtrain.parity.plain_maps import loud_source
from llmtrain.parity.small_run import PLAN
from llmtrain.parity.tokens import synthetic
from llmtrain.storage.pieces import put
from llmtrain.training.parts import Done, Part
from llmtrain.training.setup import Setup
from llmtrain.training.step import Position


def train_small(run: Run, steps: int, ranks: Ranks) -> Trace:
    """Train a small run, and return its trace. Raises UserError, on all ranks."""
    setup = set_up(run, ranks)
    setup.write()
    setup.prove()
    trace = train_steps(setup, 0, steps, parts_of(setup))
    setup.engine.close()
    return trace


def set_up(run: Run, ranks: Ranks, source: ParameterSource | None = None) -> Setup:
    """Return a run's setup over synthetic data. `source`: its initial values; None: those of the plain training."""
    config = run.config
    spec = spec_of(config)
    tokens = synthetic(config, spec.facts.vocab_size)
    return Setup(run, spec, RunData(stages=(tokens,)), ranks, source or loud_source(spec, config.train.seed))


def spec_of(config: RunConfig) -> ModelSpec:
    return ModelSpec.of(config.model, config.adapter, scores=config.objective.scores)


def train_steps(setup: Setup, first: int, last: int, parts: list[Part]) -> Trace:
    """Train steps [first, last), and return their trace, which has parameters and their variants only on rank 0."""
    engine, ranks = setup.engine, setup.ranks
    trace = Trace(parameters=[_values(engine, ranks, parts)])
    session = setup.session(first)
    with setup.loader(first * setup.run.batch.global_batch) as loader:
        for step in range(first, last):
            done = session.step(next(loader))
            norm = done.update.grad_norm
            trace.losses.append(session.figures(done)["loss"])
            trace.norms.append(math.nan if norm is None else float(norm))
            for part in parts:
                part.after_step(Done(**vars(done), position=Position(step=step + 1)))
            trace.parameters.append(_values(engine, ranks, parts))
            if step == 0:
                trace.gradients = whole_tensors(engine, ranks, "exp_avg")
            if done.update.skipped:
                trace.skipped.append(step + 1)
    return trace


def _values(engine: Engine, ranks: Ranks, parts: list[Part]) -> dict[str, torch.Tensor]:
    values = whole_tensors(engine, ranks)
    for variant, in_place in (item for part in parts for item in part.variants().items()):
        with in_place():
            values |= {VARIANT.format(variant, name): value for name, value in whole_tensors(engine, ranks).items()}
    return values


@torch.no_grad()
def whole_tensors(engine: Engine, ranks: Ranks, kind: str = PARAM) -> dict[str, torch.Tensor]:
    """Gather the fp32 masters (or a moment) on rank 0, {} on others. Elements that no rank writes are NaN, unlike any
    value."""
    sent = []
    for piece in engine.state():
        if piece.kind == kind:
            with piece.open() as values:
                sent.append((piece.name, piece.own_region, values[piece.own].detach().cpu().clone()))
    parts = ranks.gather_to_first(sent)
    if ranks.rank != 0:
        return {}
    names = {name for part in parts for name, _, _ in part}
    shapes = {name: shape for name, shape in engine.shapes().items() if kind == PARAM or name in names}
    whole = {name: torch.full(shape, math.nan) for name, shape in shapes.items()}
    for name, region, values in (piece for part in parts for piece in part):
        put(whole[name].view(-1), region, values)
    return whole


def train_all(folder: Path, ranks: Ranks, plans: dict[str, Run], steps: int) -> None:
    """Train the small run of each precision, and save the traces. Raises UserError, on all ranks."""
    for name, run in plans.items():
        trace = train_small(run, steps, ranks)
        if ranks.rank == 0:
            torch.save(vars(trace), folder / f"{name}.trace")


def main(argv: list[str], train: Callable[..., None] = train_all) -> int:
    """Run one rank. A failure is written to FOLDER for the command. `train`: gets FOLDER, the ranks and the plan."""
    folder = Path(argv[0])
    warnings.filterwarnings("ignore", category=FutureWarning)
    with failure_reported(folder):
        # The command wrote the plan into its own folder; it may contain objects of plugins' classes.
        given, plan = pickle.loads((folder / PLAN).read_bytes())
        use(given)
        asked = pickle.loads(plan)
        ranks = join_process_group(120.0)
        train(folder, ranks, *asked)
        ranks.meet()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
