"""The last answer of `llmtrain plan` for a run, in the user's cache under a hash of all that decides its memory."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from llmtrain.base import untrusted
from llmtrain.base.files import cache_folder, content_of, replace_file
from llmtrain.base.units import size
from llmtrain.config.problems import Problems, stop
from llmtrain.config.reader import read
from llmtrain.config.resolve import resolve
from llmtrain.config.run import RecomputeConfig, Run
from llmtrain.features import Expected, defaults, observing
from llmtrain.features.plan import PlanConfig, autos
from llmtrain.tracking.environment import versions


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan's answer in bytes."""

    peak: int
    """Largest peak of a rank."""
    of_rank_0: int
    more_at_least: int
    more_at_most: int
    phases: dict[str, dict[str, int]]
    """Part of the run, a phase of the heartbeat or "setup" -> the fullest rank's bytes at its peak by their content."""
    changes: dict[str, int]
    """Change of the run -> peak of the fullest rank."""
    sent: float = 0.0
    """Bytes that a rank sends in a step, at most."""
    sent_to_other_hosts: float = 0.0
    """Sent bytes that leave the host, at most."""
    step_s: dict[str, float] = field(default_factory=dict)
    """Part of a step -> seconds; empty: the plan was for no known device."""
    memory: int | None = None
    """The device's, if the plan was asked for one."""
    chosen: dict[str, Any] | None = None
    """The micro-batch and the section model.recompute, of which the plan has chosen one or both for `memory`."""
    date: str = ""

    def text(self) -> str:
        more = f" and {size(self.more_at_least)} to {size(self.more_at_most)} that no tensor holds"
        return (
            f"{size(self.peak)} of tensors on the fullest rank{more if self.more_at_most else ''} (plan of {self.date})"
        )

    @property
    def remedy(self) -> str:
        gives = [f"{change} takes it to {size(peak)}" for change, peak in self.changes.items()]
        return "; ".join(gives) or "`llmtrain plan RUN.yaml --memory SIZE` rehearses changes, with the peak of each"

    def told(self, phase: str) -> str:
        """The plan's words about this phase."""
        stays, now = Counter(self.phases.get("data")), Counter(self.phases.get(phase))
        contents = [
            f"{size(part.total())} {what} ({', '.join(f'{label} {size(n)}' for label, n in part.most_common(4))})"
            for what, part in (("stay between steps", stays), ("come in this phase", now - stays))
            if part
        ]
        return f"The plan was {self.text()}: {', '.join(contents)}. {self.remedy}."

    def expected(self) -> Expected:
        memory, sent = {phase: self.told(phase) for phase in self.phases}, self.sent_to_other_hosts
        return Expected(tensors=self.of_rank_0, sent_to_other_hosts=sent, step_s=self.step_s, memory=memory)


def store(run: Run, planned: Planned, *, on_gpu: bool) -> None:
    """Raises OSError."""
    path = _path(run, on_gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(asdict(planned) | {"date": time.strftime("%Y-%m-%d")}).encode())


def stored(run: Run, *, on_gpu: bool) -> Planned | None:
    """Return the plan; None: there is none, or its file is damaged, or of another version."""
    problems = Problems()
    try:
        planned: Planned = read(Planned, untrusted.loads(content_of(_path(run, on_gpu))), "", problems)
        problems.raise_if_any()
        if planned.chosen is not None:
            recompute = read(RecomputeConfig, planned.chosen["recompute"], "", problems)
            problems.raise_if_any()
            if not untrusted.natural(planned.chosen["micro_batch"]):
                return None
            with_chosen(run, planned.chosen["micro_batch"], recompute)
        untrusted.word("".join((*planned.changes, *planned.phases, *planned.step_s)))
    except (OSError, ValueError, LookupError, TypeError):  # ConfigError is a ValueError
        return None
    return planned


