"""Find the cause of a job that makes no progress, from the reports of its hosts.

Each cause is a function that gets the facts and returns the cause or None. The first cause that is found counts, so
certain ones (a dead host) come before likely ones (an expert without tokens).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from llmtrain.base import units
from llmtrain.base.rank.device_faults import FAULTS, DeviceFault, device_fault
from llmtrain.base.rank.folder import LEAST_FREE
from llmtrain.base.rank.stacks import Recorded, place
from llmtrain.cluster.gpus import Xid, read_xids
from llmtrain.features.watch.facts import (
    AGAIN,
    OTHER_WAY,
    Cause,
    Explanation,
    HostFacts,
    JobFacts,
    RankFacts,
    call,
    first_words,
    is_secondary,
    live,
    minority,
    names,
    rank_list,
    stands,
    timed_out,
    where,
    who,
)

_SAME_BATCHES = "The ranks do not do equally many steps or micro-batches: each must see the same number of batches."
_OF_A_SAVE = ("compare", "save", "export")
_STEP_PHASES = ("data", "reference", "forward", "backward", "step", "compare")


def _stopped(facts: JobFacts) -> Cause | None:
    stopped = [r for r in facts.ranks if r.state == "stopped"]
    if not stopped:
        return None
    pids = " ".join(str(r.pid) for r in stopped)
    lets = "lets" if facts.trigger == "pause" else "would have let"
    return Cause(
        name="stopped",
        ranks=stopped,
        says=f"{who(stopped)} <is|are> stopped (SIGSTOP, or a debugger holds <it|them>) in {stopped[0].phase}, and "
        f"<has|have> not moved for {max(r.idle_s for r in stopped):.0f} s.",
        remedy=f"On {stopped[0].host}, `kill -CONT {pids}` {lets} <it|them> continue; ask who stops processes there.",
    )


def _awaits_process(facts: JobFacts) -> Cause | None:
    those = [r for r in live(facts) if r.awaited]
    if not those or not all(r.awaits for r in live(facts)):
        return None
    first, process = those[0], those[0].awaited
    stopped = process["state"] in ("T", "t")
    how = "is stopped (SIGSTOP, or a debugger holds it)" if stopped else "moves no bytes and does not compute"
    how += f" (kernel: {process['waits_in']})" if process["waits_in"] and not stopped else ""
    lets = "lets" if facts.trigger == "pause" else "would have let"
    return Cause(
        name="child_stopped" if stopped else "child_waits",
        ranks=those,
        detail=process["program"],
        says=f"{who(those)} <waits|wait> in {first.phase}{stands(first)} for process {first.awaits} "
        f"({process['program']}), which {how}{', with ' + process['file'] + ' open' if process['file'] else ''}.",
        remedy=f"On {first.host}, `kill -CONT {first.awaits}` {lets} it continue; ask who stops processes there."
        if stopped
        else f"Look at the file server and the disks of {first.host}; checkpoint.dir wants a fast one.",
    )


def _in_plugin(facts: JobFacts) -> Cause | None:
    those = [r for r in live(facts) if r.plugin]
    if not those:
        return None
    first = those[0]
    return Cause(
        name="plugin",
        ranks=those,
        detail=first.plugin,
        says=f"{who(those)} <is|are> in {first.plugin}{stands(first)}, for {first.idle_s:.0f} s: the plugin's method "
        "does not return.",
        remedy="It waits there, or is in an endless loop: correct the plugin. A collective in it needs all ranks.",
    )


def _left_early(facts: JobFacts) -> Cause | None:
    left = [r for r in facts.ranks if r.state == "left"]
    waiting = [r for r in facts.ranks if r.inside]
    if not left or not waiting:
        return None
    return Cause(
        name="left_early",
        ranks=left,
        says=f"{who(left)} <has|have> ended by <itself|themselves> (exit code {left[0].code}) while others still wait "
        "in a collective.",
        remedy=_SAME_BATCHES,
    )


def _disk(facts: JobFacts) -> Cause | None:
    free = [r for r in facts.ranks if r.state in ("running", "disk") and not r.inside]
    at = [r for r in free if r.state == "disk" or _in_file(r)]
    if not at or len(at) == len(live(facts)) > 1:
        return None
    first = at[0]
    how = (
        "<waits|wait> for a disk or a file server that does not answer"
        if first.state == "disk"
        else "<reads|read> or <writes|write> a file"
    )
    kernel = f" (kernel: {first.waits_in})" if first.waits_in else ""
    return Cause(
        name="input_output",
        ranks=at,
        says=f"{who(at)} {how}{kernel}{stands(first)}, for {first.idle_s:.0f} s.",
        remedy=f"Look at the file server and the disks of {first.host}; data.path and train.run_dir want a fast one.",
    )


def _connecting(facts: JobFacts) -> Cause | None:
    stuck = [r for r in live(facts) if r.phase == "connect" and not r.inside]
    if not stuck:
        return None
    return Cause(
        name="not_connected",
        ranks=stuck,
        says=f"{who(stuck)} <has|have> met the others and <has|have> been making <its|their> first connections for "
        f"{stuck[0].idle_s:.0f} s: NCCL has no timeout of its own there.",
        remedy="`llmtrain doctor` measures the network between the hosts and between their GPUs; NCCL_DEBUG=INFO shows "
        "which interface and which InfiniBand ports are tried (NCCL_SOCKET_IFNAME, NCCL_IB_HCA).",
    )


def _unheard(facts: JobFacts) -> Cause | None:
    """A host was lost before its agent connected to the root, or cannot connect."""
    unheard = [r for r in facts.ranks if r.state == "unknown"]
    those = live(facts)
    if not unheard or not all(r.inside or r.on_device for r in those):
        return None
    hosts = list(dict.fromkeys(r.host for r in unheard))
    return Cause(
        name="host_unheard",
        ranks=unheard,
        host=hosts[0] if len(hosts) == 1 else "",
        says=f"{who(unheard)} <has|have> never reported, and all others wait: most likely {hosts[0]} or its network "
        f"failed just after the ranks had met; or a firewall blocks its watch from that of {facts.here}.",
        remedy=f"Look at {', '.join(hosts)} (power, kernel log, network); `llmtrain doctor` measures each pair.",
    )


def rank_0_only(facts: JobFacts) -> Cause | None:
    """Rank 0 enters a save's collective that the others never reach, or the others wait while it saves alone."""
    those = live(facts)
    zero = next((r for r in those if r.rank == 0), None)
    others = [r for r in those if r.rank != 0]
    if zero is None or not others or zero.phase not in _OF_A_SAVE:
        return None
    if any(r.phase in _OF_A_SAVE for r in others) or not (zero.inside or all(r.inside for r in others)):
        return None
    return Cause(
        name="rank_0_only_save",
        ranks=[zero],
        says=f"{who([zero])} is in {zero.phase}{stands(zero)} and the others are not: something only rank 0 does waits "
        "for all ranks.",
        remedy="Every rank must call a save (or anything else with a collective in it), not rank 0 alone.",
    )


