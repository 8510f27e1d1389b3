"""One rank of a parity check: the engine, the loader and the step of a real run, on a small model.

`python -m llmtrain.parity.worker FOLDER` with a launcher's environment; FOLDER holds the plan and takes the traces.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llmtrain.config.run import ResolvedRun
from llmtrain.data.loader import TrainLoader
from llmtrain.dist.control import Agree
from llmtrain.dist.ranks import Ranks
from llmtrain.engine.deepspeed.fragments import PARAM, fragments, owned, whole_shapes
from llmtrain.engine.deepspeed.join import join_process_group
from llmtrain.engine.start import prove_loss, start_engine, write_weights
from llmtrain.errors import UserError
from llmtrain.models.build import facts
from llmtrain.models.parallel.mesh import mesh_of
from llmtrain.parity.start import LoudSource
from llmtrain.parity.tokens import Tokens
from llmtrain.parity.trace import Trace
from llmtrain.schedule import learning_rate_factor, seed_step

PLAN = "plan.pickle"


def train_small(resolved: ResolvedRun, steps: int, ranks: Ranks) -> Trace:
    """`steps` steps of the run, as loop.py does them; parameters are put together on rank 0, empty elsewhere.

    Raises: UserError, on all ranks alike.
    """
    run, mesh = resolved.run, mesh_of(resolved.degrees)
    tokens = Tokens(run.data, facts(run.model).vocab_size)
    stepper = start_engine(resolved, ranks, mesh)
    engine = stepper.engine
    write_weights(stepper, LoudSource(run.model, run.train.seed, torch.device("cpu")), ranks)
    row = torch.from_numpy(tokens.sequence(0)[0])
    prove_loss(stepper, row, ranks, isolate_documents=run.data.isolate_documents)
    trace = Trace(parameters=[whole_tensors(engine, ranks)])
    agree = Agree(ranks)
    with TrainLoader(
        tokens,
        global_batch=resolved.batch.global_batch,
        micro_batch=resolved.batch.micro_batch,
        accumulation=resolved.batch.accumulation,
        rank=mesh.place.data,
        data_parallel=resolved.data_parallel,
    ) as loader:
        for step in range(steps):
            batch = next(loader)
            agreement = agree.start(
                counted_tokens=batch.counted_tokens if mesh.place.leads else 0,
                stop=False,
                time_up=False,
                save=False,
                save_status=(False, False),
            )
            seed_step(run.train.seed, step, ranks.rank // resolved.degrees.tensor)
            result = stepper.step(batch, agreement, learning_rate_factor(run.schedule, step, resolved.max_steps))
            trace.losses.append(stepper.global_loss(result.local_loss_sum, agreement().counted_tokens))
            trace.norms.append(math.nan if result.grad_norm is None else float(result.grad_norm))
            trace.parameters.append(whole_tensors(engine, ranks))
            if step == 0:
                trace.gradients = whole_tensors(engine, ranks, "exp_avg")
            if result.skipped:
                trace.skipped.append(step + 1)
    engine.destroy()
    return trace


@torch.no_grad()
def whole_tensors(engine: Any, ranks: Ranks, kind: str = PARAM) -> dict[str, torch.Tensor]:
    """The fp32 masters (or a moment) put together from the pieces that the ranks own, on rank 0; empty on the others.

    What no rank owns is NaN, and so differs from everything.
    """
    mine = [(f.name, *owned(f)) for f in fragments(engine) if f.kind == kind]
    sent = [(name, region, values.detach().cpu().clone()) for name, region, values in mine]
    parts: list[Any] | None = [None] * ranks.world_size if ranks.rank == 0 else None
    dist.gather_object(sent, parts, group=ranks.control)
    if parts is None:
        return {}
    names = {name for part in parts for name, _, _ in part}
    shapes = {name: shape for name, shape in whole_shapes(engine).items() if kind == PARAM or name in names}
    whole = {name: torch.full(shape, math.nan) for name, shape in shapes.items()}
    for name, region, values in (piece for part in parts for piece in part):
        for start, at, count in region.spans():
            whole[name].view(-1)[start : start + count] = values[at : at + count]
    return whole


def main(argv: list[str]) -> int:
    """All trainings of the plan on this rank. What went wrong is left in FOLDER for the command to tell."""
    folder = Path(argv[0])
    warnings.filterwarnings("ignore", category=FutureWarning)
    rank = int(os.environ["RANK"])
    try:
        plans, steps = pickle.loads((folder / PLAN).read_bytes())  # the command wrote it, into a folder of its own
        ranks = join_process_group(120.0)
        for name, resolved in plans.items():
            trace = train_small(resolved, steps, ranks)
            if ranks.rank == 0:
                trace.save(str(folder / f"{name}.part"))
                (folder / f"{name}.part").rename(folder / f"{name}.trace")
        dist.barrier(group=ranks.control)
    except BaseException as error:
        told = {"time": time.time(), "rank": rank, "text": traceback.format_exc(), "user": None}
        if isinstance(error, UserError):
            told["user"] = str(error)
        (folder / f"error-{rank}.json").write_text(json.dumps(told))
        os._exit(1)  # the others wait in a collective: no destructor may join them
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
