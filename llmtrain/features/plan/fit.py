"""`llmtrain plan --fit`: find the fastest ways to train a run that fit on given machines.

Forms (ZeRO stage, degrees, offload) whose parameters and optimizer state alone do not fit are left out. The others are
rehearsed with few layers and small micro-batches: bytes are linear in layers and micro-batch, seconds in layers and in
the inverse of the micro-batch. The best ones by this estimate are rehearsed completely, and only these are proposed.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product, starmap
from pathlib import Path
from typing import Any, NamedTuple

from llmtrain.base import untrusted
from llmtrain.base.errors import UserError
from llmtrain.base.files import scratch_folder
from llmtrain.base.units import count, lines_of, size
from llmtrain.config.deepspeed.join import without_degrees
from llmtrain.config.deepspeed.read import read_json
from llmtrain.config.run import Run
from llmtrain.features.plan import PlanConfig
from llmtrain.features.plan.asked import resolved
from llmtrain.features.plan.decide import needs, on_host
from llmtrain.features.plan.device import Machines
from llmtrain.features.plan.rehearsal import Rehearsed, kinds, prepared, rehearse_each
from llmtrain.features.plan.speed import Speeds, StepTime, step_time
from llmtrain.models.skeleton import load_config
from llmtrain.training.examine import Examined

BEST = 5
_EXPLORED = 3
"""How many forms get more than two rehearsals."""
_TRIED = 8
"""The search ends after this many complete rehearsals, if one of them fits."""
_CLOSE = 0.95
"""Share of an estimated peak that must fit for a complete rehearsal, which may find a lower peak."""
_LONG, _TILE = 32_768, 4096
"""Sequence length from which sequence parallelism and MLPs in tiles are tried, and tokens of a tile."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class Form:
    """A way to share the work: ZeRO stage, degrees of parallelism, offload."""

    stage: int
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    expert: int = 1
    offload: tuple[str, ...] = ()

    def json(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return the run's JSON in this form; the batch and the recomputation are left to the YAML."""
        zero = {key: value for key, value in (tree.get("zero_optimization") or {}).items() if "offload" not in key}
        zero |= {"stage": self.stage, **{f"offload_{name}": {"device": "cpu"} for name in self.offload}}
        made = without_degrees(tree) | {"zero_optimization": zero}
        made.pop("activation_checkpointing", None)
        if self.tensor > 1:
            made["tensor_parallel"] = {"autotp_size": self.tensor}
        if self.pipeline > 1:
            made["pipeline"] = {"stages": self.pipeline, "partition": "parameters"}
        if self.sequence > 1:
            made["sequence_parallel_size"] = self.sequence
        if self.expert > 1:
            made["expert_parallel"] = {"enabled": True, "autoep_size": self.expert}
        return made

    def __str__(self) -> str:
        shares = {"tensor": self.tensor, "pipeline": self.pipeline, "sequence": self.sequence, "expert": self.expert}
        words = [f"ZeRO {self.stage}", *(f"{name} {degree}" for name, degree in shares.items() if degree > 1)]
        return ", ".join([*words, *(f"{name} on the host" for name in self.offload)])


@dataclass(frozen=True)
class Choice:
    form: Form
    micro_batch: int
    recomputed: int | str | None
    """Value of model.recompute.layers."""
    tile: int | None = None
    """Value of model.mlp_tile_tokens; None: as in the run."""

    @property
    def values(self) -> dict[str, Any]:
        """The choice as keys and values of the run's YAML."""
        tiled = {} if self.tile is None else {"model.mlp_tile_tokens": self.tile}
        batch = {"train.micro_batch": self.micro_batch, "train.accumulation": None}
        return {**batch, "model.recompute.layers": self.recomputed, **tiled}

    @property
    def again(self) -> str:
        """Recomputed layers and tiles in words."""
        return f"{self.recomputed or 'none'}{f', tiles of {self.tile}' if self.tile else ''}"


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A choice that was rehearsed and fits."""

    choice: Choice
    accumulation: int
    peak: int
    left: int
    """Least bytes of the device that stay free beyond plan.memory_margin."""
    time: StepTime


@dataclass(frozen=True, kw_only=True)
class Fit:
    best: list[Fitted]
    counted: int
    """Number of choices that were counted, estimated or rehearsed."""
    rehearsed: int
    """Number of choices that were rehearsed with the complete model, and not only estimated from shallow ones."""

    def as_json(self) -> dict[str, Any]:
        best = [{**asdict(fitted), "mix": str(fitted.choice.form)} for fitted in self.best]
        return {"best": best, "counted": self.counted, "rehearsed": self.rehearsed}

    def text(self) -> list[str]:
        rows = [("", "mix", "micro-batch", "recomputed", "peak", "left", "step", "tokens/s")]
        for number, fitted in enumerate(self.best, 1):
            choice, time = fitted.choice, fitted.time
            way = (str(number), str(choice.form), f"{choice.micro_batch} x {fitted.accumulation}", choice.again)
            speed = (f"{time.seconds:.3g} s", count(time.tokens_per_s))
            rows.append((*way, size(fitted.peak), size(fitted.left), *speed))
        searched = f"{self.counted} choices counted, {self.rehearsed} rehearsed completely; each of these fits"
        return [*lines_of(rows), "", searched, *(f"  assumed: {note}" for note in self.best[0].time.assumed)]


class _Point(NamedTuple):
    peak: float
    seconds: float
    floor: float
    """Seconds without recomputation."""

    def between(self, other: _Point, share: float) -> _Point:
        """Interpolate linearly: `share` 0 gives this point, 1 gives `other`."""
        return _Point(*(mine + share * (its - mine) for mine, its in zip(self, other, strict=True)))


class Fitter:
    def __init__(
        self,
        run: Run,
        machines: Machines,
        speeds: Speeds,
        resolve: Callable[[Form, dict[str, Any]], Run],
    ) -> None:
        """`resolve`: makes the run with a form and other values. Raises UserError: they are not legal together."""
        assert machines.memory is not None
        self._memory = int((1 - (run.config.section(PlanConfig).memory_margin or 0.0)) * machines.memory)
        self._batch = run.batch
        self._machines, self._speeds, self._resolve = machines, speeds, resolve
        self._precision = 4 if run.mix.precision == "fp32" else 2
        _, spec, _ = prepared(run, on_gpu=machines.on_gpu)
        self._facts = spec.facts
        self._config = load_config(run.config.model)
        self._long = self._batch.sequence_length >= _LONG
        tiles = [("all", _TILE)] if self._long and run.config.model.mlp_tile_tokens is None else []
        self._again: list[tuple[str | None, int | None]] = [(None, None), ("all", None), *tiles]
        """Values of model.recompute.layers and model.mlp_tile_tokens that are rehearsed, the least memory last."""
        self._points: dict[tuple[Choice, int | None], _Point] = {}

    def fit(self) -> Fit:
        """Raises UserError: nothing fits."""
        legal, forms = list(self._legal_forms()), list[Form]()
        for group in ([form for form in legal if not form.offload], [form for form in legal if form.offload]):
            if len(forms) < 2:  # offload is slow: for what fits in no other form
                least = [[Choice(form, 1, *recomputed) for recomputed in self._again[1:]] for form in group]
                self._rehearse_shallow(choice for choices in least for choice in choices)
                points = {choices[0].form: [self._estimate(choice) for choice in choices] for choices in least}
                fitting = [form for form in group if any(self._bytes_left(point.peak) >= 0 for point in points[form])]
                forms += sorted(fitting, key=lambda form: points[form][0].floor)
        del forms[_EXPLORED:]
        estimated = []
        for form in forms:
            ways = [way for way in (*self._again, (self._facts.layers // (2 * form.pipeline), None)) if way[0] != 0]
            estimated += [Choice(form, rows, *way) for rows in self._rows(form) for way in ways]
        self._rehearse_shallow(c for c in estimated if c.micro_batch <= 2 and not isinstance(c.recomputed, int))
        likely = [choice for choice in estimated if self._bytes_left(_CLOSE * self._estimate(choice).peak) >= 0]
        likely.sort(key=lambda choice: self._estimate(choice).seconds)
        best: list[Fitted] = []
        tried = 0
        while len(best) < BEST and tried < len(likely) and (tried < _TRIED or not best):
            chosen = likely[tried : tried + BEST - len(best)]
            tried += len(chosen)
            best += self._rehearse_complete(chosen)
        if not best:
            rule = f"none of the {len(legal)} legal forms of the run fits"
            raise UserError(f"--memory {size(self._memory)}: {rule}. Give more --slots or --hosts, or a larger device")
        best.sort(key=lambda fitted: fitted.time.seconds)
        return Fit(best=best, counted=len(legal) + len(estimated), rehearsed=tried)

    def _legal_forms(self) -> Iterator[Form]:
        """Yield the forms that are legal with the run and whose parameters and optimizer state fit."""
        machines = self._machines
        experts = next((number for key in _EXPERTS if (number := getattr(self._config, key, None))), 1)
        powers = [1 << power for power in range(10)]
        within = [degree for degree in powers if machines.slots % degree == 0]
        between = [degree for degree in powers if machines.hosts % degree == 0]
        among = [degree for degree in within if experts % degree == 0]
        offloads = [(), ("optimizer",), ("optimizer", "param")]
        for form in starmap(Form, product(range(4), within, between, within if self._long else [1], among, offloads)):
            shares = form.tensor * form.pipeline
            ranks = machines.ranks // shares
            if (form.tensor > 1 and form.offload) or ranks < 1:
                continue
            weights, trained = self._facts.parameters / shares, self._facts.trained / shares
            states = weights * self._precision / (ranks if form.stage == 3 else 1) * ("param" not in form.offload)
            if not form.offload:
                states += trained * self._precision / (ranks if form.stage >= 2 else 1)
                states += trained * 12 / (ranks if form.stage else 1)
            if form.expert == 1 and self._bytes_left(states) < 0:
                continue
            with contextlib.suppress(UserError):
                self._resolve(form, Choice(form, 1, "all").values)
                yield form

    def _rows(self, form: Form) -> list[int]:
        """Return the micro-batches 1, 2, 4, ... that divide a rank's part of the global batch."""
        ranks = self._machines.ranks // (form.tensor * form.pipeline * form.sequence)
        return [1 << power for power in range(8) if self._batch.global_batch % (ranks << power) == 0]

    def _bytes_left(self, peak: float) -> int:
        return -1 if peak == math.inf else self._machines.room(int(peak), self._memory)[0]  # infinite: refused

    def _depths(self, form: Form) -> tuple[int, int]:
        """Return the layers of two shallow models: whole periods of unlike layers, the same number for each stage."""
        types = getattr(self._config.get_text_config(), "layer_types", None) or [None]
        period = next(size for size in range(1, len(types) + 1) if types == (types[:size] * len(types))[: len(types)])
        depth = max(2, period * form.pipeline)
        return min(depth, self._facts.layers), min(2 * depth, self._facts.layers)

    def _rehearse_shallow(self, choices: Iterable[Choice]) -> None:
        """Rehearse shallow models."""
        wanted = [(choice, depth) for choice in choices for depth in self._depths(choice.form)]
        for key, run, ranks in self._rehearse(key for key in wanted if key not in self._points):
            time = step_time(run, self._machines, self._speeds, ranks)
            floor = time.seconds - time.parts.get("recomputing", 0.0)
            self._points[key] = _Point(peak=needs(ranks.values()), seconds=time.seconds, floor=floor)

    def _rehearse(
        self, wanted: Iterable[tuple[Choice, int | None]]
    ) -> Iterator[tuple[tuple[Choice, int | None], Run, dict[int, Rehearsed]]]:
        """Rehearse one rank of each kind for each (choice, number of layers or None for all).

        Yields (one of `wanted`, the run, its ranks); a choice that a model or an engine refuses is left out.
        """
        on_gpu, jobs, owners = self._machines.on_gpu, list[tuple[Examined, int]](), list[Any]()
        runs: dict[Any, Run] = {}
        for key in dict.fromkeys(wanted):
            choice, layers = key
            with contextlib.suppress(UserError):
                run = self._resolve(choice.form, choice.values)
                run = run if layers is None else self._with_layers(run, layers)
                examined, runs[key] = prepared(run, on_gpu=on_gpu), run
                jobs += [(examined, rank) for rank in kinds(run.mix.degrees)]
                owners += [key] * len(kinds(run.mix.degrees))
        of_key: dict[Any, dict[int, Rehearsed]] = {key: {} for key in owners}
        for number, rehearsed in rehearse_each(jobs, self._machines.slots, on_gpu=on_gpu):
            if isinstance(rehearsed, Rehearsed):
                of_key[owners[number]][rehearsed.rank] = rehearsed
        for key, ranks in of_key.items():
            if len(ranks) == len(kinds(runs[key].mix.degrees)):
                yield key, runs[key], ranks

    def _with_layers(self, run: Run, layers: int) -> Run:
        config, model = self._config, run.config.model
        key = (getattr(config, "attribute_map", None) or {}).get("num_hidden_layers", "num_hidden_layers")
        fields_ = model.config
        if not isinstance(fields_, dict):
            path = model.folder or Path(str(model.pretrained or fields_))
            fields_ = untrusted.loads((path / "config.json" if path.is_dir() else path).read_bytes(), infinite=True)
        fields = {**fields_, key: layers}
        if isinstance(fields.get("layer_types"), list):
            fields["layer_types"] = fields["layer_types"][:layers]
        everything = model.recompute if model.recompute.layers is None else replace(model.recompute, layers="all")
        model = replace(model, config=fields, pretrained=None, recompute=everything)
        return replace(run, config=replace(run.config, model=model))

    def _estimate(self, choice: Choice) -> _Point:
        """Estimate the complete model."""
        form, rows = choice.form, choice.micro_batch
        if isinstance(choice.recomputed, int):
            share = choice.recomputed * form.pipeline / self._facts.layers
            none, everything = (self._estimate(replace(choice, recomputed=layers)) for layers in (None, "all"))
            refused = math.inf in (none.peak, everything.peak)
            return max(none, everything, key=lambda point: point.peak) if refused else none.between(everything, share)
        nothing = _Point(peak=math.inf, seconds=math.inf, floor=math.inf)
        shallow, deep = self._depths(form)
        few, many = (
            [self._points.get((replace(choice, micro_batch=micro_batch), depth), nothing) for depth in (shallow, deep)]
            for micro_batch in (1, min(2, rows))
        )
        if nothing in (*few, *many):
            return nothing
        share = (self._facts.layers - shallow) / max(1, deep - shallow)
        one, two = few[0].between(few[1], share), many[0].between(many[1], share)
        # Seconds of a step are linear in its number of micro-batches.
        slower = one.between(two, 2 * (1 - 1 / rows))
        return slower._replace(peak=one.between(two, rows - 1).peak)

    def _rehearse_complete(self, choices: Sequence[Choice]) -> Iterator[Fitted]:
        """Rehearse the complete model in each way. Yields what fits."""
        machines = self._machines
        for (choice, _), run, ranks in self._rehearse((choice, None) for choice in choices):
            peak = needs(ranks.values())
            host = math.inf if machines.host_memory is None else machines.host_memory
            if self._bytes_left(peak) < 0 or on_host(machines, ranks.values()) > host:
                continue
            time = step_time(run, machines, self._speeds, ranks)
            yield Fitted(
                choice=choice, accumulation=run.batch.accumulation, peak=peak, left=self._bytes_left(peak), time=time
            )


def fit(run: Run, words: list[str], machines: Machines, speeds: Speeds) -> Fit:
    """Find the fastest forms of the run. `words`: the run's on a command line. Raises UserError: nothing fits."""
    tree = read_json(run.config.deepspeed)
    with scratch_folder("plan") as folder:

        def in_form(form: Form, values: dict[str, Any]) -> Run:
            path = folder / f"{form}.json"
            path.write_text(json.dumps(form.json(tree)))
            more = {"deepspeed": str(path), "train.global_batch": run.batch.global_batch, **values}
            asked = [f"--{key}={'null' if value is None else value}" for key, value in more.items()]
            return resolved([*words, *asked], machines.ranks)

        return Fitter(run, machines, speeds, in_form).fit()