def _uneven(facts: JobFacts) -> Cause | None:
    """Some ranks are in another step, ask for data, or evaluate, while the rest wait in a step."""
    those = live(facts)
    waiting = [r for r in those if r.inside and r.phase in _STEP_PHASES]
    odd = [r for r in those if r.phase in ("data", "evaluate", "end") and r not in waiting]
    steps = Counter(r.step for r in those)
    if len(steps) > 1 and len(those) > 1:
        most = max(r.step for r in those)
        behind = [r for r in those if r.step < most]
        ahead = [r for r in those if r.step == most]
        fewer = behind if len(behind) < len(ahead) else ahead  # ranks with fewer batches reach the next step first
        if all(r.inside for r in those):
            return Cause(
                name="uneven_batches",
                ranks=fewer,
                says=f"{who(fewer)} <is|are> at step {fewer[0].step + 1}, the others at step "
                f"{(ahead if fewer is behind else behind)[0].step + 1}, and all wait for each other.",
                remedy=_SAME_BATCHES,
            )
    if not odd or not waiting or len(odd) + len(waiting) != len(those):
        return None
    ask = all(r.phase == "data" for r in odd)
    return Cause(
        name="slow_data" if ask else "uneven_batches",
        ranks=odd,
        says=f"{who(odd)} <is|are> in {odd[0].phase}{stands(odd[0])}, for {odd[0].idle_s:.0f} s, while the others wait "
        "for <it|them> in a step.",
        remedy=f"<It waits|They wait> for <its|their> next batch: look at the file server and the disks of "
        f"{odd[0].host}, and whether each rank has equally many batches."
        if ask
        else _SAME_BATCHES,
    )


