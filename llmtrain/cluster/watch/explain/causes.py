"""Table of causes: why a job does not go on, from what its hosts have reported.

Each row is a function of the facts that returns a cause or None. The first cause counts, so certain ones (a dead host)
stand before likely ones (an expert without tokens).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from llmtrain.cluster.gpus import Xid, read_xids
from llmtrain.cluster.watch.explain.device_faults import FAULTS, DeviceFault, device_fault, timed_out
from llmtrain.cluster.watch.explain.facts import (
    AGAIN,
    OTHER_WAY,
    Cause,
    Explanation,
    HostFacts,
    JobFacts,
    RankFacts,
    is_secondary,
)
from llmtrain.cluster.watch.explain.stalls import STALLS, as_waiting, rank_0_only
from llmtrain.cluster.watch.explain.wording import call, first_words, names, place, rank_list, stands, where, who


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
            remedy=f"Look at the network of {facts.here}. " + AGAIN,
        )
    lost = silent[0]
    ranks = [r for r in facts.ranks if r.host in {h.name for h in silent}]
    how = (
        "its watch has ended and the job completes no step: the host was switched off or all its processes were ended"
        if lost.closed
        else f"it has not reported for {lost.silent_s:.0f} s, so the host, its kernel or its network is down"
    )
    more = "" if len(silent) == 1 else f" So it is with {names(silent[1:])}."
    return Cause(
        name="host_lost",
        ranks=ranks,
        host=lost.name if len(silent) == 1 else "",
        says=f"{lost.name} ({rank_list(r for r in ranks if r.host == lost.name)}) is lost: {how}.{more}",
        remedy=f"Look at {names(silent)} (power, kernel log, network), or leave it out of the hostfile. " + AGAIN,
    )


def _broken_gpu(facts: JobFacts) -> Cause | None:
    """The driver reports a broken GPU or link in a host's kernel log; that counts more than the ranks' own errors."""
    if any(r.state == "dead" and r.error and not is_secondary(r) and not device_fault(r.error) for r in facts.ranks):
        return None  # an error of the program's own
    for host in facts.hosts:
        broken = [xid for xid in read_xids(host.xids) if xid.unfit]
        there = [r for r in facts.ranks if r.host == host.name and (r.on_device or r.state == "dead")]
        if broken and there:
            dead = [r for r in there if r.state == "dead"]
            ended = f"{who(dead)} <has|have> died in {dead[0].phase}. " if dead else ""
            return Cause(
                name="gpu_broken",
                ranks=dead or there,
                host=host.name,
                detail=f"Xid {broken[0].number}",
                says=f"{ended}The kernel of {host.name} reports a broken GPU: {_listed(broken)}{_memory(host)}.",
                remedy=f"Leave {host.name} out until its GPUs are reset and `llmtrain doctor` finds nothing. " + AGAIN,
                unfit=True,
            )
    return None


def _listed(xids: Sequence[Xid]) -> str:
    return "; ".join(map(str, xids[:3])) + (f" and {len(xids) - 3} more" if len(xids) > 3 else "")


def _memory(host: HostFacts | None) -> str:
    return f" (nvidia-smi: {host.gpu_health})" if host is not None and host.gpu_health else ""


def _device(facts: JobFacts) -> Cause | None:
    """A rank died of its device, or of a library of the device's: by an exception, or by NCCL's watchdog."""
    rows: dict[int, DeviceFault] = {}
    for rank in facts.ranks:
        found = device_fault(rank.error or rank.said) if rank.state == "dead" and not is_secondary(rank) else None
        if found is not None:
            rows[rank.rank] = found
    if not rows:
        return None
    row = min(rows.values(), key=FAULTS.index)
    ranks = [r for r in facts.ranks if rows.get(r.rank) is row]
    first = ranks[0]
    said = first.error or first.said
    host = next((h for h in facts.hosts if h.name == first.host), None)
    xids = read_xids(host.xids) if host else []
    kernel = f" The kernel of {first.host}: {_listed(xids)}." if xids else ""
    how = "raised" if first.error else "<was|were> ended from a thread of a library, which said:"
    at = f" at {first.error_at}" if first.error_at else ""
    return Cause(
        name=row.name,
        ranks=ranks,
        detail=first_words(said),
        says=f"{who(ranks)} {how} {said.rstrip('.')}{at}, in {first.phase}: {row.means}{_memory(host)}.{kernel}",
        remedy=row.remedy,
        unfit=row.unfit,
        again=row.again,
    )


def _timed_out(facts: JobFacts) -> Cause | None:
    """NCCL's watchdog has ended ranks for a collective that took too long, and nobody died of anything else."""
    late = [r for r in facts.ranks if r.state == "dead" and timed_out(r.said)]
    if not late or any(r.state == "dead" and not is_secondary(r) for r in facts.ranks):
        return None
    what = timed_out(late[0].said)
    assert what is not None
    return Cause(
        name="communication",
        ranks=late,
        detail=what.name,
        says=f"{who(late)} <was|were> ended by NCCL's watchdog in {late[0].phase}{stands(late[0])}: {what.name} "
        f"#{what.number} of <its|their> process group took longer than {what.limit_s:.0f} s (fault.timeout_s). Another "
        "rank never came to it, or the network or a device is stuck.",
        remedy="`llmtrain doctor` measures GPUs and network; a fault.stall_timeout_s below fault.timeout_s lets the "
        "watch ask the ranks where they stand before NCCL ends them.",
    )


