"""`llmtrain config check|show`: the settings of a run, checked and shown before it costs anything."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from llmtrain import features
from llmtrain.base import units
from llmtrain.base.choice import either
from llmtrain.base.errors import ConfigError
from llmtrain.commands import completion
from llmtrain.config import strict_yaml
from llmtrain.config.help import entries, json_schema
from llmtrain.config.load import COMMAND_LINE, configs_in, parse, plugins_of, run_words
from llmtrain.config.on_disk import refuse_if_preempted
from llmtrain.config.pinned import with_base
from llmtrain.config.problems import closest, show, stop
from llmtrain.config.resolve import resolve
from llmtrain.config.rules import value_of
from llmtrain.config.run import Run
from llmtrain.config.schema import SHARED
from llmtrain.config.topology import Degrees
from llmtrain.data.stream.epoch import sequences_of_epoch
from llmtrain.engine.process_memory import none_while_importing

if TYPE_CHECKING:  # without torch at run time
    from llmtrain.data.stream.train_data import RunData
    from llmtrain.models.spec import ModelFacts

USAGE = """\
usage: llmtrain config check RUN.yaml ... [--SECTION.FIELD VALUE ...] [--world-size N] [--data]
       llmtrain config show  RUN.yaml ... [--SECTION.FIELD VALUE ...] [--world-size N]
       llmtrain config schema [--plugin FILE.py]

check   makes all checks of `llmtrain train` that need no device: YAML, DeepSpeed JSON, paths, DeepSpeed's own
        checks, the model without its weights, the data's shards. Takes seconds, and needs no network unless
        model.pretrained is a model on the Hub, which is downloaded
show    prints the resolved YAML with the origin of each value, and the exact dict that DeepSpeed will get, in a
        fraction of a second
schema  prints the JSON Schema of a run's YAML, for editors

RUN.yaml ...     one file, or several: a later one overrides values of the earlier ones
--world-size N   ranks to check for (default: WORLD_SIZE, or 1)
--data           check also reads the prepared data and compares it with its checksums
"""

_ACTIONS = ["check", "show", "schema"]
_WIDEST = 60
"""Longest line (characters) that moves the column of `show`'s comments to the right."""
_USUAL_RANKS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
"""Numbers of ranks to try if none is given."""


