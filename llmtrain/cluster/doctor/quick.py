"""Whether the hosts are in order, without a measurement between them: of `llmtrain doctor`, and of launch's start."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from llmtrain.cluster.doctor import checks, compare, gpu_checks, survey
from llmtrain.cluster.doctor.checks import CHECKS, Finding
from llmtrain.cluster.doctor.report import Report
from llmtrain.cluster.hosts.hostfile import Host
from llmtrain.config.load import load
from llmtrain.config.run import ResolvedRun
from llmtrain.optimizers import OPTIMIZERS
from llmtrain.topology import Mix

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
        ops=() if run is None else needed_ops(run.mix),
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
    findings = in_order(every, hosts)
    notes = (_OWN_FOLDERS.format(folder=found.run_dir),) if found.own_folders and not all(found.nonce.values()) else ()
    elapsed_s = time.monotonic() - started
    return Report(survey=found, findings=findings, checked=frozenset(asked), elapsed_s=elapsed_s, notes=notes)


def _resolved(hosts: Sequence[Host], config: str | Path | None, overrides: Sequence[str]) -> ResolvedRun | None:
    if config is None:
        return None
    world_size = sum(host.slots for host in hosts)
    return load(["--config", str(config), *overrides], world_size, "the hostfile")


def needed_ops(mix: Mix) -> tuple[str, ...]:
    """DeepSpeed's ops that the run compiles at its start: those of an optimizer that is moved to the host."""
    return OPTIMIZERS[mix.optimizer].host_ops if mix.offload_optimizer else ()


def in_order(findings: Sequence[Finding], hosts: Sequence[Host]) -> tuple[Finding, ...]:
    """Red ones first, then in the order of the hosts."""
    order = {host.name: index for index, host in enumerate(hosts)}
    key = lambda each: (each.level != "red", order.get(each.host, 0), CHECKS.index(each.check))  # noqa: E731
    return tuple(sorted(findings, key=key))
