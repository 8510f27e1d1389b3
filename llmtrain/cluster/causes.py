"""The table of causes: why a job does not go on, read from what its hosts have reported.

Each row looks at the facts and either knows the cause or does not. The first that knows is right,
so what is certain (a dead host) stands before what is likely (an expert without tokens).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmtrain.cluster.facts import JobFacts, RankFacts
from llmtrain.cluster.wording import call, first_words, names, place, rank_list, stands, who

_AGAIN = "The same command continues from the newest checkpoint."
_SAME_BATCHES = "The ranks do not do equally many steps or micro-batches: each must see the same number of batches."
_STEP_PHASES = ("data", "forward", "backward", "step")
_SECONDARY = re.compile(
    r"Connection (closed|reset)|Broken pipe|Connection refused|peer|[Tt]imed? ?out|NCCL|remote process exited|"
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
    """One or two sentences: what is wrong and why."""
    remedy: str
    host: str = ""
    """The host that differs, where it is not that of `ranks`."""
    detail: str = ""
    """What tells two faults of this kind apart; part of the signature."""


def _silent_host(facts: JobFacts) -> Cause | None:
    silent = [h for h in facts.hosts if h.silent_s > 0 or h.closed]
    if not silent:
        return None
    if facts.here in {h.name for h in silent} or 1 < len(silent) == len(facts.hosts) - 1:
        return Cause(
            name="cut_off",
            ranks=[r for r in facts.ranks if r.host == facts.here],
            host=facts.here,
            says=f"{facts.here} reaches no other host of the job any more: most likely its own network is down. Its "
            "ranks were ended, so that none is left behind.",
            remedy=f"Look at the network of {facts.here}. " + _AGAIN,
        )
    lost = silent[0]
    ranks = [r for r in facts.ranks if r.host in {h.name for h in silent}]
    how = (
        "its watch has gone and the job makes no step: the host was switched off or all its processes were ended"
        if lost.closed
        else f"nothing was heard of it for {lost.silent_s:.0f} s, so the host, its kernel or its network is down"
    )
    more = "" if len(silent) == 1 else f" So it is with {names(silent[1:])}."
    return Cause(
        name="host_lost",
        ranks=ranks,
        host=lost.name if len(silent) == 1 else "",
        says=f"{lost.name} ({rank_list(r for r in ranks if r.host == lost.name)}) is lost: {how}.{more}",
        remedy=f"Look at {names(silent)} (power, kernel log, network), or leave it out of the hostfile. " + _AGAIN,
    )


def _dead(facts: JobFacts) -> Cause | None:
    """The rank that died first for a reason of its own; the others then die of its absence."""
    dead = [r for r in facts.ranks if r.state == "dead"]
    if not dead:
        return None
    own = [r for r in dead if not is_secondary(r)]
    silent = [r for r in own if not r.error]
    chosen = silent or own or dead
    first = chosen[0]
    oom = next((h.oom_kills for h in facts.hosts if h.name == first.host), 0)
    if first.error:
        return _raised(first, chosen)
    if first.signal == "SIGKILL" and first.stopping:
        return Cause(
            name="killed_while_stopping",
            ranks=chosen,
            says=f"{who(chosen)} was asked to stop and killed before its checkpoint was written.",
            remedy="DeepSpeed's launcher kills 30 s after its signal: send SIGTERM to the ranks instead, or allow more "
            "time. " + _AGAIN,
        )
    if first.signal == "SIGKILL" and oom:
        return Cause(
            name="out_of_memory",
            ranks=chosen,
            says=f"{who(chosen)} was killed in {first.phase}, and the kernel of {first.host} has ended {oom} "
            f"process{'es' if oom > 1 else ''} for lack of memory since the job began.",
            remedy="Give the host more memory, run fewer ranks on it, or lower train.micro_batch; `dmesg` on the host "
            "names the process.",
        )
    if first.signal in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL"):
        at = f" at {place(first.stack[0])}" if first.stack else ""
        return Cause(
            name="crashed",
            ranks=chosen,
            detail=first.signal,
            says=f"{who(chosen)} crashed with {first.signal} in {first.phase}{at}: a bug or a fault of the machine "
            "below Python.",
            remedy="Look at its output and at the kernel log; `llmtrain doctor` checks the host.",
        )
    how = f"was ended by {first.signal}" if first.signal else "has gone without a word"
    return Cause(
        name="killed",
        ranks=chosen,
        detail=first.signal,
        says=f"{who(chosen)} {how} in {first.phase}: someone or something outside the job killed it.",
        remedy=f"Ask who kills processes on {first.host} (a scheduler's limit, a user, the kernel: see `dmesg`). "
        + _AGAIN,
    )


def _raised(first: RankFacts, chosen: Sequence[RankFacts]) -> Cause:
    at = f" at {first.error_at}" if first.error_at else ""
    if is_secondary(first):
        return Cause(
            name="communication",
            ranks=chosen,
            detail=first_words(first.error),
            says=f"{who(chosen)} failed in {first.phase}{at}: {first.error}. No rank died of itself, so a connection "
            "broke or a collective took longer than fault.timeout_s.",
            remedy="`llmtrain doctor` checks the network; a slow file server or host is told by the stragglers in "
            "events.jsonl.",
        )
    memory = "out of memory" in first.error or first.error.startswith("MemoryError")
    return Cause(
        name="out_of_memory" if memory else "exception",
        ranks=chosen,
        detail=first_words(first.error),
        says=f"{who(chosen)} raised {first.error}{at}, in {first.phase}.",
        remedy="Lower train.micro_batch, or choose a higher ZeRO stage or offload."
        if memory
        else "Its traceback stands above. If the data or the code is the cause, a restart meets it again.",
    )


def _stopped(facts: JobFacts) -> Cause | None:
    stopped = [r for r in facts.ranks if r.state == "stopped"]
    if not stopped:
        return None
    pids = " ".join(str(r.pid) for r in stopped)
    return Cause(
        name="stopped",
        ranks=stopped,
        says=f"{who(stopped)} is stopped (SIGSTOP, or a debugger holds it) in {stopped[0].phase}, and has not moved "
        f"for {max(r.idle_s for r in stopped):.0f} s.",
        remedy=f"On {stopped[0].host}, `kill -CONT {pids}` would have let it go on; ask who stops processes there.",
    )


def _left_early(facts: JobFacts) -> Cause | None:
    left = [r for r in facts.ranks if r.state == "left"]
    waiting = [r for r in facts.ranks if r.inside]
    if not left or not waiting:
        return None
    return Cause(
        name="left_early",
        ranks=left,
        says=f"{who(left)} has ended by itself (exit code {left[0].code}) while others still wait in a collective.",
        remedy=_SAME_BATCHES,
    )


def _disk(facts: JobFacts) -> Cause | None:
    """One rank waits for a file: the kernel says so, or its stack ends in one."""
    free = [r for r in facts.ranks if r.state in ("running", "disk") and not r.inside]
    at = [r for r in free if r.state == "disk" or _in_file(r)]
    if not at or len(at) == len(_live(facts)) > 1:
        return None
    first = at[0]
    how = (
        "waits for a disk or a file server that does not answer" if first.state == "disk" else "reads or writes a file"
    )
    kernel = f" (kernel: {first.waits_in})" if first.waits_in else ""
    return Cause(
        name="input_output",
        ranks=at,
        says=f"{who(at)} {how}{kernel}{stands(first)}, for {first.idle_s:.0f} s.",
        remedy=f"Look at the file server and the disks of {first.host}; data.path and train.run_dir want a fast one.",
    )


def _rank_0_only(facts: JobFacts) -> Cause | None:
    """Rank 0 enters a collective of a save that the others never reach, or the others wait while it saves alone."""
    live = _live(facts)
    zero = next((r for r in live if r.rank == 0), None)
    others = [r for r in live if r.rank != 0]
    if zero is None or not others or zero.phase not in ("save", "export"):
        return None
    if any(r.phase in ("save", "export") for r in others) or not (zero.inside or all(r.inside for r in others)):
        return None
    return Cause(
        name="rank_0_only_save",
        ranks=[zero],
        says=f"{who([zero])} is in {zero.phase}{stands(zero)} and the others are not: something only rank 0 does waits "
        "for all ranks.",
        remedy="Every rank must call a save (or anything else with a collective in it), not rank 0 alone.",
    )


def _uneven(facts: JobFacts) -> Cause | None:
    """Some ranks are in another step, or ask for data, or evaluate, while the rest wait for them in a step."""
    live = _live(facts)
    waiting = [r for r in live if r.inside and r.phase in _STEP_PHASES]
    odd = [r for r in live if r.phase in ("data", "evaluate", "end") and r not in waiting]
    steps = Counter(r.step for r in live)
    if len(steps) > 1 and len(live) > 1:
        most = max(r.step for r in live)
        behind = [r for r in live if r.step < most]
        ahead = [r for r in live if r.step == most]
        fewer = behind if len(behind) <= len(ahead) else ahead
        if all(r.inside for r in live):
            return Cause(
                name="uneven_batches",
                ranks=fewer,
                says=f"{who(fewer)} is at step {fewer[0].step + 1}, the others at step "
                f"{(ahead if fewer is behind else behind)[0].step + 1}, and all wait for each other.",
                remedy=_SAME_BATCHES,
            )
    if not odd or not waiting or len(odd) + len(waiting) != len(live):
        return None
    ask = all(r.phase == "data" for r in odd)
    return Cause(
        name="slow_data" if ask else "uneven_batches",
        ranks=odd,
        says=f"{who(odd)} is in {odd[0].phase}{stands(odd[0])}, for {odd[0].idle_s:.0f} s, while the others wait for "
        "it in a step.",
        remedy=f"It waits for its next batch: look at the file server and the disks of {odd[0].host}, and whether each "
        "rank has equally many batches."
        if ask
        else _SAME_BATCHES,
    )


def _expert(facts: JobFacts) -> Cause | None:
    """ZeRO 3 gathers an expert's parameters when it is used; an expert without tokens on one rank is used by others."""
    live = _live(facts)
    if (
        not facts.alike
        or not facts.experts
        or facts.zero_stage != 3
        or len(live) < 2
        or not all(r.inside for r in live)
    ):
        return None
    if any(r.phase not in ("forward", "backward", "evaluate") for r in live):
        return None
    if len({(r.collectives, r.collective) for r in live}) < 2:
        return None
    odd = _minority(live, lambda r: (r.collectives, r.collective))
    return Cause(
        name="experts_not_leaves",
        ranks=odd,
        says=f"{who(odd)} waits in {call(odd[0])}, the others elsewhere, in {odd[0].phase} of a mixture of experts "
        "under ZeRO 3: an expert got tokens on some ranks only, so only they gather its parameters.",
        remedy="The block that holds the experts must be a ZeRO 3 leaf module (zero_optimization.leaf_module in the "
        "DeepSpeed JSON): then all its parameters are gathered together.",
    )


