"""The preflight, which begins every launch: all checks of doctor without a measurement between the hosts, and its
report. It can compile a run's DeepSpeed ops on all hosts, so that no run waits for a compiler."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmtrain.base import untrusted
from llmtrain.base.errors import ConfigError
from llmtrain.base.rank.op_builds import BUILD_LOCK
from llmtrain.base.units import counted, duration
from llmtrain.cluster.hosts.hostfile import Host
from llmtrain.cluster.hosts.ssh import NO_PDSH, on_hosts
from llmtrain.cluster.hosts.variables import deepspeed_env_problems
from llmtrain.features.doctor import checks, differences, survey
from llmtrain.features.doctor.checks import CHECKS, STALE_S, Finding, Level, Needs, Survey
from llmtrain.features.doctor.differences import right_interfaces

MASTER_PORT = 29500
"""DeepSpeed's default for the rendezvous."""
_OWN_FOLDERS = (
    "no shared file system at checkpoint.dir ({folder}): each host keeps the files of its own ranks. A resume needs "
    "the same hosts, or their files gathered"
)


def preflight(
    hosts: Sequence[Host],
    run: Needs | None = None,
    *,
    port: int = MASTER_PORT,
    ssh_port: int | None = None,
) -> Report:
    """Check all but the network between the hosts, in a few seconds.

    Args:
        hosts: of read_hostfile, or select.
        port: of the rendezvous; 0: do not look at it.
        ssh_port: of every sshd, where it is not 22.

    Raises: ConfigError: there is no ssh program.
    """
    started = time.monotonic()
    answers = survey.look(hosts, run, port, ssh_port)
    asked = set(CHECKS) - {"fabric"}
    asked -= set() if run is not None else {"config", "files"}
    asked -= set() if answers.nonce else {"shared"}
    asked -= set() if port else {"port"}
    asked -= {"name", "ssh"} if answers.alone else set()
    asked -= set() if any(facts.get("gpus") for facts in answers.facts.values()) else {"gpus"}
    every = [*checks.each_host(answers), *checks.all_gpus(answers), *differences.all_hosts(answers)]
    findings = in_order(every, hosts)
    separate = answers.own_folders and not all(answers.nonce.values())
    notes = (_OWN_FOLDERS.format(folder=answers.run_dir),) if separate else ()
    elapsed_s = time.monotonic() - started
    return Report(survey=answers, findings=findings, checked=frozenset(asked), elapsed_s=elapsed_s, notes=notes)


def examine(hosts: Sequence[Host], run: Needs, port: int) -> str | None:
    """Return the first host's address as the others know it, if one knows. Prints what it finds. Raises ConfigError."""
    report = preflight(hosts, run, port=port)
    if report.findings:
        width = None if sys.stderr.isatty() else WITHOUT_TERMINAL
        print_report(report, Console(stderr=True, width=width, highlight=False))
    if not report.ok:
        raise ConfigError("nothing was started: fix what is marked FAIL, and check with `llmtrain doctor`")
    return report.address


def in_order(findings: Sequence[Finding], hosts: Sequence[Host]) -> tuple[Finding, ...]:
    order = {host.name: index for index, host in enumerate(hosts)}
    key = lambda f: (f.level != "red", order.get(f.host, 0), CHECKS.index(f.check))  # noqa: E731
    return tuple(sorted(findings, key=key))


_MANY = 32
"""Least number of hosts with which equal rows share a line."""
_WIDE = 163
"""Width in columns of a terminal on which the complete table fits."""
WITHOUT_TERMINAL = 168
"""Width of output that goes to no terminal."""
_MARKS = {"red": ("FAIL", "bold red"), "yellow": ("warn", "yellow"), "ok": ("ok", "green"), "": ("-", "dim")}


