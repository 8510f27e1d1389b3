"""`llmtrain plan RUN.yaml`: memory and time of a run on each kind of rank, rehearsed on this machine."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.base import log, units
from llmtrain.base.errors import UserError
from llmtrain.base.files import replace_file, scratch_folder
from llmtrain.cluster.hosts.hostfile import read_hostfile
from llmtrain.commands import completion
from llmtrain.commands.config import ways_of
from llmtrain.config.chosen import with_chosen
from llmtrain.config.deepspeed.read import read_json
from llmtrain.config.load import COMMAND_LINE, command_words, configs_in, parse, run_words
from llmtrain.config.on_disk import check_teacher_folder, model_config
from llmtrain.config.pinned import fetched
from llmtrain.config.planned import Planned, store
from llmtrain.config.problems import Problems, stop
from llmtrain.config.resolve import resolve
from llmtrain.config.run import Run, autos
from llmtrain.engine.ranks.local_ranks import ending_on_sigterm
from llmtrain.plan.device import Machines, memory_of, parse_size

if TYPE_CHECKING:
    from llmtrain.plan.answer import Plan

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
    for flag, given, with_fit in (("--out", args.out, True), ("--png", args.png, False),
                                  ("--imbalance", args.imbalance if args.imbalance != 1 else None, False)):  # fmt: skip
        if given is not None and bool(args.fit) is not with_fit:
            raise stop(flag, given, f"says nothing {'with' if args.fit else 'without'} --fit",
                       f"remove {flag}, or {'--fit' if args.fit else 'add --fit'}", COMMAND_LINE)  # fmt: skip
        if flag != "--imbalance" and given is not None and not Path(given).absolute().parent.is_dir():
            raise stop(flag, given, "is in no folder", "name a file in a folder that exists", COMMAND_LINE)
    with ending_on_sigterm():
        if args.fit:
            return _fit(words, machines, args)
        plan = make_plan(words, machines, args.imbalance, f"{', '.join(configs_in(words))} on {where}")
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
        raise stop(flag, path, f"cannot be written: {error.strerror}", "name a file in a folder that exists",
                   COMMAND_LINE) from error  # fmt: skip


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
    parser.add_argument("--begun", action="store_true",
                        help="--memory is what a run finds free at its start, as auto takes it")  # fmt: skip
    parser.add_argument("--host-memory", metavar="SIZE", help="memory of a host, such as 1TiB")
    parser.add_argument("--link", metavar="NAME",
                        help="network between hosts: ib400, eth100, 40Gbit, or a file of doctor's --json")  # fmt: skip
    parser.add_argument("--price", type=float, metavar="X", help="price of a device for an hour: what the run costs")
    parser.add_argument("--disk", metavar="SIZE", help="bytes that are written in a second, for saves that wait")
    parser.add_argument("--imbalance", type=float, default=1.0, metavar="X",
                        help="tokens of the fullest rank's experts over the mean (default 1)")  # fmt: skip
    parser.add_argument("--fit", action="store_true",
                        help="rehearse other mixes: the five fastest that fit, with the same global batch")  # fmt: skip
    parser.add_argument("--out", metavar="FILE", help="with --fit: write the DeepSpeed JSON of the fastest")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--png", metavar="FILE", help="draw the ranks' memory, and its course over a step")
    completion.offer_run(parser)
    args, words = command_words(parser, argv)
    return args, run_words(words)


def _ranks(args: argparse.Namespace) -> tuple[int, int, str]:
    """Return (hosts, ranks of a host, a note on their source). Raises ConfigError."""
    for name, least in (("imbalance", 1), ("price", 0), ("hosts", 1), ("slots", 1)):
        if (number := getattr(args, name)) is not None and not least <= number < math.inf:
            raise stop(f"--{name}", number, f"must be at least {least}", f"write --{name} 2", COMMAND_LINE)
    if args.hostfile is not None and (args.hosts or args.slots):
        raise stop("--hostfile", args.hostfile, "says both --hosts and --slots", "remove these", COMMAND_LINE)
    if args.hostfile is not None:
        hosts = read_hostfile(args.hostfile)
        slots = {host.slots for host in hosts}
        if len(slots) > 1:
            raise stop("--hostfile", args.hostfile, "has hosts of unequal slots, for which a plan has no answer",
                       "give --hosts and --slots", COMMAND_LINE)  # fmt: skip
        return len(hosts), slots.pop(), ""
    assumed = "" if args.hosts or args.slots else " (--hosts and --slots, or --hostfile, ask about more)"
    return args.hosts or 1, args.slots or 1, assumed


def _fit(words: list[str], machines: Machines, args: argparse.Namespace) -> int:
    """Print the fastest mixes that fit, and the YAML of the first, whose JSON --out gets. Raises UserError."""
    if machines.memory is None:
        raise stop("--fit", True, "asks for a device's speeds and memory", "write --device h100-80", COMMAND_LINE)
    run = _resolved(words, machines.ranks)
    os.environ["DS_ACCELERATOR"] = "cpu"
    from llmtrain.plan.fit import Fitter, Form
    from llmtrain.plan.speed import speeds_for

    speeds = speeds_for(run, machines)
    if speeds is None:
        raise stop("--device", args.device, "has no speeds in the table of devices", "write --device h100-80",
                   COMMAND_LINE)  # fmt: skip
    tree = read_json(run.config.deepspeed)
    with scratch_folder("plan") as folder:

        def resolved(form: Form, values: dict[str, Any]) -> Run:
            path = folder / f"{form}.json"
            path.write_text(json.dumps(form.json(tree)))
            more = {"deepspeed": str(path), "train.global_batch": run.batch.global_batch, **values}
            asked = [f"--{key}={'null' if value is None else value}" for key, value in more.items()]
            return _resolved([*words, *asked], machines.ranks)

        found = Fitter(run, machines, speeds, resolved).fit()
    first = found.best[0]
    values = {"deepspeed": args.out or "FILE of --out", "train.global_batch": run.batch.global_batch}
    lines = [f"  {key}: {json.dumps(value)}" for key, value in (values | first.choice.values).items()]
    text = "\n".join([*found.text(), "", "in the YAML of the first:", *lines])
    print(json.dumps(found.as_json()) if args.json else text)
    if args.out:
        _write("--out", args.out, (json.dumps(first.choice.form.json(tree), indent=2) + "\n").encode())
    return 0


def make_plan(words: list[str], machines: Machines, imbalance: float, title: str) -> Plan:
    """Rehearse the run, and the changes that would make it fit. Raises UserError."""
    asked = _resolved(words, machines.ranks)  # a mistake needs no torch
    if "train.micro_batch" in autos(asked.config) and machines.memory is None:
        raise stop("train.micro_batch", "auto", "is decided by the memory of a device", "add --memory 80GiB")
    os.environ["DS_ACCELERATOR"] = "cpu"
    from llmtrain.plan.answer import Kind, Plan, name_of
    from llmtrain.plan.decide import decide, needs
    from llmtrain.plan.rehearsal import Rehearsed, kinds, prepared, rehearse
    from llmtrain.plan.speed import speeds_for, step_time

    speeds = speeds_for(asked, machines)

    def rehearsed(run: Run, ranks: Iterable[int]) -> dict[int, Rehearsed]:
        on_gpu = machines.on_gpu
        found = rehearse(prepared(run, on_gpu=on_gpu), [*ranks], machines.slots, imbalance=imbalance, on_gpu=on_gpu)
        return {each.rank: each for each in found}

    degrees, chosen = asked.mix.degrees, kinds(asked.mix.degrees)
    run, found = decide(asked, machines, lambda run: rehearsed(run, chosen))
    alike = degrees.world_size // degrees.pipeline
    micro_batch, again = run.batch.micro_batch, run.config.model.recompute
    plan = Plan(
        title=f"{title}: {_summary(run)}",
        machines=machines,
        kinds=[
            Kind(
                name=name_of(degrees.place(rank).pipeline, stages, degrees.pipeline),
                ranks=stages * alike,
                rehearsed=found[rank],
            )
            for rank, stages in chosen.items()
        ],
        checkpoint=sum(found[rank].saved * stages for rank, stages in chosen.items()) * alike,
        seconds=sum(each.cpu_s for each in found.values()),
        time=None if speeds is None else step_time(run, machines, speeds, found),
        chosen={"micro_batch": micro_batch, "recompute": asdict(again)} if autos(asked.config) else None,
    )
    if machines.memory is not None and machines.room(plan.fullest.peak, machines.memory)[0] < 0:
        fullest = plan.fullest.rehearsed.rank
        with scratch_folder("plan") as folder:
            for said, more in changes(run, folder):
                try:
                    with contextlib.suppress(UserError):  # the change goes with another value of the run
                        other = with_chosen(_resolved([*words, *more], machines.ranks), micro_batch, again)
                        plan.changes[said] = needs(rehearsed(other, [fullest]).values())
                except RuntimeError as error:  # a bug there takes nothing from the answer
                    log.warn(f"{said} could not be rehearsed: {str(error).splitlines()[-1]}")
    if imbalance == 1:  # a run is compared with balanced experts
        for each in (asked, run) if autos(asked.config) else (asked,):
            keep(plan, each)
    return plan


def keep(plan: Plan, run: Run) -> None:
    """Store the answer for `config check` and the run."""
    from llmtrain.plan.work import sent

    others = replace(plan.machines, begun=False).others(plan.fullest.peak)  # a run compares with all of its memory
    messages = [sent(kind.rehearsed.step, plan.machines.slots) for kind in plan.kinds]
    answer = Planned(
        peak=plan.fullest.peak,
        of_rank_0=plan.kinds[0].peak,
        more_at_least=sum(each.low for each in others),
        more_at_most=sum(each.high for each in others),
        phases={
            phase: {label: held for label, held in parts.items() if plan.on_device(label)}
            for phase, parts in plan.fullest.rehearsed.phases.items()
        },
        changes=plan.changes,
        sent=max(each for each, _ in messages),
        sent_to_other_hosts=max(each for _, each in messages),
        step_s={} if plan.time is None else plan.time.parts,
        memory=plan.machines.memory,
        chosen=plan.chosen,
    )
    with contextlib.suppress(OSError):  # the answer is printed
        store(run, answer, on_gpu=plan.machines.on_gpu)


def _resolved(words: list[str], world_size: int) -> Run:
    parsed = parse(words, check_paths=False)
    run = fetched(parsed.config, parsed.places)[0]
    problems = Problems(parsed.places)
    check_teacher_folder(run, problems)
    model_config(run, problems)
    problems.raise_if_any()
    # The length of an epoch in sequences decides nothing here.
    return resolve(run, world_size, "--hosts and --slots", places=parsed.places, epoch=lambda _: 1 << 30)


def changes(run: Run, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Ways to take less memory, those that cost least time first: (the change in words, more words of the run).

    `folder`: for JSONs with another value.
    """
    zero, batch = dict(run.deepspeed.get("zero_optimization") or {}), run.batch
    if run.config.model.recompute.layers != "all" and not run.mix.recomputes:
        yield "model.recompute.layers: all", ["--model.recompute.layers", "all"]
    if zero.get("stage", 0) < 3 and run.mix.degrees.data > 1:
        more = {"stage": zero.get("stage", 0) + 1}
        yield f"zero_optimization.stage {more['stage']}", ["--deepspeed", _other_json(run, more, folder)]
    if batch.micro_batch > 1:
        half = batch.micro_batch // 2
        same = [f"--train.global_batch={batch.global_batch}", "--train.accumulation=null"]
        yield f"train.micro_batch: {half}", [f"--train.micro_batch={half}", *same]
    if zero.get("stage", 0) > 0 and not run.mix.offload_optimizer:
        more = {"offload_optimizer": {"device": "cpu"}}
        yield "zero_optimization.offload_optimizer on the CPU", ["--deepspeed", _other_json(run, more, folder)]


def _other_json(run: Run, zero: dict[str, Any], folder: Path) -> str:
    """Write the run's JSON with other values of zero_optimization; returns its path."""
    tree = read_json(run.config.deepspeed)
    tree["zero_optimization"] = {**(tree.get("zero_optimization") or {}), **zero}
    path = folder / f"{'-'.join(zero)}.json"
    path.write_text(json.dumps(tree))
    return str(path)


def _summary(run: Run) -> str:
    mix, batch = run.mix, run.batch
    ways = ways_of(run)
    ways += [f"{name} {degree}" for name, degree in asdict(mix.degrees).items() if degree > 1 and name != "data"]
    ways.append(f"micro-batch of {batch.micro_batch} x {batch.sequence_length} tokens")
    return ", ".join(ways)
