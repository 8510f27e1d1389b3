"""The heartbeat of a rank: a page of memory that the rank shares with its host's agent.

The rank writes words of 8 bytes and never waits: entering and leaving a collective costs 0.65 microseconds
(tools/bench/watch.py). The agent can read the page at any time, also when the rank hangs or is dead.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmtrain.base.rank import processes

PHASES = (
    *("start", "rendezvous", "connect", "model", "resume", "data", "reference", "forward", "backward", "step"),
    *("compile", "compare", "save", "evaluate", "export", "end"),
)
"""Phases of a rank. A training step is `data`, then `forward` and `backward` for each micro-batch, then `step`.
`connect`: the ranks have met, and their process groups connect. `reference`: forward passes before a step (LooksAhead).
`compile`: torch.compile is at work."""

_MAGIC = int.from_bytes(b"llmbeat1", "little")
_WORDS = (
    *("magic", "pid", "started", "rank", "local_rank", "beats", "step", "phase", "left", "stopping", "collectives"),
    *("inside", "timed_steps", "beat_s", "waited_s", "own_s", "on_device", "given", "done"),
    *("awaits", "asked_s"),
)
_AT = {name: index for index, name in enumerate(_WORDS)}
_NAME_AT, NAME_BYTES = 8 * len(_WORDS), 48
_CALL_AT, _CALL_BYTES = _NAME_AT + NAME_BYTES, 64
_SIZE = mmap.PAGESIZE

_BEATS, _STEP, _PHASE = _AT["beats"], _AT["step"], _AT["phase"]
_COLLECTIVES, _INSIDE, _TIMED = _AT["collectives"], _AT["inside"], _AT["timed_steps"]
_BEAT_S, _WAITED_S, _OWN_S = _AT["beat_s"], _AT["waited_s"], _AT["own_s"]
_GIVEN, _DONE, _AWAITS, _ASKED_S = _AT["given"], _AT["done"], _AT["awaits"], _AT["asked_s"]
_RUNNING = -1
OTHERS = -1
"""Stands for a process id: the rank waits for what other ranks wait for."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """The contents of a rank's page at one time."""

    pid: int
    started: int
    """Start time of the process, see `processes.Stat.started`."""
    rank: int
    local_rank: int
    beats: int
    """Grows with everything that the rank does."""
    step: int
    """Optimizer steps done."""
    phase: str
    left: int | None
    """Exit code with which the rank is about to end by itself; None while it works."""
    stopping: bool
    """True if the rank was asked to stop, which it will do at the next step boundary."""
    collectives: int
    """Collectives entered so far."""
    inside: bool
    """True while the rank is inside the last collective."""
    collective: str
    """Name of the last collective."""
    timed_steps: int
    """Steps since the launch that `own_s` covers."""
    beat_s: float
    """time.monotonic() of the last beat."""
    own_s: float
    """Seconds of the timed steps outside of collectives."""
    on_device: bool
    """True if the rank computes on a device; a busy processor may then only be polling it."""
    given: int
    """Marks put into the device's queue: after each micro-batch and each update."""
    done: int
    """Marks that the device has reached."""
    plugin: str
    """The plugin's method that is running, as "parts.count: after_step"; empty: none."""
    awaits: int
    """Id of a process whose work counts as this rank's progress, or OTHERS (see `Heartbeat.awaits`); 0: none."""
    asked_s: float
    """Processor time (s) of this rank in collectives while `awaits` is set."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Heartbeat:
    """The writing side. Before `connect` it writes to private memory, so that callers need not check for a watch."""

    def __init__(self) -> None:
        # Private: else ranks forked from one process would count each other's collectives.
        self._use(mmap.mmap(-1, _SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), rank=0, local_rank=0)

    def connect(self, path: Path, *, rank: int, local_rank: int) -> None:
        """Write into a new file that the agent reads. Raises OSError."""
        self._use(_shared(path), rank=rank, local_rank=local_rank)
        os.rename(path.with_suffix(".new"), path)  # a reader finds a complete page or none

    def _use(self, memory: mmap.mmap, *, rank: int, local_rank: int) -> None:
        self._memory = memory
        view = memoryview(memory)
        self._words = view.cast("q")
        self._times = view.cast("d")
        stat = processes.stat(os.getpid())
        for name, value in (
            ("pid", os.getpid()),
            ("started", stat.started if stat else 0),
            ("rank", rank),
            ("local_rank", local_rank),
            ("left", _RUNNING),
        ):
            self._words[_AT[name]] = value
        self._entered_s = self._step_began_s = self._waited_before_s = self._computed_s = 0.0
        self._awaits = 0
        self._times[_BEAT_S] = time.monotonic()
        self._words[_AT["magic"]] = _MAGIC

    def phase(self, name: str) -> None:
        self._words[_PHASE] = _PHASE_AT[name]
        self.beat()

    def in_phase(self) -> str:
        return PHASES[self._words[_PHASE]]

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Set this phase while the block runs, and then the previous one again, unless the block raises."""
        before = self._words[_PHASE]
        self.phase(name)
        yield
        self._words[_PHASE] = before
        self.beat()

    @contextlib.contextmanager
    def calling(self, plugin: str, method: str) -> Iterator[None]:
        """Record a plugin's method while it runs, such as `parts.count` and `after_step`."""
        self._memory[_CALL_AT : _CALL_AT + _CALL_BYTES] = _call(plugin, method)
        try:
            yield
        finally:
            self._memory[_CALL_AT] = 0

    def awaits(self, pid: int) -> None:
        """Begin a wait during which the work of process `pid`, a child or this rank itself, counts as progress.
        Collectives do not, since in them the ranks only ask each other whether the wait has ended. OTHERS: wait for
        work of other ranks. 0: the wait is over."""
        self._awaits = self._words[_AWAITS] = pid
        self._words[_BEATS] += not pid

    def at_step(self, step: int) -> None:
        """Set the number of optimizer steps done before this launch."""
        self._words[_STEP] = step

    def begin_step(self) -> None:
        self._step_began_s = time.monotonic()
        self._waited_before_s = self._times[_WAITED_S]
        self.phase("data")

    def end_step(self, step: int) -> tuple[float, float]:
        """Stop timing the step. Returns (its seconds without evaluation and saves, the part of them inside
        collectives)."""
        waited_s = self._times[_WAITED_S] - self._waited_before_s
        step_s = time.monotonic() - self._step_began_s
        self._times[_OWN_S] += step_s - waited_s
        self._words[_TIMED] += 1
        self._words[_STEP] = step
        self.beat()
        return step_s, waited_s

    def enter(self, name: bytes) -> None:
        """Enter a collective; a nested one is not counted. `name`: from `named`."""
        words = self._words
        words[_INSIDE] += 1
        if words[_INSIDE] > 1:
            return
        self._memory[_NAME_AT : _NAME_AT + NAME_BYTES] = name
        words[_COLLECTIVES] += 1
        now = self._entered_s = time.monotonic()
        if self._awaits:
            self._computed_s = time.process_time()  # of all threads, also gloo's
        else:
            words[_BEATS] += 1
            self._times[_BEAT_S] = now

    def leave(self) -> None:
        words, times = self._words, self._times
        words[_INSIDE] -= 1
        if words[_INSIDE] > 0:
            return
        now = time.monotonic()
        times[_WAITED_S] += now - self._entered_s
        if self._awaits:
            times[_ASKED_S] += time.process_time() - self._computed_s
        else:
            words[_BEATS] += 1
            times[_BEAT_S] = now

    def waited_s(self) -> float:
        """Return the seconds inside collectives since the launch."""
        waited_s: float = self._times[_WAITED_S]
        return waited_s

    def idle_s(self) -> float:
        return time.monotonic() - float(self._times[_BEAT_S])

    def on_device(self) -> None:
        """Record that the rank computes on a device, whose progress `gave` and `device_did` count."""
        self._words[_AT["on_device"]] = 1

    def gave(self) -> None:
        self._words[_GIVEN] += 1

    def device_did(self, count: int) -> None:
        """Count marks that the device has reached. Safe to call from another thread."""
        self._words[_DONE] += count
        self.beat()

    def stopping(self) -> None:
        """Record that the rank was asked to stop. Safe in a signal handler."""
        self._words[_AT["stopping"]] = 1

    def left(self, code: int) -> None:
        """Record that the rank exits by itself with this code."""
        self._words[_PHASE] = _PHASE_AT["end"]
        self._words[_AT["left"]] = code
        self.beat()

    def is_leaving(self) -> bool:
        return self._words[_AT["left"]] != _RUNNING

    def beat(self) -> None:
        self._words[_BEATS] += 1
        self._times[_BEAT_S] = time.monotonic()


