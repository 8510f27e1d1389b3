"""`llmtrain doctor --hostfile hosts [RUN.yaml]`: is this cluster in order, and if not, what is to be done?"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace

from rich.console import Console

from llmtrain.cluster.hosts.hostfile import read_hostfile, select
from llmtrain.commands import completion
from llmtrain.config.load import command_words, load, run_words
from llmtrain.data.stream.epoch import sequences_of_epoch
from llmtrain.features import expected
from llmtrain.features.doctor import fabric
from llmtrain.features.doctor.needs import needs
from llmtrain.features.doctor.preflight import (
    MASTER_PORT,
    WITHOUT_TERMINAL,
    in_order,
    of_this_host,
    preflight,
    print_report,
    with_ops,
)


def main(argv: list[str]) -> int:
    """Returns 1 for a red cell, else 0. Raises ConfigError for the hostfile, the configuration and the command line."""
    parser = _parser()
    completion.offer(parser)
    args, words = command_words(parser, argv)
    hosts = select(read_hostfile(args.hostfile), args.include, args.exclude)
    started = time.monotonic()
    needed = None
    if words:
        words = run_words(words)
        run = load(words, sum(host.slots for host in hosts), "the hostfile", epoch=sequences_of_epoch)
        needed = needs(words, run)
        estimate = expected(run, on_gpu=True) or expected(run, on_gpu=False)
        sent = 0.0 if estimate is None else estimate.sent_to_other_hosts * max(host.slots for host in hosts)
        needed = replace(needed, sent_bytes=sent or None, patience_s=run.config.fault.stall_timeout_s)
    report = preflight(hosts, needed, port=args.master_port, ssh_port=args.ssh_port)
    if args.build_ops:
        report = with_ops(report, needed)
    report = replace(report, findings=in_order([*report.findings, *of_this_host(report.survey)], hosts))
    if not args.quick and fabric.has_peers(report.survey):
        report = fabric.with_fabric(report, needed)
    report = replace(report, elapsed_s=time.monotonic() - started)
    if args.json:
        print(json.dumps(report.as_json(), indent=1))
    else:
        print_report(report, Console(width=None if os.isatty(1) else WITHOUT_TERMINAL, highlight=False))
    return 0 if report.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llmtrain doctor",
        usage="llmtrain doctor --hostfile HOSTS [options] [RUN.yaml [--SECTION.FIELD VALUE ...]]",
        description=__doc__,
        epilog="`llmtrain doctor --versions` tries the installed torch, DeepSpeed and transformers on this machine.",
        allow_abbrev=False,
    )
    parser.add_argument("--hostfile", required=True, help="a line `NAME slots=COUNT` for each host")
    parser.add_argument("--include", help="hosts and devices to take, as deepspeed's")
    parser.add_argument("--exclude", help="hosts and devices to leave out, as deepspeed's")
    parser.add_argument("--master-port", type=int, default=MASTER_PORT, help="of the rendezvous (default 29500)")
    parser.add_argument("--ssh-port", type=int, help="of every sshd, where ~/.ssh/config does not say it")
    parser.add_argument("--quick", action="store_true", help="do not measure the network between the hosts")
    parser.add_argument("--build-ops", action="store_true", help="compile the DeepSpeed ops that the run needs, now")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser
