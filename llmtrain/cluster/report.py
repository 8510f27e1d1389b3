"""What doctor found, as a table of hosts that stays readable with a thousand of them, and as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmtrain.cluster.checks import CHECKS, Finding, Survey
from llmtrain.cluster.compare import right_interface
from llmtrain.units import duration

_MANY = 32
"""From this number of hosts on, hosts whose cells are all equal share a line."""
_MARKS = {"red": ("FAIL", "bold red"), "yellow": ("warn", "yellow"), "ok": ("ok", "green"), "": ("-", "dim")}


@dataclass(frozen=True, kw_only=True)
class Report:
    """The findings of one examination."""

    survey: Survey
    findings: tuple[Finding, ...]
    checked: frozenset[str]
    """Which of CHECKS were asked."""
    elapsed_s: float
    fabric: Mapping[str, Any] = field(default_factory=dict)
    """What was measured between the hosts; empty when nothing was."""
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """No red cell."""
        return not any(finding.level == "red" for finding in self.findings)

    @property
    def interfaces(self) -> dict[str, str]:
        """For each host the interface by which the others reach it, where that could be told."""
        found = {host.name: right_interface(self.survey, host.name) for host in self.survey.hosts}
        return {host: name for host, name in found.items() if name is not None}

    @property
    def address(self) -> str | None:
        """The IPv4 address of the first host as the others know it: what rank 0 listens on."""
        first = self.survey.hosts[0].name
        for host in reversed(self.survey.hosts):
            known = self.survey.facts.get(host.name, {}).get("names", {}).get("addresses", {}).get(first)
            if known is not None:
                return str(known)
        return None

    def cell(self, host: str, check: str) -> str:
        """red, yellow, ok, or nothing where it is not known."""
        levels = {finding.level for finding in self.findings if finding.host == host and finding.check == check}
        if levels:
            return "red" if "red" in levels else "yellow"
        if check not in self.checked:
            return ""
        if check in ("name", "ssh", "python"):
            known = host in self.survey.facts or (check == "ssh" and host in self.survey.failures)
            return "ok" if known else ""
        if check == "port" and host != self.survey.hosts[0].name:
            return ""
        return "ok" if host in self.survey.facts else ""

    def as_json(self) -> dict[str, Any]:
        """Everything, for programs. Values of secrets are not in it."""
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
    """The table, a fix for each cell that is not in order, and one line that says how it stands."""
    checks = [check for check in CHECKS if check in report.checked or any(f.check == check for f in report.findings)]
    rows: dict[tuple[str, ...], list[str]] = {}
    for host in report.survey.hosts:
        cells = tuple(report.cell(host.name, check) for check in checks)
        key = cells if len(report.survey.hosts) >= _MANY else (*cells, host.name)
        rows.setdefault(key, []).append(host.name)
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("host", no_wrap=True, overflow="fold", min_width=8)
    for check in checks:
        table.add_column(check.replace(" ", "\n"), justify="center", no_wrap=len(check) < 10)
    for cells, hosts in rows.items():
        marks = [Text(*_MARKS[cell]) for cell in cells[: len(checks)]]
        table.add_row(compressed(hosts), *marks)
    console.print(table)
    for line in explained(report.findings):
        console.print(line, soft_wrap=True)
    for note in report.notes:
        console.print(Text(note), soft_wrap=True)
    red = sum(finding.level == "red" for finding in report.findings)
    yellow = len(report.findings) - red
    count = f"{len(report.survey.hosts)} host{'s' * (len(report.survey.hosts) != 1)}"
    verdict = f"{red} to mend, {yellow} to know" if report.findings else "all in order"
    console.print(Text(f"{count}, {duration(report.elapsed_s)}: {verdict}", "bold red" if red else "bold green"))


def explained(findings: Iterable[Finding]) -> list[Text]:
    """Two lines for each finding; hosts of which the same is to be said share them."""
    alike: dict[tuple[str, str, str, str], list[str]] = {}
    for each in findings:
        # The fix names its host: with the name taken out, equal fixes are equal.
        key = (each.level, each.check, _without(each.host, each.what), _without(each.host, each.fix))
        alike.setdefault(key, []).append(each.host)
    lines = []
    for (level, check, what, fix), hosts in sorted(alike.items(), key=lambda item: item[0][0] != "red"):
        shown = compressed(hosts)
        name = hosts[0] if len(hosts) == 1 else "HOST"
        lines.append(Text.assemble((f"{level:<6} ", _MARKS[level][1]), (f"{check}: ", "bold"), f"{shown}: "))
        lines[-1].append(what.replace("\0", name))
        lines.append(Text(f"       fix: {fix}".replace("\0", name)))
    return lines


def _without(host: str, text: str) -> str:
    return re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-]|\.\w)", "\0", text)


def compressed(names: Sequence[str], shown: int = 8) -> str:
    """`node-[001-004,007], gpu-a`: names that differ in their last number share brackets."""
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
