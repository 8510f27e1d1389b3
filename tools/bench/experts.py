"""Mixtures of experts: a step with grouped products against transformers' loop over the experts.

    python tools/bench/experts.py                            # CPU: 16 and 64 experts under ZeRO 1 and 3
    python tools/bench/experts.py --experts 64 --zero 1      # a part of it
    python tools/bench/experts.py --isa avx2                 # with the instructions of a CPU without AVX-512
    python tools/bench/experts.py --preset gpu               # 128 experts under ZeRO 1 on one GPU, but plain PyTorch

A small Qwen3-MoE, each token computed by two of its experts; on a GPU four layers of Qwen3-30B-A3B. One side is the
loop of `llmtrain train` from the YAML on. The loop over the experts runs within that very loop, where nothing else
differs, and in plain PyTorch as its tutorials write it. On a CPU a second table has the experts' layers without the
rest of the step: both ways, with tokens spread evenly, and the products of these sizes alone. Each side has a process
of its own; they take turns round by round as in train_speed.py.

The learning rate keeps the routers at their first choices: at 3e-4 these data lead half of the experts' tokens away
within ten steps, and a loop over the experts that are left is a faster one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import contestants  # noqa: E402
import train_speed  # noqa: E402
from contestants import SKIPPED, Clock, Need, Round, Task, enter, run_llmtrain, run_plain  # noqa: E402
from machine import Card, about, gpu_gib, write  # noqa: E402

LOOP, PLAIN_LOOP = "loop", "loop in plain PyTorch"
GROUPED_LAYERS, LOOP_LAYERS, PRODUCTS = "grouped layers", "loop of layers", "products alone"
LEARNING_RATE = 1e-5
ISA = {"avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}}
"""What torch, oneDNN and MKL read when they are loaded."""
MODEL = {
    "model_type": "qwen3_moe",
    "vocab_size": 1024,
    "hidden_size": 256,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
}
OF_30B = {
    **MODEL,
    "vocab_size": 32768,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "num_experts_per_tok": 8,
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """A preset, and what is measured of it unless the command line names it."""

    shape: train_speed.Preset
    experts: list[int]
    zero: list[int]
    sides: tuple[str, ...]


PRESETS = {
    "small": Size(
        shape=train_speed.Preset(model=MODEL, sequence=256, micro_batch=4, accumulation=1, steps=4),
        experts=[16, 64],
        zero=[1, 3],
        sides=(train_speed.OURS, LOOP, PLAIN_LOOP),
    ),
    "gpu": Size(
        shape=train_speed.Preset(
            model=OF_30B,
            sequence=4096,
            micro_batch=2,
            accumulation=4,
            steps=6,
            needs={train_speed.OURS: Need(held=38.1, made=12.0), LOOP: Need(held=38.1, made=12.0)},
        ),
        experts=[128],
        zero=[1],
        sides=(train_speed.OURS, LOOP),
    ),
}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--experts", nargs="+", type=int, help="of a layer")
    parser.add_argument("--zero", nargs="+", type=int, choices=(0, 1, 2, 3), help="stages of ZeRO")
    parser.add_argument("--steps", type=int, help="timed steps of a round")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds; one more warms up")
    parser.add_argument("--isa", choices=ISA, help="no newer instructions than these; default: all of the CPU")
    parser.add_argument("--json", type=Path, help="write the figures to this file, after each round")
    found = parser.parse_args(argv)
    size = PRESETS[found.preset]
    found.experts, found.zero = found.experts or size.experts, found.zero or size.zero
    found.steps = found.steps or size.shape.steps
    return found


def serve(name: str, pipe: Connection, task: Task) -> None:
    """Entry of a side's process."""
    enter(task.threads)
    contestants.PEAK_LR = LEARNING_RATE
    clock = Clock(pipe, task)
    if name == PLAIN_LOOP:
        run_plain(clock, task, "eager")
    elif name in (GROUPED_LAYERS, LOOP_LAYERS):
        run_layers(clock, task, "grouped_mm" if name == GROUPED_LAYERS else "eager")
    elif name == PRODUCTS:
        run_products(clock, task)
    else:
        warnings.filterwarnings("ignore", category=FutureWarning)  # torch's, of collectives that DeepSpeed calls
        own = Path(task.folder) / name
        own.mkdir()
        for shared in ("data", "deepspeed.json"):
            (own / shared).symlink_to(Path(task.folder) / shared)
        if name == LOOP:
            from llmtrain.models.run import build_for_rank
            from llmtrain.models.transformers_private import loop_over_experts

            build_for_rank.avoid_grouped_product = lambda hf, dtype: loop_over_experts(hf.config)
        run_llmtrain(clock, replace(task, folder=str(own)))
    pipe.send("end")