def _expert(facts: JobFacts) -> Cause | None:
    """ZeRO 3 gathers an expert's parameters when it is used. If only some ranks have tokens for it, only these
    gather."""
    those = live(facts)
    if (
        not facts.alike
        or not facts.experts
        or facts.zero_stage != 3
        or len(those) < 2
        or not all(r.inside for r in those)
    ):
        return None
    if any(r.phase not in ("reference", "forward", "backward", "evaluate") for r in those):
        return None
    if len({(r.collectives, r.collective) for r in those}) < 2:
        return None
    odd = minority(those, lambda r: (r.collectives, r.collective))
    return Cause(
        name="experts_not_leaves",
        ranks=odd,
        says=f"{who(odd)} <waits|wait> in {call(odd[0])}, the others elsewhere, in {odd[0].phase} of a mixture of "
        "experts under ZeRO 3: an expert got tokens on some ranks only, so only they gather its parameters.",
        remedy="The block that holds the experts must be a ZeRO 3 leaf module (zero_optimization.leaf_module in the "
        "DeepSpeed JSON): then all its parameters are gathered together.",
    )


def _mismatch(facts: JobFacts) -> Cause | None:
    those = live(facts)
    if not facts.alike or len(those) < 2 or not all(r.inside for r in those):
        return None
    if len({(r.collective, r.collectives) for r in those}) < 2:
        return None
    odd = minority(those, lambda r: (r.collective, r.collectives))
    return Cause(
        name="collective_mismatch",
        ranks=odd,
        detail=call(odd[0]),
        says=f"All ranks wait, but not in the same collective: {who(odd)} in {call(odd[0])}{stands(odd[0])}.",
        remedy=OTHER_WAY,
    )


def _one_computes(facts: JobFacts) -> Cause | None:
    those = live(facts)
    free = [r for r in those if not r.inside]
    if not free or len(free) == len(those) > 1:
        return None
    first = free[0]
    if first.cpu_busy and first.on_device:
        left = f"; it has done {first.done} of {first.given} micro-batches" if first.done < first.given else ""
        return Cause(
            name="device_waits",
            ranks=free,
            says=f"{who(free)} <makes|make> no progress in {first.phase}{stands(first)}, for {first.idle_s:.0f} s: <it "
            f"waits|they wait> there for <its device|their devices>{left}, or <computes|compute> in an endless loop.",
            remedy=f"Look at `nvidia-smi` and at `dmesg | grep -i xid` on {first.host}: a device that does nothing has "
            "failed, or waits in a collective that another rank never began; one that works is slow, or in a loop.",
        )
    if first.cpu_busy:
        return Cause(
            name="slow_host",
            ranks=free,
            says=f"{who(free)} still <computes|compute> in {first.phase}{stands(first)}, for {first.idle_s:.0f} s.",
            remedy=f"Either <it is|they are> much slower (look for other processes, heat and memory on {first.host}) "
            "or <it is|they are> in an endless loop.",
        )
    return Cause(
        name="one_waits",
        ranks=free,
        says=f"{who(free)} <is|are> in {first.phase}{stands(first)} and <has|have> done nothing for "
        f"{first.idle_s:.0f} s{f' (kernel: {first.waits_in})' if first.waits_in else ''}.",
        remedy="That line waits for something outside the job: a lock, a device, a process, a server.",
    )


def _network(facts: JobFacts) -> Cause | None:
    those = live(facts)
    if len(those) < 2 or not all(r.inside for r in those):
        return None
    return Cause(
        name="communication",
        ranks=[],
        says=f"All ranks wait in the same collective ({call(those[0])}) for {facts.stalled_s:.0f} s, and all processes "
        "are there: the network between them, or the device under it, is stuck.",
        remedy="`llmtrain doctor` measures each pair of hosts; NCCL_DEBUG=INFO shows which interface is used.",
    )