def _mismatch(facts: JobFacts) -> Cause | None:
    live = _live(facts)
    if not facts.alike or len(live) < 2 or not all(r.inside for r in live):
        return None
    if len({(r.collective, r.collectives) for r in live}) < 2:
        return None
    odd = _minority(live, lambda r: (r.collective, r.collectives))
    return Cause(
        name="collective_mismatch",
        ranks=odd,
        detail=call(odd[0]),
        says=f"All ranks wait, but not in the same collective: {who(odd)} in {call(odd[0])}{stands(odd[0])}.",
        remedy="The ranks took different ways through the code: look for a condition that depends on the rank or on "
        "its data around that line.",
    )


def _one_computes(facts: JobFacts) -> Cause | None:
    """All but a few wait in a collective: those few are what they wait for."""
    live = _live(facts)
    free = [r for r in live if not r.inside]
    if not free or len(free) == len(live) > 1:
        return None
    first = free[0]
    if first.cpu_busy:
        return Cause(
            name="slow_host",
            ranks=free,
            says=f"{who(free)} still computes in {first.phase}{stands(first)}, for {first.idle_s:.0f} s.",
            remedy=f"Either it is much slower (look for other processes, heat and memory on {first.host}) or it is in "
            "a loop without an end.",
        )
    return Cause(
        name="one_waits",
        ranks=free,
        says=f"{who(free)} is in {first.phase}{stands(first)} and has done nothing for {first.idle_s:.0f} s"
        f"{f' (kernel: {first.waits_in})' if first.waits_in else ''}.",
        remedy="That line waits for something outside the job: a lock, a device, a process, a server.",
    )


