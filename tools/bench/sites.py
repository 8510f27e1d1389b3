"""Training over slow links: several sites in the lab's network, and plain data parallelism over the same links.

    python tools/bench/sites.py --sites 2 --steps 200 --ways ddp diloco local_sgd

Each site is a host of the lab (root and Debian's packages: tools/lab/README.md) with one thread, and a cable of so many
Mbit/s and so many milliseconds of round trip. A small Llama learns the running Python's sources. All ways train the
same number of tokens from the same seed: `ddp` is one run over all hosts, whose steps have as many sequences as those
of all sites together; a word like `diloco:sites.sync_every=50` sets further keys of the configuration.

A step takes at least `--pace-s` seconds, its CPU time included, so that sites that share this machine's cores do not
wait for each other: the share of computing is that time over the time from the first step's end to the last's. Bytes
are what the switch took from a host in between, headers included. A row of `ddp` has fewer steps over the network
(`--ddp-steps`), in bf16, as its gradients then travel; and the loss of the same steps in one process, in fp32 as of all
other ways.

`--start-steps` trains a model in one process first, at a constant learning rate, from which all ways start, and keeps
it in `--start`, from where the next command takes it; `--seeds` trains each way once for each, in other orders of the
data, and the losses are those of all of them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from watch import free_port  # noqa: E402

from llmtrain.base.child import child_environment  # noqa: E402
from tools.lab.lab import Lab, LabHost, why_not  # noqa: E402

MODEL = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
PORT = 29510
LIMIT_S = 7200.0


class Row(NamedTuple):
    """What one way has shown."""

    way: str
    bytes_per_step: float
    """That a site sends in a step, headers included."""
    step_s: float
    """Of a site, with what it waits."""
    losses: list[float]
    """Of validation, after all steps, of each seed."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=["ddp", "diloco", "local_sgd"], help="METHOD[:key=value...]")
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--rate-mbit", type=float, default=100.0)
    parser.add_argument("--rtt-ms", type=float, default=50.0)
    parser.add_argument("--steps", type=int, default=300, help="of each site")
    parser.add_argument("--ddp-steps", type=int, default=12, help="of ddp over the network")
    parser.add_argument("--batch", type=int, default=4, help="sequences of 128 tokens a site and step")
    parser.add_argument("--pace-s", type=float, default=1.0, help="seconds of computing a step")
    parser.add_argument("--hidden", type=int, default=MODEL["hidden_size"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--lr", type=float, default=1e-3, help="of all ways, at its peak")
    parser.add_argument("--start-steps", type=int, default=0, help="of one process, from which all ways start")
    parser.add_argument("--start", type=Path, help="the model of --start-steps, made if it is not there")
    return parser.parse_args(argv)


def train(pace_s: float, times: Path, words: Sequence[str]) -> int:
    """`llmtrain train`, slowed down; writes when each step ended."""
    from llmtrain.cli import main
    from llmtrain.training.step import Session, Step

    usual = Session.step

    def paced(self: Session, *args: Any, **kwargs: Any) -> Step:
        began_s = time.process_time()
        done = usual(self, *args, **kwargs)
        used_s = time.process_time() - began_s
        time.sleep(max(0.0, pace_s - used_s))
        with open(times, "a") as file:
            file.write(f"{time.time()} {used_s}\n")
        return done

    Session.step = paced  # type: ignore[method-assign]
    return main(["train", *words])


class Rank:
    """A training process, on a host of the lab or, without one, beside it. `words`: of `llmtrain train`."""

    def __init__(self, host: LabHost | None, home: Path, name: str, words: Sequence[str], **variables: str) -> None:
        self.name, self._times, self._log = name, home / f"{name}.times", home / f"{name}.log"
        environment = child_environment(
            **{
                "OMP_NUM_THREADS": "1",
                "DS_ACCELERATOR": "cpu",
                "WANDB_MODE": "disabled",
                "RUST_LOG": "warn",
                "LOCAL_RANK": "0",
                "RANK": "0",
                "WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29600",
                "GLOO_SOCKET_IFNAME": "eth0" if host else "lo",
                **variables,
            }
        )
        pace_s = "0" if host is None else variables["PACE_S"]
        command = [sys.executable, __file__, "--rank", pace_s, str(self._times), "--config", str(home / "recipe.yaml")]
        run: Any = host.popen if host else subprocess.Popen
        with open(self._log, "w") as log:
            self.process = run([*command, *words], env=environment, cwd=str(home), stdout=log, stderr=log)

    def steps(self) -> list[tuple[float, float]]:
        """(when it ended, its CPU-seconds) of each step so far."""
        lines = self._times.read_text().splitlines() if self._times.exists() else []
        return [(float(ended), float(used)) for ended, used in map(str.split, lines)]

    def said(self) -> str:
        """The end of its output."""
        return self._log.read_text()[-3000:]


def recipe(home: Path, options: argparse.Namespace, batch: int, steps: int, seed: int, **ds: Any) -> Path:
    """Write the configuration of a run; returns its folder. `ds`: further keys of its DeepSpeed JSON."""
    home.mkdir(parents=True)
    (home / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 0}, **ds}))
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), max(1, options.hidden // 64))
    begins = (
        {"pretrained": options.begin}
        if options.begin
        else {"config": {**MODEL, **heads, "hidden_size": options.hidden}}
    )
    tree = {
        "deepspeed": str(home / "ds.json"),
        "model": begins,
        "data": {"path": options.data, "sequence_length": 128, "seed": seed},
        "optim": {"lr": options.lr},
        "schedule": {"name": "cosine", "warmup_steps": min(20, steps // 4)},
        "train": {
            "run_dir": str(home / "run"),
            "global_batch": batch,
            "micro_batch": options.batch,
            "max_steps": steps,
            "seed": seed,
            "log_every": 10,
            "export": False,
        },
        "checkpoint": {"every_steps": 10 * steps},
    }
    (home / "recipe.yaml").write_text(json.dumps(tree))
    return home


def wait(ranks: Sequence[Rank], until: int | None = None) -> None:
    """Until all have done that many steps, or have ended. Raises SystemExit when one fails."""
    deadline_s = time.monotonic() + LIMIT_S
    while any(rank.process.poll() is None for rank in ranks):
        failed = [rank for rank in ranks if rank.process.poll()]
        if failed or time.monotonic() > deadline_s:
            break
        if until is not None and all(len(rank.steps()) >= until for rank in ranks):
            return
        time.sleep(0.1)
    ended = [(rank, rank.process.poll()) for rank in ranks]
    # Of several that have not succeeded, one that failed rather than its neighbours, which still run.
    if left := [each for each in ended if each[1]] or [each for each in ended if each[1] is None]:
        for rank in ranks:
            rank.process.kill()
        rank, code = left[0]
        raise SystemExit(f"{rank.name} {'has not ended' if code is None else f'ended with {code}'}:\n{rank.said()}")


def loss_of(run: Path) -> float:
    """The last validation's."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float([row["eval/loss"] for row in rows if "eval/loss" in row][-1])


def over_network(lab: Lab, ranks: Sequence[Rank], pace_s: float) -> tuple[float, float]:
    """(bytes that a host sends in a step, seconds of a step), from the end of the first step to that of the last."""
    wait(ranks, until=1)
    first, before = min(len(rank.steps()) for rank in ranks), [host.bytes()[0] for host in lab.hosts]
    wait(ranks)
    sent = sum(host.bytes()[0] - already for host, already in zip(lab.hosts, before, strict=True)) / len(lab.hosts)
    steps = [rank.steps() for rank in ranks]
    done = min(map(len, steps)) - first
    used_s = statistics.median(used for each in steps for _, used in each)
    if used_s > pace_s:
        print(f"  a step computes for {used_s:.2f} s: --pace-s {pace_s:g} is too short", flush=True)
    return sent / done, max(each[-1][0] - each[first - 1][0] for each in steps) / done


@contextmanager
def shaped(options: argparse.Namespace, folder: Path) -> Iterator[Lab]:
    """A lab with slow cables."""
    with Lab(options.sites, folder=folder) as lab:
        for host in lab.hosts:  # a frame passes two cables, and its answer two
            host.shape(rate_mbit=options.rate_mbit, delay_ms=options.rtt_ms / 4)
        yield lab


def start(options: argparse.Namespace, folder: Path) -> str:
    """The Hugging Face folder from which all ways start; none: an empty string."""
    model = folder / "start/run/export"
    if options.start is not None and options.start.is_dir():  # copied: a host of the lab has a /tmp of its own
        return str(shutil.copytree(options.start, model))
    if not options.start_steps:
        return ""
    home = recipe(folder / "start", options, options.batch * options.sites, options.start_steps, seed=1000)
    words = ["--schedule.name", "constant", "--optim.lr", "1e-3", "--train.export", "true"]
    wait([Rank(None, home, "start", words)])
    print(f"all start from {options.start_steps} steps of one process: loss {loss_of(home / 'run'):.4f}", flush=True)
    if options.start is not None:
        shutil.copytree(model, options.start)
    return str(model)


def ddp(options: argparse.Namespace, folder: Path) -> Row:
    """One run over all hosts, and one in a process for each seed, as many at a time as there are sites."""
    batch, pace = options.batch * options.sites, {"PACE_S": str(options.pace_s)}
    bf16 = {"bf16": {"enabled": True}, "communication_data_type": "bf16"}
    home = recipe(folder / "ddp", options, batch, options.ddp_steps, options.seeds[0], **bf16)
    with shaped(options, folder) as lab:
        world = {"WORLD_SIZE": str(options.sites), "MASTER_ADDR": lab.hosts[0].address, **pace}
        ranks = [
            Rank(host, home, host.name, ["--train.eval", "false"], RANK=str(number), **world)
            for number, host in enumerate(lab.hosts)
        ]
        sent, step_s = over_network(lab, ranks, options.pace_s)
    homes = [recipe(folder / f"alone-{seed}", options, batch, options.steps, seed) for seed in options.seeds]
    for at in range(0, len(homes), options.sites):
        some = homes[at : at + options.sites]
        wait([Rank(None, each, each.name, [], MASTER_PORT=str(free_port())) for each in some])
    return Row("ddp", sent, step_s, [loss_of(each / "run") for each in homes])


def sites(way: str, options: argparse.Namespace, folder: Path) -> Row:
    """The runs of all seeds; bytes and times are means."""
    method, *more = way.split(":")
    keys = [word for pair in more for word in ("--" + pair).split("=", 1)]
    found = [_of_seed(method, keys, options, folder, f"{way}-{seed}", seed) for seed in options.seeds]
    sent, step_s, losses = (list(each) for each in zip(*found, strict=True))
    return Row(way, statistics.mean(sent), statistics.mean(step_s), losses)


def _of_seed(
    method: str, keys: list[str], options: argparse.Namespace, folder: Path, name: str, seed: int
) -> tuple[float, float, float]:
    """A run a site: (bytes and seconds of a step, loss)."""
    chosen = ["--sites.method", method, "--sites.pace", "equal", *keys]  # as many tokens in each way
    with shaped(options, folder) as lab:
        address = f"{lab.hosts[0].address}:{PORT}"
        command = [sys.executable, "-m", "llmtrain", "sites", "coordinator", "--bind", address]
        with open(folder / "coordinator.log", "a") as log:
            coordinator = lab.hosts[0].popen(command, cwd=str(ROOT), stdout=log, stderr=log)
        try:
            words = ["--sites.coordinator", address, "--sites.start_sites", str(options.sites), *chosen]
            homes = [
                recipe(folder / name / host.name, options, options.batch, options.steps, seed) for host in lab.hosts
            ]
            ranks = [
                Rank(host, home, host.name, ["--sites.name", host.name, *words], PACE_S=str(options.pace_s))
                for host, home in zip(lab.hosts, homes, strict=True)
            ]
            sent, step_s = over_network(lab, ranks, options.pace_s)
        finally:
            coordinator.kill()
            coordinator.wait()
    return sent, step_s, loss_of(homes[0] / "run")


def main(argv: Sequence[str] | None = None) -> int:
    """Run every way and print the table."""
    options = arguments(argv)
    if reason := why_not():
        raise SystemExit(reason)
    from machine import about

    print(", ".join(f"{key} {value}" for key, value in about().items()), flush=True)
    print(
        f"{options.sites} sites, {options.rate_mbit:g} Mbit/s, {options.rtt_ms:g} ms, {options.steps} steps of "
        f"{options.batch * 128} tokens a site and {options.pace_s:g} s"
    )
    print(
        f"{'way':40}{'bytes/step':>12}{'of ddp':>9}{'step, s':>9}{'computing':>11}{'loss':>8}{'of ddp':>8}",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="llmtrain-bench-") as made:
        folder, options.data = Path(made), str(Path(made) / "data")
        words = ["prepare", "--source", "stdlib", "--vocab-size", "1024", "--out", options.data]
        subprocess.run([sys.executable, "-m", "llmtrain", *words], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        options.begin = ""
        options.begin = start(options, folder)
        plain = None
        for way in options.ways:
            row = ddp(options, folder) if way == "ddp" else sites(way, options, folder)
            plain = row if way == "ddp" else plain
            fewer = f"1/{plain.bytes_per_step / row.bytes_per_step:.0f}" if plain else ""
            ratios = [own / of for own, of in zip(row.losses, plain.losses, strict=True)] if plain else []
            worse = f"{statistics.mean(ratios):.3f}" if plain else ""
            print(
                f"{row.way:40}{row.bytes_per_step:>12,.0f}{fewer:>9}{row.step_s:>9.2f}"
                f"{options.pace_s / row.step_s:>11.1%}{statistics.mean(row.losses):>8.4f}{worse:>8}",
                flush=True,
            )
            if len(row.losses) > 1:
                each = ", ".join(map("{:.4f}".format, row.losses))
                print(f"  of each seed: {each}; of ddp: {', '.join(map('{:.4f}'.format, ratios))}", flush=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        raise SystemExit(train(float(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
    raise SystemExit(main())
