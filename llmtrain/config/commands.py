"""`llmtrain config check` and `llmtrain config show`: what a run will do, before it costs anything."""

from __future__ import annotations

import json
import os

from llmtrain import units
from llmtrain.config.batch import Batch
from llmtrain.config.deepspeed import deep_check
from llmtrain.config.load import dump, parse, resolve
from llmtrain.config.problems import closest, stop
from llmtrain.config.run import ResolvedRun

USAGE = """\
usage: llmtrain config check RUN.yaml [--SECTION.FIELD VALUE ...] [--world-size N] [--deep]
       llmtrain config show  RUN.yaml [--SECTION.FIELD VALUE ...] [--world-size N]

check   checks YAML, DeepSpeed JSON and paths against each other; no GPU, no network, no torch
show    prints the resolved YAML and the exact dict that DeepSpeed will get

--world-size N   ranks to check for (default: WORLD_SIZE, or 1)
--deep           lets the installed DeepSpeed check the dict too (takes seconds)
"""


def main(argv: list[str]) -> int:
    """The command line behind `llmtrain config`. Returns 0.

    Raises: ConfigError.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    action, rest = argv[0], argv[1:]
    if action not in ("check", "show"):
        near = closest(action, ("check", "show"))
        raise stop("llmtrain config", action, "is not a command", f"did you mean {near}?" if near else "check or show")
    if "-h" in rest or "--help" in rest:
        print(USAGE, end="")
        return 0
    if not rest or rest[0].startswith("-"):
        remedy = f"write llmtrain config {action} RUN.yaml"
        raise stop(f"llmtrain config {action}", rest[:1], "needs the run's YAML first", remedy)
    yaml_path, rest = rest[0], rest[1:]
    deep = "--deep" in rest
    world_size, source, rest = _world_size([word for word in rest if word != "--deep"])
    parsed = parse(["--config", yaml_path, *rest])
    resolved = resolve(parsed.run, world_size, source, places=parsed.places)
    if deep:
        deep_check(resolved.deepspeed, resolved.run.deepspeed)
    if action == "show":
        print(f"# {yaml_path}, resolved for {world_size} rank(s)\n{dump(resolved.run)}")
        print(f"# {resolved.run.deepspeed}, exactly as DeepSpeed gets it\n{json.dumps(resolved.deepspeed, indent=2)}\n")
    print(summary(resolved))
    if action == "check":
        print(f"ok: {yaml_path} with {resolved.run.deepspeed}{' (DeepSpeed agrees)' if deep else ''}")
    return 0


def summary(resolved: ResolvedRun) -> str:
    """The batch equation solved, the length, the way of computing, and the notes: a few lines."""
    train, sequence_length = resolved.run.train, resolved.run.data.sequence_length
    assert train.global_batch and train.micro_batch and train.accumulation
    batch = Batch(
        global_batch=train.global_batch,
        micro_batch=train.micro_batch,
        accumulation=train.accumulation,
        data_parallel=resolved.data_parallel,
    )
    step_tokens = batch.global_batch * sequence_length
    lines = [f"batch:   {batch.equation()} ({units.count(step_tokens)} tokens a step)"]
    if resolved.max_steps is not None:
        tokens = units.count(resolved.max_steps * step_tokens)
        lines.append(f"length:  {resolved.max_steps} optimizer steps, {tokens} tokens")
    else:
        lines.append(f"length:  {train.max_minutes:g} minutes")
    offload = [name for name, on in (("optimizer", resolved.offload_optimizer), ("parameters", resolved.offload_param))
               if on]  # fmt: skip
    ways = [resolved.precision, f"ZeRO {resolved.zero_stage}", resolved.run.optim.name or ""]
    ways += [f"offload of {' and '.join(offload)}"] if offload else []
    ways += ["activation checkpointing"] if resolved.activation_checkpointing else []
    lines += [f"compute: {', '.join(ways)}", f"run dir: {train.run_dir}"]
    return "\n".join([*lines, *(f"note:    {note}" for note in resolved.notes)])


def _world_size(words: list[str]) -> tuple[int, str, list[str]]:
    """Take --world-size out of the words: (ranks, where the number came from, the other words)."""
    rest: list[str] = []
    text, source = os.environ.get("WORLD_SIZE", "1"), "WORLD_SIZE"
    if "WORLD_SIZE" not in os.environ:
        source = "assumed; give --world-size N"
    iterator = iter(words)
    for word in iterator:
        if word == "--world-size":
            text, source = next(iterator, ""), "--world-size"
        elif word.startswith("--world-size="):
            text, source = word.partition("=")[2], "--world-size"
        else:
            rest.append(word)
    if not text.isdecimal() or int(text) < 1:
        raise stop("--world-size", text, "must be a whole number of ranks, at least 1", "write --world-size 8")
    return int(text), source, rest
