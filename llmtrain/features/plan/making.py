"""Makes the answer of `llmtrain plan`: rehearses a run and changes of it, and stores the answer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llmtrain.base import log
from llmtrain.base.errors import UserError
from llmtrain.base.files import scratch_folder
from llmtrain.commands.config import ways_of
from llmtrain.config.deepspeed.read import read_json
from llmtrain.config.run import Run
from llmtrain.features.plan import autos
from llmtrain.features.plan.answer import Kind, Plan, name_of
from llmtrain.features.plan.asked import resolved
from llmtrain.features.plan.decide import decide, needs
from llmtrain.features.plan.device import Machines
from llmtrain.features.plan.planned import Planned, store, with_chosen
from llmtrain.features.plan.rehearsal import Rehearsed, kinds, prepared, rehearse
from llmtrain.features.plan.speed import speeds_for, step_time
from llmtrain.features.plan.work import sent


def make_plan(asked: Run, words: list[str], machines: Machines, imbalance: float, title: str) -> Plan:
    """Rehearse the run, and the changes that would make it fit. `words`: the run's on a command line. Raises
    UserError."""
    speeds = speeds_for(asked, machines)

    def rehearsed(run: Run, ranks: Iterable[int]) -> dict[int, Rehearsed]:
        on_gpu = machines.on_gpu
        answers = rehearse(prepared(run, on_gpu=on_gpu), [*ranks], machines.slots, imbalance=imbalance, on_gpu=on_gpu)
        return {answer.rank: answer for answer in answers}

    degrees, chosen = asked.mix.degrees, kinds(asked.mix.degrees)
    run, ranks = decide(asked, machines, lambda run: rehearsed(run, chosen))
    alike = degrees.world_size // degrees.pipeline
    micro_batch, recompute = run.batch.micro_batch, run.config.model.recompute
    plan = Plan(
        title=f"{title}: {_summary(run)}",
        machines=machines,
        kinds=[
            Kind(
                name=name_of(degrees.place(rank).pipeline, stages, degrees.pipeline),
                ranks=stages * alike,
                rehearsed=ranks[rank],
            )
            for rank, stages in chosen.items()
        ],
        checkpoint=sum(ranks[rank].saved * stages for rank, stages in chosen.items()) * alike,
        seconds=sum(rank.cpu_s for rank in ranks.values()),
        time=None if speeds is None else step_time(run, machines, speeds, ranks),
        chosen={"micro_batch": micro_batch, "recompute": asdict(recompute)} if autos(asked.config) else None,
    )
    if machines.memory is not None and machines.room(plan.fullest.peak, machines.memory)[0] < 0:
        fullest = plan.fullest.rehearsed.rank
        with scratch_folder("plan") as folder:
            for change, more_words in changes(run, folder):
                try:
                    with contextlib.suppress(UserError):  # the change goes with another value of the run
                        other = with_chosen(resolved([*words, *more_words], machines.ranks), micro_batch, recompute)
                        plan.changes[change] = needs(rehearsed(other, [fullest]).values())
                except RuntimeError as error:  # a bug there takes nothing from the answer
                    log.warn(f"{change} could not be rehearsed: {str(error).splitlines()[-1]}")
    if imbalance == 1:  # a run is compared with balanced experts
        for planned in (asked, run) if autos(asked.config) else (asked,):
            keep(plan, planned)
    return plan


def keep(plan: Plan, run: Run) -> None:
    """Store the answer for `config check` and the run."""
    others = replace(plan.machines, begun=False).others(plan.fullest.peak)  # a run compares with all of its memory
    messages = [sent(kind.rehearsed.step, plan.machines.slots) for kind in plan.kinds]
    answer = Planned(
        peak=plan.fullest.peak,
        of_rank_0=plan.kinds[0].peak,
        more_at_least=sum(other.low for other in others),
        more_at_most=sum(other.high for other in others),
        phases={
            phase: {label: bytes_ for label, bytes_ in parts.items() if plan.on_device(label)}
            for phase, parts in plan.fullest.rehearsed.phases.items()
        },
        changes=plan.changes,
        sent=max(sent_bytes for sent_bytes, _ in messages),
        sent_to_other_hosts=max(to_other_hosts for _, to_other_hosts in messages),
        step_s={} if plan.time is None else plan.time.parts,
        memory=plan.machines.memory,
        chosen=plan.chosen,
    )
    with contextlib.suppress(OSError):  # the answer is printed
        store(run, answer, on_gpu=plan.machines.on_gpu)


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