def run_layers(clock: Clock, task: Task, way: str) -> None:
    """Forward and backward pass of all layers' experts, with choices given: each expert gets as many tokens."""
    import torch

    from llmtrain.engine.process_memory import keep_freed_memory

    keep_freed_memory()  # as a run
    model: Any = contestants._peer_model(task, torch.float32, way)
    tokens, chosen = task.micro_batch * task.sequence, task.model["num_experts_per_tok"]
    choices_TK = torch.arange(tokens * chosen).view(tokens, chosen)[torch.randperm(tokens)] % task.model["num_experts"]
    shares_TK = torch.full((tokens, chosen), 1 / chosen, requires_grad=True)
    inputs_TH = torch.randn(tokens, task.model["hidden_size"], requires_grad=True)
    clock.ready()
    for _ in range(task.total_steps):
        for layer in model.model.layers:
            made_TH = layer.mlp.experts(inputs_TH, choices_TK, shares_TK)
            made_TH.backward(inputs_TH.detach())
        model.zero_grad()
        inputs_TH.grad = shares_TK.grad = None
        clock.step_done(made_TH.detach().sum())


def run_products(clock: Clock, task: Task) -> None:
    """The products of these layers, forward and backward, one expert after another, into memory that is there."""
    import torch

    experts, width, hidden = (task.model[key] for key in ("num_experts", "moe_intermediate_size", "hidden_size"))
    rows = task.micro_batch * task.sequence * task.model["num_experts_per_tok"] // experts
    products = []
    for outputs, inputs in ((2 * width, hidden), (hidden, width)):
        weights, inputs_, grads = (
            torch.randn(experts, *s) for s in ((outputs, inputs), (rows, inputs), (rows, outputs))
        )
        for left, right in ((inputs_, weights.mT), (grads, weights), (grads.mT, inputs_)):
            into = torch.empty(experts, left.shape[1], right.shape[2])
            products.append(list(zip(left.unbind(), right.unbind(), into.unbind(), strict=True)))
    clock.ready()
    for _ in range(task.total_steps):
        for _ in range(task.model["num_hidden_layers"]):
            for of_experts in products:
                for left, right, into in of_experts:
                    torch.mm(left, right, out=into)
        clock.step_done(torch.zeros(()))


