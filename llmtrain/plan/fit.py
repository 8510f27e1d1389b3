"""`llmtrain plan --fit`: the fastest ways to train a run on given machines, among those that fit.

Forms (ZeRO stage, degrees, offload) whose states alone do not fit are left out by arithmetic. The others are rehearsed
with few layers and rows: bytes are linear in layers and rows, seconds in layers and in the inverse of rows. The best by
that estimate are rehearsed as they are, and these alone are proposed.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from llmtrain.base import untrusted
from llmtrain.base.errors import UserError
from llmtrain.base.units import count, size
from llmtrain.config.run import ResolvedRun
from llmtrain.models.skeleton import load_config
from llmtrain.plan.device import Machines, held_by_no_tensor
from llmtrain.plan.rehearsal import Rehearsed, kinds, prepared, rehearse_each
from llmtrain.plan.speed import Speeds, StepTime, step_time

BEST = 5
_EXPLORED = 3
"""Forms of which more than two rehearsals are made."""
_TRIED = 8
"""Most complete rehearsals."""
_LONG, _TILE = 32_768, 4096
"""Tokens: of a row for which sequence parallelism and MLPs in tiles are tried, and of a tile."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """A way to share the work."""

    stage: int
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    expert: int = 1
    offload: tuple[str, ...] = ()

    def json(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """The run's JSON with this form, whose batch and recomputation the YAML has."""
        zero = {key: value for key, value in (tree.get("zero_optimization") or {}).items() if "offload" not in key}
        zero |= {"stage": self.stage, **{f"offload_{name}": {"device": "cpu"} for name in self.offload}}
        theirs = (
            "tensor_parallel",
            "pipeline",
            "sequence_parallel_size",
            "expert_parallel",
            "activation_checkpointing",
        )
        made = {key: copy.deepcopy(value) for key, value in tree.items() if key not in theirs}
        made |= dict.fromkeys(
            ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
        )
        made["zero_optimization"] = zero
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


