"""Words for facts: ranks, hosts, places in the code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from llmtrain.base import units
from llmtrain.cluster.watch.explain.facts import Frame, HostFacts, RankFacts

_WRAPS = "llmtrain/cluster/watch/heartbeat.py"
"""The file whose wrapper is around every collective."""


def place(frame: Frame) -> str:
    return f"{short(frame.file)}:{frame.line} ({frame.function})"


def short(file: str) -> str:
    """The path from the package's folder on; for other files the last two parts."""
    for package in ("llmtrain/", "deepspeed/", "torch/", "transformers/"):
        _, mark, tail = file.rpartition(f"/{package}")
        if mark:
            return package + tail
    return "/".join(file.split("/")[-2:])


def own_line(stack: Sequence[Frame]) -> Frame | None:
    """The innermost line that is not a library's: one that the user can read."""
    ours = [f for f in stack if "/llmtrain/" in f.file or not re.search(r"/lib(64)?/python[\d.]+/", f.file)]
    around = [f for f in ours if not f.file.endswith(_WRAPS)]
    return next(iter(around or ours or stack), None)


def stands(rank: RankFacts) -> str:
    """ " at file:line (function)", or nothing where that is not known."""
    frame = own_line(rank.stack)
    return f" at {place(frame)}" if frame else ""


def call(rank: RankFacts) -> str:
    return f"{rank.collective} #{rank.collectives}"


def where(ranks: Iterable[RankFacts]) -> str:
    """ "rank 0 waits in all_reduce #120, in backward at ...; ranks 1-3 ..." for groups that stand alike."""
    groups: dict[str, list[RankFacts]] = {}
    for rank in ranks:
        if rank.inside:
            text = f"in {call(rank)}, in {rank.phase} (step {rank.step + 1}){stands(rank)}"
        else:
            text = f"in {rank.phase} (step {rank.step + 1}){stands(rank)}"
        groups.setdefault(text, []).append(rank)
    shown = list(groups.items())[:4]
    lines = [
        f"{rank_list(group)} {'wait' if group[0].inside else 'are' if len(group) > 1 else 'is'}"
        f"{'s' if group[0].inside and len(group) == 1 else ''} {text}"
        for text, group in shown
    ]
    if len(groups) > len(shown):
        lines.append(f"and {sum(len(g) for g in list(groups.values())[len(shown) :])} more elsewhere")
    return "; ".join(lines)


def who(ranks: Sequence[RankFacts]) -> str:
    """ "rank 3 on node-2", "ranks 0-3 on node-1"; of several hosts, each."""
    hosts: dict[str, list[RankFacts]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(rank)
    parts = [f"{rank_list(group)} on {host}" for host, group in hosts.items()]
    return ", ".join(parts[:4]) + (f" and {len(parts) - 4} more hosts" if len(parts) > 4 else "")


def rank_list(ranks: Iterable[RankFacts]) -> str:
    """ "rank 3", "ranks 0-3, 7"."""
    numbers = sorted(r.rank for r in ranks)
    text = units.spans(numbers, most=6)
    return f"rank {text}" if len(numbers) == 1 else f"ranks {text}"


def names(hosts: Sequence[HostFacts]) -> str:
    return ", ".join(h.name for h in hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")


def first_words(error: str) -> str:
    """The error without the parts that differ between two of a kind: addresses, ports, process ids."""
    return re.sub(r"0x[0-9a-f]+|\[[^]]*\]:?\d*|\b\d{4,}\b", "#", error.splitlines()[0] if error else "")[:160]