@dataclass(frozen=True, kw_only=True)
class Report:
    survey: Survey
    findings: tuple[Finding, ...]
    checked: frozenset[str]
    """The CHECKS that were made."""
    elapsed_s: float
    fabric: Mapping[str, Any] = field(default_factory=dict)
    """Measurements between the hosts; empty without any."""
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not any(finding.level == "red" for finding in self.findings)

    @cached_property
    def interfaces(self) -> dict[str, str]:
        """Interface of each host by which the others reach it, if known."""
        return right_interfaces(self.survey)

    @property
    def address(self) -> str | None:
        """IPv4 address of the first host as the others know it: rank 0 listens on it."""
        first = self.survey.hosts[0].name
        for host in reversed(self.survey.hosts):
            address = self.survey.facts.get(host.name, {}).get("names", {}).get("addresses", {}).get(first)
            if address is not None:
                return str(address)
        return None

    @cached_property
    def _levels(self) -> dict[tuple[str, str], str]:
        ordered = sorted(self.findings, key=lambda finding: finding.level == "red")
        return {(finding.host, finding.check): finding.level for finding in ordered}

    def cell(self, host: str, check: str) -> str:
        """Return "red", "yellow", "ok", or "" if unknown."""
        if (host, check) in self._levels:
            return self._levels[host, check]
        if check not in self.checked:
            return ""
        if check in ("name", "ssh", "python"):
            answered = host in self.survey.facts or (check == "ssh" and host in self.survey.failures)
            return "ok" if answered else ""
        if check == "port" and host != self.survey.hosts[0].name:
            return ""
        return "ok" if host in self.survey.facts else ""

    def as_json(self) -> dict[str, Any]:
        """Return the complete report for programs, without values of secrets."""
        return {
            "ok": self.ok,
            "elapsed_s": round(self.elapsed_s, 3),
            "hosts": [
                {
                    "name": host.name,
                    "slots": host.slots,
                    "cells": {check: self.cell(host.name, check) or "unknown" for check in CHECKS},
                    "interface": self.interfaces.get(host.name),
                    "facts": self.survey.facts.get(host.name),
                }
                for host in self.survey.hosts
            ],
            "findings": [asdict(finding) for finding in self.findings],
            "fabric": dict(self.fabric),
            "notes": list(self.notes),
        }


def print_report(report: Report, console: Console) -> None:
    """Print the table, a fix for each fault, and a summary; a narrow terminal gets only the faulty columns."""
    hosts = report.survey.hosts
    checks = [check for check in CHECKS if check in report.checked or any(f.check == check for f in report.findings)]
    fine = [check for check in checks if not any(report.cell(host.name, check) in ("red", "yellow") for host in hosts)]
    if console.width < _WIDE:
        checks = [check for check in checks if check not in fine]
    console.print(_table(report, checks))
    if console.width < _WIDE and fine:
        console.print(Text(f"no fault found in: {', '.join(fine)}", "green"), soft_wrap=True)
    for line in explained(report.findings):
        console.print(line, soft_wrap=True)
    for note in report.notes:
        console.print(Text(untrusted.shown(note, lines=True)), soft_wrap=True)
    red = sum(finding.level == "red" for finding in report.findings)
    yellow = len(report.findings) - red
    verdict = f"{red} to fix, {yellow} to know" if report.findings else "all in order"
    head = f"{counted(len(hosts), 'host')}, {duration(report.elapsed_s)}"
    console.print(Text(f"{head}: {verdict}", "bold red" if red else "bold green"))


