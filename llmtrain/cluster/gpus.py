"""NVIDIA's reports on a host's GPUs: the driver's lines in the kernel log, nvidia-smi's report, NVLinks.

The watch imports this file; doctor pipes it into a host's Python, before probe.py: standard library only, Python 3.8
on.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<bus>[0-9a-fA-F:.]+)\): (?P<number>\d+)")
_KERNEL_LOG = "/dev/kmsg"
_MOST_BYTES = 4 << 20
_DAY_S = 86400.0
_REPORT = ("nvidia-smi", "-q")
MEMORY_REPORT = (*_REPORT, "-d", "ECC,PAGE_RETIREMENT,ROW_REMAPPER")
"""Command for the part of the report about a GPU's memory."""
_SECTIONS = ("MIG Mode", "ECC Errors", "Retired Pages", "Remapped Rows", "Fabric", "FB Memory Usage", "Processes")
"""Sections of the report that doctor reads."""


@dataclass(frozen=True)
class Xid:
    """A fault that the driver has written to the kernel log."""

    bus: str
    """PCI address of the GPU."""
    number: int

    @property
    def meaning(self) -> str:
        return _XIDS.get(self.number, ("a fault of the GPU", False))[0]

    @property
    def unfit(self) -> bool:
        """True if the GPU or its link is broken, or unusable until a reset: nothing that a user's program causes."""
        return _XIDS.get(self.number, ("", False))[1]

    def __str__(self) -> str:
        return f"Xid {self.number} of GPU {self.bus}: {self.meaning}"


_XIDS: Mapping[int, tuple[str, bool]] = {
    13: ("a kernel read or wrote where it must not, or had an illegal instruction", False),
    31: ("a kernel used an address that is not mapped", False),
    43: ("the GPU stopped processing for a program, which made a mistake", False),
    45: ("a program's work was cleared away after another fault", False),
    48: ("an uncorrectable error of its memory (double-bit ECC)", True),
    61: ("its internal controller had a fault", False),
    62: ("its internal controller has halted", True),
    63: ("a part of its memory was taken out of use after an ECC error", False),
    64: ("a part of its memory could not be taken out of use", True),
    69: ("a kernel had an illegal instruction or argument", False),
    74: ("an error of an NVLink", True),
    79: ("it has fallen off the bus", True),
    92: ("a high rate of ECC errors that were corrected", False),
    94: ("an uncorrectable error of its memory, kept to the program that met it", False),
    95: ("an uncorrectable error of its memory that affects all programs", True),
    109: ("it did not switch between programs in time", True),
    119: ("its system processor (GSP) did not answer", True),
    120: ("its system processor (GSP) had a fault", True),
    136: ("its link to other GPUs could not be trained", True),
    137: ("a program met an error of an NVLink elsewhere", False),
    140: ("an uncorrectable error of its memory", True),
    143: ("it could not be started", True),
    **dict.fromkeys(range(144, 151), ("an error of an NVLink", True)),
}
"""Xid number -> (meaning, True if the host is unfit for work), after NVIDIA's document "XID Errors"."""


def read_xids(lines: Iterable[str]) -> list[Xid]:
    """Return the faults in a kernel log's lines, in order; a fault that a GPU repeats is returned once."""
    matches = (_XID.search(line) for line in lines)
    return list(dict.fromkeys(Xid(match["bus"], int(match["number"])) for match in matches if match))


