"""`llmtrain doctor --hostfile hosts [--config RUN.yaml]`: is this cluster in order, and if not, what is to be done?"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from llmtrain import completion
from llmtrain.cluster.doctor import all_reduce, build_ops, checks, compare, fabric, gpu_checks, survey
from llmtrain.cluster.doctor.checks import CHECKS, Finding, Survey
from llmtrain.cluster.doctor.report import Report, print_report
from llmtrain.cluster.hosts.envfile import deepspeed_env_problems
from llmtrain.cluster.hosts.hostfile import Host, read_hostfile, select
from llmtrain.config.load import load
from llmtrain.config.run import ResolvedRun
from llmtrain.optimizers import OPTIMIZERS

MASTER_PORT = 29500
"""DeepSpeed's default for the rendezvous."""
_OWN_FOLDERS = (
    "no shared file system at checkpoint.dir ({folder}): each host keeps the files of its own ranks. A resume needs "
    "the same hosts, or their files gathered"
)


def quick(
    hosts: Sequence[Host],
    config: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    port: int = MASTER_PORT,
    ssh_port: int | None = None,
    timeout_s: float = 25.0,
) -> Report:
    """Everything but measurements between the hosts: a few seconds.

    Args:
        hosts: of read_hostfile, or select.
        config: the run's YAML; it is resolved here for the number of ranks, and compared on all hosts.
        overrides: further words of the run's command line, such as --train.run_dir X.
        port: of the rendezvous; 0: do not look at it.
        ssh_port: of every sshd, where it is not 22.
        timeout_s: for each host.

    Raises:
        ConfigError: the configuration is wrong for this number of ranks, or there is no ssh program.
    """
    started = time.monotonic()
    run = _resolved(hosts, config, overrides)
    files = [] if run is None else [str(config), run.run.deepspeed]
    found = survey.look(
        hosts,
        files=files,
        run_dir=None if run is None else run.run.checkpoint.dir or run.run.train.run_dir,
        own_folders=run is not None and run.run.checkpoint.dir is not None,
        port=port,
        ops=needed_ops(run),
        timeout_s=timeout_s,
        ssh_port=ssh_port,
    )
    asked = set(CHECKS) - {"fabric"}
    asked -= set() if run is not None else {"config"}
    asked -= set() if found.nonce else {"shared"}
    asked -= set() if port else {"port"}
    asked -= {"name", "ssh"} if found.alone else set()
    asked -= set() if any(facts.get("gpus") for facts in found.facts.values()) else {"gpus"}
    every = [*checks.each_host(found), *gpu_checks.all_gpus(found), *compare.all_hosts(found)]
    findings = _sorted(every, hosts)
    notes = (_OWN_FOLDERS.format(folder=found.run_dir),) if found.own_folders and not all(found.nonce.values()) else ()
    elapsed_s = time.monotonic() - started
    return Report(survey=found, findings=findings, checked=frozenset(asked), elapsed_s=elapsed_s, notes=notes)


def _resolved(hosts: Sequence[Host], config: str | Path | None, overrides: Sequence[str]) -> ResolvedRun | None:
    if config is None:
        return None
    world_size = sum(host.slots for host in hosts)
    return load(["--config", str(config), *overrides], world_size, "the hostfile")


def needed_ops(run: ResolvedRun | None) -> tuple[str, ...]:
    """DeepSpeed's ops that the run compiles at its start: those of an optimizer that is moved to the host."""
    return () if run is None or not run.offload_optimizer else OPTIMIZERS[run.optim.name].host_ops


def with_fabric(report: Report, ssh_port: int | None = None) -> Report:
    """The report with what was measured between the hosts that answered, in seconds and bit/s, and between GPUs."""
    measured, findings = fabric.examine(report.survey, ssh_port)
    reduced = all_reduce.measure(report.survey, ssh_port)
    return replace(
        report,
        findings=_sorted([*report.findings, *findings, *all_reduce.judge(reduced)], report.survey.hosts),
        checked=report.checked | {"fabric"},
        fabric=asdict(replace(measured, all_reduce=reduced)),
        notes=(*report.notes, *fabric.summary(measured), *all_reduce.summary(reduced)),
    )


def _with_ops(report: Report, args: argparse.Namespace) -> Report:
    """Build what is missing, then look again."""
    lines, failed = build_ops.build(report.survey, args.ssh_port)
    if not lines and not failed:
        return replace(report, notes=(*report.notes, "ops: all that this run needs are built"))
    again = quick(
        report.survey.hosts, args.config, overrides=args.overrides, port=args.master_port, ssh_port=args.ssh_port
    )
    findings = _sorted([*again.findings, *failed], report.survey.hosts)
    return replace(again, findings=findings, notes=tuple(lines))


def _deepspeeds_own_file(survey: Survey) -> list[Finding]:
    """`.deepspeed_env` here: a launch by hand reads it for other hosts. `llmtrain launch` does not, and calls quick."""
    parts = (problem.rpartition(": ") for problem in (() if survey.alone else deepspeed_env_problems()))
    first = survey.hosts[0].name
    return [Finding(host=first, check="env", level="red", what=what, fix=fix) for what, _, fix in parts]


def _sorted(findings: Sequence[Finding], hosts: Sequence[Host]) -> tuple[Finding, ...]:
    """Red ones first, then in the order of the hosts."""
    order = {host.name: index for index, host in enumerate(hosts)}
    key = lambda each: (each.level != "red", order.get(each.host, 0), CHECKS.index(each.check))  # noqa: E731
    return tuple(sorted(findings, key=key))


def main(argv: list[str]) -> int:
    """0: no red cell. 1: a red cell. Raises ConfigError for the hostfile, the configuration and the command line."""
    parser = _parser()
    completion.offer(parser)
    args = parser.parse_args(argv)
    hosts = select(read_hostfile(args.hostfile), args.include, args.exclude)
    started = time.monotonic()
    report = quick(hosts, args.config, overrides=args.overrides, port=args.master_port, ssh_port=args.ssh_port)
    if args.build_ops:
        report = _with_ops(report, args)
    report = replace(report, findings=_sorted([*report.findings, *_deepspeeds_own_file(report.survey)], hosts))
    if not args.quick and all_reduce.is_worth_it(report.survey):
        report = with_fabric(report, args.ssh_port)
    report = replace(report, elapsed_s=time.monotonic() - started)
    if args.json:
        print(json.dumps(report.as_json(), indent=1))
    else:
        print_report(report, Console(width=None if os.isatty(1) else 160, highlight=False))
    return 0 if report.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="llmtrain doctor", description=__doc__, allow_abbrev=False)
    parser.add_argument("--hostfile", required=True, help="a line `NAME slots=COUNT` for each host")
    parser.add_argument("--include", help="hosts and devices to take, as deepspeed's")
    parser.add_argument("--exclude", help="hosts and devices to leave out, as deepspeed's")
    parser.add_argument("--config", metavar="RUN.yaml", help="the run that is to be started; checked on all hosts")
    parser.add_argument("--master-port", type=int, default=MASTER_PORT, help="of the rendezvous (default 29500)")
    parser.add_argument("--ssh-port", type=int, help="of every sshd, where ~/.ssh/config does not say it")
    parser.add_argument("--quick", action="store_true", help="do not measure the network between the hosts")
    parser.add_argument("--build-ops", action="store_true", help="compile the DeepSpeed ops that the run needs, now")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("overrides", nargs="*", help="after --: further words of the run's command line")
    return parser