def main(argv: list[str]) -> int:
    """Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="llmtrain config")
    parser.add_argument("action", choices=_ACTIONS)
    parser.add_argument("run", nargs="?")
    parser.add_argument("--world-size")
    parser.add_argument("--data", action="store_true")
    completion.offer_run(parser)
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    action, rest = argv[0], argv[1:]
    if action not in _ACTIONS:
        near = closest(action, _ACTIONS)
        raise stop("llmtrain config", action, "is not a command", f"did you mean {near}?" if near else either(_ACTIONS))
    if "-h" in rest or "--help" in rest:
        print(USAGE, end="")
        return 0
    if action == "schema":
        if words := plugins_of(rest):
            raise stop(
                "llmtrain config schema",
                words[0],
                "takes no argument but --plugin: the schema is of all runs",
                "remove it",
            )
        print(json.dumps(json_schema(), indent=1))
        return 0
    world_size, source, rest = _world_size(rest)
    reads_data, rest = "--data" in rest, [word for word in rest if word != "--data"]
    words = run_words(rest)
    parsed, files, assumed = parse(words), ", ".join(configs_in(words)), source.startswith("assumed")
    others = []  # usual numbers of ranks that fit the run's degrees and batch
    for ranks in _USUAL_RANKS if assumed else ():
        with contextlib.suppress(ConfigError):
            resolve(parsed.config, ranks, places=parsed.places, epoch=sequences_of_epoch)
            others.append(ranks)
    try:
        run = resolve(
            parsed.config, world_size, source, places=parsed.places, notes=parsed.notes, epoch=sequences_of_epoch
        )
    except ConfigError as error:
        if not others:
            raise
        raise ConfigError(f"{error}\n  the check was for 1 rank; it passes with {_give(others)}") from error
    if others:
        note = f"the figures are for 1 rank; for more give {_give(others)}"
        run = replace(run, notes=(*run.notes, note))
    if action == "show":
        print(f"# {files}, resolved for {units.counted(world_size, 'rank')}")
        print("".join(f"# {note}\n" for note in parsed.notes) + _with_origins(run))
        print(f"# {run.config.deepspeed}, exactly as DeepSpeed gets it\n{json.dumps(run.deepspeed, indent=2)}\n")
        print(summary(run))
    else:
        refuse_if_preempted(run.config, run.places)
        with none_while_importing():
            from llmtrain.training.examine import examine  # imports torch

            run, spec, data = examine(with_base(run))
        print(summary(run, spec.facts))
        if reads_data:
            print(_read_data(data))
        print(f"ok: {files} with {run.config.deepspeed}")
    return 0


def _with_origins(run: Run) -> str:
    """Return the resolved run as YAML; a comment behind each value says where it was set (FILE:LINE or --KEY), or
    "default" or "computed"."""
    text = strict_yaml.dump(run.config)
    lines, keys = text.splitlines(), strict_yaml.parse(text, "").lines
    defaults: dict[str, set[str]] = {}
    for entry in entries():
        defaults.setdefault(entry.key, set()).add(entry.default)
    width = max(len(line) for line in lines if len(line) <= _WIDEST)
    for key, number in keys.items():
        if any(other.startswith(f"{key}.") for other in keys):
            continue
        named = key
        while not ({named} & (run.places.keys() | defaults) or "[" in named or "." not in named):
            # a key in a user's map, or a field of a stage, whose place is not known: take the parent's
            named = named.rpartition(".")[0]
        if place := run.places.get(named):
            origin = f"--{named}" if place == COMMAND_LINE else place.replace(", line ", ":")
        else:
            value = show(value_of(key, run.config))
            origin = "default" if value in defaults.get(named, ("null",)) else "computed"
        lines[number - 1] = f"{lines[number - 1]:<{width}}  # {origin}"
    return "\n".join([*lines, ""])


def _give(ranks: list[int]) -> str:
    return f"--world-size {either(list(map(str, ranks)))}"


def _read_data(data: RunData) -> str:
    """Compare all data with its checksums. Returns a line about it. Raises DataError."""
    files = [file for each in (*data.stages, *data.sets.values()) for file in each.sums(origins=True)]
    files += [file for asked in data.choices.values() for file in asked.prepared.sums(origins=True)]
    files = list({file.path: file for file in files}.values())
    for file in files:
        file.compare()
    size = units.size(sum(file.bytes for file in files))
    unverified = sum(not file.xxh3 for file in files)
    without = f", except {units.counted(unverified, 'file')} without a checksum" if unverified else ""
    return f"data:    {units.counted(len(files), 'file')}, {size}: equal to the checksums in the manifests{without}"


def summary(run: Run, facts: ModelFacts | None = None) -> str:
    """Return a few lines about batch, length, layout and precision, the model's size if known, and the notes."""
    train, batch = run.config.train, run.batch
    equation = (
        f"global_batch {batch.global_batch}, micro_batch auto" if train.micro_batch == "auto" else batch.equation()
    )
    lines = [f"batch:   {equation} ({units.count(batch.tokens)} tokens a step)"]
    for number, stage in enumerate(run.stages.stages[1:], 1):
        lines.append(
            f"stage {number}: from step {stage.first_step}: {', '.join(stage.data.folders)}, sequences of "
            f"{stage.batch.sequence_length}, {stage.batch.equation()} ({units.count(stage.batch.tokens)} tokens a step)"
            f"{', ' + stage.schedule.name if stage.schedule_from == stage.first_step else ''}"
        )
    if run.max_steps is not None:
        tokens = units.count(run.stages.tokens(run.max_steps))
        lines.append(f"length:  {run.max_steps} optimizer steps, {tokens} tokens")
    else:
        lines.append(f"length:  {train.max_minutes:g} minutes")
    lines += [
        f"compute: {', '.join(ways_of(run))}",
        f"optim:   {_optimizer(run)}",
        f"ranks:   {_ranks(run.mix.degrees)}",
    ]
    if facts is not None:
        lines.append(f"model:   {units.count(facts.parameters)} parameters")
    lines += features.summary(run)
    lines.append(f"run dir: {train.run_dir}")
    return "\n".join([*lines, *(f"note:    {note}" for note in run.notes)])


def ways_of(run: Run) -> list[str]:
    """Return a word or two each for precision, ZeRO, optimizer, offload and recomputation."""
    mix = run.mix
    optimizer = "optimizer to a disk" if mix.swaps else "optimizer"
    parameters = "parameters to a disk" if mix.weights_on_disk else "parameters"
    offload = [name for name, on in ((optimizer, mix.offload_optimizer), (parameters, mix.offload_param)) if on]
    ways = [mix.arithmetic, f"ZeRO {mix.zero_stage}", run.config.optim.name]
    ways += ["moments in bf16"] if mix.bf16_moments else []
    ways += [f"offload of {' and '.join(offload)}"] if offload else []
    layers, kept = run.config.model.recompute.layers, " without attention" if mix.keep_attention else ""
    of = f" of {units.counted(layers, 'layer')}" if isinstance(layers, int) else ""
    of = " of as many layers as memory asks for" if layers == "auto" else of
    of += " a stage" if of and mix.degrees.pipeline > 1 else ""
    ways += [f"activation checkpointing{of}{kept}"] if mix.recomputes else []
    return ways


def _optimizer(run: Run) -> str:
    found: dict[str, list[str]] = {}
    for key in SHARED:
        section, name = key.split(".")
        if section == "optim" and hasattr(run.config.optim, name):
            origin = run.places.get(key, "llmtrain's defaults").partition(", ")[0]
            found.setdefault(origin, []).append(f"{name} {show(getattr(run.config.optim, name))}")
    return "; ".join(f"{', '.join(values)} ({origin})" for origin, values in found.items())


def _ranks(degrees: Degrees) -> str:
    shared = {"pipeline": degrees.pipeline, "sequence": degrees.sequence, "tensor": degrees.tensor}
    ways = [f"{name} {degree}" for name, degree in shared.items() if degree > 1]
    ways.append(f"data-parallel {degrees.data}")
    experts = f", {degrees.expert} of the data-parallel ones share the experts" if degrees.expert > 1 else ""
    return f"{degrees.world_size} = {' x '.join(ways)}{experts}"


def _world_size(words: list[str]) -> tuple[int, str, list[str]]:
    """Take --world-size out of the words. Returns (ranks, where the number comes from, the other words)."""
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