def _network(facts: JobFacts) -> Cause | None:
    live = _live(facts)
    if len(live) < 2 or not all(r.inside for r in live):
        return None
    return Cause(
        name="communication",
        ranks=[],
        says=f"All ranks wait in the same collective ({call(live[0])}) for {facts.stalled_s:.0f} s, and all processes "
        "are there: the network between them, or the device under it, does not move.",
        remedy="`llmtrain doctor` measures each pair of hosts; NCCL_DEBUG=INFO tells which interface is used.",
    )


def _behind(facts: JobFacts) -> Cause | None:
    """On a GPU a rank hands its collectives over and goes on, so none is inside one: who has handed over fewest?"""
    live = _live(facts)
    fewest = min((r.collectives for r in live), default=0)
    behind = [r for r in live if r.collectives == fewest]
    if not facts.alike or len(behind) == len(live):
        return None
    first = behind[0]
    most = max(r.collectives for r in live)
    return Cause(
        name="behind",
        ranks=behind,
        says=f"{who(behind)} has begun {fewest} collectives, others up to {most}: in {first.phase}{stands(first)} it "
        f"does not come to the next, since {first.idle_s:.0f} s.",
        remedy="That line waits for the device, for a file or for something outside the job.",
    )


def _unknown(facts: JobFacts) -> Cause | None:
    live = _live(facts)
    return Cause(
        name="unknown",
        ranks=[],
        says=f"No rank has made progress for {facts.stalled_s:.0f} s"
        + (f"; {who(live)} is in {live[0].phase}{stands(live[0])}." if len(live) == 1 else "."),
        remedy="The stacks of all ranks are in events.jsonl. A step that is meant to take so long wants a larger "
        "fault.stall_timeout_s.",
    )


