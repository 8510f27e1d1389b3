"""`llmtrain plan RUN.yaml`: the memory of a run on each kind of rank, rehearsed on this machine."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.base import units
from llmtrain.base.errors import ConfigError
from llmtrain.base.files import replace_file
from llmtrain.cluster.hosts.hostfile import read_hostfile
from llmtrain.commands import completion
from llmtrain.config.load import COMMAND_LINE, Parsed, command_words, configs_in, parse, run_words
from llmtrain.config.pinned import fetched
from llmtrain.config.problems import stop
from llmtrain.config.resolve import resolve
from llmtrain.config.run import ResolvedRun
from llmtrain.plan.device import memory_of

if TYPE_CHECKING:
    from llmtrain.plan.answer import Plan

DESCRIPTION = """\
Rehearse a run on this machine: its own model, engine, JSON, loss and optimizer for two steps, on tensors without memory
and ranks that do not exist. Says for each kind of rank how much memory it takes, when, for what, and whether it fits.
Needs no GPU, no data and no weights. Exit code 0: it fits, or no device is named; 1: it does not fit, or may not;
2: a mistake in the run."""

_EPOCH = 1 << 30
"""Sequences: the length of an epoch decides nothing here."""


def main(argv: list[str]) -> int:
    """Returns the exit code. Raises UserError."""
    args, words = _arguments(argv)
    hosts, slots, source = _ranks(args)
    memory = memory_of(args.device, args.memory)
    title = (
        f"{', '.join(configs_in(words))} on {units.counted(hosts, 'host')} of {units.counted(slots, 'rank')}{source}"
    )
    plan = make_plan(words, hosts, slots, args.device, memory, title)
    if args.png:
        drawn = io.BytesIO()
        plan.figure().savefig(drawn, format="png", dpi=150)
        replace_file(Path(args.png), drawn.getvalue())
    print(json.dumps(plan.as_json(), indent=1) if args.json else plan.text())
    return 0 if plan.fits is not False and (memory is None or plan.fits) else 1


def _arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="llmtrain plan",
        usage="llmtrain plan RUN.yaml [--SECTION.FIELD VALUE ...] [--hostfile HOSTS | --hosts N --slots N] "
        "[--device NAME | --memory SIZE]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--hostfile", help="the hosts of the run, as of `llmtrain launch`")
    parser.add_argument("--hosts", type=int, metavar="N", help="number of hosts (default 1)")
    parser.add_argument("--slots", type=int, metavar="N", help="ranks of a host (default 1)")
    parser.add_argument("--device", metavar="NAME", help="cpu, or a GPU such as h100-80; default: any GPU")
    parser.add_argument("--memory", metavar="SIZE", help="memory of a device, such as 80GiB")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--png", metavar="FILE", help="draw the ranks' memory, and its course over a step")
    completion.offer_run(parser)
    args, words = command_words(parser, argv)
    return args, run_words(words)


def _ranks(args: argparse.Namespace) -> tuple[int, int, str]:
    """Return (hosts, ranks of a host, a note on their source). Raises ConfigError."""
    if args.hostfile is not None:
        hosts = read_hostfile(args.hostfile)
        slots = {host.slots for host in hosts}
        if len(slots) > 1:
            raise stop("--hostfile", args.hostfile, "has hosts of unequal slots, for which a plan has no answer",
                       "give --hosts and --slots", COMMAND_LINE)  # fmt: skip
        return len(hosts), slots.pop(), ""
    for flag in ("hosts", "slots"):
        if (number := getattr(args, flag)) is not None and number < 1:
            raise stop(f"--{flag}", number, "must be at least 1", f"write --{flag} 1", COMMAND_LINE)
    assumed = "" if args.hosts or args.slots else " (--hosts and --slots, or --hostfile, ask about more)"
    return args.hosts or 1, args.slots or 1, assumed


def make_plan(words: list[str], hosts: int, slots: int, device: str | None, memory: int | None, title: str) -> Plan:
    """Rehearse the run, and the changes that would make it fit. Raises UserError."""
    parsed, resolved = _resolved(words, hosts * slots)  # a mistake needs no torch
    os.environ["DS_ACCELERATOR"] = "cpu"
    from llmtrain.plan.answer import Change, Kind, Plan, name_of
    from llmtrain.plan.prepare import ahead, changes, prepared
    from llmtrain.plan.rehearsal import kinds, rehearse

    on_gpu = device != "cpu"
    checked = prepared(resolved, on_gpu=on_gpu)
    degrees, chosen = resolved.degrees, kinds(resolved.degrees)
    alike = degrees.world_size // degrees.pipeline
    found = {each.rank: each for each in rehearse(checked, list(chosen), slots)}
    plan = Plan(
        title=f"{title}: {_summary(resolved, checked.spec.facts.parameters)}",
        hosts=hosts,
        slots=slots,
        on_gpu=on_gpu,
        memory=memory,
        device=device or "a device",
        kinds=[
            Kind(
                name=name_of(degrees.place(rank).pipeline, stages, degrees.pipeline),
                ranks=stages * alike,
                rehearsed=found[rank],
                ahead=ahead(resolved) if on_gpu else 0,
            )
            for rank, stages in chosen.items()
        ],
        checkpoint=sum(found[rank].saved * stages for rank, stages in chosen.items()) * alike,
        seconds=sum(each.cpu_s for each in found.values()),
    )
    if memory is None or plan.fits:
        return plan
    fullest = plan.fullest.rehearsed.rank
    with tempfile.TemporaryDirectory() as folder:
        for said, more in changes(parsed, resolved, Path(folder)):
            with contextlib.suppress(ConfigError):  # the change goes with another value of the run
                _, other = _resolved([*words, *more], hosts * slots)
                (then,) = rehearse(prepared(other, on_gpu=on_gpu), [fullest], slots)
                plan.changes.append(Change(words=said, peak=then.peak + (ahead(other) if on_gpu else 0)))
    return plan


def _resolved(words: list[str], world_size: int) -> tuple[Parsed, ResolvedRun]:
    parsed = parse(words, check_paths=False)
    run = fetched(parsed.run, parsed.places)[0]
    return parsed, resolve(run, world_size, "--hosts and --slots", places=parsed.places, epoch=lambda _: _EPOCH)


def _summary(resolved: ResolvedRun, parameters: int) -> str:
    mix, batch = resolved.mix, resolved.batch
    ways = [f"{units.count(parameters)} parameters", mix.precision, f"ZeRO {mix.zero_stage}", resolved.optim.name]
    ways += [f"{name} {degree}" for name, degree in asdict(mix.degrees).items() if degree > 1 and name != "data"]
    ways.append(f"micro-batch of {batch.micro_batch} x {batch.sequence_length} tokens")
    return ", ".join(ways)