def _table(report: Report, checks: Sequence[str]) -> Table:
    """Make one line for each host; with many hosts one for all equal ones."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for host in report.survey.hosts:
        cells = tuple(report.cell(host.name, check) for check in checks)
        key = cells if len(report.survey.hosts) >= _MANY else (*cells, host.name)
        rows.setdefault(key, []).append(host.name)
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("host", overflow="fold", min_width=8)
    for check in checks:
        header = check.replace(" ", "\n")
        table.add_column(header, justify="center", min_width=max(4, *map(len, header.split("\n"))))
    for cells, names in rows.items():
        marks = [Text(*_MARKS[cell]) for cell in cells[: len(checks)]]
        table.add_row(compressed(names), *marks)
    return table


def explained(findings: Iterable[Finding]) -> list[Text]:
    """Return two lines for each finding; hosts with equal findings share them."""
    alike: dict[tuple[str, str, str, str], list[str]] = {}
    for finding in findings:
        # A fix names its host: without the name, equal fixes compare equal.
        key = (finding.level, finding.check, _without(finding.host, finding.what), _without(finding.host, finding.fix))
        alike.setdefault(key, []).append(finding.host)
    lines = []
    for (level, check, what, fix), hosts in sorted(alike.items(), key=lambda item: item[0][0] != "red"):
        shown = compressed(hosts)
        name = hosts[0] if len(hosts) == 1 else "HOST"
        lines.append(Text.assemble((f"{level:<6} ", _MARKS[level][1]), (f"{check}: ", "bold"), f"{shown}: "))
        lines[-1].append(untrusted.shown(what.replace("\0", name), lines=True))
        lines.append(Text(untrusted.shown(f"       fix: {fix}".replace("\0", name), lines=True)))
    return lines


def _without(host: str, text: str) -> str:
    return re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-]|\.\w)", "\0", text)


def compressed(names: Sequence[str], shown: int = 8) -> str:
    """Return `node-[001-004,007], gpu-a`: names that differ in their last number share brackets."""
    groups: dict[tuple[str, str, int], list[int]] = {}
    for name in names:
        matched = re.fullmatch(r"(.*?)(\d+)(\D*)", name)
        if matched is None:
            groups[(name, "", 0)] = []
            continue
        width = len(matched[2])
        groups.setdefault((matched[1], matched[3], width), []).append(int(matched[2]))
    parts = []
    for (head, tail, width), numbers in groups.items():
        runs: list[list[int]] = []
        for number in sorted(numbers):
            if runs and number == runs[-1][-1] + 1:
                runs[-1][1:] = [number]
            else:
                runs.append([number])
        words = ["-".join(f"{n:0{width}d}" for n in run) for run in runs]
        if len(words) > shown:
            words = [*words[:shown], "..."]
        inside = ",".join(words)
        parts.append(f"{head}[{inside}]{tail}" if len(numbers) > 1 else f"{head}{inside}{tail}")
    more = f" and {len(parts) - shown} more" if len(parts) > shown else ""
    count = f" ({len(names)})" if len(names) > 3 else ""
    return ", ".join(parts[:shown]) + more + count


def of_this_host(survey: Survey) -> list[Finding]:
    """Return findings on the launching host: `.deepspeed_env`, and the program that starts other hosts."""
    if survey.alone:
        return []
    first = survey.hosts[0].name
    # A launch by hand reads the file for other hosts, `llmtrain launch` does not.
    parts = (problem.rpartition(": ") for problem in deepspeed_env_problems())
    findings = [Finding(host=first, check="env", level="red", what=what, fix=fix) for what, _, fix in parts]
    if shutil.which("pdsh") is None:
        what, fix = NO_PDSH
        level: Level = "red"
        if "SLURM_JOB_ID" in os.environ:  # srun may start them
            level, fix = "yellow", f"{fix}, or start with `llmtrain launch --launcher slurm`"
        findings.append(Finding(host=first, check="ssh", level=level, what=f"here: {what}", fix=fix))
    return findings


_BUILD_LIMIT_S = 600.0

# Removes locks of dead builds, then builds. A live build has a young lock, for which DeepSpeed waits. Hosts that share
# the folder build one after the other: all but the first find the op there.
_PROGRAM = """
import contextlib, fcntl, json, os, sys, time
ask = json.loads(sys.argv[1])
os.environ.update(ask["variables"])
from torch.utils.cpp_extension import _get_build_directory
folder = os.path.dirname(_get_build_directory("cpu_adam", verbose=False))
held = os.open(os.path.join(folder, ask["lock"]), os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(held, fcntl.LOCK_EX)
for path in ask["locks"]:
    with contextlib.suppress(FileNotFoundError):  # a build that ended meanwhile
        if time.time() - os.stat(path).st_mtime > ask["stale_s"]:
            os.unlink(path)
from deepspeed.ops.op_builder.all_ops import ALL_OPS
for name in ask["ops"]:
    ALL_OPS[name].load(verbose=False)
"""


def _build_ops(survey: Survey) -> tuple[list[str], list[Finding]]:
    """Build the run's missing ops on all hosts. Returns a line for each success, and findings."""
    ranks = {name: value for name, value in os.environ.items() if name == "TORCH_EXTENSIONS_DIR"}  # a launch's, too
    # Hosts with equal needs share one call of on_hosts, which bounds the number of hosts at a time.
    alike: dict[str, list[str]] = {}
    for host, facts in survey.facts.items():
        if (state := facts.get("ops")) is None:
            continue
        ops, locks = [name for name in survey.ops if name not in state["built"]], state["locks"]
        if ops or any(age > STALE_S for age in locks.values()):
            asked = {"ops": ops, "locks": sorted(locks), "stale_s": STALE_S, "lock": BUILD_LOCK, "variables": ranks}
            alike.setdefault(json.dumps(asked), []).append(host)
    lines, findings = [], []
    for text, hosts in alike.items():
        command, ops = (sys.executable, "-c", _PROGRAM, text), json.loads(text)["ops"]
        answers = on_hosts(hosts, command, timeout_s=_BUILD_LIMIT_S, port=survey.ssh_port, here=survey.alone)
        for host, answer in answers.items():
            if answer.code == 0:
                what = (
                    f"built {', '.join(ops)} in {answer.elapsed_s:.0f} s" if ops else "removed a lock of a dead build"
                )
                lines.append(f"{host}: {what}")
                continue
            printed = [line.strip() for line in answer.stderr.splitlines() if line.strip()]
            why = answer.trouble.text if answer.trouble and answer.code is None else "; ".join(printed[-2:])[:300]
            what = f"{', '.join(ops)} could not be built: {why}"
            fix = "see the compiler's words: " + survey.on(host, f"{sys.executable} -m deepspeed.env_report")
            findings.append(Finding(host=host, check="ops", level="red", what=what, fix=fix))
    return lines, findings


def with_ops(report: Report, run: Needs | None) -> Report:
    asked = report.survey
    lines, failed = _build_ops(asked)
    if not lines and not failed:
        return replace(report, notes=(*report.notes, "ops: all that this run needs are built"))
    report_now = preflight(asked.hosts, run, port=asked.port, ssh_port=asked.ssh_port)
    findings = in_order([*report_now.findings, *failed], asked.hosts)
    return replace(report_now, findings=findings, notes=tuple(lines))
