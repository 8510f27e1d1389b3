"""Planned against measured seconds of a step: CPU ranks on hosts of the lab, behind slow cables.

    python tools/bench/plan_time.py

Each host has one rank and one thread. The plan measures this machine's speed for a second, and knows the cables' rate
(root and Debian's packages: tools/lab/README.md).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tests.helpers.launching import write_run  # noqa: E402
from tools.lab.lab import Lab, why_not  # noqa: E402

HOSTS = 2
MODEL = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 256,
}
FORMS: dict[str, dict[str, Any]] = {
    "ZeRO 0": {"zero_optimization": {"stage": 0}},
    "ZeRO 1": {"zero_optimization": {"stage": 1}},
    "ZeRO 2": {"zero_optimization": {"stage": 2}},
    "ZeRO 3": {"zero_optimization": {"stage": 3}},
    "ZeRO 1, tensor 2": {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}},
    "ZeRO 1, pipeline 2": {"zero_optimization": {"stage": 1}, "pipeline": {"stages": 2}},
}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate-mbit", type=int, default=100, help="of each host's cable")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", nargs="*", help="forms (default: all)")
    return parser.parse_args(argv)


def planned(recipe: Path, rate_mbit: int) -> tuple[float, dict[str, float]]:
    """Seconds of a step, and of its parts."""
    words = ["plan", str(recipe), "--hosts", str(HOSTS), "--slots", "1", "--device", "cpu", "--json"]
    words += ["--link", f"{rate_mbit}mbit"]
    done = subprocess.run([sys.executable, "-m", "llmtrain", *words], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(done.stderr)
    found = json.loads(done.stdout)["time"]
    return found["seconds"], found["parts"]


def measured(recipe: Path, lab: Lab) -> tuple[float, float]:
    """Median seconds of a step, and the share inside collectives."""
    started = []
    for rank, host in enumerate(lab.hosts):
        more = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(HOSTS), "LOCAL_WORLD_SIZE": "1"}
        more |= {"MASTER_ADDR": lab.hosts[0].address, "MASTER_PORT": "29600", "GLOO_SOCKET_IFNAME": "eth0"}
        words = [sys.executable, "-m", "llmtrain", "train", "--config", str(recipe)]
        with open(recipe.with_suffix(f".{rank}.log"), "w") as log:
            env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **more}
            started.append(host.popen(words, env=env, cwd=ROOT, stdout=log, stderr=log))
    codes = [process.wait(600) for process in started]
    if any(codes):
        raise SystemExit(recipe.with_suffix(".0.log").read_text()[-3000:])
    rows = [json.loads(line) for line in (recipe.parent / "run/metrics.jsonl").read_text().splitlines()]
    tokens = rows[0]["tokens"]
    steps = [tokens / row["tokens_per_s"] for row in rows[2:]]  # the first ones make connections and moments
    return statistics.median(steps), statistics.median(row["comm_share"] for row in rows[2:])


def main(argv: Sequence[str] | None = None) -> int:
    """Print both sides of each form."""
    options = arguments(argv)
    if reason := why_not():
        raise SystemExit(reason)
    print(f"{'form':22} {'planned s':>10} {'of it messages':>15} {'measured s':>11} {'in collectives':>15}")
    with tempfile.TemporaryDirectory(dir=ROOT) as made:  # a host of the lab has a /tmp of its own
        folder = Path(made)
        words = ["prepare", "--source", "stdlib", "--vocab-size", "512", "--out", str(folder / "data")]
        subprocess.run([sys.executable, "-m", "llmtrain", *words], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        with Lab(HOSTS, folder=folder) as lab:
            for host in lab.hosts:
                host.shape(rate_mbit=options.rate_mbit)
            for form, more in FORMS.items():
                if options.only and form not in options.only:
                    continue
                tree = {"bf16": {"enabled": True}, "communication_data_type": "bf16", **more}
                batch = {"micro_batch": 2, "global_batch": 8, "max_steps": options.steps}
                path = str(folder / "data")
                home = folder / form.replace(" ", "-").replace(",", "")
                data = {"path": path, "sequence_length": 256}
                recipe = write_run(home, path, tree, batch, model={"config": MODEL}, data=data)
                plan_s, parts = planned(recipe, options.rate_mbit)
                took_s, share = measured(recipe, lab)
                sent = parts.get("messages", 0.0)
                print(
                    f"{form:22} {plan_s:10.2f} {sent:15.2f} {took_s:11.2f} {share * took_s:15.2f} "
                    f"{plan_s / took_s - 1:+.0%}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
