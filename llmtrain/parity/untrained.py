"""Two comparisons without training: of a run's course, and of the sequences that it reads.

The first compares data, batch, length, rate and RoPE of each step in a run's own objects with the rules of
docs/stages.md and docs/training.md, also after resumes. The second reads the data folder's bytes by their definition
(docs/data.md), and shares no code with the loader.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from llmtrain.base import units
from llmtrain.base.errors import DataError, UserError
from llmtrain.config.resolve import resolve
from llmtrain.config.run import Run, RunConfig
from llmtrain.data.batches import AnswerBatch, MicroBatch
from llmtrain.data.stream.epoch import sequences_of_epoch
from llmtrain.data.stream.loader import Course, Dealt, batches_of
from llmtrain.data.stream.train_data import TrainData
from llmtrain.parity.plain import rate_of_step
from llmtrain.training.examine import rate_of
from llmtrain.training.reporting import StageBorders
from llmtrain.training.step import Position

_EACH, _RESUMES = 100_000, 25
"""Steps to compare (a longer run: those next to a border, and a sample); resumes to try."""
_LEFT_OUT = "        not trained here: stages, evaluation, saving and resume, sequences beyond the first 48 of the data"
_NAMES = ("data of stage", "sequence", "batch", "length", "rate", "rope")
_SEQUENCES, _TOGETHER = 48, 4
"""Sequences to check, and rows of a micro-batch."""


def compare_course(user: Run, worlds: Sequence[int]) -> tuple[list[str], bool]:
    """Return (lines of the report, False if data, batch, length, rate or rope of a step differ from the definition).
    `worlds`: world sizes to try; larger ones follow in case the run's batches need more ranks."""
    reason, run = "", None
    for ranks in (*worlds, *(user.mix.degrees.world_size * 2**power for power in range(12))):
        try:
            run = run or resolve(user.config, ranks, "--ranks", epoch=sequences_of_epoch)
        except UserError as error:
            reason = reason or str(error).splitlines()[0]
    if run is None:
        return [f"  the course is not compared: {reason}", _LEFT_OUT], True
    plan, course, wrong = _plan(user.config, run), _course(run), list[str]()
    end = run.max_steps or plan[-1].first + 1000
    about = {step for edge in (*(part.first for part in plan), end) for step in range(edge - 2, edge + 3)}
    near = sorted(step for step in about if 0 < step < end)
    resumes = near[:: 1 + len(near) // _RESUMES]
    for first in (0, *resumes):
        launch, index = _course(run), course.at(first).index
        launch.go_on(first, json.loads(json.dumps(course.record(first, index))))
        steps = sorted({first, *(s for s in near if s > first), *(() if first else range(0, end, 1 + end // _EACH))})
        told = zip(steps, _by_the_run(run, launch, steps), strict=True)
        found = (_other(got, _by_definition(plan, step, run.max_steps), step, first) for step, got in told)
        wrong += list(filter(None, found))[:1]
    what = f"{units.counted(end, 'step')}, {units.counted(len(plan), 'stage')}, {len(resumes)} resumes"
    line = f"  {'FAIL' if wrong else 'PASS'}  course: {what}: data, batch, length, rate, rope by their definition"
    return [line, *(f"          {each}" for each in wrong[:3]), _LEFT_OUT], not wrong


def _other(got: tuple[Any, ...], right: tuple[Any, ...], step: int, first: int) -> str:
    for name, mine, want in zip(_NAMES, got, right, strict=True):
        if mine != want and not (name == "rate" and math.isclose(mine, want, rel_tol=1e-9, abs_tol=1e-12)):
            since = f", resumed at {first}" if first else ""
            return f"step {step + 1}{since}: {name} {mine}, by its definition {want}"
    return ""


def _plan(config: RunConfig, run: Run) -> list[Any]:
    """Return the stages by their definition: a stage inherits the values that it does not set from the stage before
    it."""
    ranks, train, folders, sets, parts = run.batch.data_parallel, run.config.train, config.data.folders, [], []
    now = SimpleNamespace(
        first=0,
        length=config.data.sequence_length,
        micro=train.micro_batch,
        batch=train.global_batch,
        schedule=run.config.schedule,
        since=0,
        rope={},
    )
    for number, stage in enumerate([None, *config.data.stages]):
        if stage is not None:
            now, given = SimpleNamespace(**vars(now)), stage.train
            now.first, now.rope = stage.from_step, now.rope | (stage.rope or {})
            folders = {stage.path: 1.0} if stage.path else stage.mixture or folders
            now.length, now.micro = stage.sequence_length or now.length, given.micro_batch or now.micro
            if given.global_batch or given.accumulation:  # two give the third; with one, micro stays
                now.batch = given.global_batch or given.accumulation * now.micro * ranks
                now.micro = now.batch // (given.accumulation * ranks) if given.accumulation else now.micro
            if stage.schedule is not None:
                now.schedule, now.since = run.stages[number].schedule, stage.from_step  # with defaults filled in
        shares = {os.path.normpath(folder): weight / sum(folders.values()) for folder, weight in folders.items()}
        sets.append((shares, now.length))
        now.data = sets.index(sets[-1])
        parts.append(now)
    return parts


def _by_definition(plan: list[Any], step: int, end: int | None) -> tuple[Any, ...]:
    """Compute a step's values from the stages only. Data of an earlier stage continues where that stage ended; a
    schedule ends with the run, or where the next schedule begins."""
    parts = [part for part in plan if part.first <= step]
    spans, part = pairwise([*parts, SimpleNamespace(first=step)]), parts[-1]
    read = sum((after.first - each.first) * each.batch for each, after in spans if each.data == part.data)
    ends = [each.since for each in plan if each.since > part.since] + ([] if end is None else [end])
    rate = rate_of_step(part.schedule, step - part.since + 1, min(ends, default=part.since) - part.since)
    return part.data, read, part.batch, part.length, rate, part.rope


class _NotingBorders(StageBorders):
    def _turn(self, stage: int) -> None:
        self.rope = self._course.stages[stage].rope

    def _tell(self, position: Position) -> None:
        pass


def _course(run: Run) -> Course:
    """Return a course over data sets that have fingerprints but no contents."""
    sharing = [run.stages.sharing(number)[0] for number in range(len(run.stages))]
    sets: Any = {first: SimpleNamespace(number=first, fingerprint=str(first)) for first in sharing}
    return Course(run.stages, [sets[first] for first in sharing])


def _by_the_run(run: Run, course: Course, steps: list[int]) -> Iterator[tuple[Any, ...]]:
    """Yield each step's values as a start of the run at the first of `steps` computes them."""
    setup = SimpleNamespace(course=course, engine=SimpleNamespace(module=None), run=run)
    launch: Any = SimpleNamespace(setup=setup, tracker=SimpleNamespace(event=lambda *_, **__: None), loader=None)
    borders, before = _NotingBorders(launch), None
    borders.begin(Position(step=steps[0], sample_index=course.at(steps[0]).index))
    for step in steps:
        at: Any = course.at(step)
        done: Any = SimpleNamespace(last=False, batch=before, position=Position(step=step, sample_index=at.index))
        if before is not None:
            borders.after_step(done)
        borders.request()
        before, rate = at, rate_of(run.stages, step, max_steps=run.max_steps)
        yield at.data.number, at.index, at.batch.global_batch, at.batch.sequence_length, rate, borders.rope


class _Shards:
    """Numbers in consecutive shards, which are memory-mapped, since a folder may be larger than memory."""

    def __init__(self, parts: Sequence[np.ndarray], sizes: list[int], *, bits: bool = False) -> None:
        """`bits`: the numbers are bits, eight in a byte, the highest first."""
        self._parts, self._starts, self._bits = parts, np.cumsum([0, *sizes]), bits

    def __len__(self) -> int:
        return int(self._starts[-1])

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers at `places` as int64."""
        found = np.empty(len(places), dtype=np.int64)
        for part, start, end in zip(self._parts, self._starts, self._starts[1:], strict=False):
            here = (places >= start) & (places < end)
            own = places[here] - start
            found[here] = (part[own // 8] >> (7 - own % 8)) & 1 if self._bits else part[own]
        return found

    def span(self, start: int, end: int) -> list[int]:
        return self.at(np.arange(start, end)).tolist()


@dataclass(frozen=True, kw_only=True)
class Plain:
    """The training split of one folder."""

    stream: _Shards
    separator: int
    doubled: bool = False
    """Texts also begin with the separator."""
    lengths: np.ndarray | None = None
    """Number of tokens of each row; None for texts."""
    counted: _Shards | None = None
    """1 for each token that counts, else 0."""
    prompts: np.ndarray | None = None
    """Hash of each row's prompt; None if the folder has no answers judged alone."""
    begins: np.ndarray | None = None
    desirable: np.ndarray | None = None
    reference: np.ndarray | None = None
    together: int = 1
    """Number of rows in a record."""

    @classmethod
    def of(cls, folder: Path, *, column: bool, together: int = 1) -> Plain:
        """Read a folder. Raises OSError, ValueError or KeyError if its files differ from their definition."""
        manifest = json.loads((folder / "manifest.json").read_text())
        kind = "<u2" if manifest["dtype"] == "uint16" else "<u4"
        shards = manifest["shards"]["train"]
        ids = [np.memmap(folder / shard["file"], kind, "r") for shard in shards]
        sizes = [len(each) for each in ids]
        numbers = np.fromfile(folder / "reference-train.f32", "<f4") if column else None
        separator = manifest["separator_id"]
        doubled = manifest.get("first_tokens", [])[:1] == [separator]
        texts = cls(
            stream=_Shards(ids, sizes), separator=separator, doubled=doubled, reference=numbers, together=together
        )
        chat = manifest.get("chat")
        if chat is None:
            return texts
        files = [np.memmap((folder / shard["file"]).with_suffix(".rows"), np.uint8, "r") for shard in shards]
        rows = [shard["documents"] for shard in shards]
        masks = [-(-size // 8) for size in sizes]
        lengths = [np.frombuffer(f[: 4 * n].tobytes(), "<u4") for f, n in zip(files, rows, strict=True)]
        bits = [f[4 * n : 4 * n + size] for f, n, size in zip(files, rows, masks, strict=True)]
        of_rows = replace(
            texts, lengths=np.concatenate(lengths).astype(np.int64), counted=_Shards(bits, sizes, bits=True)
        )
        if not chat.get("unpaired"):
            return of_rows
        # 8 bytes of the prompt's hash, 4 of the answer's beginning, 1 of the judgement
        each = np.concatenate(
            [
                f[4 * n + size : 4 * n + size + 13 * n].reshape(n, 13)
                for f, n, size in zip(files, rows, masks, strict=True)
            ]
        )
        return replace(
            of_rows,
            prompts=np.frombuffer(each[:, :8].tobytes(), "<u8"),
            begins=np.frombuffer(each[:, 8:12].tobytes(), "<u4").astype(np.int64),
            desirable=each[:, 12].astype(bool),
        )

    def row(self, index: int) -> tuple[list[int], list[bool]]:
        """Return (ids, for each whether it counts)."""
        assert self.lengths is not None and self.counted is not None
        start = int(self.lengths[:index].sum())
        end = start + int(self.lengths[index])
        return self.stream.span(start, end), [bool(each) for each in self.counted.span(start, end)]

    def rows_like(self, ids: list[int]) -> list[int]:
        assert self.lengths is not None
        starts = np.cumsum(self.lengths) - self.lengths
        where = np.flatnonzero(self.lengths == len(ids))
        for place, token in enumerate(ids):
            where = where[self.stream.at(starts[where] + place) == token]
        return where.tolist()


def differences(config: RunConfig, precision: str) -> tuple[str, list[str]]:
    """Return (description, differences) of the first sequences that the run reads. Raises DataError."""
    data, column = TrainData(config.data), config.objective.reference == "column"
    if column:
        data.take_reference(precision)
    folders = [config.data.path] if config.data.path else list(config.data.mixture or ())
    try:
        plains = [Plain.of(Path(str(folder)), column=column, together=data.kind.together) for folder in folders]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{', '.join(map(str, folders))}: not a prepared folder of this version ({error})") from error
    total = min(_SEQUENCES, data.sequences_per_epoch)
    found, documents = [], 0
    for micro in batches_of(data.kind, data.sequence_at, total, _TOGETHER, Dealt()):
        for row in range(len(micro.sequences)):
            documents += len(list(_documents(micro, row)))
            wrong = [_sequence(plain, micro, row, config) for plain in plains]
            if all(wrong):
                found.append(f"training sequence {micro.sequences[row]}: {min(wrong, key=len)}")
    what = (
        f"{units.counted(total, 'sequence')} of {', '.join(map(str, folders))}, {units.counted(documents, 'document')}"
    )
    return what + (", each with its log-probability under the reference" if column else ""), found


def _documents(micro: MicroBatch, row: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of each document, which begins at position 0."""
    length = micro.inputs.shape[1]
    begins = [0] if micro.positions is None else (micro.positions[row] == 0).nonzero().flatten().tolist()
    yield from zip(begins, [*begins[1:], length], strict=True)


def _sequence(plain: Plain, micro: MicroBatch, row: int, config: RunConfig) -> str:
    """Return why a row of a micro-batch cannot come from this folder, or ""."""
    if micro.positions is not None:
        for first, end in _documents(micro, row):
            if micro.positions[row, first:end].tolist() != list(range(end - first)):
                return "a document's positions do not go 0, 1, 2, ..."
    if plain.lengths is None:
        return _text(plain, micro, row, config)
    if isinstance(micro, AnswerBatch):
        return _answers(plain, micro, row)
    for first, end in _documents(micro, row):
        ids, labels = (each[row, first:end].tolist() for each in (micro.inputs, micro.labels))
        if set(ids) == {plain.separator} and set(labels) == {-100}:
            continue  # padding
        if not any(_labels(*plain.row(like)) == labels for like in plain.rows_like(ids)):
            return f"the document at token {first} is no row of the folder, or other tokens of it count"
    return ""


def _labels(ids: list[int], counted: list[bool]) -> list[int]:
    return [*(token if counts else -100 for token, counts in zip(ids[1:], counted[1:], strict=True)), -100]


def _text(plain: Plain, micro: MicroBatch, row: int, config: RunConfig) -> str:
    """Return why a row is not text of the folder from a multiple of its length, with the next tokens as labels, or
    ""."""
    ids, labels = micro.inputs[row].tolist(), micro.labels[row].tolist()
    where = np.arange((len(plain.stream) - 1) // len(ids)) * len(ids)
    for place, token in enumerate(ids):
        where = where[plain.stream.at(where + place) == token]
    for start in where.tolist():
        after = plain.stream.span(start + 1, start + len(ids) + 1)
        hides = config.data.mask_document_starts
        want = [
            -100 if hides and before == plain.separator and (token == before or not plain.doubled) else token
            for before, token in zip(ids, after, strict=True)
        ]
        if labels == want:
            return ""
    return "no sequence of the folder has its tokens and labels"


def _answers(plain: Plain, micro: AnswerBatch, row: int) -> str:
    """Return what is wrong with the answers in a row: tokens, labels, reference, judgement or partner; or ""."""
    here = sorted({int(each) for each in micro.answers[row]} - {len(micro.rows)})
    for answer in here:
        number = int(micro.rows[answer])
        ids, counted = plain.row(number)
        mask = (micro.answers[row] == answer).nonzero().flatten()
        if micro.inputs[row, mask].tolist() != ids:
            return f"row {number}: its tokens differ"
        if micro.labels[row, mask].tolist() != _labels(ids, counted):
            return f"row {number}: other tokens count"
        if plain.reference is not None and (
            micro.reference is None or float(micro.reference[answer]) != float(plain.reference[number])
        ):
            return f"row {number}: its log-probability under the reference is that of another row"
        if answer % plain.together != number % plain.together:
            return f"row {number}: the answers of a record are exchanged"
        if plain.desirable is not None and (wrong := _judged(plain, micro, row, answer, number)):
            return wrong
    return ""


def _judged(plain: Plain, micro: AnswerBatch, row: int, answer: int, number: int) -> str:
    assert plain.desirable is not None and plain.begins is not None and plain.prompts is not None
    if bool(micro.facts["desirable"][answer]) != bool(plain.desirable[number]):
        return f"row {number}: its judgement differs"
    other = micro.mismatched
    assert other is not None
    ids = other.inputs[row, (other.answers[row] == answer).nonzero().flatten()].tolist()
    begin = int(plain.begins[number])
    if ids[:begin] != plain.row(number)[0][:begin]:
        return f"row {number}: its mismatched answer follows a prompt that is not the row's own"
    assert plain.lengths is not None
    sizes = plain.lengths - plain.begins
    able = np.flatnonzero((sizes == len(ids) - begin) & (plain.prompts != plain.prompts[number])).tolist()
    if not any(plain.row(each)[0][int(plain.begins[each]) :] == ids[begin:] for each in able):
        return f"row {number}: its mismatched answer is no answer to another prompt"
    if plain.reference is not None and (
        other.reference is None or float(other.reference[answer]) != float(plain.reference[len(plain.lengths) + number])
    ):
        return f"row {number}: the reference's log-probability of its mismatched answer belongs to another row"
    return ""


def compare_folder(config: RunConfig, precision: str) -> tuple[list[str], bool] | None:
    """Return (lines of the report, True if the sequences are the folder's), or None if the data is not here."""
    named = [config.data.path] if config.data.path else list(config.data.mixture or ())
    if not named or not all((Path(str(folder)) / "manifest.json").is_file() for folder in named):
        return None
    try:
        what, wrong = differences(config, precision)
    except DataError as error:
        return [f"  data is not compared: {error}"], True
    lines = [f"  {'FAIL' if wrong else 'PASS'}  data: {what}, read from the files by their definition"]
    return [*lines, *(f"          {each}" for each in wrong[:3])], not wrong
