"""What the watch of a job costs: steps with it and without it, in turns, in one run of two ranks on this machine.

    python tools/bench/watch.py [--hidden 256] [--layers 4] [--blocks 40] [--control]

In every other block of ten steps the heartbeat's calls do nothing, and the watch's process is stopped. Both sides are
printed, and what can be counted: the processor time of that process and of the heartbeat's calls. With --control
nothing is switched: what is printed then is this machine's noise.

    python tools/bench/watch.py --hosts 1024

What the reports of so many hosts with 8 ranks each cost the watch of rank 0's host; no run is started.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from llmtrain.base.child import child_environment  # noqa: E402

BLOCK = 10
RECIPE = """
deepspeed: {repo}/ds_configs/zero1_fp32.json
model: {{config: {{model_type: llama, vocab_size: 512, hidden_size: {hidden}, intermediate_size: {wide},
  num_hidden_layers: {layers}, num_attention_heads: 4, num_key_value_heads: 4}}}}
data: {{path: {data}, sequence_length: 128}}
train: {{run_dir: {run}, global_batch: 8, micro_batch: 2, max_steps: {steps}, log_every: 10, eval_sequences: 2,
  export: false}}
"""


def rank(recipe: str, results: str, control: str) -> None:
    """One rank: llmtrain's own training, with the watch switched off in every other block of steps."""
    from llmtrain.base.rank.folder import AGENT
    from llmtrain.base.rank.heartbeat import _COLLECTIVES, Heartbeat, heart
    from llmtrain.cli import main

    blocks: list[list[float]] = [[]]  # seconds of steps; in every second block, from the first on, with the watch
    seen = {"steps": 0, "on": True, "began": 0.0}
    calls = [getattr(Heartbeat, name) for name in ("phase", "beat", "end_step", "enter", "leave")]
    codes = [call.__code__ for call in calls]
    counted = {"agent_s": 0.0, "on_s": 0.0, "collectives": 0.0}
    since: dict[str, float] = {}

    def nothing(self: Heartbeat, *_: Any) -> None:
        pass

    def count(on: bool) -> None:
        """The processor time of the watch's process while it runs."""
        ran_ns = int(Path(f"/proc/{agent()}/schedstat").read_text().split()[0])
        if not on and since:
            counted["agent_s"] += ran_ns / 1e9 - since["agent_s"]
            counted["on_s"] += time.perf_counter() - since["on_s"]
        since.update(agent_s=ran_ns / 1e9, on_s=time.perf_counter())

    def agent() -> int:
        return int(json.loads((Path(os.environ["LLMTRAIN_WATCH"]) / AGENT).read_text())["pid"])

    def switch(on: bool) -> None:
        if os.environ["LOCAL_RANK"] == "0":
            count(on)
        if control:
            return
        for call, code in zip(calls, codes, strict=True):  # the wrappers of the collectives hold the functions
            call.__code__ = code if on else nothing.__code__
        if os.environ["LOCAL_RANK"] == "0":
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent(), signal.SIGCONT if on else signal.SIGSTOP)

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
        steps = seen["steps"] if control else seen["steps"] / 2  # the others were not counted
        counted["collectives"] = heart._words[_COLLECTIVES] / steps
        Path(results).write_text(json.dumps({"blocks": blocks, **counted}))
    sys.exit(code)


def cost_of_a_call() -> float:
    """Microseconds that a collective takes longer because it is counted."""
    import torch

    from llmtrain.base.rank.heartbeat import _counted

    def plain() -> None:
        pass

    def seconds(function: Callable[[], None]) -> float:
        began = time.perf_counter()
        for _ in range(100_000):
            function()
        return time.perf_counter() - began

    counted = _counted("all_reduce", plain, torch.compiler.is_compiling)
    return (seconds(counted) - seconds(plain)) / 100_000 * 1e6


def account(found: dict[str, Any]) -> None:
    """What can be counted instead of timed."""
    step_us = 1e6 * statistics.median(seconds for block in found["blocks"][::2] for seconds in block)
    cost_us, collectives = cost_of_a_call(), found["collectives"]
    calls, process = 100 * collectives * cost_us / step_us, 100 * found["agent_s"] / found["on_s"]
    print(
        f"counted: {collectives:.1f} collectives a step, {cost_us:.2f} us more each: {calls:.3f} % of a step; the "
        f"watch's process: {process:.3f} % of a core"
    )


def cost_of_hosts(hosts: int) -> None:
    """What the root of the watch does each second: hear every host once, look at everything ten times."""
    from llmtrain.features.watch.facts import RankFacts
    from llmtrain.features.watch.verdict import Judge, Pauses

    judge, pauses = Judge(300.0, 0.0), Pauses(300.0)
    reports = []
    for host in range(hosts):
        ranks = [RankFacts(rank=8 * host + n, host=f"node-{host}", collective="all_reduce") for n in range(8)]
        own = {"beats": 1, "timed_steps": 1, "own_s": 1.0, "active": False}
        reports.append(json.dumps({"ranks": [{**rank.to_json(), **own} for rank in ranks], "oom_kills": 0}))
    began = time.process_time()
    for host, text in enumerate(reports):
        judge.hear(f"node-{host}", json.loads(text), 1.0)
    heard = time.process_time()
    for tenth in range(10):
        judge.decide(1.0 + tenth / 10)
        pauses.feed(judge.stalled_s(1.0 + tenth / 10))
    looked = time.process_time()
    print(
        f"{hosts} hosts of 8 ranks: {heard - began:.4f} s to hear them, {looked - heard:.4f} s to look ten times: "
        f"{100 * (looked - began):.1f} % of a core"
    )


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


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name, default in (("hidden", 256), ("layers", 4), ("blocks", 40)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--hosts", type=int)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Print both sides, or with --hosts what the reports cost."""
    asked = arguments(argv)
    if asked.hosts:
        cost_of_hosts(asked.hosts)
        return
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
        env = child_environment(
            WORLD_SIZE="2",
            LOCAL_SIZE="2",
            OMP_NUM_THREADS="1",
            DS_ACCELERATOR="cpu",
            WANDB_MODE="disabled",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free_port()),
        )
        command = [sys.executable, __file__, "rank", str(recipe), str(results), "control" if asked.control else ""]
        ranks = [
            subprocess.Popen(command, env={**env, "RANK": str(n), "LOCAL_RANK": str(n)}, stdout=subprocess.DEVNULL)
            for n in range(2)
        ]
        assert [each.wait() for each in ranks] == [0, 0]
        found = json.loads(results.read_text())
    found["blocks"] = found["blocks"][2:]
    report(found["blocks"])
    account(found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(*sys.argv[2:5])
    else:
        main()