def _behind(facts: JobFacts) -> Cause | None:
    """The ranks with the fewest collectives are behind. On GPUs a rank only starts collectives and is inside none."""
    those = live(facts)
    fewest = min((r.collectives for r in those), default=0)
    behind = [r for r in those if r.collectives == fewest]
    if not facts.alike or len(behind) == len(those):
        return None
    first = behind[0]
    most = max(r.collectives for r in those)
    return Cause(
        name="behind",
        ranks=behind,
        says=f"{who(behind)} <has|have> begun {units.counted(fewest, 'collective')}, others up to {most}: in "
        f"{first.phase}{stands(first)} <has|have> not begun the next one for {first.idle_s:.0f} s.",
        remedy="That line waits for the device, for a file or for something outside the job.",
    )


def _devices_wait(facts: JobFacts) -> Cause | None:
    those = live(facts)
    if not all(r.on_device for r in those) or any(r.inside for r in those):
        return None
    return Cause(
        name="communication",
        ranks=[],
        says=f"All ranks {'have begun the same collectives and ' if facts.alike else ''}wait for their devices for "
        f"{facts.stalled_s:.0f} s: a collective does not end there, so the network between the devices, or one of the "
        "devices, is stuck.",
        remedy="`llmtrain doctor` measures GPUs and hosts and looks for their faults; NCCL_DEBUG=INFO shows which "
        "paths are used.",
    )


def _unknown(facts: JobFacts) -> Cause | None:
    those = live(facts)
    return Cause(
        name="unknown",
        ranks=[],
        says=f"No rank has made progress for {facts.stalled_s:.0f} s"
        + (f"; {who(those)} is in {those[0].phase}{stands(those[0])}." if len(those) == 1 else "."),
        remedy="The stacks of all ranks are in events.jsonl. A step that is meant to take so long wants a larger "
        "fault.stall_timeout_s.",
    )


_FILE_CALLS = ("read", "write", "readinto", "fsync", "open", "pread", "copyfileobj", "_sync", "sync", "read_bytes")


def _in_file(rank: RankFacts) -> bool:
    """Return True if the rank is in a file operation. C functions have no Python frames, so the caller's name
    decides."""
    return bool(rank.stack) and (
        rank.stack[0].function in _FILE_CALLS
        or rank.stack[0].file.endswith(("llmtrain/checkpoint/durable.py", "/shutil.py", "/pathlib.py"))
    )


def _as_waiting(rank: RankFacts) -> RankFacts:
    """If the rank's device has a pending collective, return the rank as if the host were inside it, as on a CPU."""
    pending = _pending(rank)
    if rank.inside or pending is None:
        return rank
    return replace(
        rank, inside=True, collective=f"{pending.name} of group {pending.group}", collectives=pending.pending
    )


def _pending(rank: RankFacts) -> Recorded | None:
    return next((group for group in rank.recorded if group.pending), None)


def never_began(facts: JobFacts) -> Cause | None:
    """Some ranks have not started the collective in which the devices of their group wait."""
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
        absent = [rank for rank in missing if _pending(rank) is None]  # the other missing ranks wait, too
        if not absent:
            continue
        first = absent[0]
        waited_for = (group.group, group.pending)
        inside = [r for r in those.values() if (p := _pending(r)) and (p.group, p.pending) == waited_for]
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


def _begun(rank: RankFacts, group: str) -> int:
    return next((record.begun for record in rank.recorded if record.group == group), 0)


STALLS = (
    *(_stopped, _awaits_process, _in_plugin, _left_early, _disk, _connecting, _unheard, rank_0_only, _uneven),
    *(_expert, _mismatch, never_began, _one_computes, _network, _behind, _devices_wait, _unknown),
)
"""The first cause counts: certain ones come before likely ones."""