def read_report(text: str) -> dict[str, dict[str, Any]]:
    """Parse `nvidia-smi -q`. Returns PCI address -> sections as nested dicts; "N/A" stays a text. A key that is
    repeated (as for processes) has a list: {"Processes": {"Type": ["C", "C"]}}."""
    gpus: dict[str, dict[str, Any]] = {}
    gpu: dict[str, Any]
    open_: list[tuple[int, dict[str, Any]]] = []  # the sections that enclose this line, with their indents
    for line in text.splitlines():
        if line.startswith("GPU "):
            gpus[line[4:].strip()] = gpu = {}
            open_ = [(0, gpu)]
            continue
        key, colon, value = (part.strip() for part in line.partition(" : "))
        indent = len(line) - len(line.lstrip())
        if not open_ or not indent or not key:
            continue
        while len(open_) > 1 and open_[-1][0] >= indent:
            open_.pop()
        enclosing = open_[-1][1]
        if not colon:
            section = enclosing.setdefault(key, {})
            if isinstance(section, dict):
                open_.append((indent, section))
        elif key in enclosing:
            enclosing[key] = [*as_list(enclosing[key]), value]
        else:
            enclosing[key] = value
    return gpus


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def section(gpu: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    for name in names:
        inner = gpu.get(name)
        gpu = inner if isinstance(inner, Mapping) else {}
    return gpu


def memory_fault(gpu: Mapping[str, Any]) -> str:
    """Return the memory faults in a GPU's report as text; empty: none."""
    words = []
    volatile = section(gpu, "ECC Errors", "Volatile")
    broken = sum(int(v) for k, v in volatile.items() if "Uncorrectable" in k and str(v).isdigit())
    if broken:
        words.append(f"{broken} uncorrectable ECC error{'s' * (broken > 1)} since the driver was loaded")
    rows = section(gpu, "Remapped Rows")
    if rows.get("Remapping Failure Occurred") == "Yes":
        words.append("rows of its memory could not be replaced")
    if "Yes" in (rows.get("Pending"), section(gpu, "Retired Pages").get("Pending Page Blacklist")):
        words.append("a broken part of its memory is replaced at the next reset only")
    return "; ".join(words)


def read_links(text: str) -> list[tuple[int, int]]:
    """Parse `nvidia-smi nvlink -s`. Returns (NVLinks that are up, all NVLinks) of each GPU in order."""
    links: list[tuple[int, int]] = []
    for line in text.splitlines():
        if line.startswith("GPU "):
            links.append((0, 0))
        elif links and re.match(r"\s+Link \d+:", line):
            up, every = links[-1]
            links[-1] = (up + ("inactive" not in line), every + 1)
    return links


class Command:
    """A command that is started at once and read later: nvidia-smi takes a second, and never ends after a GPU was
    lost."""

    def __init__(self, argv: tuple[str, ...], within_s: float) -> None:
        self._until_s = time.monotonic() + within_s
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # no such command
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def answer(self) -> str:
        """Return the output if the command ends in time, else "". A process that hangs in the kernel is abandoned."""
        if self._process is None or self._process.stdout is None:
            return ""
        handle, output = self._process.stdout.fileno(), bytearray()
        os.set_blocking(handle, False)
        while time.monotonic() < self._until_s and len(output) < _MOST_BYTES:
            try:
                data = os.read(handle, 1 << 16)
            except BlockingIOError:
                time.sleep(0.02)
                continue
            if not data:
                self._process.poll()
                return output.decode(errors="replace")
            output += data
        self._process.kill()
        return ""


class KernelLog:
    """Reads the driver's fault reports of the last `seconds` from the kernel log."""

    def __init__(self, seconds: float, within_s: float) -> None:
        self._lines: list[str] | None = None
        try:
            self._lines = _kernel_log(seconds)
        except OSError:  # often only for root; the groups adm and systemd-journal may read the journal
            words = ("journalctl", "-k", "-q", "--no-pager", "-o", "cat", f"--since=-{seconds:.0f}s")
            self._journal = Command(words, within_s)

    def xid_lines(self) -> list[str]:
        """Return the newest 50 lines with faults, oldest first; none if this user may not read the log."""
        lines = self._lines if self._lines is not None else self._journal.answer().splitlines()
        return [line for line in lines if _XID.search(line)][-50:]


def _kernel_log(seconds: float) -> list[str]:
    """Return recent kernel messages without their "priority,number,microseconds,...;". Raises OSError."""
    since_us = (time.monotonic() - seconds) * 1e6
    handle = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    texts: list[str] = []
    try:
        while True:
            try:
                raw = os.read(handle, 8192)
            except BlockingIOError:  # no more
                return texts
            except BrokenPipeError:  # overwritten while it was read: go on with the next
                continue
            if not raw:
                return texts
            head, _, text = raw.decode(errors="replace").partition(";")
            with contextlib.suppress(ValueError, IndexError):
                if int(head.split(",")[2]) >= since_us:
                    texts.append(text.partition("\n")[0])
    finally:
        os.close(handle)


def look_gpus(ask: Mapping[str, Any]) -> dict[str, Any]:
    if shutil.which("nvidia-smi") is None:
        return {}
    within_s = 9.0
    report, links = Command(_REPORT, within_s), Command(("nvidia-smi", "nvlink", "-s"), within_s)
    kernel = KernelLog(_DAY_S, within_s)
    gpus = read_report(report.answer())
    return {
        "report": [{"bus": bus, **{name: gpu[name] for name in _SECTIONS if name in gpu}} for bus, gpu in gpus.items()],
        "links": read_links(links.answer()),
        "xids": kernel.xid_lines(),
    }
