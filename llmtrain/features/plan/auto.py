"""At a run's start, decide train.micro_batch and model.recompute.layers auto by a plan that is stored or made now, and
check plan.memory_margin."""

from __future__ import annotations

import contextlib
import shlex
import time
from dataclasses import replace
from typing import Any

import torch

from llmtrain.base import log
from llmtrain.base.child import Child, ending_with_parent, of_module
from llmtrain.base.files import scratch_folder
from llmtrain.base.units import size
from llmtrain.checkpoint.snapshot import memory_available
from llmtrain.config import plugins
from llmtrain.config.run import RecomputeConfig, Run
from llmtrain.config.strict_yaml import dump
from llmtrain.config.topology import ranks_of_this_host
from llmtrain.engine.ranks.device import memory_of
from llmtrain.engine.ranks.local_ranks import ending_on_sigterm
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.features.plan import PlanConfig, autos
from llmtrain.features.plan.planned import in_words, refuse_without_room, stored, with_chosen

LIMIT_S = 300.0
"""Time limit of a start's two to five rehearsals, which take 8 CPU-seconds each for 1B and 35 for 8B."""


def decided(run: Run, ranks: Ranks) -> Run:
    """Return the run with values for auto, the same on all ranks, and a note on them. All ranks call it.

    If no plan is stored for a device of at most this size, a child process of rank 0 rehearses the run for the free
    memory of the fullest device, and stores the answer.
    """
    on_gpu = ranks.device.type == "cuda"
    if not autos(run.config):
        return run
    least, free = (min(ranks.gather(memory)) for memory in (memory_of(ranks.device), free_bytes(ranks.device)))
    planned = ranks.first(lambda: stored(run, on_gpu=on_gpu))
    # A driver takes up to 2 % of the memory that a device's name promises.
    if planned is not None and planned.chosen and planned.memory and least >= 0.98 * planned.memory:
        chosen, why = planned.chosen, f"for {size(planned.memory)}: {planned.text()}"
    else:
        chosen, why = _rehearsed(run, free, ranks)
    decided = with_chosen(run, chosen["micro_batch"], RecomputeConfig(**chosen["recompute"]))
    note = f"{' and '.join(autos(run.config))} auto: {in_words(chosen)}, {why}"
    return replace(decided, notes=(*run.notes, note))


def check_room(run: Run, ranks: Ranks) -> None:
    """Check plan.memory_margin. All ranks call it. Raises UserError: less of the smallest device stays free."""
    if run.config.section(PlanConfig).memory_margin is None:
        return
    least = min(ranks.gather(memory_of(ranks.device)))
    with ranks.together():
        if ranks.rank == 0:  # the plan is in the cache of one host
            refuse_without_room(run, least, on_gpu=ranks.device.type == "cuda")


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of this rank's device, or on a CPU its share of the host's free memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return memory_available() // ranks_of_this_host()


def _rehearsed(run: Run, free: int, ranks: Ranks) -> tuple[dict[str, Any], str]:
    """Return the chosen values, and the reason in words."""
    config = replace(run.config, parts={}, trackers={})  # parts that a Python program passes are in no YAML
    slots = ranks_of_this_host() if ranks.world_size % ranks_of_this_host() == 0 else ranks.world_size
    words = ["--hosts", str(ranks.world_size // slots), "--slots", str(slots), "--memory", str(free), "--begun"]
    words += [] if ranks.device.type == "cuda" else ["--device", "cpu"]
    words += [word for plugin in plugins.words() for word in (plugins.FLAG, plugin)]
    with contextlib.ExitStack() as stack:
        child = None
        if ranks.rank == 0:
            log.info(f"{' and '.join(autos(config))} auto: rehearsing the run for {size(free)} of free memory")
            stack.enter_context(ending_on_sigterm())
            file = stack.enter_context(scratch_folder("plan")) / "run.yaml"
            file.write_text(dump(config))
            child = Child(of_module("llmtrain", "plan", str(file), *words, "--json"), preexec_fn=ending_with_parent())
            stack.callback(child.close)
        answer = ranks.at_length(lambda: None if child is None else _answer(child))
    answer_here = ranks.first(lambda: answer)
    if isinstance(answer_here, dict):
        return answer_here["chosen"], f"for {size(free)}: {size(answer_here['peak'])} of tensors on the fullest rank"
    command = shlex.join(["llmtrain", "plan", "RUN.yaml", *words])
    least = {"micro_batch": 1, "recompute": {"layers": "all", "keep": config.model.recompute.keep}}
    return least, f"the choice that takes least memory: {answer_here}; `{command}` decides it before a start"


def _answer(child: Child) -> dict[str, Any] | str:
    """Wait for the plan and return it, or the reason why there is none."""
    until_s, answers = time.monotonic() + LIMIT_S, list[dict[str, Any]]()
    while not child.is_closed and time.monotonic() < until_s:
        time.sleep(0.1)
        answers += child.received()
    if answers:
        return answers[0]
    child.close()
    return f"the rehearsal ended with exit code {child.code}" if child.is_closed else f"no plan after {LIMIT_S:.0f} s"