def _aborted(facts: JobFacts) -> Cause | None:
    """gloo ends a rank whose collective does not match the others', from a thread of its own; NCCL would wait.

    It aborts where the message is too long for the buffer, and may crash where it is not.
    """
    ended = [r for r in facts.ranks if r.state == "dead" and r.signal in ("SIGABRT", "SIGSEGV")]
    aborted = [r for r in ended if not r.on_device and (r.native or (r.inside and r.signal == "SIGABRT"))]
    if not aborted or any(r.state == "dead" and not is_secondary(r) and r not in aborted for r in facts.ranks):
        return None
    alive = tuple(replace(r, state="running", inside=True) if r.state == "dead" else r for r in facts.ranks)
    found = rank_0_only(replace(facts, ranks=alive))
    first = aborted[0]
    if found is not None or first.signal != "SIGABRT":
        return found
    return Cause(
        name="collective_mismatch",
        ranks=aborted,
        detail=call(first),
        says=f"{who(aborted)} <was|were> ended by the communication library {'in' if first.inside else 'after'} "
        f"{call(first)}, in {first.phase}{stands(first)}: other ranks were in another collective.",
        remedy=OTHER_WAY,
    )


def _dead(facts: JobFacts) -> Cause | None:
    """The rank that died first for a reason of its own; the others died because it was gone."""
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
            says=f"{who(chosen)} <was|were> asked to stop and killed before <its|their> checkpoint was written.",
            remedy="DeepSpeed's launcher kills 30 s after its signal: send SIGTERM to the ranks instead, or allow more "
            "time. " + AGAIN,
        )
    if first.signal == "SIGKILL" and oom:
        return Cause(
            name="out_of_memory",
            ranks=chosen,
            says=f"{who(chosen)} <was|were> killed in {first.phase}, and the kernel of {first.host} has ended {oom} "
            f"process{'es' if oom > 1 else ''} for lack of memory since the job began.",
            remedy="Give the host more memory, run fewer ranks on it, or lower train.micro_batch; `dmesg` on the host "
            "names the process.",
        )
    if first.signal in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL"):
        at = f" at {place(first.stack[0])}" if first.stack else ""
        watchdog = " NCCL's watchdog aborts a rank after a CUDA error, and its output shows which."
        return Cause(
            name="crashed",
            ranks=chosen,
            detail=first.signal,
            says=f"{who(chosen)} crashed with {first.signal} in {first.phase}{at}: a bug or a fault of the machine "
            f"below Python.{watchdog if first.on_device and first.signal == 'SIGABRT' else ''}",
            remedy="Look at its output and at the kernel log; `llmtrain doctor` checks the host.",
        )
    how = f"<was|were> ended by {first.signal}" if first.signal else "<has|have> disappeared without an error message"
    return Cause(
        name="killed",
        ranks=chosen,
        detail=first.signal,
        says=f"{who(chosen)} {how} in {first.phase}: someone or something outside the job killed it.",
        remedy=f"Ask who kills processes on {first.host} (a scheduler's limit, a user, the kernel: see `dmesg`). "
        + AGAIN,
    )


def _raised(first: RankFacts, chosen: Sequence[RankFacts]) -> Cause:
    at = f" at {first.error_at}" if first.error_at else ""
    if is_secondary(first):
        return Cause(
            name="communication",
            ranks=chosen,
            detail=first_words(first.error),
            says=f"{who(chosen)} failed in {first.phase}{at}: {first.error}. No rank failed on its own, so a "
            "connection broke or a collective took longer than fault.timeout_s (LLMTRAIN_VERBOSE=1 shows tracebacks).",
            remedy="`llmtrain doctor` checks the network; a slow file server or host shows as a straggler in "
            "events.jsonl.",
        )
    return Cause(
        name="exception",
        ranks=chosen,
        detail=first_words(first.error),
        says=f"{who(chosen)} raised {first.error}{at}, in {first.phase}.",
        remedy="Its traceback is above. If the data or the code is the cause, a restart fails in the same way.",
    )


CAUSES: tuple[Callable[[JobFacts], Cause | None], ...] = (
    *(_silent_host, _broken_gpu, _device, _timed_out, _aborted, _dead),
    *STALLS,
)


def numbered(text: str, count: int) -> str:
    """Choose singular or plural in each "<is|are>"."""
    return re.sub(r"<([\w ]+)\|([\w ]+)>", r"\1" if count == 1 else r"\2", text)


def explain(facts: JobFacts) -> Explanation:
    """One paragraph: the ranks that differ, where they are, why, a remedy. There is always one, also for an unknown
    cause."""
    facts = as_waiting(facts)
    cause = next(found for row in CAUSES if (found := row(facts)) is not None)
    host = cause.host or (cause.ranks[0].host if len({r.host for r in cause.ranks}) == 1 else "")
    odd = {r.rank for r in cause.ranks}
    others = [
        r
        for r in facts.ranks
        if r.rank not in odd and r.state not in ("dead", "left", "unknown") and r.host != cause.host
    ]
    parts = [numbered(cause.says, len(cause.ranks))]
    if waiting := where(others):
        parts.append(f"{'The others' if odd else 'The ranks'}: {waiting}.")
    parts.append(numbered(cause.remedy, len(cause.ranks)))
    began = f"no progress for {facts.stalled_s:.0f} s" if facts.trigger == "pause" else "fault"
    return Explanation(
        what=facts.trigger,
        cause=cause.name,
        host=host,
        ranks=sorted(odd),
        step=facts.step,
        signature=f"step {facts.step + 1}: {cause.name}{': ' + cause.detail if cause.detail else ''}",
        text=f"{began} after step {facts.step}: " + " ".join(parts),
        unfit=cause.unfit,
        again=cause.again,
    )
