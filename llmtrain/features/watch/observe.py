"""Observes the ranks of a host from outside: their heartbeats, their processes, their stacks."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmtrain.base.rank import processes
from llmtrain.base.rank.folder import RECORD_WANTED, STACK_SIGNAL, of_rank, read_json
from llmtrain.base.rank.heartbeat import OTHERS, Beat, read
from llmtrain.base.rank.processes import Process, Stat
from llmtrain.base.rank.stacks import Frame
from llmtrain.cluster.gpus import MEMORY_REPORT, Command, KernelLog, memory_fault, read_report
from llmtrain.features.watch.facts import HostFacts, RankFacts, telling_line

_SAMPLE_S = 2.0
_BUSY_SHARE, _BUSY_BYTES = 0.1, 256 << 10
"""Share of a processor, and bytes, in a sample of a busy rank: an idle rank's threads use far less."""
_GROWS_BYTES = 16 << 20
"""Memory growth in a sample that counts as work: unlike a busy processor, it cannot last for ever."""
_COMPUTES = ("start", "export", "compile")
"""Phases that advance with the processor, whatever the rank's device is."""
_OWN_PACE = ("model", "resume", "save", "end")
"""Phases of any length: they advance while files move or memory fills; without a device, while the rank computes."""
_STACK_S, _RECORD_S = 0.5, 2.0
_CRASHES = {
    "Fatal Python error: Segmentation fault": "SIGSEGV",
    "Fatal Python error: Bus error": "SIGBUS",
    "Fatal Python error: Aborted": "SIGABRT",
    "Fatal Python error: Floating-point exception": "SIGFPE",
    "Fatal Python error: Illegal instruction": "SIGILL",
}
"""First line of faulthandler's dump -> signal."""
_D_STATE_S = 5.0


_FRAME = re.compile(r'^\s+File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.*)$')


def parse_stacks(text: str) -> tuple[Frame, ...]:
    """The main thread's stack in faulthandler's newest dump, innermost frame first: the "Current thread" after a
    signal, else the last one, which is the oldest."""
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


