"""Mixtures of experts: a step with grouped products against transformers' loop over the experts.

    python tools/bench/experts.py                            # CPU: 16 and 64 experts under ZeRO 1 and 3
    python tools/bench/experts.py --experts 64 --zero 1      # a part of it
    python tools/bench/experts.py --preset gpu               # 128 experts under ZeRO 1 on one GPU, but plain PyTorch

A small Qwen3-MoE, each token computed by two of its experts; on a GPU four layers of Qwen3-30B-A3B. One side is the
loop of `llmtrain train` from the YAML on. The loop over the experts runs within that very loop, where nothing else
differs, and in plain PyTorch as its tutorials write it. Each has a process of its own; they take turns round by round
as in train_speed.py.
"""

from __future__ import annotations

import argparse
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

import train_speed  # noqa: E402
from contestants import SKIPPED, Clock, Need, Round, Task, enter, run_llmtrain, run_plain  # noqa: E402
from machine import Card, about, gpu_gib, write  # noqa: E402

LOOP, PLAIN_LOOP = "loop", "loop in plain PyTorch"
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
    parser.add_argument("--json", type=Path, help="write the figures to this file, after each round")
    found = parser.parse_args(argv)
    size = PRESETS[found.preset]
    found.experts, found.zero = found.experts or size.experts, found.zero or size.zero
    found.steps = found.steps or size.shape.steps
    return found


def serve(name: str, pipe: Connection, task: Task) -> None:
    """Entry of a side's process."""
    enter(task.threads)
    if name == PLAIN_LOOP:
        run_plain(Clock(pipe, task), task, "eager")
        pipe.send("end")
        return
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's, of collectives that DeepSpeed calls
    own = Path(task.folder) / name
    own.mkdir()
    for shared in ("data", "deepspeed.json"):
        (own / shared).symlink_to(Path(task.folder) / shared)
    if name == LOOP:
        from llmtrain.models.run import build_for_rank
        from llmtrain.models.transformers_private import loop_over_experts

        build_for_rank.avoid_grouped_product = lambda hf, dtype: loop_over_experts(hf.config)
    run_llmtrain(Clock(pipe, task), replace(task, folder=str(own)))
    pipe.send("end")


def compare(
    stage: int, experts: int, options: argparse.Namespace, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Figures of each side as train_speed.py has them. `keep` gets those so far, after each round."""
    import torch

    on_gpu, size = torch.cuda.is_available(), PRESETS[options.preset]
    words = ["--zero", str(stage), "--rounds", str(options.rounds), "--steps", str(options.steps)]
    with tempfile.TemporaryDirectory(prefix="llmtrain-bench-") as folder:
        preset = replace(size.shape, model={**size.shape.model, "num_experts": experts})
        train_speed.PRESETS["experts"] = preset
        task = train_speed.prepare(train_speed.arguments([*words, "--preset", "experts"]), Path(folder))
        task = replace(task, contestants=size.sides)
        left, together = train_speed.arrange(preset, options.preset, task, gpu_gib() if preset.needs else None)
        if train_speed.OURS not in left:
            raise SystemExit(SKIPPED)
        task = replace(task, contestants=left)

        def figures(rounds: dict[str, list[Round]]) -> dict[str, Any]:
            return {"zero": stage, "experts": experts, **train_speed.figures(task, rounds, on_gpu)}

        return figures(train_speed.race(task, lambda rounds: keep(figures(rounds)), serve, together=together))


def main(argv: Sequence[str] | None = None) -> int:
    """Run all comparisons and print the table."""
    options = arguments(argv)
    machine, sides = about(), PRESETS[options.preset].sides
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    ms = "ms" if "memory" in machine else "CPU-ms"  # of a GPU is told how large its memory is
    titles = [f"{'grouped' if name == train_speed.OURS else name}, {ms} a step" for name in sides]
    titles += [f"grouped over {name}" for name in sides[1:]]
    print(f"| ZeRO | experts | {' | '.join(titles)} | largest difference of losses |")
    print("|---" * (len(titles) + 3) + "|", flush=True)
    tables: list[dict[str, Any]] = []
    with Card() as card:

        def keep(found: dict[str, Any]) -> None:
            write(options.json, {"machine": machine, **card.figures(), "tables": [*tables, found]})

        for stage in options.zero:
            for experts in options.experts:
                one = compare(stage, experts, options, keep)
                tables.append(one)
                cells = [f"{of['ms_per_step']:.0f}" for of in one["contestants"].values()]
                cells += [f"{1 / ratio:.2f}" for ratio in one["speed_of_ours_over"].values()]
                apart = max(one["largest_loss_difference"].values(), default=0.0)
                print(f"| {stage} | {experts} | {' | '.join(cells)} | {apart:.1e} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