def refuse_without_room(run: Run, memory: int, *, on_gpu: bool) -> None:
    """Compare the plan with `memory` bytes of a rank's device. Raises ConfigError: plan.memory_margin is not left, or
    there is no plan."""
    margin, planned = run.config.section(PlanConfig).memory_margin, stored(run, on_gpu=on_gpu)
    assert margin is not None
    key = "plan.memory_margin"
    if planned is None:
        raise stop(key, margin, "this host's cache has no plan of the run", "make one with `llmtrain plan`")
    if memory - planned.peak - planned.more_at_least < margin * memory:
        rule = f"less than this share of the device's {size(memory)} would stay free: the plan is {planned.text()}"
        raise stop(key, margin, rule, planned.remedy)


def summary(run: Run) -> Iterator[str]:
    """Lines about the memory of a run, for `config check`."""
    plans = {"": stored(run, on_gpu=True), " on the CPU": stored(run, on_gpu=False)}
    for where, planned in plans.items():
        if planned is not None:
            yield f"memory:  {planned.text()}{where}"
    if not any(plans.values()):
        yield "memory:  `llmtrain plan RUN.yaml --hosts N --slots N` rehearses it"
    if keys := autos(run.config):
        chosen = next((planned.chosen for planned in plans.values() if planned is not None), None)
        last = f"; the last plan took {in_words(chosen)}" if chosen else ""
        decides = "the start decides by the free memory, or `llmtrain plan` before it"
        yield f"memory:  {' and '.join(keys)} auto: {decides}{last}"


def _path(run: Run, on_gpu: bool) -> Path:
    sections, numeric = asdict(run.config), defaults().keys() - observing().keys()
    decides = {name: sections[name] for name in ("model", "adapter", "objective", "optim", *numeric)}
    decides |= {"json": run.deepspeed, "degrees": asdict(run.mix.degrees), "gpu": on_gpu}
    decides |= {"pipeline": run.pipeline_partition, "experts": run.expert_parallel}
    decides |= {"eval": run.config.train.eval, "versions": versions(), "model files": _model_files(run)}
    batches = [(stage.batch, stage.data.isolate_documents) for stage in run.stages]
    decides["batches"] = [(b.micro_batch, b.accumulation, b.sequence_length, apart) for b, apart in batches]
    key = hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return cache_folder() / "plans" / f"{key}.json"


def _model_files(run: Run) -> list[str]:
    """Contents of the files that name the sizes of the run's models: a folder may get another model."""
    objective = run.config.objective
    names = [run.config.model.pretrained, run.config.model.config, objective.teacher]
    paths = [Path(name) for name in names if isinstance(name, str)]
    files = [path / "config.json" if path.is_dir() else path for path in paths]
    return [file.read_text(errors="replace") for file in files if file.is_file()]


def in_words(chosen: dict[str, Any]) -> str:
    layers, keep = chosen["recompute"]["layers"], chosen["recompute"]["keep"]
    exception = " but their attention" if keep else ""
    return f"micro-batch {chosen['micro_batch']}, {layers or 'no'} layers recomputed{exception}"


def with_chosen(run: Run, micro_batch: int, recompute: RecomputeConfig) -> Run:
    """The run with these values where it has auto. Raises ConfigError: the micro-batch does not go with the run."""
    if run.config.train.micro_batch == "auto":
        run = _with_micro_batch(run, micro_batch)
    if run.config.model.recompute.layers != "auto":
        return run
    mix = replace(run.mix, recomputes=recompute.layers is not None, keep_attention=recompute.keep is not None)
    config = replace(run.config, model=replace(run.config.model, recompute=recompute))
    return replace(run, config=config, mix=mix)


def _with_micro_batch(run: Run, count: int) -> Run:
    """Return the run with a number for train.micro_batch auto. Raises ConfigError: the number does not go with it."""
    train = run.config.train
    as_steps = replace(train, micro_batch=count, max_steps=run.max_steps, max_tokens=None, epochs=None)
    made = resolve(replace(run.config, train=as_steps), run.mix.degrees.world_size, places=dict(run.places))
    train = replace(made.config.train, max_steps=train.max_steps, max_tokens=train.max_tokens, epochs=train.epochs)
    return replace(made, config=replace(made.config, train=train), notes=run.notes)