def _silent_host(facts: JobFacts) -> Cause | None:
    silent = [h for h in facts.hosts if h.silent_s > 0 or h.closed]
    if not silent:
        return None
    alone = len(silent) == len(facts.hosts) - 1 > 1
    up = f" ({facts.interface} of {facts.here} is up)" if facts.interface else ""
    if facts.here in {h.name for h in silent} or (alone and facts.interface_down):
        how = "they or the network are down" + up
        how = f"its interface {facts.interface} is down" if facts.interface_down else how
        return Cause(
            name="cut_off",
            ranks=[r for r in facts.ranks if r.host == facts.here],
            host=facts.here,
            says=f"no other host of the job answers {facts.here} any more: {how}. Its ranks were ended, so that "
            "none is left behind.",
            remedy=f"Look at the other hosts and at the network of {facts.here}. " + AGAIN,
        )
    lost = silent[0]
    ranks = [r for r in facts.ranks if r.host in {h.name for h in silent}]
    how = (
        "its watch has ended and the job completes no step: the host was switched off or all its processes were ended"
        if lost.closed
        else f"it has not reported for {lost.silent_s:.0f} s, so the host, its kernel or its network is down"
    )
    more = "" if len(silent) == 1 else f" The same is true of {names(silent[1:])}."
    more += f" Or the network is down: {facts.here} hears no other host{up}." if alone else ""
    return Cause(
        name="host_lost",
        ranks=ranks,
        host=lost.name if len(silent) == 1 else "",
        says=f"{lost.name} ({rank_list(r for r in ranks if r.host == lost.name)}) is lost: {how}.{more}",
        remedy=f"Look at {names(silent)} (power, kernel log, network), or leave it out of the hostfile. " + AGAIN,
    )


def _broken_gpu(facts: JobFacts) -> Cause | None:
    """The driver reports a broken GPU or link in a host's kernel log, which counts more than the ranks' own errors."""
    if any(r.state == "dead" and r.error and not is_secondary(r) and not device_fault(r.error) for r in facts.ranks):
        return None  # an error of the program's own
    for host in facts.hosts:
        broken = [xid for xid in read_xids(host.xids) if xid.unfit]
        ranks = [r for r in facts.ranks if r.host == host.name and (r.on_device or r.state == "dead")]
        if broken and ranks:
            dead = [r for r in ranks if r.state == "dead"]
            ended = f"{who(dead)} <has|have> died in {dead[0].phase}. " if dead else ""
            return Cause(
                name="gpu_broken",
                ranks=dead or ranks,
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
    rows: dict[int, DeviceFault] = {}
    for rank in facts.ranks:
        fault = device_fault(rank.error or rank.said) if rank.state == "dead" and not is_secondary(rank) else None
        if fault is not None:
            rows[rank.rank] = fault
    if not rows:
        return None
    row = min(rows.values(), key=FAULTS.index)
    ranks = [r for r in facts.ranks if rows.get(r.rank) is row]
    first = ranks[0]
    message = first.error or first.said
    host = next((h for h in facts.hosts if h.name == first.host), None)
    xids = read_xids(host.xids) if host else []
    kernel = f" The kernel of {first.host}: {_listed(xids)}." if xids else ""
    how = "raised" if first.error else "<was|were> ended from a thread of a library, which said:"
    at = f" at {first.error_at}" if first.error_at else ""
    return Cause(
        name=row.name,
        ranks=ranks,
        detail=first_words(message),
        says=f"{who(ranks)} {how} {message.rstrip('.')}{at}, in {first.phase}: {row.means}{_memory(host)}.{kernel}",
        remedy=row.remedy,
        unfit=row.unfit,
        again=row.again,
    )


def _timed_out(facts: JobFacts) -> Cause | None:
    """NCCL's watchdog has ended ranks for a slow collective, and no rank died by another fault."""
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
        "watch ask the ranks for their places before NCCL ends them.",
    )


def _aborted(facts: JobFacts) -> Cause | None:
    """gloo aborts or crashes a rank whose collective differs from the others'; NCCL would wait."""
    ended = [r for r in facts.ranks if r.state == "dead" and r.signal in ("SIGABRT", "SIGSEGV")]
    aborted = [r for r in ended if not r.on_device and (r.native or (r.inside and r.signal == "SIGABRT"))]
    if not aborted or any(r.state == "dead" and not is_secondary(r) and r not in aborted for r in facts.ranks):
        return None
    alive = tuple(replace(r, state="running", inside=True) if r.state == "dead" else r for r in facts.ranks)
    cause = rank_0_only(replace(facts, ranks=alive))
    first = aborted[0]
    if cause is not None or first.signal != "SIGABRT":
        return cause
    return Cause(
        name="collective_mismatch",
        ranks=aborted,
        detail=call(first),
        says=f"{who(aborted)} <was|were> ended by the communication library {'in' if first.inside else 'after'} "
        f"{call(first)}, in {first.phase}{stands(first)}: other ranks were in another collective.",
        remedy=OTHER_WAY,
    )


