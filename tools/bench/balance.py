"""Ranks of unequal speed: what of the sum of their speeds a run reaches with equal and with measured shares.

    python tools/bench/balance.py

A small Llama learns the running Python's sources, in runs of `llmtrain train` whose forward passes take so many
milliseconds more for a sequence, by rank (`--ms`): ranks that share this machine's cores then do not slow each other
down. Each rank first trains alone at its own speed; all of them together, with `balance.mode` equal and measured.
Speeds are tokens per second as metrics.jsonl has them, of the fastest of the last steps: whatever else the machine does
only adds to one. In the row `slows down` the
first rank takes `--later` times as long for a sequence from the middle of the run on; its sum of speeds is that after.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from llmtrain.base.child import child_environment  # noqa: E402

MODEL = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
LAST = 10
"""Steps of which the fastest counts."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ms", nargs="+", type=float, default=[40.0, 80.0], help="of a sequence, by rank")
    parser.add_argument("--later", type=float, default=4.0)
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 3], help="of ZeRO")
    parser.add_argument("--micro-batch", type=int, default=12)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=48)
    return parser.parse_args(argv)


def train(first_ms: float, then_ms: float, after: int, words: Sequence[str]) -> int:
    """`llmtrain train`, slowed down: another time after so many forward passes."""
    from llmtrain.cli import main
    from llmtrain.models.language import LanguageModel

    usual, passes = LanguageModel.forward, [0]

    def forward(self: LanguageModel, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        passes[0] += self.training
        time.sleep(len(inputs) * (then_ms if passes[0] > after else first_ms) / 1e3)
        return usual(self, inputs, *args, **kwargs)

    LanguageModel.forward = forward  # type: ignore[method-assign]
    return main(["train", *words])


def run(
    home: Path, data: Path, paces: Sequence[tuple[float, float]], stage: int, options: argparse.Namespace, mode: str
) -> float:
    """Tokens per second of a run whose ranks have these milliseconds for a sequence, before and after its middle."""
    home.mkdir(parents=True)
    (home / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    tree = {
        "deepspeed": str(home / "ds.json"),
        "model": {"config": MODEL},
        "data": {"path": str(data), "sequence_length": 64},
        "schedule": {"name": "constant"},
        "train": {
            "run_dir": str(home / "run"),
            "micro_batch": options.micro_batch,
            "accumulation": options.accumulation,
            "max_steps": options.steps if len(paces) > 1 else min(options.steps, LAST + 4),
            "log_every": 1,
            "eval": False,
            "export": False,
        },
        "balance": {"mode": mode},
    }
    (home / "recipe.yaml").write_text(json.dumps(tree))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = child_environment(
        OMP_NUM_THREADS="1",
        DS_ACCELERATOR="cpu",
        WORLD_SIZE=str(len(paces)),
        WANDB_MODE="disabled",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    middle = options.steps // 2 * options.accumulation
    ranks = []
    with open(home / "log", "w") as log:
        for rank, pace in enumerate(paces):
            words = [*map(str, pace), str(middle), "--config", str(home / "recipe.yaml")]
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--rank", *words], env={**common, **place}, stdout=log, stderr=log
                )
            )
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"a run has failed:\n{(home / 'log').read_text()[-3000:]}")
    rows = [json.loads(line) for line in (home / "run/metrics.jsonl").read_text().splitlines()]
    return float(max([row["tokens_per_s"] for row in rows if "tokens_per_s" in row][-LAST:]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run all and print the table."""
    options = arguments(argv)
    from machine import about

    print(", ".join(f"{key} {value}" for key, value in about().items()), flush=True)
    print(
        f"{options.steps} steps, micro-batch {options.micro_batch} x accumulation {options.accumulation}; "
        f"milliseconds of a sequence by rank: {', '.join(f'{each:g}' for each in options.ms)}"
    )
    print(f"{'ZeRO':6}{'shares':14}{'tokens/s':>10}{'sum of speeds':>15}{'reached':>9}", flush=True)
    steady = [(each, each) for each in options.ms]
    later = [(options.ms[0], options.ms[0] * options.later), *steady[1:]]
    with tempfile.TemporaryDirectory(prefix="llmtrain-bench-") as made:
        folder, data = Path(made), Path(made) / "data"
        words = ["prepare", "--source", "stdlib", "--vocab-size", "1024", "--out", str(data)]
        subprocess.run([sys.executable, "-m", "llmtrain", *words], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        for stage in options.stages:
            speeds = {}
            for ms in {*options.ms, options.ms[0] * options.later}:
                speeds[ms] = run(folder / f"{stage}-{ms}", data, [(ms, ms)], stage, options, "equal")
            for name, paces, mode in (
                ("equal", steady, "equal"),
                ("measured", steady, "measured"),
                ("slows down", later, "measured"),
            ):
                total = sum(speeds[last] for _, last in paces)
                speed = run(folder / f"{stage}-{name}", data, paces, stage, options, mode)
                print(f"{stage:<6}{name:14}{speed:>10.0f}{total:>15.0f}{speed / total:>9.1%}", flush=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        raise SystemExit(train(float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), sys.argv[5:]))
    raise SystemExit(main())
