"""Efficiency of the cores of several hosts: `llmtrain prepare --on HOSTFILE`, and the same corpus on one core alone.

    python tools/bench/prepare_hosts.py --mb 300

The hosts are those of tools/lab (root and Debian's packages: tools/lab/README.md), each pinned to a core of its own
with all that runs in it: its ssh daemon and, on the first one, the command. The lone core is another one in each round.
They take turns; times are from the command's start to its end, with starts, reading, hashing and the manifest. The
tokenizer is there already. `busy` is the share of the machine's processors in use meanwhile: beyond those of the hosts
it is other work, which spoils the figure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from posttraining import texts, train  # noqa: E402

from tools.lab.lab import Lab, why_not  # noqa: E402
from tools.lab.processes import living_in, namespace_of  # noqa: E402


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="hosts of one core (default 2)")
    parser.add_argument("--mb", type=float, default=300, help="text in MB (default 300, a minute or two of one core)")
    parser.add_argument("--vocabulary", type=int, default=32768, help="tokens (default 32768)")
    parser.add_argument("--rounds", type=int, default=3, help="(default 3)")
    return parser.parse_args(argv)


def taken(lab: Lab, words: Sequence[str], out: Path, core: int, *more: str) -> tuple[float, float]:
    """(seconds, busy share of the machine) of a preparation that the first host starts on a core."""
    command = ["taskset", "-c", str(core), sys.executable, "-m", "llmtrain", *words, "--out", str(out), *more]
    psutil.cpu_percent()
    began = time.monotonic()
    process = lab.hosts[0].popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = process.communicate()[0]
    elapsed = time.monotonic() - began
    if process.returncode:
        raise SystemExit(said)
    return elapsed, psutil.cpu_percent() / 100


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    if reason := why_not():
        raise SystemExit(reason)
    cores = sorted(os.sched_getaffinity(0))[: options.hosts]
    if len(cores) < options.hosts:
        raise SystemExit(f"--hosts {options.hosts}: there are {len(cores)} cores")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        corpus, few = folder / "corpus.jsonl", folder / "few.jsonl"
        for path, megabytes in ((corpus, options.mb), (few, min(options.mb, 20))):
            with open(path, "w") as file:
                file.writelines(json.dumps({"text": text}) + "\n" for text in texts(megabytes))
        size = corpus.stat().st_size / 1e6
        words = ["prepare", "--source", str(corpus), "--tokenizer", str(train(few, options.vocabulary, folder / "bpe"))]
        print(f"{size:.0f} MB of jsonl\n  one core, s  {options.hosts} hosts, s    busy  efficiency", flush=True)
        found = []
        with Lab(options.hosts, folder) as lab:
            for host, core in zip(lab.hosts, cores, strict=True):
                for process in living_in(namespace_of(host.pid)):
                    process.cpu_affinity([core])
            hostfile = str(lab.hostfile())
            for turn in range(options.rounds):
                alone, busy_alone = taken(lab, words, folder / f"alone-{turn}", cores[turn % len(cores)])
                shared, busy = taken(lab, words, folder / f"shared-{turn}", cores[0], "--on", hostfile)
                found.append(alone / shared / options.hosts)
                print(f"{alone:>13.1f}{shared:>12.1f}   {busy_alone:.2f} {busy:.2f}  {found[-1]:>8.3f}", flush=True)
        print(f"efficiency {statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})")


if __name__ == "__main__":
    main()
