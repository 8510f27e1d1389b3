"""The bubble of a pipeline against (S - 1) / (M + S - 1): `python tools/bench/pipeline.py --stages 2,4 --micro 4,8`.

The real stages, the real engine and its schedule, with a tiny model; each stage sleeps in its forward and in its
backward pass, the backward twice as long. So all stages take equally long, whatever cores this machine has, and what
is left of a step is waiting. Printed: share of the step that an average stage did not spend in its passes, from its
first instruction to the end of the last micro-batch; the formula; their ratio. The target is a ratio of 1 +- 0.1.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.multiprocessing as mp

MODEL = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
LENGTH = 8


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], None


def resolved_run(stages: int, micro_batches: int) -> Any:
    """A run of one row a micro-batch."""
    from llmtrain.config.resolve import resolve
    from llmtrain.config.run import DataConfig, ModelConfig, RunConfig, TrainConfig
    from llmtrain.optim.optimizers import AdamW
    from llmtrain.optim.schedules import Constant

    tree = {"zero_optimization": {"stage": 1}, "pipeline": {"stages": stages, "partition": "uniform"}}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(tree, file)
        file.flush()
        config = RunConfig(
            deepspeed=file.name,
            model=ModelConfig(config=dict(MODEL)),
            data=DataConfig(path="-", sequence_length=LENGTH),
            optim=AdamW(lr=1e-4),
            schedule=Constant(),
            train=TrainConfig(micro_batch=1, accumulation=micro_batches, max_steps=1),
        )
        return resolve(config, stages, "the benchmark")


def time_instructions(engine: Any) -> list[tuple[str, float]]:
    """Have the engine note (what, seconds) before and after each instruction of its schedule, in the list returned."""
    from deepspeed.runtime.pipe import schedule

    marks: list[tuple[str, float]] = []

    def timed(name: str, instruction: Callable[..., None]) -> Callable[..., None]:
        def run(engine: Any, **kwargs: Any) -> None:
            marks.append(("begin", time.perf_counter()))
            instruction(engine, **kwargs)
            marks.append((name, time.perf_counter()))

        return run

    passes = {schedule.ForwardPass: "pass", schedule.BackwardPass: "pass"}
    ends = dict.fromkeys((schedule.OptimizerStep, schedule.ReduceTiedGrads, schedule.ReduceGrads), "end")
    names = {**passes, **ends}
    engine._INSTRUCTION_MAP = {
        kind: timed(names.get(kind, "other"), instruction) for kind, instruction in engine._INSTRUCTION_MAP.items()
    }
    return marks


def rank_main(rank: int, stages: int, micro_batches: int, port: int, forward_s: float, steps: int, out: Any) -> None:
    """One rank: puts (rank, seconds of a step, seconds in its passes) of each step but the first into `out`."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(stages)}
    os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
    from llmtrain.data.batches import MicroBatch
    from llmtrain.engine.deepspeed.build import build_engine, join_process_group
    from llmtrain.engine.weights import fill_parameters
    from llmtrain.models.parallel.mesh import mesh_of
    from llmtrain.models.run.build_for_rank import build_model
    from llmtrain.models.spec import ModelSpec

    ranks = join_process_group(120.0)
    run = resolved_run(stages, micro_batches)
    mesh = mesh_of(run.mix.degrees)
    spec = ModelSpec.of(run.config.model)
    model: Any = build_model(run, spec, ranks.device, mesh)
    engine = build_engine(model, run, {}, ranks, mesh)
    fill_parameters(engine, spec.initial_weights(0, ranks.device))
    engine.refresh()

    def slow(module: Any, args: Any, result: torch.Tensor) -> torch.Tensor:
        time.sleep(forward_s)
        return _SlowBackward.apply(result, 2 * forward_s)

    model.stage.register_forward_hook(slow)
    marks = time_instructions(engine.deepspeed)
    tokens = torch.arange(LENGTH).unsqueeze(0)
    micros = [MicroBatch(inputs=tokens, labels=tokens, sequences=[0]) for _ in range(micro_batches)]
    for step in range(steps + 1):
        torch.distributed.barrier()
        marks.clear()
        began = time.perf_counter()
        engine.forward_backward(micros, lambda: LENGTH * micro_batches)
        engine.update(1.0)
        pairs = list(zip(marks[::2], marks[1::2], strict=True))
        busy = sum(end - begin for (_, begin), (name, end) in pairs if name == "pass")
        last = max(end for _, (name, end) in pairs if name != "end")
        if step:  # the first one sends shapes
            out.put((rank, last - began, busy))


def measure(stages: int, micro_batches: int, forward_s: float, steps: int) -> float:
    """The smallest share of waiting over the steps: other programs on this machine only add to it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = mp.get_context("spawn").SimpleQueue()
    mp.spawn(rank_main, args=(stages, micro_batches, port, forward_s, steps, out), nprocs=stages)
    times: dict[int, list[tuple[float, float]]] = {}
    for _ in range(stages * steps):
        rank, step_s, busy_s = out.get()
        times.setdefault(rank, []).append((step_s, busy_s))
    shares = []
    for step in range(steps):
        of_step = [times[rank][step] for rank in range(stages)]
        length = max(step_s for step_s, _ in of_step)
        shares.append(1 - sum(busy_s for _, busy_s in of_step) / stages / length)
    return min(shares)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="The bubble of a pipeline against its formula.")
    parser.add_argument("--stages", default="2,4", help="numbers of stages (at most 4)")
    parser.add_argument("--micro", default="4,8,16", help="micro-batches of a step")
    parser.add_argument(
        "--forward-ms", type=float, default=30.0, help="forward time of a stage; backward takes twice it"
    )
    parser.add_argument("--steps", type=int, default=2, help="steps measured")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    from llmtrain.models.parallel.pipeline import bubble_share

    args = arguments(argv)
    print("| stages | micro-batches | bubble measured | (S - 1) / (M + S - 1) | ratio |\n|---|---|---|---|---|")
    for stages in map(int, args.stages.split(",")):
        for micro_batches in map(int, args.micro.split(",")):
            share = measure(stages, micro_batches, args.forward_ms / 1000, args.steps)
            want = bubble_share(stages, micro_batches)
            print(f"| {stages} | {micro_batches} | {share:.1%} | {want:.1%} | {share / want:.2f} |", flush=True)


if __name__ == "__main__":
    main()