def _shared_memory(facts: JobFacts) -> Cause | None:
    """A write into shared memory found no free page. Other ranks' errors may be unknown, as they are kept there,
    too."""
    full = {h.name: h.shm_free for h in facts.hosts if h.shm_free is not None and h.shm_free < LEAST_FREE}
    ended = [r for r in facts.ranks if r.state == "dead" and r.signal == "SIGBUS" and r.host in full]
    if not ended:
        return None
    first = ended[0]
    at = f" at {place(first.stack[0])}" if first.stack else ""
    return Cause(
        name="shared_memory",
        ranks=ended,
        detail="SIGBUS",
        says=f"{who(ended)} <was|were> ended by SIGBUS in {first.plugin or first.phase}{at}: /dev/shm of {first.host} "
        f"is full ({units.size(full[first.host])} free), and a write into shared memory got no page.",
        remedy="Delete unused files there (`ls -la /dev/shm`), or mount -o remount,size=50% /dev/shm (docker run "
        "--shm-size 16g). " + AGAIN,
    )


def _dead(facts: JobFacts) -> Cause | None:
    """One rank died first, and the others died because it was gone."""
    dead = [r for r in facts.ranks if r.state == "dead"]
    if not dead:
        return None
    primary = [r for r in dead if not is_secondary(r)]
    if not primary and (refused := [r for r in facts.ranks if r.refusal]):
        return Cause(
            name="refused",
            ranks=refused,
            detail=refused[0].refusal,
            says=f"{who(refused)} <has|have> ended with an error that the others do not have: {refused[0].refusal}.",
            remedy="Correct that; the others ended because a rank was gone.",
        )
    silent = [r for r in primary if not r.error]
    chosen = silent or primary or dead
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
        size = f" {who([first])} held {units.size(first.resident)} when the watch looked last."
        return Cause(
            name="out_of_memory",
            ranks=chosen,
            says=f"{who(chosen)} <was|were> killed in {first.phase}, and the kernel of {first.host} has ended {oom} "
            f"process{'es' if oom > 1 else ''} for lack of memory since the job began.{size if first.resident else ''}",
            remedy=facts.memory.get(first.phase)
            or facts.memory.get("setup")
            or "Give the host more memory, run fewer ranks on it, or lower "
            "train.micro_batch: `llmtrain plan` says what each change gives. `dmesg` on the host names the process.",
        )
    if first.signal in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL"):
        at = f" at {place(first.stack[0])}" if first.stack else ""
        watchdog = " NCCL's watchdog aborts a rank after a CUDA error, and its output shows which."
        return Cause(
            name="crashed",
            ranks=chosen,
            detail=first.signal,
            says=f"{who(chosen)} crashed with {first.signal} in {first.plugin or first.phase}{at}: a bug or a fault of "
            f"the machine below Python.{watchdog if first.on_device and first.signal == 'SIGABRT' else ''}",
            remedy="Look at its output and at the kernel log; `llmtrain doctor` checks the host.",
        )
    if first.plugin and not first.signal:
        return Cause(
            name="plugin",
            ranks=chosen,
            detail=first.plugin,
            says=f"{who(chosen)} <has|have> ended in {first.plugin} (exit code {first.code}).",
            remedy="A plugin must not end its process (os._exit); an exception there ends all ranks after a save.",
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
    *(_silent_host, _broken_gpu, _device, _timed_out, _aborted, _shared_memory, _dead),
    *STALLS,
)


def numbered(text: str, count: int) -> str:
    """Choose singular or plural in each "<is|are>"."""
    return re.sub(r"<([\w ]+)\|([\w ]+)>", r"\1" if count == 1 else r"\2", text)


def explain(facts: JobFacts) -> Explanation:
    """Return one paragraph: the ranks that differ, their places, the cause, a remedy."""
    facts = replace(facts, ranks=tuple(map(_as_waiting, facts.ranks)))
    cause = next(match for row in CAUSES if (match := row(facts)) is not None)
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
    parts.append(numbered(cause.remedy, len(cause.ranks)).replace("<again>", facts.again))
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