@dataclass(frozen=True, kw_only=True)
class Choice:
    form: Form
    micro_batch: int
    recomputed: int | str | None
    """Value of model.recompute.layers."""
    tile: int | None = None
    """Value of model.mlp_tile_tokens; None: as in the run."""

    @property
    def values(self) -> dict[str, Any]:
        """Keys of the run's YAML."""
        tiled = {} if self.tile is None else {"model.mlp_tile_tokens": self.tile}
        return {"train.micro_batch": self.micro_batch, "train.accumulation": None,
                "model.recompute.layers": self.recomputed, **tiled}  # fmt: skip

    @property
    def again(self) -> str:
        """Recomputed layers, and tiles, in words."""
        return f"{self.recomputed or 'none'}{f', tiles of {self.tile}' if self.tile else ''}"


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A choice that was rehearsed and fits."""

    choice: Choice
    accumulation: int
    peak: int
    left: int
    """Bytes of the device that stay free, at least."""
    time: StepTime


@dataclass(frozen=True, kw_only=True)
class Fit:
    best: list[Fitted]
    counted: int
    """Choices that were counted, estimated or rehearsed."""
    rehearsed: int
    """Choices that were rehearsed as they are."""

    def as_json(self) -> dict[str, Any]:
        best = [{**asdict(each), "mix": str(each.choice.form), "time": each.time.as_json()} for each in self.best]
        return {"best": best, "counted": self.counted, "rehearsed": self.rehearsed}

    def text(self) -> list[str]:
        rows = [("", "mix", "micro-batch", "recomputed", "peak", "left", "step", "tokens/s")]
        for number, each in enumerate(self.best, 1):
            rows.append((str(number), str(each.choice.form), f"{each.choice.micro_batch} x {each.accumulation}",
                         each.choice.again, size(each.peak), size(each.left),
                         f"{each.time.seconds:.3g} s", count(each.time.tokens_per_s)))  # fmt: skip
        wide = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        table = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, wide, strict=True)).rstrip() for row in rows]
        told = f"{self.counted} choices counted, {self.rehearsed} rehearsed completely; each of these fits"
        return [*table, "", told, *(f"  assumed: {note}" for note in self.best[0].time.notes)]


@dataclass(frozen=True, kw_only=True)
class _Point:
    peak: float
    seconds: float
    floor: float
    """Seconds without recomputation."""

    def between(self, other: _Point, share: float) -> _Point:
        """The point at 0: this one, at 1: `other`, on a straight line through both."""
        mine, theirs = asdict(self), asdict(other)
        return _Point(**{name: mine[name] + share * (theirs[name] - mine[name]) for name in mine})


class Fitter:
    def __init__(
        self,
        run: ResolvedRun,
        machines: Machines,
        speeds: Speeds,
        resolve: Callable[[Form, dict[str, Any]], ResolvedRun],
    ) -> None:
        """`resolve`: makes the run with a form and other values. Raises UserError: they are not legal together."""
        assert machines.memory is not None
        self._memory, self._batch = machines.memory, run.batch
        self._machines, self._speeds, self._resolve = machines, speeds, resolve
        self._precision = 4 if run.precision == "fp32" else 2
        self._facts = prepared(run, on_gpu=machines.on_gpu).spec.facts
        self._config = load_config(run.run.model)
        self._long = self._batch.sequence_length >= _LONG
        tiles = [("all", _TILE)] if self._long and run.run.model.mlp_tile_tokens is None else []
        self._again: list[tuple[str | None, int | None]] = [(None, None), ("all", None), *tiles]
        """Values of model.recompute.layers and model.mlp_tile_tokens that are rehearsed, the least memory last."""
        self._points: dict[tuple[Choice, int], _Point] = {}

    def fit(self) -> Fit:
        """Raises UserError: nothing fits."""
        legal, forms = list(self._legal()), list[Form]()
        for some in ([each for each in legal if not each.offload], [each for each in legal if each.offload]):
            if len(forms) < 2:  # offload is slow: for what fits in no other form
                least = [[self._choice(form, 1, again) for again in self._again[1:]] for form in some]
                self._estimate([choice for choices in least for choice in choices])
                known = {each[0].form: [self._point(choice) for choice in each] for each in least}
                fitting = [form for form in some if any(self._left(point.peak) >= 0 for point in known[form])]
                forms += sorted(fitting, key=lambda form: known[form][0].floor)
        del forms[_EXPLORED:]
        wanted = product(forms, (1, 2), self._again)
        self._estimate([self._choice(*each) for each in wanted if each[1] in self._rows(each[0])])
        half = (self._facts.layers // 2, None)
        estimated = [self._choice(form, rows, again)
                     for form in forms for rows in self._rows(form) for again in (*self._again, half)]  # fmt: skip
        points = {each: self._point(each) for each in estimated}
        likely = sorted(
            (each for each in estimated if self._left(points[each].peak) >= 0), key=lambda each: points[each].seconds
        )
        best: list[Fitted] = []
        tried = 0
        while len(best) < BEST and tried < min(_TRIED, len(likely)):
            chosen = likely[tried : tried + BEST - len(best)]
            tried += len(chosen)
            best += self._complete(chosen)
        if not best:
            raise UserError(f"--memory {size(self._memory)}: no form of the run fits, of {len(legal)} legal ones. Give "
                            "more --slots or --hosts, or a larger device")  # fmt: skip
        best.sort(key=lambda each: each.time.seconds)
        return Fit(best=best, counted=len(legal) + len(estimated), rehearsed=tried)

    @staticmethod
    def _choice(form: Form, rows: int, again: tuple[int | str | None, int | None]) -> Choice:
        return Choice(form=form, micro_batch=rows, recomputed=again[0], tile=again[1])

    def _legal(self) -> Iterator[Form]:
        """Forms that the configuration takes and whose states fit."""
        machines = self._machines
        experts = next((each for key in _EXPERTS if (each := getattr(self._config, key, None))), 1)
        powers = [1 << power for power in range(10)]
        within = [each for each in powers if machines.slots % each == 0]
        for stage, tensor, pipeline, sequence, expert, offload in product(
            range(4),
            within,
            [each for each in powers if machines.hosts % each == 0],
            within if self._long else [1],
            [each for each in within if experts % each == 0],
            [(), ("optimizer",), ("optimizer", "param")],
        ):
            form = Form(
                stage=stage, tensor=tensor, pipeline=pipeline, sequence=sequence, expert=expert, offload=offload
            )
            ranks = machines.ranks // (tensor * pipeline)
            if (tensor > 1 and offload) or ranks < 1:
                continue
            whole, shared = self._facts.parameters / (tensor * pipeline), self._facts.trained / (tensor * pipeline)
            states = whole * self._precision / (ranks if stage == 3 else 1) * ("param" not in offload)
            states += shared * self._precision / (ranks if stage >= 2 else 1) * ("optimizer" not in offload)
            states += shared * 12 / (ranks if stage else 1) * ("optimizer" not in offload)
            if expert == 1 and self._left(states) < 0:
                continue
            with contextlib.suppress(UserError):
                self._resolve(form, Choice(form=form, micro_batch=1, recomputed="all").values)
                yield form

    def _rows(self, form: Form) -> list[int]:
        """Micro-batches that divide a rank's part of the global batch: 1, 2, 4, ..."""
        ranks = self._machines.ranks // (form.tensor * form.pipeline * form.sequence)
        return [1 << power for power in range(8) if self._batch.global_batch % (ranks << power) == 0]

    def _left(self, peak: float) -> int:
        if peak == math.inf:  # refused
            return -1
        return int(self._memory - peak - sum(each.high for each in held_by_no_tensor(int(peak), self._machines)))

    def _depths(self, form: Form) -> tuple[int, int]:
        """Depths for two shallow models: complete periods of unlike layers, as many for each stage."""
        types = getattr(self._config.get_text_config(), "layer_types", None) or [None]
        period = next(each for each in range(1, len(types) + 1) if types == (types[:each] * len(types))[: len(types)])
        depth = max(2, period * form.pipeline)
        return min(depth, self._facts.layers), min(2 * depth, self._facts.layers)

    def _estimate(self, wanted: Sequence[Choice]) -> None:
        """Rehearse shallow models; what a model or an engine refuses is left out."""
        runs: dict[tuple[Choice, int], ResolvedRun] = {}
        for choice in wanted:
            for depth in self._depths(choice.form):
                if (choice, depth) not in self._points:
                    with contextlib.suppress(UserError):
                        runs[choice, depth] = self._shallow(self._resolve(choice.form, choice.values), depth)
        self._points |= {key: self._of(runs[key], found) for key, found in self._rehearse(runs)}

    def _rehearse(self, runs: Mapping[Any, ResolvedRun]) -> Iterator[tuple[Any, dict[int, Rehearsed]]]:
        """Yield each run's key and one rank of each kind; a run that is refused on one of them is left out."""
        on_gpu, jobs, owners = self._machines.on_gpu, list[tuple[Any, int]](), list[Any]()
        for key, run in runs.items():
            with contextlib.suppress(UserError):
                checked = prepared(run, on_gpu=on_gpu)
                jobs += [(checked, rank) for rank in kinds(run.degrees)]
                owners += [key] * len(kinds(run.degrees))
        found: dict[Any, dict[int, Rehearsed]] = {key: {} for key in owners}
        for number, rehearsed in rehearse_each(jobs, self._machines.slots, on_gpu=on_gpu):
            if isinstance(rehearsed, Rehearsed):
                found[owners[number]][rehearsed.rank] = rehearsed
        yield from ((key, ranks) for key, ranks in found.items() if len(ranks) == len(kinds(runs[key].degrees)))

    def _of(self, run: ResolvedRun, found: Mapping[int, Rehearsed]) -> _Point:
        time = step_time(run, self._machines, self._speeds, found)
        peak = max(each.peak + each.ahead for each in found.values())
        return _Point(peak=peak, seconds=time.seconds, floor=time.seconds - time.parts.get("recomputing", 0.0))

    def _shallow(self, run: ResolvedRun, layers: int) -> ResolvedRun:
        config, model = self._config, run.run.model
        key = (getattr(config, "attribute_map", None) or {}).get("num_hidden_layers", "num_hidden_layers")
        given = model.config
        if not isinstance(given, dict):
            path = model.folder or Path(str(model.pretrained or given))
            given = untrusted.loads((path / "config.json" if path.is_dir() else path).read_bytes(), infinite=True)
        fields = {**given, key: layers}
        if isinstance(fields.get("layer_types"), list):
            fields["layer_types"] = fields["layer_types"][:layers]
        again = model.recompute if model.recompute.layers in (None, "all") else replace(model.recompute, layers="all")
        model = replace(model, config=fields, pretrained=None, recompute=again)
        return replace(run, run=replace(run.run, model=model))

    def _point(self, choice: Choice) -> _Point:
        """Estimate the complete model."""
        form, rows = choice.form, choice.micro_batch
        if isinstance(choice.recomputed, int):
            share = choice.recomputed * form.pipeline / self._facts.layers
            none, everything = (self._point(replace(choice, recomputed=layers)) for layers in (None, "all"))
            refused = math.inf in (none.peak, everything.peak)
            return max(none, everything, key=lambda each: each.peak) if refused else none.between(everything, share)
        nothing = _Point(peak=math.inf, seconds=math.inf, floor=math.inf)
        shallow, deep = self._depths(form)
        few, many = (
            [self._points.get((replace(choice, micro_batch=each), depth), nothing) for depth in (shallow, deep)]
            for each in (1, min(2, rows))
        )
        if nothing in (*few, *many):
            return nothing
        share = (self._facts.layers - shallow) / max(1, deep - shallow)
        one, two = few[0].between(few[1], share), many[0].between(many[1], share)
        # Seconds of a step are linear in its number of micro-batches.
        slower = one.between(two, 2 * (1 - 1 / rows))
        return replace(slower, peak=one.between(two, rows - 1).peak)

    def _complete(self, choices: Sequence[Choice]) -> Iterator[Fitted]:
        """Rehearse the complete model in each way. Yields what fits."""
        machines, runs = self._machines, dict[Choice, ResolvedRun]()
        for choice in choices:
            with contextlib.suppress(UserError):
                runs[choice] = self._resolve(choice.form, choice.values)
        for choice, ranks in self._rehearse(runs):
            peak = max(each.peak + each.ahead for each in ranks.values())
            on_host = machines.slots * max(each.host + peak * (not machines.on_gpu) for each in ranks.values())
            if self._left(peak) < 0 or (machines.host_memory is not None and on_host > machines.host_memory):
                continue
            time = step_time(runs[choice], machines, self._speeds, ranks)
            yield Fitted(choice=choice, accumulation=runs[choice].batch.accumulation, peak=peak,
                         left=self._left(peak), time=time)  # fmt: skip


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
