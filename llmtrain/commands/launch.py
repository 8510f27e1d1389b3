"""The command line of `llmtrain launch`, which starts a job on several hosts, watches it, and restarts it after a
fault."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from llmtrain import features
from llmtrain.base.errors import ConfigError
from llmtrain.base.files import refuse_if_in_use
from llmtrain.base.imports import name_cpu
from llmtrain.cluster.hosts.hostfile import Host, is_alone, on_visible_devices, read_hostfile, select, this_machine
from llmtrain.cluster.launch import slurm
from llmtrain.cluster.launch.attempts import Attempts
from llmtrain.cluster.launch.launchers import launcher_of
from llmtrain.cluster.launch.placement import LaunchedRun, Options, describe, make_placement
from llmtrain.commands import completion
from llmtrain.config.load import command_words, load, run_words
from llmtrain.config.on_disk import refuse_if_preempted
from llmtrain.config.plugin_import import carried
from llmtrain.config.run import Run, same_command
from llmtrain.data.stream.epoch import sequences_of_epoch

MAX_RESTARTS = 3


def main(argv: list[str]) -> int:
    """Returns the exit code (see docs/cluster.md). Raises UserError."""
    options = _options(argv)
    run = load(
        list(options.words), sum(host.slots for host in options.hosts), "the hosts' slots", epoch=sequences_of_epoch
    )
    options = replace(options, carried=carried())
    mark = secrets.token_hex(8)
    placement = make_placement(options, options.hosts, mark)
    launcher = launcher_of(options.launcher, mark)
    launcher.check(placement)
    if options.dry_run:
        print(describe(placement, options, launcher.command(placement)))
        return 0
    if placement.alone:
        name_cpu()
    refuse_if_preempted(run.config, run.places)
    refuse_if_in_use(run.run_dir)
    launched = LaunchedRun(
        folder=run.run_dir,
        resume=run.config.resume,
        again=same_command(run.config),
        start_timeout_s=run.config.fault.start_timeout_s,
        examine=partial(features.before_launch, run, options.words),
        batches=batches_of(run),
        resolve=batches,
    )
    return Attempts(options, mark, launched).run()


def batches(words: Sequence[str], ranks: int) -> list[int]:
    """Return the sequences per optimizer step of each stage on `ranks` ranks. Raises ConfigError."""
    return batches_of(load(list(words), ranks, "the hosts that are left", epoch=sequences_of_epoch))


def batches_of(run: Run) -> list[int]:
    return [stage.batch.global_batch for stage in run.stages]


def _options(argv: list[str]) -> Options:
    parser = argparse.ArgumentParser(
        prog="llmtrain launch",
        usage="llmtrain launch [--hostfile HOSTS] [options] -- RUN.yaml [--SECTION.FIELD VALUE ...]",
        description="Start a run on the hosts of a hostfile or on this machine, watch it, restart it after a fault.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--hostfile",
        help="a line `NAME slots=COUNT` for each host; the first one holds rank 0 "
        "(default: all GPUs of this machine, or 2 ranks on its CPU)",
    )
    parser.add_argument("--include", default=None, help="only these hosts and devices: NAME[:DEVICE,...], joined by @")
    parser.add_argument("--exclude", default=None, help="all hosts and devices except these, in the same form")
    parser.add_argument("--launcher", choices=("pdsh", "slurm"), default="pdsh", help="slurm: hosts from SLURM_*, srun")
    parser.add_argument("--max-restarts", type=int, default=MAX_RESTARTS, help="after faults (default: %(default)s)")
    parser.add_argument("--min-hosts", type=int, default=None, help="fewest hosts to restart with (default: all)")
    parser.add_argument("--preempt-file", default=None, help="if it appears on any host, the job saves and ends")
    parser.add_argument("--env-file", default=None, help="lines NAME=VALUE for the ranks, off any command line")
    parser.add_argument(
        "--dry-run", action="store_true", help="print hosts, ranks, command, environment; start nothing"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="show the ranks' process ids, and the tracebacks of all ranks"
    )
    completion.offer_run(parser)
    given, words = command_words(parser, argv)
    if not words:
        raise ConfigError(
            "no run: write `llmtrain launch -- RUN.yaml`, or `llmtrain launch --hostfile HOSTS -- RUN.yaml`"
        )
    words = run_words(words)
    if given.preempt_file:
        words += ["--fault.preempt_file", given.preempt_file]
    hosts = _hosts(given)
    least = len(hosts) if given.min_hosts is None else given.min_hosts
    if not 1 <= least <= len(hosts):
        raise ConfigError(f"--min-hosts is {least}: give 1 to {len(hosts)}, the number of hosts")
    if given.max_restarts < 0:
        raise ConfigError(f"--max-restarts is {given.max_restarts}: give 0 or more")
    return Options(
        hosts=hosts,
        words=tuple(words),
        launcher=given.launcher,
        max_restarts=given.max_restarts,
        min_hosts=least,
        env_file=given.env_file,
        dry_run=given.dry_run,
        verbose=given.verbose,
    )


def _hosts(given: argparse.Namespace) -> tuple[Host, ...]:
    if given.launcher == "slurm":
        if given.hostfile is not None:
            raise ConfigError("--launcher slurm takes the hosts from Slurm: leave --hostfile out")
        return select(slurm.hosts_of(os.environ), given.include, given.exclude)
    listed = (this_machine(),) if given.hostfile is None else read_hostfile(given.hostfile)
    hosts = select(listed, given.include, given.exclude)
    if is_alone(hosts) and not given.include and not given.exclude:
        return (on_visible_devices(hosts[0], os.environ),)
    return hosts
