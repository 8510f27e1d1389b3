"""The network between the hosts, measured: TCP rates of each pair, and an all-reduce over all GPUs."""

from __future__ import annotations

import json
import random
import secrets
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from llmtrain.base import units
from llmtrain.base.child import read_marked
from llmtrain.cluster.hosts.hostfile import Host
from llmtrain.cluster.hosts.ssh import FAN_OUT, Answer, on_hosts
from llmtrain.features.doctor import tcp_rates
from llmtrain.features.doctor.checks import Finding, Level, Needs, Survey
from llmtrain.features.doctor.differences import addresses_by_interface, right_interfaces
from llmtrain.features.doctor.preflight import Report, in_order
from llmtrain.features.doctor.survey import ask_python, in_parallel, program

ALL_PAIRS_TO = FAN_OUT
"""Largest number of hosts with every pair measured. More are split into groups of at most this size, each host in
SAMPLE pairs."""
SAMPLE = 6
SLOW = 0.5
"""A rate below this fraction of the usual one is slow."""
LATE = 4.0
"""A round trip is late above 1 ms and above LATE times the median."""
HALF = 0.65
"""A link is half duplex if both directions at once carry at most this fraction of the two alone: half duplex has 0.5,
full duplex 1."""
IDLE = 0.2
"""With at least this fraction of idle processor time a slightly lower rate is the network's fault."""
LONG_STEP_S = 10.0
"""Seconds of sending in an optimizer step from which on the processors mostly wait."""
SLOW_LINK = 1e8
"""bit/s below which a link is slow for any run: a billion gradients in bf16 take over 5 minutes."""
WINDOW_S, LONG_WINDOW_S = 0.24, 0.6
_UNMEASURED = "no measurement between "
_PAIR_S = 1.5
_START_S = 12.0


@dataclass(frozen=True, kw_only=True)
class Pair:
    first: str
    second: str
    trip_s: float = 0.0
    """Shortest round trip."""
    up: float = 0.0
    """bit/s from the first to the second, alone."""
    down: float = 0.0
    both_up: float = 0.0
    """bit/s while both directions are used."""
    both_down: float = 0.0
    idle: float = 1.0
    """Fraction of idle processor time of the first host during `both`; near 0 the processors limit the rate, not the
    network."""
    error: str | None = None

    @property
    def rate(self) -> float:
        """bit/s of the slower direction alone."""
        return min(self.up, self.down)

    @property
    def duplex(self) -> float:
        """Rate of both directions at once, as a fraction of the two alone."""
        return (self.both_up + self.both_down) / max(1.0, self.up + self.down)

    def other(self, host: str) -> str:
        return self.second if host == self.first else self.first


@dataclass(frozen=True, kw_only=True)
class Fabric:
    pairs: tuple[Pair, ...]
    all_reduce: Mapping[str, Any] = field(default_factory=dict)
    """Result of `measure_all_reduce`."""


