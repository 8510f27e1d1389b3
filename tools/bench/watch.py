"""What the watch of a job costs: steps with it and without it, in turns, in one run of two ranks on this machine.

    python tools/bench/watch.py [--hidden 256] [--layers 4] [--blocks 40]

In every other block of ten steps the wrappers around the collectives are taken off, the heartbeat's calls do nothing,
and the watch's process is stopped. Both sides are printed, with the cost of one heartbeat call.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BLOCK = 10
REPO = Path(__file__).resolve().parents[2]
RECIPE = """
deepspeed: {repo}/ds_configs/zero1_fp32.json
model: {{config: {{model_type: llama, vocab_size: 512, hidden_size: {hidden}, intermediate_size: {wide},
  num_hidden_layers: {layers}, num_attention_heads: 4, num_key_value_heads: 4}}}}
data: {{path: {data}, sequence_length: 128}}
train: {{run_dir: {run}, global_batch: 8, micro_batch: 2, max_steps: {steps}, log_every: 10, eval_sequences: 2,
  export: false}}
tracking: {{wandb: disabled}}
"""


def rank(recipe: str, results: str) -> None:
    """One rank: llmtrain's own training, with the watch switched off in every other block of steps."""
    import torch.distributed as dist

    from llmtrain.cli import main
    from llmtrain.cluster.watch.folder import AGENT
    from llmtrain.cluster.watch.heartbeat import Heartbeat, heart
    from llmtrain.engine import collectives

    blocks: list[list[float]] = [[]]  # seconds of steps; in every second block, from the first on, with the watch
    seen = {"steps": 0, "on": True, "began": 0.0}
    plain: dict[str, Any] = {}
    calls = ("phase", "beat", "end_step", "enter", "leave")

    def switch(on: bool) -> None:
        for name in collectives._FUNCTIONS:
            wrapped = getattr(dist, name, None)
            if wrapped is not None and on and name in plain:
                setattr(dist, name, plain.pop(name))
            elif wrapped is not None and not on:
                plain[name] = wrapped
                setattr(dist, name, wrapped.__wrapped__)
        for name in calls[:3]:  # the wrappers hold the other two
            if on:
                heart.__dict__.pop(name, None)
            else:
                heart.__dict__[name] = lambda *_: None
        if os.environ["LOCAL_RANK"] == "0":
            agent = json.loads((Path(os.environ["LLMTRAIN_WATCH"]) / AGENT).read_text())["pid"]
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent, signal.SIGCONT if on else signal.SIGSTOP)

    def begin_step() -> None:
        now = time.perf_counter()
        if seen["steps"] > BLOCK and seen["steps"] % BLOCK > 1:  # the first ones of a block warm its caches
            blocks[-1].append(now - seen["began"])
        seen["steps"] += 1
        if seen["steps"] % BLOCK == 0:
            blocks.append([])
            seen["on"] = not seen["on"]
            switch(bool(seen["on"]))
        seen["began"] = time.perf_counter()
        if seen["on"]:
            Heartbeat.begin_step(heart)

    heart.begin_step = begin_step  # type: ignore[method-assign]
    code = main(["train", "--config", recipe])
    if not seen["on"]:
        switch(True)
    if os.environ["RANK"] == "0":
        Path(results).write_text(json.dumps(blocks))
    sys.exit(code)


def cost_of_a_call() -> float:
    """Microseconds of entering and leaving a collective."""
    from llmtrain.cluster.watch.heartbeat import Heartbeat, named

    heart, name, rounds = Heartbeat(), named("all_reduce"), 100_000
    began = time.perf_counter()
    for _ in range(rounds):
        heart.enter(name)
        heart.leave()
    return (time.perf_counter() - began) / rounds * 1e6


def report(blocks: list[list[float]]) -> None:
    """Each block is held against the one after it, so that a machine that gets slower is on neither side."""
    middle = [statistics.median(block) for block in blocks if len(block) > BLOCK // 2]
    costs: list[float] = []  # per cent, of each pair of neighbours
    for first, second in itertools.pairwise(middle):
        with_it, without = (second, first) if len(costs) % 2 else (first, second)
        costs.append(100 * (with_it / without - 1))
    draw = random.Random(0)
    means = sorted(trimmed_mean(draw.choices(costs, k=len(costs))) for _ in range(2000))
    on, off = statistics.median(middle[::2]), statistics.median(middle[1::2])
    print(
        f"{len(middle)} blocks of {BLOCK} steps, in turns; median step {on * 1e3:.2f} ms with, {off * 1e3:.2f} without"
    )
    print(
        f"the watch costs {trimmed_mean(costs):+.2f} % of a step; 95 % of resampled means: {means[50]:+.2f} to "
        f"{means[1949]:+.2f} %"
    )


def trimmed_mean(values: list[float]) -> float:
    """Without the tenth at either end: a neighbour's burst falls on one block, not on its pair."""
    cut = len(values) // 10
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name, default in (("hidden", 256), ("layers", 4), ("blocks", 40)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text, data, results = Path(folder) / "text", Path(folder) / "data", Path(folder) / "times.json"
        words = [" ".join(f"word{(i * j) % 997}" for j in range(200)) for i in range(1, 200)]
        text.mkdir()
        for number, line in enumerate(words):
            (text / f"{number}.txt").write_text(line)
        tool = [sys.executable, "-m", "llmtrain"]
        prepare = ["prepare", "--source", str(text), "--out", str(data), "--vocab-size", "512"]
        subprocess.run([*tool, *prepare], check=True, cwd=REPO, stdout=subprocess.DEVNULL)
        recipe = Path(folder) / "recipe.yaml"
        shape = {"hidden": asked.hidden, "wide": 2 * asked.hidden, "layers": asked.layers}
        steps = BLOCK * asked.blocks + 1
        recipe.write_text(RECIPE.format(repo=REPO, data=data, run=Path(folder) / "run", steps=steps, **shape))
        env = {**os.environ, "PYTHONPATH": str(REPO), "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "OMP_NUM_THREADS": "1"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu"}
        command = [sys.executable, __file__, "rank", str(recipe), str(results)]
        ranks = [
            subprocess.Popen(command, env={**env, "RANK": str(n), "LOCAL_RANK": str(n)}, stdout=subprocess.DEVNULL)
            for n in range(2)
        ]
        assert [each.wait() for each in ranks] == [0, 0]
        blocks = json.loads(results.read_text())[2:]
    report(blocks)
    print(f"one collective entered and left: {cost_of_a_call():.2f} us")


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(*sys.argv[2:4])
    else:
        main()