def has_mark(pid: int, mark: str) -> bool:
    """True if a process was started with this mark in its environment; False for other users' processes."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"{processes.MARK}={mark}".encode() in file.read().split(b"\0")
    except OSError:
        return False


def descendants(roots: set[int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid in processes.pids():
        stat = processes.stat(pid)
        if stat is not None:
            children.setdefault(stat.parent, []).append(pid)
    below: set[int] = set()
    queue = list(roots)
    while queue:
        for child in children.get(queue.pop(), []):
            if child not in below and child not in roots:
                below.add(child)
                queue.append(child)
    return below


def oom_kills() -> int:
    """Processes that the kernel has killed for lack of memory; 0 if unknown."""
    try:
        with open("/proc/vmstat", "rb") as file:
            for line in file:
                if line.startswith(b"oom_kill "):
                    return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0


def waits_in(pid: int) -> str:
    """The kernel function in which a process waits; empty if unknown."""
    try:
        with open(f"/proc/{pid}/wchan") as file:
            function = file.read().strip()
    except OSError:
        return ""
    return "" if function == "0" else function


@dataclass(frozen=True)
class _Use:
    """Resources that a rank, or the process that it awaits, and the processes below have used so far."""

    root: int
    """Id of the uppermost process."""
    own_s: float
    below_s: float
    moved: int
    resident: int


@dataclass
class _Seen:
    """One rank, as last observed."""

    page: int
    """Descriptors of its heartbeat, its stacks and the requests for them: they outlive the names of the files."""
    stack: int
    ask: int
    beat: Beat
    pidfd: int | None = None
    """Readable when the process ends: its parent leaves only a moment to read the exit status."""
    exit_status: int | None = None
    sampled_s: float = 0.0
    use: _Use | None = None
    computes: bool = False
    """Its own processor time grows: it computes, or polls its device."""
    works: bool = False
    """No waiting rank does this: files move, memory fills, or a process below it computes."""
    resident: int = 0
    """Bytes of memory that it held when it was last seen alive."""


class HostRanks:
    """The ranks with heartbeats in a folder."""

    def __init__(self, folder: Path, host: str, local_size: int, connects_s: float = 0.0) -> None:
        """`connects_s`: silence of a rank during its first connections that is no stall."""
        self._folder, self._host, self._local_size = folder, host, local_size
        self._connects_s = connects_s
        self._seen: dict[int, _Seen] = {}
        self._written: dict[int, int] = {}
        """Size of each rank's stacks before the last request."""

    def observe(self, now: float) -> list[dict[str, Any]]:
        """Return a report of each rank for `Judge.hear`. `now`: time.monotonic()."""
        if len(self._seen) < self._local_size:
            self._look_for_new()
        reports = []
        for seen in self._seen.values():
            seen.beat = read(seen.page) or seen.beat
            facts = self._facts(seen, now)
            counts = {"beats": seen.beat.beats, "timed_steps": seen.beat.timed_steps, "own_s": seen.beat.own_s}
            reports.append({**facts.to_json(), **counts, "active": self._is_active(seen, facts)})
        return reports

    def endings(self) -> list[int]:
        """Return file descriptors that become readable when a rank ends."""
        return [seen.pidfd for seen in self._seen.values() if seen.pidfd is not None]

    def nameless(self) -> bool:
        """True if something has removed a heartbeat's file; an open one is still read."""
        return any(not os.fstat(seen.page).st_nlink for seen in self._seen.values())

    def processes(self) -> list[Process]:
        return [Process(seen.beat.pid, seen.beat.started) for seen in self._seen.values()]

    def complete(self) -> bool:
        return len(self._seen) >= self._local_size

    def gone(self) -> bool:
        return not any(process.alive() for process in self.processes())

    def on_device(self) -> bool:
        return any(seen.beat.on_device for seen in self._seen.values())

    def capture(self, *, record: bool = False) -> list[dict[str, Any]]:
        """Return the reports with each rank's Python stack, in about a second. `record`: with NCCL's flight recorder,
        in two more; only for a job that is to be ended, as a rank calls the driver for it."""
        self._take_stacks()
        if record:
            self._ask_for_records()
        reports = self.observe(time.monotonic())
        for report in reports:
            self._add_stack(report)
            if report["state"] == "dead" and not report["error"]:
                output = _text(of_rank(self._folder, report["rank"], "stderr"))
                report["said"] = telling_line(output)
            if record:
                record_file = read_json(of_rank(self._folder, report["rank"], "record")) or {}
                report["recorded"] = record_file.get("groups", [])
        return reports

    def _take_stacks(self) -> None:
        self._written = {rank: os.fstat(seen.stack).st_size for rank, seen in self._seen.items()}
        for seen in self._seen.values():
            os.write(seen.ask, b"?")
        for rank in self._without_answer():  # Python's lock is held, by a C function perhaps: then no frame changes
            process = Process(self._seen[rank].beat.pid, self._seen[rank].beat.started)
            stat = processes.stat(process.pid)
            if self._seen[rank].beat.left is None and stat is not None and stat.state not in "Tt":
                process.send(STACK_SIGNAL)
        self._without_answer()

    def _without_answer(self) -> list[int]:
        """Return the ranks that do not show their stack in time."""
        deadline = time.monotonic() + _STACK_S
        sizes: dict[int, int] = {}
        while True:
            now = {rank: os.fstat(self._seen[rank].stack).st_size for rank in self._written}
            silent = [rank for rank, size in self._written.items() if now[rank] == size]
            if time.monotonic() > deadline or (now == sizes and not silent):
                return silent
            sizes = now
            time.sleep(0.1)

    def _ask_for_records(self) -> None:
        wanted = [
            of_rank(self._folder, rank, "record")
            for rank, seen in self._seen.items()
            if seen.beat.on_device and seen.beat.left is None and Process(seen.beat.pid, seen.beat.started).alive()
        ]
        with contextlib.suppress(OSError):
            (self._folder / RECORD_WANTED).touch()
        deadline = time.monotonic() + _RECORD_S
        while not all(path.exists() for path in wanted) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _add_stack(self, report: dict[str, Any]) -> None:
        stacks = _content(self._seen[report["rank"]].stack)
        text = stacks[self._written.get(report["rank"], 0) :]
        if not text and report["state"] == "dead":  # faulthandler wrote the stack of a crash
            text = stacks[max(0, stacks.rfind(b"Fatal Python error: ")) :]  # after the answers to earlier questions
            crash = _CRASHES.get(text.partition(b"\n")[0].decode(errors="replace"), "")
            report["signal"] = report["signal"] or crash
            report["native"] = bool(crash) and b"\nCurrent thread" not in text
        frames = parse_stacks(text.decode(errors="replace"))
        report["stack"] = [[f.file, f.line, f.function] for f in frames[:40]]
        report["waits_in"] = waits_in(report["pid"])
        if report["awaits"] not in (0, OTHERS, report["pid"]):
            report["awaited"] = _awaited(report["awaits"])

    def _look_for_new(self) -> None:
        for path in sorted(self._folder.glob("rank-*.beat")):
            beat = read(path)
            if beat is None or beat.rank in self._seen:
                continue
            with contextlib.suppress(OSError):
                page = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                stack = os.open(path.with_suffix(".stack"), os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
                how = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
                ask = os.open(path.with_suffix(".ask"), how, 0o600)
                seen = self._seen[beat.rank] = _Seen(page, stack, ask, beat)
                seen.pidfd = os.pidfd_open(beat.pid)

    def _facts(self, seen: _Seen, now: float) -> RankFacts:
        beat = seen.beat
        stat = processes.stat(beat.pid)
        is_same = stat is not None and stat.started == beat.started
        if stat is not None and is_same and stat.state in "ZX":
            seen.exit_status = stat.exit_status
        ended = stat is None or not is_same or stat.state in "ZX"
        if ended:
            beat = seen.beat = read(seen.page) or beat  # the rank may have left after the first reading
        if ended and seen.pidfd is not None:
            os.close(seen.pidfd)
            seen.pidfd = None
        error, error_at, phase = self._error(beat.rank)
        idle_s = max(0.0, now - beat.beat_s)
        state = "running"
        if ended or error:
            state = "left" if beat.left is not None and not error else "dead"
        elif stat is not None and stat.state in "Tt":
            state = "stopped"
        elif stat is not None and stat.state == "D" and idle_s > _D_STATE_S:
            state = "disk"
        if stat is not None and not ended:
            seen.resident = stat.resident
            self._sample_use(seen, stat, idle_s, now)
        return RankFacts(
            rank=beat.rank,
            host=self._host,
            pid=beat.pid,
            state=state,
            step=beat.step,
            phase=phase or beat.phase,
            collective=beat.collective,
            collectives=beat.collectives,
            inside=beat.inside,
            idle_s=round(idle_s, 1),
            cpu_busy=seen.computes or seen.works,
            awaits=beat.awaits,
            stopping=beat.stopping,
            code=beat.left if beat.left is not None else _code(seen.exit_status),
            signal=_signal(seen.exit_status) if state == "dead" and not error else "",
            error=error,
            error_at=error_at,
            refusal=self._refusal(beat.rank) if state == "left" and beat.left else "",
            on_device=beat.on_device,
            given=beat.given,
            done=beat.done,
            plugin=beat.plugin,
            resident=seen.resident,
        )

    def _sample_use(self, seen: _Seen, stat: Stat, idle_s: float, now: float) -> None:
        if idle_s < _SAMPLE_S:
            seen.use, seen.computes, seen.works = None, True, True
            return
        if seen.beat.inside and seen.beat.awaits == seen.beat.pid:  # it asks the other ranks, and that is no work
            seen.computes = seen.works = False
            return
        if seen.use is not None and now - seen.sampled_s < _SAMPLE_S:
            return
        use, before = _used(seen.beat, stat), seen.use
        if before is not None and before.root == use.root:
            least_s = _BUSY_SHARE * (now - seen.sampled_s)
            seen.computes = use.own_s - before.own_s > least_s
            seen.works = (
                use.below_s - before.below_s > least_s
                or use.moved - before.moved > _BUSY_BYTES
                or use.resident - before.resident > _GROWS_BYTES
            )
        seen.sampled_s, seen.use = now, use

    def _is_active(self, seen: _Seen, facts: RankFacts) -> bool:
        """True for a silent rank that works for an unknown time or waits for others to join. A processor that polls for
        a device does not count: the device's progress is its heartbeat (engine/progress.py)."""
        if facts.state == "running" and facts.awaits:  # its collectives are questions, and end at once
            return facts.awaits != OTHERS and (seen.works or (seen.computes and not facts.on_device))
        if facts.state != "running" or facts.inside:
            return False
        if facts.phase == "rendezvous":
            return True  # the rendezvous has its own limit, and names the missing ranks
        if facts.phase == "connect":
            return facts.idle_s < self._connects_s  # NCCL has no limit there
        computes = seen.computes and not facts.plugin  # a plugin's endless loop ends no earlier than its long wait
        if facts.phase in _COMPUTES:
            return seen.works or computes
        if facts.phase in _OWN_PACE:
            return seen.works or (computes and not facts.on_device)
        return seen.works and seen.beat.timed_steps == 0  # modules are imported, ops are built

    def _refusal(self, rank: int) -> str:
        return str((read_json(of_rank(self._folder, rank, "refusal")) or {}).get("reason", ""))

    def _error(self, rank: int) -> tuple[str, str, str]:
        raw = read_json(of_rank(self._folder, rank, "error")) or {}
        return str(raw.get("error", "")), str(raw.get("at", "")), str(raw.get("phase", ""))


def _used(beat: Beat, stat: Stat) -> _Use:
    """Return the resources used by a rank, whose /proc stat is `stat`, and by the processes below it; or by another
    process that it awaits."""
    pid, below_s = beat.pid, 0.0
    own_s, resident = stat.cpu_s - beat.asked_s, stat.resident
    if beat.awaits not in (0, OTHERS, pid):
        pid, own_s, resident = beat.awaits, 0.0, 0
        if child := processes.stat(pid):
            below_s, resident = child.cpu_s, child.resident
    moved = processes.bytes_moved(pid)
    for child_pid in descendants({pid}):
        below = processes.stat(child_pid)
        below_s += below.cpu_s if below else 0.0
        moved += processes.bytes_moved(child_pid)
    return _Use(root=pid, own_s=own_s, below_s=below_s, moved=moved, resident=resident)


def _awaited(pid: int) -> dict[str, str]:
    """Describe a process for which a rank waits; `file`: the one that it has opened last."""
    words, stat, files = processes.words(pid), processes.stat(pid), [""]
    with contextlib.suppress(OSError):
        for handle in sorted(int(name) for name in os.listdir(f"/proc/{pid}/fd"))[3:]:
            file = os.readlink(f"/proc/{pid}/fd/{handle}")
            files += [file] if file.startswith("/") and not file.startswith(("/dev/", "/memfd:")) else []
    program = words[words.index("-m") + 1] if "-m" in words[:-1] else " ".join(words[:1])
    state = stat.state if stat else ""
    return {"program": program, "state": state, "waits_in": waits_in(pid), "file": files[-1]}


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _content(handle: int) -> bytes:
    return os.pread(handle, os.fstat(handle).st_size, 0)


def _signal(status: int | None) -> str:
    number = (status or 0) & 0x7F
    if not number:
        return ""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _code(status: int | None) -> int | None:
    return None if status is None or status & 0x7F else status >> 8


_LATELY_S = 600.0
"""Seconds before a stall in which a GPU fault in the kernel log still belongs to it."""
_WITHIN_S = 2.5


def captured(ranks: HostRanks, stall_s: float, *, ends: bool) -> dict[str, Any]:
    """Return this host's facts for an explanation, within 3 s: `stacks` and `shm_free` (HostFacts).

    If a job on GPUs is about to be ended (`ends`), also `xids` and `gpu_health`. Only then, because asking the driver
    can block a rank.
    """
    free = None
    with contextlib.suppress(OSError):
        free = shutil.disk_usage("/dev/shm").free
    if not ends or not ranks.on_device():
        return {"stacks": ranks.capture(), "shm_free": free}
    kernel, memory = KernelLog(_LATELY_S + stall_s, _WITHIN_S), Command(MEMORY_REPORT, _WITHIN_S)
    stacks = ranks.capture(record=True)
    faults = {bus: memory_fault(gpu) for bus, gpu in read_report(memory.answer()).items()}
    health = "; ".join(f"GPU {bus}: {what}" for bus, what in faults.items() if what)
    return {"stacks": stacks, "shm_free": free, "xids": kernel.xid_lines(), "gpu_health": health[:500]}


def with_answer(host: HostFacts, answer: dict[str, Any]) -> HostFacts:
    xids, free = tuple(str(line) for line in answer.get("xids", ())), answer.get("shm_free")
    host = replace(host, shm_free=free if isinstance(free, int) else None)
    return replace(host, xids=xids, gpu_health=str(answer.get("gpu_health", "")))