def groups(hosts: Sequence[str], seed: int = 0) -> list[list[str]]:
    """Return all hosts as one group, or random groups of at most ALL_PAIRS_TO."""
    if len(hosts) <= ALL_PAIRS_TO:
        return [list(hosts)]
    names = list(hosts)
    random.Random(seed).shuffle(names)
    count = -(-len(names) // ALL_PAIRS_TO)
    return [names[start::count] for start in range(count)]


def rounds(hosts: Sequence[str], most: int | None = None) -> list[list[tuple[str, str]]]:
    """Return every pair once (a round robin), in rounds with each host at most once. `most`: limit of rounds."""
    names: list[str | None] = list(hosts)
    if len(names) % 2:
        names.append(None)
    plan = []
    for _ in range(min(most or len(names), len(names) - 1)):
        half = len(names) // 2
        opposite = zip(names[:half], reversed(names[half:]), strict=True)
        plan.append([(a, b) for a, b in opposite if a is not None and b is not None])
        names = [names[0], names[-1], *names[1:-1]]
    return plan


def measure_pairs(survey: Survey, plan: Sequence[Sequence[tuple[str, str]]], window_s: float) -> list[Pair]:
    """Measure the rounds with all their hosts at once: about a second a round, bounded if a host is absent."""
    names = list(dict.fromkeys(name for round_ in plan for pair in round_ for name in pair))
    base = random.randint(30001, 31990)  # above the ports that launches choose: one may be about to start
    limit_s = _START_S + len(plan) * (_PAIR_S + 8 * window_s)
    questions = {
        "token": secrets.token_hex(16),
        "ports": [base, base + 1, base + 2],
        "addresses": addresses(survey, names),
        "window_s": window_s,
        "patience_s": _START_S,
        "pair_limit_s": 3 * _PAIR_S + 16 * window_s + _START_S,
        "limit_s": limit_s,
    }

    def one(name: str) -> Answer:
        pairs = [pair for round_ in plan for pair in round_ if name in pair]
        text = program(Path(tcp_rates.__file__), {**questions, "host": name, "pairs": pairs})
        return ask_python(name, text, survey, timeout_s=limit_s + 10.0)

    # All hosts at once: they wait for each other.
    answers = in_parallel(names, one, fan_out=len(names))
    pairs = []
    for first, second in (pair for round_ in plan for pair in round_):
        answer = answers[first]
        measured = read_marked(answer.stdout, tcp_rates.MARK) or {}
        why = answer.trouble.text if answer.trouble and answer.code is None else "the measurement did not end in time"
        about = measured.get(second) or {"error": measured.get("", {}).get("error", why)}
        pairs.append(Pair(first=first, second=second, **about))
    return pairs


def addresses(survey: Survey, names: Sequence[str]) -> dict[str, str]:
    """Return the address of each host by which the others know it."""
    rights = right_interfaces(survey)
    by_host = {name: addresses_by_interface(survey.facts[name]).get(rights.get(name, ""), []) for name in names}
    return {name: addresses[0] if addresses else name for name, addresses in by_host.items()}


def better(first: Sequence[Pair], second_try: Sequence[Pair]) -> list[Pair]:
    """Return the better of two measurements of each pair: one that was slow only once was busy, not slow."""
    repeated = {(pair.first, pair.second): pair for pair in second_try}
    best = []
    for pair in first:
        other = repeated.get((pair.first, pair.second), pair)
        if pair.error or other.error:
            best.append(other if pair.error else pair)
            continue
        rate = max((pair, other), key=lambda candidate: candidate.rate)
        # The mean of the two duplex fractions: either may be of a busy moment.
        scale = (pair.duplex + other.duplex) / 2 / max(1e-9, rate.duplex)
        trip_s = min(pair.trip_s, other.trip_s)
        best.append(replace(rate, trip_s=trip_s, both_up=rate.both_up * scale, both_down=rate.both_down * scale))
    return best


def examine(survey: Survey) -> tuple[Fabric, list[Finding]]:
    """Measure all pairs, and odd ones a second time."""
    names = [host.name for host in survey.hosts if host.name in survey.facts]
    if len(names) < 2:
        return Fabric(pairs=()), []
    pairs = []
    for group in groups(names):
        plan = rounds(group, None if len(names) <= ALL_PAIRS_TO else SAMPLE)
        pairs += measure_pairs(survey, plan, WINDOW_S)
    odd = {finding.host for finding in judge(pairs)}
    if odd:
        suspects = [pair for pair in pairs if pair.first in odd or pair.second in odd][: 4 * FAN_OUT]
        plan = _packed([(pair.first, pair.second) for pair in suspects])
        pairs = better(pairs, measure_pairs(survey, plan, LONG_WINDOW_S))
    return Fabric(pairs=tuple(pairs)), judge(pairs)


def _packed(pairs: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Pack pairs into rounds with each host at most once."""
    packed: list[list[tuple[str, str]]] = []
    for pair in pairs:
        fits = (round_ for round_ in packed if not any(set(pair) & set(other) for other in round_))
        place = next(fits, None)
        if place is None:
            packed.append([pair])
        else:
            place.append(pair)
    return packed


def judge(pairs: Sequence[Pair]) -> list[Finding]:
    """Find slow hosts, which have no good pair, and slow pairs, whose hosts are both faster in other pairs."""
    return [*_broken(pairs), *_odd([pair for pair in pairs if pair.error is None])]


def _broken(pairs: Sequence[Pair]) -> Iterator[Finding]:
    for pair in pairs:
        if pair.error is not None:
            what = f"{_UNMEASURED}{pair.first} and {pair.second}: {pair.error}"
            fix = f"a firewall between them? on {pair.first}: ping -c 3 {pair.second}; all TCP ports must be open"
            yield Finding(host=pair.first, check="fabric", level="red", what=what, fix=fix)


def without_doubt(findings: Sequence[Finding], hosts: Collection[str]) -> list[Finding]:
    """Turn the findings with an unmeasured pair yellow if the all-reduce of its hosts worked: ranks connect in one
    direction, at other ports, through a firewall that lets them out."""
    judged = []
    for finding in findings:
        pair = finding.what.removeprefix(_UNMEASURED).partition(":")[0].split(" and ")
        if finding.what.startswith(_UNMEASURED) and {*pair} <= {*hosts}:
            what = f"{finding.what}; the all-reduce worked: its ranks connect another way, at other ports"
            finding = replace(finding, level="yellow", what=what)
        judged.append(finding)
    return judged


def too_slow(pairs: Sequence[Pair], sent_bytes: float | None, patience_s: float) -> list[Finding]:
    """Return a finding if the slowest pair takes too long for the `sent_bytes` of a step (None: is below SLOW_LINK).

    The finding is red if sending alone takes longer than `patience_s`, which a run waits for progress.
    """
    good = [pair for pair in pairs if pair.error is None and pair.rate > 0]
    if not good:
        return []
    slowest = min(good, key=lambda pair: pair.rate)
    what = f"{bits(slowest.rate)} between {slowest.first} and {slowest.second}: "
    fix = "a faster network, fewer hosts, a larger batch by train.accumulation, or a site a host"
    if sent_bytes is None:
        if slowest.rate >= SLOW_LINK:
            return []
        seconds = 4e9 * 8 / slowest.rate
        what += f"the gradients of 1 B parameters in bf16 (4 GB a step) would take {units.duration(seconds)}"
        fix = f"`llmtrain plan RUN.yaml --hostfile HOSTS`, after which doctor knows the run's own bytes; {fix}"
        return [Finding(host=slowest.first, check="fabric", level="yellow", what=what, fix=fix)]
    seconds = sent_bytes * 8 / slowest.rate
    if seconds < LONG_STEP_S:
        return []
    what += f"about {units.size(sent_bytes)} that a step sends take {units.duration(seconds)}"
    level: Level = "red" if seconds > patience_s else "yellow"
    what += f", and the run ends after {units.duration(patience_s)} without progress" if level == "red" else ""
    return [Finding(host=slowest.first, check="fabric", level=level, what=what, fix=fix)]


def _odd(pairs: Sequence[Pair]) -> Iterator[Finding]:
    by_host: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_host.setdefault(pair.first, []).append(pair)
        by_host.setdefault(pair.second, []).append(pair)
    if len(by_host) < 3:
        return  # a single pair cannot be compared with others
    best = {host: max(pair.rate for pair in pairs) for host, pairs in by_host.items()}
    trip = {host: min(pair.trip_s for pair in pairs) for host, pairs in by_host.items()}
    duplex = {host: max(pair.duplex for pair in pairs) for host, pairs in by_host.items()}
    middle = {host: median(pair.duplex for pair in pairs) for host, pairs in by_host.items()}
    usual, usual_trip, usual_duplex = (median(figures.values()) for figures in (best, trip, duplex))
    slow = {host for host in by_host if best[host] < SLOW * usual}
    late = {host for host in by_host if trip[host] > LATE * usual_trip + 1e-3}
    free = {host: max(pair.idle for pair in pairs) >= IDLE for host, pairs in by_host.items()}
    halves = {h for h in by_host if middle[h] < HALF and (best[h] < SLOW * usual or (usual_duplex > 0.8 and free[h]))}
    for host in (host for host in by_host if host in slow | late | halves):
        pair = max(by_host[host], key=lambda candidate: candidate.rate)
        words = []
        if host in halves:
            words.append(f"a half-duplex link: {_both(pair)}")
        if host in slow:
            words.append(f"a slow host: at best {bits(best[host])} to any other, where {bits(usual)} is usual")
        if host in late:
            words.append(
                f"a slow host: round trips of {1e3 * trip[host]:.1f} ms, where {1e3 * usual_trip:.2f} are usual"
            )
        fix = f"on {host}: ethtool INTERFACE (speed, duplex, errors); its cable, its port on the switch, other traffic"
        yield Finding(host=host, check="fabric", level="red", what="; ".join(words), fix=fix)
    for pair in pairs:
        if {pair.first, pair.second} & (slow | late | halves):
            continue
        words = _odd_pair(pair, best, trip, duplex)
        if words:
            what = f"a slow pair, {pair.first} and {pair.second}: {'; '.join(words)}"
            fix = f"look at the path between the two: on {pair.first}: traceroute {pair.second}; cables, switches"
            yield Finding(host=pair.first, check="fabric", level="red", what=what, fix=fix)


def _odd_pair(
    pair: Pair, best: Mapping[str, float], trip: Mapping[str, float], duplex: Mapping[str, float]
) -> list[str]:
    ends = (pair.first, pair.second)
    words = []
    rate, late = min(best[end] for end in ends), max(trip[end] for end in ends)
    if pair.rate < SLOW * rate:
        words.append(f"{bits(pair.up)} one way and {bits(pair.down)} back, where both have {bits(rate)} to others")
        if pair.duplex < HALF:
            words.append(f"half duplex: {_both(pair)}")
    elif pair.duplex < HALF and pair.idle >= IDLE and min(duplex[end] for end in ends) > 0.8:
        words.append(f"half duplex: {_both(pair)}")
    if pair.trip_s > LATE * late + 1e-3:
        words.append(f"round trips of {1e3 * pair.trip_s:.1f} ms, where both have {1e3 * late:.2f} to others")
    return words


def _both(pair: Pair) -> str:
    return (
        f"{bits(pair.up)} and {bits(pair.down)} alone, {bits(pair.both_up)} and {bits(pair.both_down)} at once "
        f"({pair.first} to {pair.second} and back)"
    )


def bits(rate: float) -> str:
    """Format bit/s: 94 Mbit/s."""
    for limit, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if rate >= limit:
            return f"{rate / limit:.3g} {unit}"
    return f"{rate:.3g} bit/s"


def summary(fabric: Fabric) -> list[str]:
    good = [pair for pair in fabric.pairs if pair.error is None]
    lines = []
    if good:
        rates, trips = sorted(pair.rate for pair in good), sorted(pair.trip_s for pair in good)
        lines.append(
            f"{units.counted(len(good), 'pair')} over TCP: {bits(rates[0])} to {bits(rates[-1])} "
            f"(median {bits(median(rates))}), round trip {1e3 * trips[0]:.2f} to {1e3 * trips[-1]:.2f} ms"
        )
    return lines


_WITHIN_S = {"gloo": 60.0, "nccl": 150.0}
_MARK = "llmtrain-all-reduce "
_IN_FOLDER = 'cd "$1" && shift && PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$@"'


def has_peers(survey: Survey) -> bool:
    names = [host.name for host in survey.hosts if host.name in survey.facts]
    return len(names) > 1 or any(len(ranks) > 1 for ranks in _here(survey, names).values())


_ALL_REDUCE = "llmtrain.features.doctor.all_reduce"
"""Program with torch for each host, which gets its questions as JSON and prints `mark` and its answer."""


def measure_all_reduce(survey: Survey) -> dict[str, Any]:
    """Try a run's collectives: an all-reduce of all ranks, then each pair of a host's GPUs. There is a rank for each
    GPU in the hostfile, or one for each host without GPUs; at most 64 hosts are used. Sizes grow while they are quick.

    Returns: hosts (those used), backend, ranks (a number), steps (bytes and seconds), pairs (names and bytes a second),
    errors (by host).
    """
    names = [host.name for host in survey.hosts if host.name in survey.facts]
    names = [names[0], *random.Random(0).sample(names[1:], min(len(names), ALL_PAIRS_TO) - 1)]
    by_host = _here(survey, names)
    backend = _backend(survey, names)
    labels = {r: f"{name} GPU {at}" if backend == "nccl" else name for name, gpus in by_host.items() for r, at in gpus}
    port = survey.port if survey.facts[names[0]].get("port", {}).get("free") else random.randint(32001, 32700)
    questions = {
        "mark": _MARK,
        "backend": backend,
        "ranks": [labels[rank] for rank in sorted(labels)],
        "address": "127.0.0.1" if survey.alone else addresses(survey, names[:1])[names[0]],
        "port": port,
        "rounds": _rounds(by_host),
        "limit_s": _WITHIN_S[backend] / 2,
    }

    def one(name: str) -> Answer:
        worker = [sys.executable, "-m", _ALL_REDUCE, json.dumps({**questions, "here": by_host[name]})]
        command = ["/bin/sh", "-c", _IN_FOLDER, "sh", survey.folder, *worker]
        return on_hosts([name], command, timeout_s=_WITHIN_S[backend], port=survey.ssh_port, here=survey.alone)[name]

    measured: dict[str, Any] = {"hosts": names, "backend": backend, "ranks": len(labels)}
    measured |= {"steps": [], "pairs": [], "errors": {}}
    for name, answer in in_parallel(names, one, fan_out=len(names)).items():
        result, error = _read(answer)
        if error:
            measured["errors"][name] = error
        elif result.get("steps"):
            measured["steps"] = result["steps"]
            measured["pairs"] = [[labels[int(a)], labels[int(b)], rate] for a, b, rate in result["pairs"]]
    return measured


def _backend(survey: Survey, names: Sequence[str]) -> str:
    devices = [survey.facts[name].get("devices", {}).get("count", 0) for name in names]
    cuda = [survey.facts[name].get("packages", {}).get("cuda") for name in names]
    return "nccl" if all(devices) and all(cuda) else "gloo"


def _here(survey: Survey, names: Sequence[str]) -> dict[str, list[tuple[int, int]]]:
    by_name: dict[str, Host] = {host.name: host for host in survey.hosts}
    every = _backend(survey, names) == "nccl"
    ranks, rank = {}, 0
    for name in names:
        devices = by_name[name].devices if every else by_name[name].devices[:1]
        ranks[name] = list(enumerate(devices, start=rank))
        rank += len(devices)
    return ranks


def _rounds(ranks_of: Mapping[str, Sequence[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
    """Return every pair of a host's ranks once, on all hosts at once."""
    of_hosts = [rounds([str(rank) for rank, _ in ranks]) for ranks in ranks_of.values() if len(ranks) > 1]
    together = zip_longest(*of_hosts, fillvalue=())
    return [[(int(a), int(b)) for pairs in parallel for a, b in pairs] for parallel in together]


def _read(answer: Answer) -> tuple[dict[str, Any], str]:
    """Return (the program's answer on a host, the reason of its failure there or "")."""
    program_answer = read_marked(answer.stdout, _MARK)
    result = program_answer or {}
    if answer.code == 0 and program_answer is not None and not result.get("error"):
        return result, ""
    last = [line for line in answer.stderr.splitlines() if line.strip()][-1:]
    trouble = answer.trouble.text if answer.trouble and answer.code is None else None
    return result, result.get("error") or trouble or "".join(last) or "it printed nothing"


def judge_all_reduce(measured: Mapping[str, Any]) -> list[Finding]:
    """Red for hosts on which it failed, and for a GPU without a fast link to any other of its host."""
    findings = []
    for host, why in measured["errors"].items():
        what = f"an all-reduce of {measured['ranks']} ranks with {measured['backend']} failed: {why[:300]}"
        fix = f"fix the other cells marked FAIL; then on {host}: is every TCP port open to the other hosts?"
        findings.append(Finding(host=host, check="fabric", level="red", what=what, fix=fix))
    best: dict[str, float] = {}
    for first, second, rate in measured["pairs"]:
        best[first], best[second] = max(best.get(first, 0.0), rate), max(best.get(second, 0.0), rate)
    usual = median(best.values()) if len(best) > 2 else 0.0
    for gpu in (gpu for gpu in best if best[gpu] < SLOW * usual):
        host, _, number = gpu.rpartition(" GPU ")
        way = f"at best {_rate(best[gpu])} to another one of its host, where {_rate(usual)} is usual"
        fix = f"leave it out (--exclude {host}:{number}); on {host}: nvidia-smi topo -m; nvidia-smi -q -d PERFORMANCE"
        what = f"a slow GPU {number}: {way}"
        findings.append(Finding(host=host, check="fabric", level="red", what=what, fix=fix))
    return findings


def all_reduce_summary(measured: Mapping[str, Any]) -> list[str]:
    lines = []
    if steps := measured["steps"]:
        shown = ", ".join(f"{_bytes(step['bytes'])} {1e3 * step['seconds']:.3g} ms" for step in steps)
        lines.append(f"all-reduce of {measured['ranks']} ranks ({measured['backend']}): {shown}")
    if rates := sorted(rate for _, _, rate in measured["pairs"]):
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


def with_fabric(report: Report, run: Needs | None) -> Report:
    """Add the measurements between hosts, in seconds and bit/s, and between GPUs."""
    measured, findings = examine(report.survey)
    reduced = measure_all_reduce(report.survey)
    if reduced["steps"] and not reduced["errors"]:  # over the connections that a run of this backend makes
        findings = without_doubt(findings, reduced["hosts"])
    findings = [*findings, *too_slow(measured.pairs, *((run.sent_bytes, run.patience_s) if run else (None, 0.0)))]
    return replace(
        report,
        findings=in_order([*report.findings, *findings, *judge_all_reduce(reduced)], report.survey.hosts),
        checked=report.checked | {"fabric"},
        fabric=asdict(replace(measured, all_reduce=reduced)),
        notes=(*report.notes, *summary(measured), *all_reduce_summary(reduced)),
    )
