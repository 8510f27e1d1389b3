"""What a row of the table of causes answers, and what several rows ask."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmtrain.cluster.watch.explain.device import device_fault, timed_out
from llmtrain.cluster.watch.explain.facts import JobFacts, RankFacts

AGAIN = "The same command continues from the newest checkpoint."
OTHER_WAY = (
    "The ranks took different paths through the code: look for a condition that depends on the rank or on its "
    "data around that line."
)
_SECONDARY = re.compile(
    r"Connection (closed|reset)|Broken pipe|Connection refused|remote peer|[Tt]imed? ?out|NCCL|remote process exited|"
    r"Application timeout|Socket Timeout|recvValue failed|failed to recv|EOFError|DistNetworkError|DistBackendError"
)
"""What a rank says when another one has gone: the other is the cause."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """What a row of the table knows."""

    name: str
    ranks: Sequence[RankFacts]
    """Those that differ."""
    says: str
    """One or two sentences: what is wrong and why. `<is|are>`: for one of `ranks`, for several."""
    remedy: str
    host: str = ""
    """The host that differs, where it is not that of `ranks`."""
    detail: str = ""
    """What tells two faults of this kind apart; part of the signature."""
    unfit: bool = False
    again: bool = True
    """As of `Explanation`."""


def live(facts: JobFacts) -> list[RankFacts]:
    """Those of which is known what they do."""
    return [r for r in facts.ranks if r.state not in ("dead", "left", "unknown")]


def is_echo(error: str) -> bool:
    """Whether an exception of this text comes of another rank's end.

    NCCL hands on what its calls of CUDA have met: that is this rank's own, whatever else the text says.
    """
    return bool(_SECONDARY.search(error)) and device_fault(error) is None


def is_secondary(rank: RankFacts) -> bool:
    """It died because another one had gone: an error of communication, or the launcher's SIGTERM."""
    return rank.signal in ("SIGTERM", "SIGINT", "SIGHUP") or is_echo(rank.error) or timed_out(rank.said) is not None


def minority(ranks: Sequence[RankFacts], key: Callable[[RankFacts], object]) -> list[RankFacts]:
    """Those whose key fewest ranks share; of equally many, those that have done least."""
    groups: dict[object, list[RankFacts]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return min(groups.values(), key=lambda group: (len(group), group[0].collectives))
