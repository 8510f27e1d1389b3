"""Collectives, tried before a run: every GPU of every host in one all-reduce, and each pair of a host's GPUs."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from statistics import median
from typing import Any

from llmtrain.base import units
from llmtrain.cluster.doctor.checks import Finding, Survey
from llmtrain.cluster.doctor.fabric import ALL_PAIRS_TO, SLOW, addresses, rounds
from llmtrain.cluster.doctor.survey import in_parallel, read_marked
from llmtrain.cluster.hosts.hostfile import Host
from llmtrain.cluster.hosts.ssh import Answer, on_hosts

_WITHIN_S = {"gloo": 60.0, "nccl": 150.0}
_MARK = "llmtrain-all-reduce "
_IN_FOLDER = 'cd "$1" && shift && PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$@"'


def is_worth_it(survey: Survey) -> bool:
    """Whether there is more than one rank to try: several hosts, or one with several GPUs."""
    names = [host.name for host in survey.hosts if host.name in survey.facts]
    return len(names) > 1 or any(len(each) > 1 for each in _here(survey, names).values())


def measure(survey: Survey, module: str, ssh_port: int | None = None) -> dict[str, Any]:
    """backend, ranks (their number), steps (bytes and seconds), pairs (names and bytes a second), errors (by host).

    With the backend that a run would take: a rank for each GPU that the hostfile names, or one for each host without.
    Sizes grow while they are quick. Of more than 64 hosts so many take part. `module`: the program that each host
    runs, which gets its questions as JSON and prints `mark` and its answer.
    """
    names = [host.name for host in survey.hosts if host.name in survey.facts]
    names = [names[0], *random.Random(0).sample(names[1:], min(len(names), ALL_PAIRS_TO) - 1)]
    here = _here(survey, names)
    backend = _backend(survey, names)
    labels = {r: f"{name} GPU {at}" if backend == "nccl" else name for name, own in here.items() for r, at in own}
    port = survey.port if survey.facts[names[0]].get("port", {}).get("free") else random.randint(32001, 32700)
    questions = {
        "mark": _MARK,
        "backend": backend,
        "ranks": [labels[rank] for rank in sorted(labels)],
        "address": "127.0.0.1" if survey.alone else addresses(survey, names[:1])[names[0]],
        "port": port,
        "rounds": _rounds(here),
        "limit_s": _WITHIN_S[backend] / 2,
    }

    def one(name: str) -> Answer:
        worker = [sys.executable, "-m", module, json.dumps({**questions, "here": here[name]})]
        command = ["/bin/sh", "-c", _IN_FOLDER, "sh", survey.folder, *worker]
        return on_hosts([name], command, timeout_s=_WITHIN_S[backend], port=ssh_port, here=survey.alone)[name]

    found: dict[str, Any] = {"backend": backend, "ranks": len(labels), "steps": [], "pairs": [], "errors": {}}
    for name, answer in in_parallel(names, one, fan_out=len(names)).items():
        said, error = _read(answer)
        if error:
            found["errors"][name] = error
        elif said.get("steps"):
            found["steps"] = said["steps"]
            found["pairs"] = [[labels[int(a)], labels[int(b)], rate] for a, b, rate in said["pairs"]]
    return found


def _backend(survey: Survey, names: Sequence[str]) -> str:
    devices = [survey.facts[name].get("devices", {}).get("count", 0) for name in names]
    cuda = [survey.facts[name].get("packages", {}).get("cuda") for name in names]
    return "nccl" if all(devices) and all(cuda) else "gloo"


def _here(survey: Survey, names: Sequence[str]) -> dict[str, list[tuple[int, int]]]:
    """The ranks of each host, with their devices."""
    by_name: dict[str, Host] = {host.name: host for host in survey.hosts}
    every = _backend(survey, names) == "nccl"
    found, rank = {}, 0
    for name in names:
        devices = by_name[name].devices if every else by_name[name].devices[:1]
        found[name] = list(enumerate(devices, start=rank))
        rank += len(devices)
    return found


def _rounds(here: Mapping[str, Sequence[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
    """Every pair of ranks of a host once; all hosts at once, and no rank twice in a round."""
    of_hosts = [rounds([str(rank) for rank, _ in own]) for own in here.values() if len(own) > 1]
    together = zip_longest(*of_hosts, fillvalue=())
    return [[(int(a), int(b)) for own in each for a, b in own] for each in together]


def _read(answer: Answer) -> tuple[dict[str, Any], str]:
    """What the program said on a host, and why it failed there."""
    found = read_marked(answer.stdout, _MARK)
    said = found or {}
    if answer.code == 0 and found is not None and not said.get("error"):
        return said, ""
    last = [line for line in answer.stderr.splitlines() if line.strip()][-1:]
    trouble = answer.trouble.text if answer.trouble and answer.code is None else None
    return said, said.get("error") or trouble or "".join(last) or "it said nothing"


def worked(found: Mapping[str, Any]) -> bool:
    """True if all ranks met and added up, over the connections that a run of this backend makes."""
    return not found["errors"] and bool(found["steps"])


def judge(found: Mapping[str, Any]) -> list[Finding]:
    """Red for the hosts on which it failed, and for a GPU without a good way to any other of its host."""
    findings = []
    for host, why in found["errors"].items():
        what = f"an all-reduce of {found['ranks']} ranks with {found['backend']} failed: {why[:300]}"
        fix = f"fix what else is marked FAIL; then on {host}: is every TCP port open to the other hosts?"
        findings.append(Finding(host=host, check="fabric", level="red", what=what, fix=fix))
    best: dict[str, float] = {}
    for first, second, rate in found["pairs"]:
        best[first], best[second] = max(best.get(first, 0.0), rate), max(best.get(second, 0.0), rate)
    usual = median(best.values()) if len(best) > 2 else 0.0
    for gpu in (gpu for gpu in best if best[gpu] < SLOW * usual):
        host, _, number = gpu.rpartition(" GPU ")
        way = f"at best {_rate(best[gpu])} to another one of its host, where {_rate(usual)} is usual"
        fix = f"leave it out (--exclude {host}:{number}); on {host}: nvidia-smi topo -m; nvidia-smi -q -d PERFORMANCE"
        what = f"a slow GPU {number}: {way}"
        findings.append(Finding(host=host, check="fabric", level="red", what=what, fix=fix))
    return findings


def summary(found: Mapping[str, Any]) -> list[str]:
    """The figures, in lines for people."""
    lines = []
    if steps := found["steps"]:
        shown = ", ".join(f"{_bytes(step['bytes'])} {1e3 * step['seconds']:.3g} ms" for step in steps)
        lines.append(f"all-reduce of {found['ranks']} ranks ({found['backend']}): {shown}")
    if rates := sorted(rate for _, _, rate in found["pairs"]):
        lines.append(
            f"{units.counted(len(rates), 'pair')} of GPUs of a host: {_rate(rates[0])} to {_rate(rates[-1])} each way "
            f"(median {_rate(median(rates))})"
        )
    return lines


def _rate(bytes_a_second: float) -> str:
    return f"{bytes_a_second / 1e9:.3g} GB/s"


def _bytes(count: float) -> str:
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB")):
        if count >= limit:
            return f"{count / limit:g} {unit}"
    return f"{count / 2**10:g} KiB"
