"""Compares a small training in two environments, and finds the first value that differs by more than rounding.

Ranks of both run this llmtrain, with the torch, transformers and DeepSpeed of their environment, from the same first
values. They keep what each module gets and gives, gradients, moments and updates, in the order of the step. As a
program: a rank, like parity/trainer.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import pickle
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn

import llmtrain
from llmtrain.base.errors import UserError
from llmtrain.config import plugins
from llmtrain.config.problems import COMMAND_LINE, stop
from llmtrain.config.run import Run
from llmtrain.engine.ranks.local_ranks import RankError
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.features import parts_of
from llmtrain.models.adapter import AdaptedSource
from llmtrain.models.own_settings import trained_names
from llmtrain.models.source import ParameterSource
from llmtrain.models.spec import ModelSpec
from llmtrain.models.structure.calls import tensors_of
from llmtrain.parity.compare import MOVEMENT, NORM, SPREADS, Difference, share
from llmtrain.parity.plain_maps import loud_source
from llmtrain.parity.small import noise
from llmtrain.parity.small_run import AUTOCAST, PLAN
from llmtrain.parity.trainer import main, set_up, spec_of, train_steps, whole_tensors
from llmtrain.parity.worlds import PARTS, SAME, AgainstPlain, Asked
from llmtrain.storage.pieces import byte_view

FIRST = "first.pt"
"""File of the first values that an environment draws itself."""
_NUDGED = 3
"""Trainings here whose weights differ by rounding; the tolerance is SPREADS times their largest difference."""
_NUDGE = {"fp32": 2.5e-7, "bf16": 2.0**-8, AUTOCAST: 2.0**-8, "fp16": 2.0**-11}
"""Relative: in fp32 as in plain.py, else half a unit in the last place, by which an operation rounds its output."""
_OUTPUT = 1e-5
"""Smallest tolerance of a value in fp32, relative. These have others:"""
_LEAST = {"gradient": NORM, "gradient of output": NORM, "gradient norm": NORM, "first moment": NORM, "update": MOVEMENT}
_NEEDED = ("torch", "transformers", "deepspeed", "numpy")
_FACTS = """
import json, sys
from importlib.metadata import distributions
found = {each.metadata["Name"].lower().replace("_", "-"): each.version for each in reversed([*distributions()])}
print(json.dumps([sys.version_info[:2] >= (3, 11), {"python": sys.version.split()[0], **found}]))
"""
_SKETCH = 64
Summary = tuple[str, Tensor]
"""(hash of a tensor's bytes, its sketch)"""
Kept = dict[tuple[str, str, int], tuple[str, Summary]]
"""Values of a step, in order: {(kind, name of the module or parameter, number): (code that computes it, summary)}."""


def summary(value: Tensor) -> Summary:
    """The sketch has `_SKETCH` sums with other signs and sizes. The distance between two sketches is that between the
    tensors, mostly within a fifth (Charikar, Chen, Farach-Colton 2002), in 512 bytes."""
    flat = value.detach().cpu().reshape(-1).contiguous()
    numbers = F.pad(flat.double(), (0, -len(flat) % _SKETCH))
    weights = torch.cos(torch.arange(len(numbers), dtype=torch.float64).square())  # no generator of either version
    return xxhash.xxh3_64_hexdigest(byte_view(flat)), (numbers * weights).view(-1, _SKETCH).sum(0)


def packages_of(given: str) -> tuple[str, dict[str, str]]:
    """Return (path of the interpreter, versions of the packages). `given`: an interpreter, or an environment's folder.

    Raises: ConfigError.
    """
    # Not resolved: Python finds its packages by the link that was called.
    python = Path(given, "bin/python" if Path(given).is_dir() else "").absolute()
    try:
        answer = subprocess.run([python, "-c", _FACTS], stdout=subprocess.PIPE, check=True, timeout=60).stdout
        is_new, packages = json.loads(answer)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        remedy = "give the folder of a virtual environment, or the path of its python"
        raise stop("--against", given, f"no Python answers there: {error}", remedy, COMMAND_LINE) from None
    if lacks := [name for name in _NEEDED if name not in packages] or ["Python 3.11"] * (not is_new):
        rule = f"the environment has no {', '.join(lacks)}, and llmtrain needs it"
        raise stop("--against", given, rule, "install it there, or give another environment", COMMAND_LINE)
    return str(python), packages


def package_lines(here: dict[str, str], there: dict[str, str]) -> Iterator[str]:
    both = sorted(here.keys() & there.keys(), key=lambda name: (name not in _NEEDED, name))
    other = [f"{name} {here[name]} | {there[name]}" for name in both if here[name] != there[name]]
    yield f"  versions, here | there: {', '.join(other) or 'equal'}"
    for title, alone in {"here": here.keys() - there.keys(), "there": there.keys() - here.keys()}.items():
        if alone:
            yield f"  only {title}: {', '.join(sorted(alone))}"


class AgainstEnvironment(AgainstPlain):
    """The ranks here against the ranks of another environment."""

    def __init__(self, given: str) -> None:
        """`given`: as for `packages_of`. Raises ConfigError."""
        self._environments = [packages_of(python) for python in (sys.executable, given)]

    def comparable(self, user: Run) -> Run:
        model = replace(user.config.model, compile_layers=False)  # a compiled layer calls no hooks of its parts
        return replace(user, config=replace(user.config, model=model))

    def before_ranks(self, user: Run) -> Iterator[int]:
        here, there = (packages for _, packages in self._environments)
        print("\n".join(package_lines(here, there)), flush=True)
        yield from ()

    def of_worlds(self, user: Run, worlds: list[int]) -> Iterator[int]:
        yield from ()

    def of_ranks(self, folder: Path, asked: Asked, plans: dict[str, Run]) -> int:
        return SAME if same_in_both(folder, asked, plans, [python for python, _ in self._environments]) else PARTS


def same_in_both(folder: Path, asked: Asked, plans: dict[str, Run], pythons: list[str]) -> bool:
    """Train and print the comparison. `pythons`: the interpreters here and there. Raises UserError, RankError."""
    one = next(iter(plans.values()))
    spec = ModelSpec.of(one.config.model, one.config.adapter, scores=one.config.objective.scores)
    values, trained = values_of(loud_source(spec, one.config.train.seed)), trained_names(spec)
    # A link to this package alone: around its folder may lie the other packages of this environment.
    (folder / "code").mkdir()
    (folder / "code/llmtrain").symlink_to(Path(llmtrain.__file__).parent)
    search = os.pathsep.join(filter(None, (str(folder / "code"), os.environ.get("PYTHONPATH"))))
    for place, python, seeds in (folder / "there", pythons[1], 1), (folder / "here", pythons[0], 1 + _NUDGED):
        place.mkdir()
        (place / PLAN).write_bytes(pickle.dumps((plugins.words(), pickle.dumps((plans, asked.steps, seeds)))))
        for name, seed in ((name, seed) for name in plans for seed in range(seeds)):
            changes = {n: _NUDGE[name] * noise(seed, n, values[n].numel()) for n in trained if seed}
            torch.save({n: value * (1 + changes.get(n, 0.0)) for n, value in values.items()}, place / f"{name}-{seed}")
        variables = {"PYTHONPATH": search, "PYTHONSAFEPATH": "1"}
        if place.name == "there":  # torch would load an operator that another torch has compiled
            variables["TORCH_EXTENSIONS_DIR"] = str(place / "compiled")
        try:
            with asked.ranks(place, one.mix.degrees.world_size, python=python, variables=variables) as ranks:
                ranks.wait()
        except (UserError, RankError) as error:
            raise type(error)(f"{python}: {error}") from None
    drawn, other = torch.load(folder / "there" / FIRST, weights_only=True), list[str]()
    if asked.run.config.model.pretrained is None:
        other = [
            name for name in values if name not in drawn or _relative(drawn[name], summary(values[name])) > _OUTPUT
        ]
    if other:
        print(f"  FAIL  first values of {len(other)} tensors of {len(values)} are drawn differently, first {other[0]}")
    return all([not other, *(_compare(folder, name, asked.steps, one.mix.degrees.world_size) for name in plans)])


def values_of(source: ParameterSource) -> dict[str, Tensor]:
    """Return the flat values of a source, by name."""
    return {name: source.read(name, 0, math.prod(source.shape(name))) for name in source.order()}


def _compare(folder: Path, name: str, steps: int, world_size: int) -> bool:
    """Print the comparison in one precision."""
    equal, count, alone, worst = 0, 0, set[str](), Difference(kind="", step=0, got=0.0, tolerated=1.0)
    trainings = (f"here/{name}-0", f"there/{name}-0", *(f"here/{name}-{1 + seed}" for seed in range(_NUDGED)))
    for step in range(1, steps + 1):
        first: dict[int, tuple[Difference, float]] = {}
        for rank in range(world_size):
            here, there, *nudged = (
                torch.load(folder / f"{training}.{step}.{rank}", weights_only=True) for training in trainings
            )
            alone.update(f"{kind} of {of}" for kind, of, _ in here.keys() ^ there.keys())
            for place, key in enumerate(key for key in here if key in there):
                (code, want), (other_code, got) = here[key], there[key]
                least = max(_NUDGE[name], _LEAST.get(key[0], _OUTPUT) if name == "fp32" else 0.0)
                spread = max((_relative(other[key][1], want) for other in nudged if key in other), default=0.0)
                note = f"rank {rank}, by {code}" + (f", there {other_code}" if code != other_code else "")
                one = Difference(
                    kind=key[0],
                    name=" of ".join(filter(None, key[:2])),
                    step=step,
                    note=note,
                    got=_relative(got, want),
                    tolerated=max(least, SPREADS * spread),
                )
                equal, count, worst = equal + (not one.got), count + 1, max(worst, one, key=lambda each: each.ratio)
                if one.ratio > 1:
                    first.setdefault(place, (one, share(got[1], want[1])))
                    break
        if first:
            one, factor = first[min(first)]
            print(
                f"  FAIL  {name} parts at step {step}: {one.name} ({one.note})\n        differs by "
                f"{one.got:.1e}, tolerated {one.tolerated:.1e}; {factor:.6g} x the one here along it"
            )
            return False
    print(f"  PASS  {name}: {equal} of {count} values equal to the bit")
    if equal < count:
        print(
            f"        the others within rounding: {worst.got:.1e} of {worst.tolerated:.1e}  (step {worst.step}, "
            f"{worst.name})"
        )
    if alone:
        print(f"        not compared: {len(alone)} that one of both lacks, such as {min(alone)}")
    return True


def _relative(got: Summary, want: Summary) -> float:
    """Return the length of the difference over that of `want`; 0: equal to the bit."""
    if got[0] == want[0]:
        return 0.0
    ratio = float((got[1] - want[1]).norm() / (want[1].norm() or 1.0))
    return ratio if math.isfinite(ratio) else math.inf


@contextlib.contextmanager
def watched(root: nn.Module) -> Iterator[Kept]:
    """Keep what modules get and give, and the gradients of their outputs and parameters."""
    kept: Kept = {}
    numbers: dict[tuple[str, str], Iterator[int]] = defaultdict(itertools.count)

    def take(kind: str, name: str, by: nn.Module | str, value: Any) -> None:
        code = by if isinstance(by, str) else f"{type(by).__name__} of {type(by).__module__}"
        for tensor in filter(torch.is_floating_point, tensors_of(value)):
            kept[kind, name, next(numbers[kind, name])] = code, summary(tensor)
            if kind == "output" and tensor.requires_grad:
                tensor.register_hook(partial(take, "gradient of output", name, "what follows it"))

    def before(name: str, above: nn.Module, _: nn.Module, given: Any, named: dict[str, Any]) -> None:
        # Masks may have other values to the same effect, which the outputs show.
        take("input", name, above, [given, *(value for key, value in named.items() if "mask" not in key)])

    def after(name: str, module: nn.Module, _: Any, output: Any) -> None:
        take("output", name, module, output)

    with contextlib.ExitStack() as hooks:
        for name, module in root.named_modules():
            above = root.get_submodule(name.rpartition(".")[0])
            if not name.endswith("experts"):  # they give rows that no token has, with whatever was in that memory
                hooks.enter_context(module.register_forward_pre_hook(partial(before, name, above), with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(partial(after, name)))
            for own, parameter in module.named_parameters(name, recurse=False):
                if parameter.requires_grad:
                    hooks.enter_context(parameter.register_hook(partial(take, "gradient", own, module)))
        yield kept


def train_all(folder: Path, ranks: Ranks, plans: dict[str, Run], steps: int, seeds: int) -> None:
    """Train the small run of each precision from each seed's first values. Raises UserError, on all ranks."""
    for name, seed in ((name, seed) for name in plans for seed in range(seeds)):
        train_watched(plans[name], steps, ranks, folder / f"{name}-{seed}")


def train_watched(run: Run, steps: int, ranks: Ranks, start: Path) -> None:
    """Train from the first values in the file `start`, and keep all values of each step on each rank.

    Raises: UserError, on all ranks.
    """
    spec = spec_of(run.config)
    source = loud_source(spec, run.config.train.seed)
    if ranks.rank == 0:
        torch.save({name: summary(value) for name, value in values_of(source).items()}, start.parent / FIRST)
    setup = set_up(run, ranks, AdaptedSource(source, {}, 0, torch.load(start, weights_only=True)))
    setup.write()
    parts = parts_of(setup)
    for step in range(steps):
        with watched(setup.engine.module.hf) as kept:
            trace = train_steps(setup, step, step + 1, parts)
        moments = whole_tensors(setup.engine, ranks, "exp_avg")
        if ranks.rank == 0:
            before, after = trace.parameters
            kept["loss", "", 0] = "the objective", summary(torch.tensor(trace.losses))
            for name, moment in moments.items():
                kept["first moment", name, 0] = "reduction, clipping or betas", summary(moment)
            kept["gradient norm", "", 0] = "the engine", summary(torch.tensor(trace.norms))
            for name, value in after.items():
                kept["update", name, 0] = "the optimizer", summary(value - before[name])
        torch.save(kept, f"{start}.{step + 1}.{ranks.rank}")
    setup.engine.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], train_all))
