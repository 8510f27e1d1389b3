"""Whether the hosts are in order, without a measurement between them: of `llmtrain doctor`, and of launch's start."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from llmtrain.cluster.doctor import checks, compare, gpu_checks, survey
from llmtrain.cluster.doctor.checks import CHECKS, Finding, Folder
from llmtrain.cluster.doctor.report import Report
from llmtrain.cluster.hosts.hostfile import Host

MASTER_PORT = 29500
"""DeepSpeed's default for the rendezvous."""
_OWN_FOLDERS = (
    "no shared file system at checkpoint.dir ({folder}): each host keeps the files of its own ranks. A resume needs "
    "the same hosts, or their files gathered"
)


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a run needs of its hosts."""

    files: tuple[str, ...]
    """Alike on all of them: its YAML and its DeepSpeed JSON."""
    folders: tuple[Folder, ...] = ()
    """That its ranks read, and what in them."""
    folder: str
    """Of its checkpoints."""
    own_folders: bool
    """Each host may have one of its own there."""
    sent_bytes: float | None = None
    """That each host sends to others in an optimizer step, about; None: not known here."""
    patience_s: float = 300.0
    """Without progress on any rank, after which the run is ended."""
    ops: tuple[str, ...]
    """DeepSpeed ops that it compiles at its start."""


def quick(
    hosts: Sequence[Host],
    run: Needs | None = None,
    *,
    port: int = MASTER_PORT,
    ssh_port: int | None = None,
    timeout_s: float = 25.0,
) -> Report:
    """Everything but measurements between the hosts: a few seconds.

    Args:
        hosts: of read_hostfile, or select.
        run: what is to be started there.
        port: of the rendezvous; 0: do not look at it.
        ssh_port: of every sshd, where it is not 22.
        timeout_s: for each host.

    Raises:
        ConfigError: there is no ssh program.
    """
    started = time.monotonic()
    found = survey.look(
        hosts,
        files=() if run is None else run.files,
        folders=() if run is None else run.folders,
        run_dir=None if run is None else run.folder,
        own_folders=run is not None and run.own_folders,
        port=port,
        ops=() if run is None else run.ops,
        timeout_s=timeout_s,
        ssh_port=ssh_port,
    )
    asked = set(CHECKS) - {"fabric"}
    asked -= set() if run is not None else {"config", "files"}
    asked -= set() if found.nonce else {"shared"}
    asked -= set() if port else {"port"}
    asked -= {"name", "ssh"} if found.alone else set()
    asked -= set() if any(facts.get("gpus") for facts in found.facts.values()) else {"gpus"}
    every = [*checks.each_host(found), *gpu_checks.all_gpus(found), *compare.all_hosts(found)]
    findings = in_order(every, hosts)
    notes = (_OWN_FOLDERS.format(folder=found.run_dir),) if found.own_folders and not all(found.nonce.values()) else ()
    elapsed_s = time.monotonic() - started
    return Report(survey=found, findings=findings, checked=frozenset(asked), elapsed_s=elapsed_s, notes=notes)


def in_order(findings: Sequence[Finding], hosts: Sequence[Host]) -> tuple[Finding, ...]:
    """Red ones first, then in the order of the hosts."""
    order = {host.name: index for index, host in enumerate(hosts)}
    key = lambda each: (each.level != "red", order.get(each.host, 0), CHECKS.index(each.check))  # noqa: E731
    return tuple(sorted(findings, key=key))