def compare(
    stage: int, experts: int, options: argparse.Namespace, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Figures of each side as train_speed.py has them. `keep` gets those so far, after each round."""
    import torch

    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory(prefix="llmtrain-bench-") as folder:
        preset, task = prepare(stage, experts, options, Path(folder))
        left, together = train_speed.arrange(preset, options.preset, task, gpu_gib() if preset.needs else None)
        if train_speed.OURS not in left:
            raise SystemExit(SKIPPED)
        task = replace(task, contestants=left)

        def figures(rounds: dict[str, list[Round]]) -> dict[str, Any]:
            return {"zero": stage, "experts": experts, **train_speed.figures(task, rounds, on_gpu)}

        rounds = train_speed.race(task, lambda rounds: keep(figures(rounds)), serve, together=together)
        log = (Path(folder) / train_speed.OURS / "run-llmtrain/metrics.jsonl").read_text().splitlines()
        idle = [row["moe/idle_experts"] for row in map(json.loads, log) if "moe/idle_experts" in row]
        return {**figures(rounds), "idle_experts": idle[-1] if idle else None}


def prepare(stage: int, experts: int, options: argparse.Namespace, folder: Path) -> tuple[train_speed.Preset, Task]:
    """The preset with so many experts, and the task of its sides."""
    words = ["--zero", str(stage), "--rounds", str(options.rounds), "--steps", str(options.steps)]
    size = PRESETS[options.preset]
    preset = replace(size.shape, model={**size.shape.model, "num_experts": experts})
    train_speed.PRESETS["experts"] = preset
    task = train_speed.prepare(train_speed.arguments([*words, "--preset", "experts"]), folder)
    return preset, replace(task, contestants=size.sides)


def compare_layers(experts: int, options: argparse.Namespace) -> dict[str, float]:
    """CPU-ms a step of each way through all layers' experts, and the medians of the ratios within a round."""
    sides = (GROUPED_LAYERS, LOOP_LAYERS, PRODUCTS)
    with tempfile.TemporaryDirectory(prefix="llmtrain-bench-") as folder:
        task = replace(prepare(1, experts, options, Path(folder))[1], contestants=sides)
        rounds = train_speed.race(task, lambda _: None, serve)
    ms = {name: [1000 * one.cpu_s / task.steps_per_round for one in rounds[name]] for name in sides}
    grouped = ms[GROUPED_LAYERS]
    over = {
        f"{GROUPED_LAYERS} over {name}": statistics.median(a / b for a, b in zip(grouped, ms[name], strict=True))
        for name in sides[1:]
    }
    return {**{name: statistics.median(values) for name, values in ms.items()}, **over}


def main(argv: Sequence[str] | None = None) -> int:
    """Run all comparisons and print the tables."""
    options = arguments(argv)
    os.environ.update(ISA.get(options.isa, {}))  # the sides' processes inherit them
    machine, sides = about(), PRESETS[options.preset].sides
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    ms = "ms" if "memory" in machine else "CPU-ms"  # of a GPU is told how large its memory is
    titles = [f"{'grouped' if name == train_speed.OURS else name}, {ms} a step" for name in sides]
    titles += [f"grouped over {name}" for name in sides[1:]]
    titles += ["largest difference of losses", "idle experts of all layers"]
    print(f"| ZeRO | experts | {' | '.join(titles)} |")
    print("|---" * (len(titles) + 2) + "|", flush=True)
    tables: list[dict[str, Any]] = []
    layers: dict[int, dict[str, float]] = {}
    with Card() as card:

        def keep(found: dict[str, Any]) -> None:
            head = {"machine": machine, "isa": options.isa, **card.figures()}
            write(options.json, {**head, "tables": [*tables, found]})

        for stage in options.zero:
            for experts in options.experts:
                one = compare(stage, experts, options, keep)
                tables.append(one)
                cells = [f"{of['ms_per_step']:.0f}" for of in one["contestants"].values()]
                cells += [f"{1 / ratio:.2f}" for ratio in one["speed_of_ours_over"].values()]
                apart = max(one["largest_loss_difference"].values(), default=0.0)
                idle = "-" if one["idle_experts"] is None else one["idle_experts"]
                print(f"| {stage} | {experts} | {' | '.join(cells)} | {apart:.1e} | {idle} |", flush=True)
    for experts in options.experts if "memory" not in machine else ():
        layers[experts] = compare_layers(experts, options)
        if len(layers) == 1:
            print(f"\n| experts | {' | '.join(layers[experts])} |\n|---" + "|---" * len(layers[experts]) + "|")
        cells = [f"{value:.2f}" if " over " in name else f"{value:.1f}" for name, value in layers[experts].items()]
        print(f"| {experts} | {' | '.join(cells)} |", flush=True)
        write(options.json, {"machine": machine, "isa": options.isa, "tables": tables, "layers": layers})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