_PHASE_AT = {name: index for index, name in enumerate(PHASES)}


@functools.cache
def _call(plugin: str, method: str) -> bytes:
    return f"{plugin}: {method}".encode(errors="replace")[:_CALL_BYTES].ljust(_CALL_BYTES, b"\0")


def named(name: str) -> bytes:
    """Encode a collective's name for `Heartbeat.enter`."""
    return name.encode(errors="replace")[:NAME_BYTES].ljust(NAME_BYTES, b"\0")


def _shared(path: Path) -> mmap.mmap:
    new = path.with_suffix(".new")
    handle = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(handle, 0, _SIZE)  # else with a full /dev/shm the first beat would be a SIGBUS
        return mmap.mmap(handle, _SIZE)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(handle)


def read(page: Path | int) -> Beat | None:
    """Return the state of a rank; None: the page is not valid. `page`: its path, or a descriptor, which still works
    after the file is deleted."""
    try:
        raw = os.pread(page, _SIZE, 0) if isinstance(page, int) else page.read_bytes()
    except OSError:
        return None
    if len(raw) < _SIZE:
        return None
    words, times = memoryview(raw).cast("q"), memoryview(raw).cast("d")
    phase = words[_PHASE]
    if words[0] != _MAGIC or not 0 <= phase < len(PHASES):
        return None
    left = words[_AT["left"]]
    return Beat(
        **{name: words[_AT[name]] for name in ("pid", "started", "rank", "local_rank", "beats", "step", "timed_steps")},
        phase=PHASES[phase],
        left=None if left == _RUNNING else left,
        stopping=bool(words[_AT["stopping"]]),
        collectives=words[_COLLECTIVES],
        inside=words[_INSIDE] > 0,
        collective=raw[_NAME_AT : _NAME_AT + NAME_BYTES].rstrip(b"\0").decode(errors="replace"),
        beat_s=times[_BEAT_S],
        own_s=times[_OWN_S],
        on_device=bool(words[_AT["on_device"]]),
        given=words[_GIVEN],
        done=words[_DONE],
        awaits=words[_AWAITS],
        asked_s=times[_ASKED_S],
        plugin=raw[_CALL_AT : _CALL_AT + _CALL_BYTES].partition(b"\0")[0].decode(errors="replace"),
    )


