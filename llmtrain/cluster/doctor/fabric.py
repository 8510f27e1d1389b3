"""The network between the hosts, measured: which pair, which host, which link is not like the others."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from llmtrain.base import units
from llmtrain.cluster.doctor import wire
from llmtrain.cluster.doctor.checks import Finding, Level, Survey
from llmtrain.cluster.doctor.compare import held, right_interfaces
from llmtrain.cluster.doctor.survey import ask_python, in_parallel, program, read_marked
from llmtrain.cluster.hosts.ssh import FAN_OUT, Answer

ALL_PAIRS_TO = FAN_OUT
"""Hosts of which every pair is measured. More are measured in groups of so many, each host in SAMPLE pairs."""
SAMPLE = 6
SLOW = 0.5
"""A rate below this part of what is usual is slow."""
LATE = 4.0
"""A round trip of more than so many usual ones, and a millisecond, is late."""
HALF = 0.65
"""Both directions at once carry this part of the two alone, or less: half duplex has 0.5, full duplex 1."""
IDLE = 0.2
"""With less processor time to spare, a rate that is not far below the others says nothing of the network."""
LONG_STEP_S = 10.0
"""Seconds of sending in an optimizer step above which the processors mostly wait."""
SLOW_LINK = 1e8
"""bit/s below which a link is slow for any run; a billion gradients in bf16 take 5 minutes and more."""
WINDOW_S, LONG_WINDOW_S = 0.24, 0.6
_UNMEASURED = "no measurement between "
_PAIR_S = 1.5
_START_S = 12.0


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What one pair of hosts was measured to do."""

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
    """Part of the first host's processor time that was free meanwhile: without any, `both` tells of them, not of the
    network."""
    error: str | None = None

    @property
    def rate(self) -> float:
        """bit/s of the slower direction alone."""
        return min(self.up, self.down)

    @property
    def duplex(self) -> float:
        """Rate of both directions at once, as a part of the two alone."""
        return (self.both_up + self.both_down) / max(1.0, self.up + self.down)

    def other(self, host: str) -> str:
        return self.second if host == self.first else self.first


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The measurements of one examination."""

    pairs: tuple[Pair, ...]
    all_reduce: Mapping[str, Any] = field(default_factory=dict)
    """What all_reduce.py measured."""


def groups(hosts: Sequence[str], seed: int = 0) -> list[list[str]]:
    """All hosts; or, of more than ALL_PAIRS_TO, random groups of at most so many."""
    if len(hosts) <= ALL_PAIRS_TO:
        return [list(hosts)]
    names = list(hosts)
    random.Random(seed).shuffle(names)
    count = -(-len(names) // ALL_PAIRS_TO)
    return [names[each::count] for each in range(count)]


def rounds(hosts: Sequence[str], most: int | None = None) -> list[list[tuple[str, str]]]:
    """Every pair once (a round robin), in rounds in which no host stands twice; the first `most` rounds of that."""
    names: list[str | None] = list(hosts)
    if len(names) % 2:
        names.append(None)
    found = []
    for _ in range(min(most or len(names), len(names) - 1)):
        half = len(names) // 2
        opposite = zip(names[:half], reversed(names[half:]), strict=True)
        found.append([(a, b) for a, b in opposite if a is not None and b is not None])
        names = [names[0], names[-1], *names[1:-1]]
    return found


def measure_pairs(
    survey: Survey, plan: Sequence[Sequence[tuple[str, str]]], window_s: float, ssh_port: int | None = None
) -> list[Pair]:
    """Go through the rounds on all their hosts at once: about a second a round, and bounded if a host does not play."""
    names = list(dict.fromkeys(name for each in plan for pair in each for name in pair))
    base = random.randint(30001, 31990)  # below are those that launches choose: one may be about to start beside us
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
        own = [pair for each in plan for pair in each if name in pair]
        text = program(Path(wire.__file__), {**questions, "host": name, "pairs": own})
        return ask_python(name, text, timeout_s=limit_s + 10.0, port=ssh_port)

    # Every host must be there at once: they wait for each other.
    answers = in_parallel(names, one, fan_out=len(names))
    found = []
    for first, second in (pair for each in plan for pair in each):
        answer = answers[first]
        measured = read_marked(answer.stdout, wire.MARK) or {}
        why = answer.trouble.text if answer.trouble and answer.code is None else "the measurement did not end in time"
        about = measured.get(second) or {"error": measured.get("", {}).get("error", why)}
        found.append(Pair(first=first, second=second, **about))
    return found


def addresses(survey: Survey, names: Sequence[str]) -> dict[str, str]:
    """By which the other hosts know each of these."""
    rights = right_interfaces(survey)
    found = {name: held(survey.facts[name]).get(rights.get(name, ""), []) for name in names}
    return {name: addresses[0] if addresses else name for name, addresses in found.items()}


def better(first: Sequence[Pair], again: Sequence[Pair]) -> list[Pair]:
    """Each pair's better measurement: what was slow once only was busy, not slow."""
    repeated = {(pair.first, pair.second): pair for pair in again}
    found = []
    for pair in first:
        other = repeated.get((pair.first, pair.second), pair)
        if pair.error or other.error:
            found.append(other if pair.error else pair)
            continue
        rate = max((pair, other), key=lambda each: each.rate)
        # Of the two shares that both directions had at once, the mean: either may have been a busy moment.
        scale = (pair.duplex + other.duplex) / 2 / max(1e-9, rate.duplex)
        found.append(
            Pair(
                first=pair.first,
                second=pair.second,
                trip_s=min(pair.trip_s, other.trip_s),
                up=rate.up,
                down=rate.down,
                both_up=rate.both_up * scale,
                both_down=rate.both_down * scale,
                idle=rate.idle,
            )
        )
    return found


