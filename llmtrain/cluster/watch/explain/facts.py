"""What is known of a job when it is to be explained: gathered on every host, read by paragraph.py and its tables."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from llmtrain.cluster.watch.explain.device_faults import device_fault, timed_out


@dataclass(frozen=True)
class Frame:
    """A line of Python that a rank is in."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What NCCL's flight recorder has of one process group on one rank."""

    group: str
    """Its name, the same on all its ranks."""
    ranks: tuple[int, ...]
    """Global ranks of its members."""
    begun: int
    """Number of the newest collective that this rank has handed to its device; 0: none that is still recorded."""
    pending: int = 0
    """Number of the oldest one that has not ended on the device; 0: all have."""
    name: str = ""
    """Name of that one."""

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Recorded:
        """Of what `vars` gives. Raises TypeError, KeyError, ValueError."""
        numbers = {key: int(raw[key]) for key in ("begun", "pending")}
        return cls(group=str(raw["group"]), ranks=tuple(map(int, raw["ranks"])), name=str(raw["name"]), **numbers)


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """One rank."""

    rank: int
    host: str
    pid: int = 0
    state: str = "running"
    """running | stopped (SIGSTOP, a debugger) | disk (in a system call that no signal ends) | dead | left (ended by
    itself) | unknown (on a host of which nothing is heard)."""
    step: int = 0
    """Optimizer steps done."""
    phase: str = "start"
    """One of heartbeat.PHASES."""
    collective: str = ""
    """The last collective that it entered."""
    collectives: int = 0
    """How many it has entered."""
    inside: bool = False
    """It is still in that collective."""
    idle_s: float = 0.0
    """Seconds since it did anything that its heartbeat shows."""
    cpu_busy: bool = False
    """It uses its processor, or its files move."""
    stopping: bool = False
    """It was asked to stop."""
    code: int | None = None
    """The exit code that it chose itself."""
    signal: str = ""
    """The signal that ended it, where that is known."""
    native: bool = False
    """A thread without Python raised it: one of a library's own."""
    error: str = ""
    """The exception that ended it, as "ValueError: ..."."""
    error_at: str = ""
    """file:line of that exception, innermost line of the project first."""
    stack: tuple[Frame, ...] = ()
    """Innermost first; empty for a rank that could not answer."""
    waits_in: str = ""
    """The kernel function in which it waits."""
    on_device: bool = False
    """It computes on a device: then it keeps its processor busy also while it only waits for that."""
    given: int = 0
    """Micro-batches that it has handed to its device."""
    done: int = 0
    """Those that the device has done."""
    said: str = ""
    """The line of its standard error that tells of a fault below Python, of a rank that a signal ended."""
    recorded: tuple[Recorded, ...] = ()
    """Of NCCL's flight recorder, asked at a stall."""

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> RankFacts:
        """Of what `to_json` gave, on another host of the job. Raises TypeError, KeyError, ValueError."""
        known = {item.name for item in fields(cls)}
        given = {key: value for key, value in raw.items() if key in known}
        given["stack"] = tuple(Frame(str(f), int(n), str(w)) for f, n, w in raw.get("stack", ()))
        given["recorded"] = tuple(Recorded.from_json(each) for each in raw.get("recorded", ()))
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        stack = [[f.file, f.line, f.function] for f in self.stack]
        return {**vars(self), "stack": stack, "recorded": [vars(each) for each in self.recorded]}


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """One host."""

    name: str
    silent_s: float = 0.0
    """Seconds since its watch was last heard; 0 while it is there."""
    closed: bool = False
    """Its watch has ended without a message, but the connection was closed: the host's kernel still answered."""
    oom_kills: int = 0
    """Processes that its kernel has ended for lack of memory since the job began."""
    xids: tuple[str, ...] = ()
    """Lines of its kernel log in which the NVIDIA driver told of a fault lately."""
    gpu_health: str = ""
    """What nvidia-smi says of errors of its GPUs' memory; empty when all is well or nothing was asked."""


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """Everything that the table of causes may look at."""

    trigger: str
    """dead_rank | silent_host | stall | pause: the last one may pass."""
    ranks: tuple[RankFacts, ...]
    hosts: tuple[HostFacts, ...]
    here: str = ""
    """The host on which these facts were put together: that of rank 0, once the ranks have met."""
    stalled_s: float = 0.0
    """How long no rank has made progress."""
    alike: bool = True
    """All ranks do the same collectives in the same order: not so in a pipeline."""
    experts: bool = False
    """The model is a mixture of experts."""
    zero_stage: int = 0

    @property
    def step(self) -> int:
        """The last optimizer step that any rank has done."""
        return max((r.step for r in self.ranks), default=0)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What the user reads, what events.jsonl holds, what the supervisor gets."""

    what: str
    """The trigger."""
    cause: str
    """Its short name in the table of causes."""
    host: str
    """The host that differs; "" where none does."""
    ranks: list[int] = field(default_factory=list)
    """The ranks that differ."""
    step: int = 0
    """Optimizer steps done."""
    signature: str = ""
    """Equal for two faults of the same kind at the same step: a restart would meet it again."""
    text: str = ""
    """The paragraph."""
    unfit: bool = False
    """The fault is one of the host itself: a restart should leave it out until somebody has looked at it."""
    again: bool = True
    """Another start may do better; False: it would meet the same fault."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_FRAME = re.compile(r'^\s+File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.*)$')


def parse_stacks(text: str) -> tuple[Frame, ...]:
    """The main thread's stack in the newest dump of faulthandler, innermost frame first.

    A signal reaches the main thread when it can; that block says "Current thread". Otherwise the main thread is the
    last one, because it is the oldest.
    """
    blocks: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if "(most recent call first):" in line:
            blocks.append((line, []))
        elif blocks and (match := _FRAME.match(line)):
            blocks[-1][1].append(Frame(match["file"], int(match["line"]), match["function"]))
    if not blocks:
        return ()
    current = [frames for head, frames in blocks if head.startswith("Current thread") and frames]
    return tuple(current[-1] if current else blocks[-1][1])


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
