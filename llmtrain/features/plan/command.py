"""`llmtrain plan RUN.yaml`: memory and time of a run on each kind of rank, rehearsed on this machine."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
from pathlib import Path

from llmtrain.base import units
from llmtrain.base.files import replace_file
from llmtrain.cluster.hosts.hostfile import read_hostfile
from llmtrain.commands import completion
from llmtrain.config.deepspeed.read import read_json
from llmtrain.config.load import COMMAND_LINE, command_words, configs_in, run_words
from llmtrain.config.problems import stop
from llmtrain.config.run import Run
from llmtrain.engine.ranks.local_ranks import ending_on_sigterm
from llmtrain.features.plan import autos
from llmtrain.features.plan.asked import resolved
from llmtrain.features.plan.device import Machines, memory_of, parse_size

DESCRIPTION = """\
Rehearse a run on this machine: its own model, engine, JSON, loss and optimizer for two steps, on tensors without memory
and ranks that do not exist. Says for each kind of rank how much memory it takes, when, for what, and whether it fits.
Needs no GPU, no data and no weights. Exit code 0: it fits, or no device is named; 1: it does not fit, or may not;
2: a mistake in the run."""


def main(argv: list[str]) -> int:
    """Returns the exit code. Raises UserError."""
    args, words = _arguments(argv)
    hosts, slots, source = _ranks(args)
    machines = Machines(
        hosts=hosts,
        slots=slots,
        device=args.device or "a device",
        on_gpu=args.device != "cpu",
        memory=memory_of(args.device, args.memory),
        begun=args.begun,
        host_memory=None if args.host_memory is None else parse_size("--host-memory", args.host_memory),
        link=args.link,
        price=args.price,
        disk=None if args.disk is None else parse_size("--disk", args.disk),
    )
    where = f"{units.counted(hosts, 'host')} of {units.counted(slots, 'rank')}{source}"
    imbalance = args.imbalance if args.imbalance != 1 else None
    flags = (("--out", args.out, True), ("--png", args.png, False), ("--imbalance", imbalance, False))
    for flag, value, with_fit in flags:
        if value is not None and bool(args.fit) is not with_fit:
            remedy = f"remove {flag}, or {'--fit' if args.fit else 'add --fit'}"
            raise stop(flag, value, f"has no effect {'with' if args.fit else 'without'} --fit", remedy, COMMAND_LINE)
        if flag != "--imbalance" and value is not None and not Path(value).absolute().parent.is_dir():
            raise stop(
                flag, value, "is in a folder that does not exist", "name a file in a folder that exists", COMMAND_LINE
            )
    with ending_on_sigterm():
        run = resolved(words, machines.ranks)  # a mistake needs no torch
        os.environ["DS_ACCELERATOR"] = "cpu"
        if args.fit:
            return _fit(run, words, machines, args)
        if "train.micro_batch" in autos(run.config) and machines.memory is None:
            raise stop("train.micro_batch", "auto", "needs the memory of a device to be decided", "add --memory 80GiB")
        from llmtrain.features.plan.making import make_plan

        plan = make_plan(run, words, machines, args.imbalance, f"{', '.join(configs_in(words))} on {where}")
    print(json.dumps(plan.as_json()) if args.json else plan.text())
    if args.png:
        drawn = io.BytesIO()
        plan.figure().savefig(drawn, format="png", dpi=150)
        _write("--png", args.png, drawn.getvalue())
    asked = machines.memory is not None or machines.host_memory is not None
    return 0 if plan.fits or not asked else 1


def _write(flag: str, path: str, content: bytes) -> None:
    """Raises ConfigError."""
    try:
        replace_file(Path(path), content)
    except OSError as error:
        raise stop(
            flag, path, f"cannot be written: {error.strerror}", "name a file in a folder that exists", COMMAND_LINE
        ) from error


def _arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="llmtrain plan",
        usage="llmtrain plan RUN.yaml [--SECTION.FIELD VALUE ...] [--hostfile HOSTS | --hosts N --slots N] "
        "[--device NAME | --memory SIZE] [--host-memory SIZE]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--hostfile", help="the hosts of the run, as of `llmtrain launch`")
    parser.add_argument("--hosts", type=int, metavar="N", help="number of hosts (default 1)")
    parser.add_argument("--slots", type=int, metavar="N", help="ranks of a host (default 1)")
    parser.add_argument("--device", metavar="NAME", help="cpu, or a GPU such as h100-80; default: any GPU")
    parser.add_argument("--memory", metavar="SIZE", help="memory of a device, such as 80GiB")
    parser.add_argument(
        "--begun", action="store_true", help="--memory is what a run finds free at its start, as auto takes it"
    )
    parser.add_argument("--host-memory", metavar="SIZE", help="memory of a host, such as 1TiB")
    parser.add_argument(
        "--link", metavar="NAME", help="network between hosts: ib400, eth100, 40Gbit, or a file of doctor's --json"
    )
    parser.add_argument("--price", type=float, metavar="X", help="price of a device for an hour: what the run costs")
    parser.add_argument("--disk", metavar="SIZE", help="bytes that are written in a second, for saves that wait")
    text = "tokens of the fullest rank's experts over the mean (default 1)"
    parser.add_argument("--imbalance", type=float, default=1.0, metavar="X", help=text)
    parser.add_argument(
        "--fit", action="store_true", help="rehearse other mixes: the five fastest that fit, with the same global batch"
    )
    parser.add_argument("--out", metavar="FILE", help="with --fit: write the DeepSpeed JSON of the fastest")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--png", metavar="FILE", help="draw the ranks' memory, and its course over a step")
    completion.offer_run(parser)
    args, words = command_words(parser, argv)
    return args, run_words(words)


def _ranks(args: argparse.Namespace) -> tuple[int, int, str]:
    """Return (number of hosts, ranks of a host, where these numbers are from). Raises ConfigError."""
    for name, least in (("imbalance", 1), ("price", 0), ("hosts", 1), ("slots", 1)):
        if (number := getattr(args, name)) is not None and not least <= number < math.inf:
            raise stop(f"--{name}", number, f"must be at least {least}", f"write --{name} 2", COMMAND_LINE)
    if args.hostfile is not None and (args.hosts or args.slots):
        raise stop("--hostfile", args.hostfile, "says both --hosts and --slots", "remove these", COMMAND_LINE)
    if args.hostfile is not None:
        hosts = read_hostfile(args.hostfile)
        slots = {host.slots for host in hosts}
        if len(slots) > 1:
            rule = "its hosts must have the same number of slots"
            raise stop("--hostfile", args.hostfile, rule, "give --hosts and --slots", COMMAND_LINE)
        return len(hosts), slots.pop(), ""
    assumed = "" if args.hosts or args.slots else " (--hosts and --slots, or --hostfile, ask about more)"
    return args.hosts or 1, args.slots or 1, assumed


def _fit(run: Run, words: list[str], machines: Machines, args: argparse.Namespace) -> int:
    """Print the fastest forms that fit and the YAML of the first; write its JSON to --out. Raises UserError."""
    if machines.memory is None:
        raise stop("--fit", True, "needs a device, for its speeds and memory", "write --device h100-80", COMMAND_LINE)
    from llmtrain.features.plan.fit import fit
    from llmtrain.features.plan.speed import speeds_for

    speeds = speeds_for(run, machines)
    if speeds is None:
        raise stop(
            "--device", args.device, "has no speeds in the table of devices", "write --device h100-80", COMMAND_LINE
        )
    fitted = fit(run, words, machines, speeds)
    first = fitted.best[0]
    values = {"deepspeed": args.out or "FILE of --out", "train.global_batch": run.batch.global_batch}
    lines = [f"  {key}: {json.dumps(value)}" for key, value in (values | first.choice.values).items()]
    text = "\n".join([*fitted.text(), "", "in the YAML of the first:", *lines])
    print(json.dumps(fitted.as_json()) if args.json else text)
    if args.out:
        made = first.choice.form.json(read_json(run.config.deepspeed))
        _write("--out", args.out, (json.dumps(made, indent=2) + "\n").encode())
    return 0
