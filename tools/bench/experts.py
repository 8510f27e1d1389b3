"""Mixtures of experts: a step with grouped products against transformers' loop over the experts.

    python tools/bench/experts.py                            # CPU: 16 and 64 experts under ZeRO 1 and 3
    python tools/bench/experts.py --experts 64 --zero 1      # a part of it

A small Qwen3-MoE, each token computed by two of its experts. One side is the loop of `llmtrain train` from the YAML on.
The loop over the experts runs twice: within that very loop, where nothing else differs, and in plain PyTorch as its
tutorials write it. Each has a process of its own; they take turns round by round as in train_speed.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import train_speed  # noqa: E402
from contestants import Clock, Task, enter, run_llmtrain, run_plain  # noqa: E402

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


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", nargs="+", type=int, default=[16, 64], help="of a layer")
    parser.add_argument("--zero", nargs="+", type=int, choices=(0, 1, 2, 3), default=[1, 3], help="stages of ZeRO")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a round")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds; one more warms up")
    return parser.parse_args(argv)


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


def compare(stage: int, experts: int, options: argparse.Namespace) -> dict[str, float]:
    """CPU-ms a step of each side (ms on a GPU), ratios of times within a round, the largest difference of losses."""
    import torch

    on_gpu = torch.cuda.is_available()
    words = ["--zero", str(stage), "--rounds", str(options.rounds), "--steps", str(options.steps)]
    with tempfile.TemporaryDirectory(prefix="llmtrain-bench-") as folder:
        train_speed.PRESETS["experts"] = train_speed.Preset(
            model={**MODEL, "num_experts": experts}, sequence=256, micro_batch=4, accumulation=1, steps=options.steps
        )
        task = train_speed.prepare(train_speed.arguments([*words, "--preset", "experts"]), Path(folder))
        task = replace(task, contestants=(train_speed.OURS, LOOP, PLAIN_LOOP))
        found = train_speed.figures(task, train_speed.race(task, lambda _: None, serve), on_gpu)
    times, ratios = found["contestants"], found["speed_of_ours_over"]
    return {
        **{name: one["ms_per_step"] for name, one in times.items()},
        **{f"over {name}": 1 / ratio for name, ratio in ratios.items()},
        "difference": max(found["largest_loss_difference"].values()),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run all comparisons and print the table."""
    options = arguments(argv)
    print(", ".join(f"{key} {value}" for key, value in train_speed.about().items()), flush=True)
    print("| ZeRO | experts | grouped, CPU-ms a step | loop | loop in plain PyTorch | grouped over loop | "
          "grouped over loop in plain PyTorch | largest difference of losses |")  # fmt: skip
    print("|---" * 8 + "|", flush=True)
    for stage in options.zero:
        for experts in options.experts:
            one = compare(stage, experts, options)
            sides = " | ".join(f"{one[name]:.0f}" for name in (train_speed.OURS, LOOP, PLAIN_LOOP))
            over = " | ".join(f"{one[f'over {name}']:.2f}" for name in (LOOP, PLAIN_LOOP))
            print(f"| {stage} | {experts} | {sides} | {over} | {one['difference']:.1e} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
