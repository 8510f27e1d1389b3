"""What NCCL's flight recorder adds to the facts of a stall: which collective each device is in, who never began it.

On a GPU a rank hands its collectives over and goes on, so its heartbeat does not show it inside of one.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmtrain.cluster.watch.explain.cause import Cause, live
from llmtrain.cluster.watch.explain.facts import JobFacts, RankFacts, Recorded
from llmtrain.cluster.watch.explain.wording import rank_list, stands, who


def excerpt(trace: Mapping[str, Any]) -> list[Recorded]:
    """Of the recorder's JSON (torch's `_dump_nccl_trace_json`): one for each process group with collectives in it.

    Messages between two ranks are left out: their numbers are not the same on all ranks of a group.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for entry in trace.get("entries", ()):
        if not entry["is_p2p"]:
            groups.setdefault(str(entry["process_group"][0]), []).append(entry)
    found = []
    for group, entries in groups.items():
        about = trace["pg_config"].get(group, {})
        open_ = [entry for entry in entries if entry["state"] != "completed"]
        oldest = min(open_, key=_number) if open_ else None
        found.append(
            Recorded(
                group=group,
                ranks=tuple(ast.literal_eval(about.get("ranks") or "[]")),
                begun=max(map(_number, entries)),
                pending=0 if oldest is None else _number(oldest),
                name="" if oldest is None else str(oldest["profiling_name"]).removeprefix("nccl:"),
            )
        )
    return found


def _number(entry: Mapping[str, Any]) -> int:
    return int(entry["collective_seq_id"])


def as_waiting(facts: JobFacts) -> JobFacts:
    """The facts with each rank inside of the collective in which its device is, as without a device it would be."""
    return replace(facts, ranks=tuple(map(_as_waiting, facts.ranks)))


def _as_waiting(rank: RankFacts) -> RankFacts:
    pending = _pending(rank)
    if rank.inside or pending is None:
        return rank
    return replace(
        rank, inside=True, collective=f"{pending.name} of group {pending.group}", collectives=pending.pending
    )


def _pending(rank: RankFacts) -> Recorded | None:
    return next((group for group in rank.recorded if group.pending), None)


def never_began(facts: JobFacts) -> Cause | None:
    """Ranks that have not handed over the collective in which the devices of others of its group wait."""
    those = {rank.rank: rank for rank in live(facts)}
    for waiting in those.values():
        group = _pending(waiting)
        if group is None:
            continue
        missing = [
            those[member]
            for member in group.ranks
            if member in those and those[member].recorded and _begun(those[member], group.group) < group.pending
        ]
        absent = [rank for rank in missing if _pending(rank) is None]  # the others of them wait for somebody, too
        if not absent:
            continue
        first = absent[0]
        inside = [r for r in those.values() if (found := _pending(r)) and _key(found) == _key(group)]
        wait = "device of {} waits" if len(inside) == 1 else "devices of {} wait"
        return Cause(
            name="behind",
            ranks=absent,
            detail=group.name,
            says=f"{who(absent)} <has|have> never begun {group.name} #{group.pending} of process group {group.group}, "
            f"in which the {wait.format(rank_list(inside))} (NCCL's flight recorder): <it is|they are> in "
            f"{first.phase}{stands(first)}, for {first.idle_s:.0f} s.",
            remedy="That line waits for its device, for a file or for something outside the job, or took another "
            "path through the code.",
        )
    return None


def _key(group: Recorded) -> tuple[str, int]:
    return group.group, group.pending


def _begun(rank: RankFacts, group: str) -> int:
    return next((each.begun for each in rank.recorded if each.group == group), 0)
