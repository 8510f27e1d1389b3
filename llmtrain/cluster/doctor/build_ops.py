"""Compile the DeepSpeed ops of a run on all hosts before it starts, so that no run waits for a compiler."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from llmtrain.base.rank.op_builds import BUILD_LOCK
from llmtrain.cluster.doctor.checks import STALE_S, Finding, Survey
from llmtrain.cluster.doctor.preflight import Needs, Report, in_order, preflight
from llmtrain.cluster.hosts.ssh import on_hosts

LIMIT_S = 600.0

# Removes locks of dead builds, then builds. A live build has a young lock, for which DeepSpeed waits. Hosts that share
# the folder build one after the other: all but the first find the op there.
_PROGRAM = """
import fcntl, json, os, sys, time
ask = json.loads(sys.argv[1])
os.environ.update(ask["variables"])
from torch.utils.cpp_extension import _get_build_directory
folder = os.path.dirname(_get_build_directory("cpu_adam", verbose=False))
held = os.open(os.path.join(folder, ask["lock"]), os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(held, fcntl.LOCK_EX)
for path in ask["locks"]:
    if os.path.exists(path) and time.time() - os.stat(path).st_mtime > ask["stale_s"]:
        os.unlink(path)
from deepspeed.ops.op_builder.all_ops import ALL_OPS
for name in ask["ops"]:
    ALL_OPS[name].load(verbose=False)
"""


def build(survey: Survey, ssh_port: int | None = None) -> tuple[list[str], list[Finding]]:
    """Build the missing ops of the run on all hosts. Returns a line for each success, and findings."""
    wanted: dict[str, tuple[list[str], Mapping[str, float]]] = {}
    for host, facts in survey.facts.items():
        ops = facts.get("ops")
        if ops is not None:
            missing = [name for name in survey.ops if name not in ops["built"]]
            if missing or any(age > STALE_S for age in ops["locks"].values()):
                wanted[host] = (missing, ops["locks"])
    lines: list[str] = []
    findings: list[Finding] = []
    # Hosts with equal needs share one call of on_hosts, which bounds the number of hosts at a time.
    alike: dict[str, list[str]] = {}
    for host, (missing, locks) in wanted.items():
        ranks = {name: value for name, value in os.environ.items() if name == "TORCH_EXTENSIONS_DIR"}  # a launch's, too
        asked = {"ops": missing, "locks": sorted(locks), "stale_s": STALE_S, "lock": BUILD_LOCK, "variables": ranks}
        text = json.dumps(asked)
        alike.setdefault(text, []).append(host)
    for text, hosts in alike.items():
        built, failed = _build_on(survey, hosts, text, ssh_port)
        lines += built
        findings += failed
    return lines, findings


def _build_on(survey: Survey, hosts: Sequence[str], text: str, ssh_port: int | None) -> tuple[list[str], list[Finding]]:
    command, ops = (sys.executable, "-c", _PROGRAM, text), json.loads(text)["ops"]
    lines, findings = [], []
    for host, answer in on_hosts(hosts, command, timeout_s=LIMIT_S, port=ssh_port, here=survey.alone).items():
        if answer.code == 0:
            what = f"built {', '.join(ops)} in {answer.elapsed_s:.0f} s" if ops else "removed a lock of a dead build"
            lines.append(f"{host}: {what}")
            continue
        printed = [line.strip() for line in answer.stderr.splitlines() if line.strip()]
        why = answer.trouble.text if answer.trouble and answer.code is None else "; ".join(printed[-2:])[:300]
        findings.append(
            Finding(
                host=host,
                check="ops",
                level="red",
                what=f"{', '.join(ops)} could not be built: {why}",
                fix="see the compiler's words: " + survey.on(host, f"{sys.executable} -m deepspeed.env_report"),
            )
        )
    return lines, findings


def with_ops(report: Report, run: Needs | None, port: int, ssh_port: int | None) -> Report:
    """Build what is missing, then look again."""
    lines, failed = build(report.survey, ssh_port)
    if not lines and not failed:
        return replace(report, notes=(*report.notes, "ops: all that this run needs are built"))
    again = preflight(report.survey.hosts, run, port=port, ssh_port=ssh_port)
    findings = in_order([*again.findings, *failed], report.survey.hosts)
    return replace(again, findings=findings, notes=tuple(lines))
