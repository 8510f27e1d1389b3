"""Facts about a job without progress, collected on every host; causes.py finds the cause from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from llmtrain.base import units
from llmtrain.base.rank.device_faults import device_fault, is_echo
from llmtrain.base.rank.stacks import Frame, Recorded, own_line, place


@dataclass(frozen=True, kw_only=True)
class TimedOut:
    """A report by NCCL's watchdog of a collective that took too long."""

    number: int
    """Number of the collective in its process group."""
    name: str
    limit_s: float


_TIMED_OUT = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<name>\w+),"
    r".*?Timeout\(ms\)=(?P<limit>\d+)\)"
)
# Lines of standard error: torch's logging of errors, std::terminate's report of an exception, NCCL's log.
_ENDS = re.compile(r"\s*(?:(?:\[rank\d+\]:)?\[[EF]\d+ [^\]]*\]|what\(\):|.*NCCL WARN)\s*(?P<said>.+)$")


def timed_out(text: str) -> TimedOut | None:
    match = _TIMED_OUT.search(text)
    if match is None:
        return None
    return TimedOut(number=int(match["number"]), name=match["name"].lower(), limit_s=int(match["limit"]) / 1000)


def telling_line(output: str) -> str:
    """Return the first line of standard error that reports a fault; later lines are consequences."""
    for line in output.splitlines():
        if match := _ENDS.match(line):
            line_of_fault = match["said"].strip()
            if timed_out(line_of_fault) or device_fault(line_of_fault):
                return line_of_fault[:500]
    return ""


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    rank: int
    host: str
    pid: int = 0
    state: str = "running"
    """running | stopped (SIGSTOP, a debugger) | disk (in a system call that no signal ends) | dead | left (ended by
    itself) | unknown (on a silent host)."""
    step: int = 0
    """Optimizer steps done."""
    phase: str = "start"
    """One of heartbeat.PHASES."""
    collective: str = ""
    """Name of the last collective that the rank entered."""
    collectives: int = 0
    """Number of collectives that the rank has entered."""
    inside: bool = False
    """True if the rank is still in the last collective."""
    idle_s: float = 0.0
    """Seconds since the rank's heartbeat last changed."""
    cpu_busy: bool = False
    """True if the rank uses its processor, or reads or writes files."""
    stopping: bool = False
    """True if the rank was asked to stop."""
    code: int | None = None
    """Exit code, if the rank chose it itself."""
    signal: str = ""
    """Signal that ended the rank, if known."""
    native: bool = False
    """True if a library's own thread, without Python, raised the signal."""
    error: str = ""
    """Exception that ended the rank, as "ValueError: ..."."""
    error_at: str = ""
    """file:line of that exception, innermost line of the project first."""
    refusal: str = ""
    """Message about the user's mistake with which the rank ended, if other ranks did not meet the mistake."""
    stack: tuple[Frame, ...] = ()
    """Python stack, innermost frame first; empty if the rank could not answer."""
    waits_in: str = ""
    """Kernel function in which the rank waits."""
    on_device: bool = False
    """True if the rank computes on a device; a busy processor may then only be polling it."""
    given: int = 0
    """Micro-batches that were queued on the device."""
    done: int = 0
    """Micro-batches that the device has finished."""
    plugin: str = ""
    """Method of a plugin that is running, as "parts.count: after_step"."""
    said: str = ""
    """Line of standard error with a fault below Python, if a signal ended the rank."""
    recorded: tuple[Recorded, ...] = ()
    """Entries of NCCL's flight recorder, read at a stall."""
    resident: int = 0
    """Resident memory in bytes when the rank was last seen alive."""
    awaits: int = 0
    """Id of the process that the rank waits for, while it asks the other ranks in a loop whether the wait is over; see
    `Beat.awaits`."""
    awaited: dict[str, str] = field(default_factory=dict)
    """What is known of the process in `awaits`: `program`, `state` in /proc, kernel function (`waits_in`), last
    `file`."""

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> RankFacts:
        """Parse `to_json` of another host of the job. Raises TypeError, KeyError, ValueError."""
        names = {item.name for item in fields(cls)}
        values = {key: value for key, value in raw.items() if key in names}
        values["stack"] = tuple(Frame(str(f), int(n), str(w)) for f, n, w in raw.get("stack", ()))
        values["recorded"] = tuple(Recorded.from_json(record) for record in raw.get("recorded", ()))
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        stack = [[f.file, f.line, f.function] for f in self.stack]
        return {**vars(self), "stack": stack, "recorded": [vars(record) for record in self.recorded]}


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    name: str
    silent_s: float = 0.0
    """Seconds since the host's agent last sent a message; 0 if it does."""
    closed: bool = False
    """True if the agent ended without a message and its connection was closed, so the host's kernel still answered."""
    oom_kills: int = 0
    """Processes that the host's kernel has killed for lack of memory since the job began."""
    shm_free: int | None = None
    """Free bytes in the host's /dev/shm."""
    xids: tuple[str, ...] = ()
    """Recent faults that the NVIDIA driver reports, as lines of the kernel log."""
    gpu_health: str = ""
    """Memory errors of the host's GPUs by nvidia-smi; empty if there are none, or it was not asked."""


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    trigger: str
    """dead_rank | silent_host | stall | pause. A pause may end by itself."""
    ranks: tuple[RankFacts, ...]
    hosts: tuple[HostFacts, ...]
    here: str = ""
    """Host that collected the facts; rank 0's host, once the ranks have met."""
    stalled_s: float = 0.0
    """Seconds without progress of any rank."""
    again: str = "The same command"
    """Words for the command that continues the run, for messages."""
    alike: bool = True
    """True if all ranks do the same collectives in the same order, so not in a pipeline."""
    experts: bool = False
    """True if the model is a mixture of experts."""
    zero_stage: int = 0
    interface: str = ""
    """Network interface by which `here` reaches the other hosts; empty if unknown."""
    interface_down: bool = False
    memory: dict[str, str] = field(default_factory=dict)
    """Phase -> what is known of a rank's memory in it, in words; empty: nothing."""

    @property
    def step(self) -> int:
        return max((r.step for r in self.ranks), default=0)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The explanation for the user, for events.jsonl, and for the supervisor as its message `fault`."""

    what: str
    """The trigger."""
    cause: str
    """Short name of the cause in the table."""
    host: str
    """The host that differs, or ""."""
    ranks: list[int] = field(default_factory=list)
    """The ranks that differ."""
    step: int = 0
    """Optimizer steps done."""
    signature: str = ""
    """Equal for two faults of one kind at one step: another restart would meet the same fault."""
    text: str = ""
    """The paragraph."""
    unfit: bool = False
    """The host itself is at fault: a restart should leave it out until it is repaired."""
    again: bool = True
    """Another start may succeed; False: it would meet the same fault."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