def examine(survey: Survey, ssh_port: int | None = None) -> tuple[Fabric, list[Finding]]:
    """Measure all pairs, those that look odd a second time."""
    names = [host.name for host in survey.hosts if host.name in survey.facts]
    if len(names) < 2:
        return Fabric(pairs=()), []
    pairs = []
    for group in groups(names):
        plan = rounds(group, None if len(names) <= ALL_PAIRS_TO else SAMPLE)
        pairs += measure_pairs(survey, plan, WINDOW_S, ssh_port)
    odd = {finding.host for finding in judge(pairs)}
    if odd:
        suspects = [pair for pair in pairs if pair.first in odd or pair.second in odd][: 4 * FAN_OUT]
        plan = _packed([(pair.first, pair.second) for pair in suspects])
        pairs = better(pairs, measure_pairs(survey, plan, LONG_WINDOW_S, ssh_port))
    return Fabric(pairs=tuple(pairs)), judge(pairs)


def _packed(pairs: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Pairs in rounds in which no host stands twice, each in the first where it fits."""
    packed: list[list[tuple[str, str]]] = []
    for pair in pairs:
        fits = (each for each in packed if not any(set(pair) & set(other) for other in each))
        place = next(fits, None)
        if place is None:
            packed.append([pair])
        else:
            place.append(pair)
    return packed


def judge(pairs: Sequence[Pair]) -> list[Finding]:
    """A slow host has no good pair; a slow pair is slower than both of its hosts are elsewhere."""
    return [*_broken(pairs), *_odd([pair for pair in pairs if pair.error is None])]


def _broken(pairs: Sequence[Pair]) -> Iterator[Finding]:
    for pair in pairs:
        if pair.error is not None:
            what = f"{_UNMEASURED}{pair.first} and {pair.second}: {pair.error}"
            fix = f"a firewall between them? on {pair.first}: ping -c 3 {pair.second}; all TCP ports must be open"
            yield Finding(host=pair.first, check="fabric", level="red", what=what, fix=fix)


def without_doubt(findings: Sequence[Finding]) -> list[Finding]:
    """Findings that stay where the all-reduce worked: a pair that our measurement alone could not connect is no bar to
    a run. Its ranks connect from one of the two hosts to the other, at ports of their own, and a firewall on one host
    lets them out."""
    found = []
    for each in findings:
        if each.what.startswith(_UNMEASURED):
            what = f"{each.what}; the all-reduce worked: its ranks connect another way, at other ports"
            each = replace(each, level="yellow", what=what)
        found.append(each)
    return found


def too_slow(pairs: Sequence[Pair], sent_bytes: float | None, patience_s: float) -> list[Finding]:
    """The slowest pair, held against what a run sends in a step; without a run, against SLOW_LINK.

    Red where the sending alone takes longer than the run waits for progress: it would be ended at its first step.
    """
    good = [pair for pair in pairs if pair.error is None and pair.rate > 0]
    if not good:
        return []
    slowest = min(good, key=lambda each: each.rate)
    what = f"{bits(slowest.rate)} between {slowest.first} and {slowest.second}: "
    fix = "a faster network, fewer hosts, a larger batch by train.accumulation, or a site a host"
    if sent_bytes is None:
        if slowest.rate >= SLOW_LINK:
            return []
        seconds = 4e9 * 8 / slowest.rate
        what += f"the gradients of 1 B parameters in bf16 (4 GB a step) would take {units.duration(seconds)}"
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
        return  # nothing to hold a single pair against
    best = {host: max(pair.rate for pair in own) for host, own in by_host.items()}
    trip = {host: min(pair.trip_s for pair in own) for host, own in by_host.items()}
    duplex = {host: max(pair.duplex for pair in own) for host, own in by_host.items()}
    middle = {host: median(pair.duplex for pair in own) for host, own in by_host.items()}
    usual, usual_trip, usual_duplex = (median(each.values()) for each in (best, trip, duplex))
    slow = {host for host in by_host if best[host] < SLOW * usual}
    late = {host for host in by_host if trip[host] > LATE * usual_trip + 1e-3}
    free = {host: max(pair.idle for pair in own) >= IDLE for host, own in by_host.items()}
    halves = {h for h in by_host if middle[h] < HALF and (best[h] < SLOW * usual or (usual_duplex > 0.8 and free[h]))}
    for host in (host for host in by_host if host in slow | late | halves):
        pair = max(by_host[host], key=lambda each: each.rate)
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
    """bit/s as people write them: 94 Mbit/s."""
    for limit, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if rate >= limit:
            return f"{rate / limit:.3g} {unit}"
    return f"{rate:.3g} bit/s"


def summary(fabric: Fabric) -> list[str]:
    """The figures, in lines for people."""
    good = [pair for pair in fabric.pairs if pair.error is None]
    lines = []
    if good:
        rates, trips = sorted(pair.rate for pair in good), sorted(pair.trip_s for pair in good)
        lines.append(
            f"{units.counted(len(good), 'pair')} over TCP: {bits(rates[0])} to {bits(rates[-1])} "
            f"(median {bits(median(rates))}), round trip {1e3 * trips[0]:.2f} to {1e3 * trips[-1]:.2f} ms"
        )
    return lines