CAUSES: tuple[Callable[[JobFacts], Cause | None], ...] = (
    _silent_host,
    _dead,
    _stopped,
    _left_early,
    _disk,
    _rank_0_only,
    _uneven,
    _expert,
    _mismatch,
    _one_computes,
    _network,
    _behind,
    _unknown,
)


def _live(facts: JobFacts) -> list[RankFacts]:
    """Those of which is known what they do."""
    return [r for r in facts.ranks if r.state not in ("dead", "left", "unknown")]


def is_secondary(rank: RankFacts) -> bool:
    """It died because another one had gone: an error of communication, or the launcher's SIGTERM."""
    return rank.signal in ("SIGTERM", "SIGINT", "SIGHUP") or (bool(rank.error) and bool(_SECONDARY.search(rank.error)))


def _minority(ranks: Sequence[RankFacts], key: Callable[[RankFacts], object]) -> list[RankFacts]:
    """Those whose key fewest ranks share; of equally many, those that have done least."""
    groups: dict[object, list[RankFacts]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return min(groups.values(), key=lambda group: (len(group), group[0].collectives))


_FILE_CALLS = ("read", "write", "readinto", "fsync", "open", "pread", "copyfileobj", "_sync", "sync", "read_bytes")


def _in_file(rank: RankFacts) -> bool:
    """Its innermost line of Python is a call on files. C functions are no frames: the caller's name has to tell."""
    return bool(rank.stack) and (
        rank.stack[0].function in _FILE_CALLS
        or rank.stack[0].file.endswith(("llmtrain/checkpoint/durable.py", "/shutil.py", "/pathlib.py"))
    )