AGAIN = "<again> continues from the newest checkpoint."
"""Part of a remedy; <again> stands for `JobFacts.again`."""
OTHER_WAY = (
    "The ranks took different paths through the code: look for a condition that depends on the rank or on its "
    "data around that line."
)


@dataclass(frozen=True, kw_only=True)
class Cause:
    name: str
    ranks: Sequence[RankFacts]
    """The ranks that differ."""
    says: str
    """One or two sentences: the fault and its reason. `<is|are>`: for one rank, for several."""
    remedy: str
    host: str = ""
    """The host that differs, if it is not the one of `ranks`."""
    detail: str = ""
    """Distinguishes two faults of this kind; part of the signature."""
    unfit: bool = False
    again: bool = True
    """`unfit` and `again` mean the same as in `Explanation`."""


def live(facts: JobFacts) -> list[RankFacts]:
    return [r for r in facts.ranks if r.state not in ("dead", "left", "unknown")]


def is_secondary(rank: RankFacts) -> bool:
    """True if it died because a peer had gone: an error of communication, or the launcher's SIGTERM."""
    return rank.signal in ("SIGTERM", "SIGINT", "SIGHUP") or is_echo(rank.error) or timed_out(rank.said) is not None


def minority(ranks: Sequence[RankFacts], key: Callable[[RankFacts], object]) -> list[RankFacts]:
    """Return the ranks with the rarest key; on a tie those with the fewest collectives."""
    groups: dict[object, list[RankFacts]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return min(groups.values(), key=lambda group: (len(group), group[0].collectives))


def stands(rank: RankFacts) -> str:
    """Return " at file:line (function)", or "" if unknown."""
    frame = own_line(rank.stack)
    return f" at {place(frame)}" if frame else ""


def call(rank: RankFacts) -> str:
    return f"{rank.collective} #{rank.collectives}"


def where(ranks: Iterable[RankFacts]) -> str:
    """Return "rank 0 waits in all_reduce #120, in backward at ...; ranks 1-3 ..." for groups at one place."""
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
    """Return "rank 3 on node-2", "ranks 0-3 on node-1"; of several hosts, each."""
    hosts: dict[str, list[RankFacts]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(rank)
    parts = [f"{rank_list(group)} on {host}" for host, group in hosts.items()]
    return ", ".join(parts[:4]) + (f" and {len(parts) - 4} more hosts" if len(parts) > 4 else "")


def rank_list(ranks: Iterable[RankFacts]) -> str:
    numbers = sorted(r.rank for r in ranks)
    text = units.spans(numbers, most=6)
    return f"rank {text}" if len(numbers) == 1 else f"ranks {text}"


def names(hosts: Sequence[HostFacts]) -> str:
    return ", ".join(h.name for h in hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")


def first_words(error: str) -> str:
    """Return the error's first line, at most 160 characters, with # for addresses, ports and process ids.

    So repetitions of an error are equal.
    """
    return re.sub(r"0x[0-9a-f]+|\[[^]]*\]:?\d*|\b\d{4,}\b", "#", error.splitlines()[0] if error else "")[:160]