heart = Heartbeat()
"""This process's heartbeat; `watch.begin` connects it."""


_FUNCTIONS = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "_all_gather_base", "barrier"),
    *("batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend"),
    *("monitored_barrier", "new_group", "recv", "reduce", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_tensor", "_reduce_scatter_base", "scatter", "scatter_object_list", "send", "split_group"),
)


def count_collectives(torch: Any) -> None:
    """Count torch.distributed's collectives, which DeepSpeed's calls end in, in this heartbeat. Call it once a process,
    before DeepSpeed starts. `torch`: the module, which the watch does not import itself. The count tells apart ranks
    that wait in the same line in different rounds."""
    dist = torch.distributed
    if getattr(dist.all_reduce, "counted", False):
        return
    compiling = torch.compiler.is_compiling
    for name in _FUNCTIONS:
        plain = getattr(dist, name, None)
        if plain is not None:
            setattr(dist, name, _counted(name.removeprefix("_"), plain, compiling))
    dist.Work.wait = _counted("an asynchronous collective", dist.Work.wait, compiling)


def _counted(name: str, plain: Callable[..., Any], compiling: Callable[[], bool]) -> Callable[..., Any]:
    entry = named(name)
    enter, leave = heart.enter, heart.leave

    @functools.wraps(plain)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if compiling():  # torch.compile must see the plain function, which it knows by name
            return plain(*args, **kwargs)
        enter(entry)
        try:
            return plain(*args, **kwargs)
        finally:
            leave()

    counted.counted = True  # type: ignore[attr-defined]
    return counted
