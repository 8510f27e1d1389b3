"""Compares the rows that a run reads with its data folder, read again from the bytes by its definition (docs/data.md).
No code is shared with the loader."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from llmtrain.base import units
from llmtrain.base.errors import DataError
from llmtrain.config.run import RunConfig
from llmtrain.data.stream.loader import AnswerBatch, MicroBatch, UnpairedBatch, batches_of
from llmtrain.data.stream.train_data import TrainData

_SEQUENCES, _TOGETHER = 48, 4
"""Sequences to check, and rows of a micro-batch."""


class _Shards:
    """Numbers in consecutive shards, mapped: a folder may exceed memory."""

    def __init__(self, parts: Sequence[np.ndarray], sizes: list[int], *, bits: bool = False) -> None:
        """`bits`: eight in a byte, the highest first."""
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
    lengths: np.ndarray | None = None
    """Tokens of each row; None: texts."""
    counted: _Shards | None = None
    """1 for a token that counts."""
    prompts: np.ndarray | None = None
    """Hash of each row's prompt; None: the folder has no unpaired answers."""
    begins: np.ndarray | None = None
    desirable: np.ndarray | None = None
    reference: np.ndarray | None = None

    @classmethod
    def of(cls, folder: Path, *, column: bool) -> Plain:
        """Raises OSError, ValueError or KeyError: the files differ from their definition."""
        manifest = json.loads((folder / "manifest.json").read_text())
        kind = "<u2" if manifest["dtype"] == "uint16" else "<u4"
        shards = manifest["shards"]["train"]
        ids = [np.memmap(folder / shard["file"], kind, "r") for shard in shards]
        sizes = [len(each) for each in ids]
        numbers = np.fromfile(folder / "reference-train.f32", "<f4") if column else None
        texts = cls(stream=_Shards(ids, sizes), separator=manifest["separator_id"], reference=numbers)
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
        """Return (ids, True for each that counts)."""
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


def differences(run: RunConfig, precision: str) -> tuple[str, list[str]]:
    """Return (description, differences) of the run's first sequences. Raises DataError."""
    data, column = TrainData(run.data), run.objective.reference == "column"
    if column:
        data.take_reference(precision)
    folders = [run.data.path] if run.data.path else list(run.data.mixture or ())
    try:
        plains = [Plain.of(Path(str(folder)), column=column) for folder in folders]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{', '.join(map(str, folders))}: not a prepared folder of this version ({error})") from error
    total = min(_SEQUENCES, data.sequences_per_epoch)
    found, documents = [], 0
    for micro in batches_of(data.window_at, total, _TOGETHER, 0, 1, False):
        for row in range(len(micro.sample_indices)):
            documents += len(list(_documents(micro, row)))
            wrong = [_sequence(plain, micro, row, run) for plain in plains]
            if all(wrong):
                found.append(f"training sequence {micro.sample_indices[row]}: {min(wrong, key=len)}")
    what = (
        f"{units.counted(total, 'sequence')} of {', '.join(map(str, folders))}, {units.counted(documents, 'document')}"
    )
    return what + (", each with its log-probability under the reference" if column else ""), found


def _documents(micro: MicroBatch, row: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of each document: position 0 begins one."""
    length = micro.inputs.shape[1]
    begins = [0] if micro.positions is None else (micro.positions[row] == 0).nonzero().flatten().tolist()
    yield from zip(begins, [*begins[1:], length], strict=True)


def _sequence(plain: Plain, micro: MicroBatch, row: int, run: RunConfig) -> str:
    """Return why a row of a micro-batch cannot come from this folder, or ""."""
    if micro.positions is not None:
        for first, end in _documents(micro, row):
            if micro.positions[row, first:end].tolist() != list(range(end - first)):
                return "a document's positions do not go 0, 1, 2, ..."
    if plain.lengths is None:
        return _text(plain, micro, row, run)
    if isinstance(micro, AnswerBatch):
        return _answers(plain, micro, row)
    for first, end in _documents(micro, row):
        ids, labels = (each[row, first:end].tolist() for each in (micro.inputs, micro.labels))
        if set(ids) == {plain.separator} and set(labels) == {-100}:
            continue  # padding
        if not any(_labels(*plain.row(like)) == labels for like in plain.rows_like(ids)):
            return f"the document at {first} is no row of the folder with its counted tokens"
    return ""


def _labels(ids: list[int], counted: list[bool]) -> list[int]:
    return [*(token if counts else -100 for token, counts in zip(ids[1:], counted[1:], strict=True)), -100]


def _text(plain: Plain, micro: MicroBatch, row: int, run: RunConfig) -> str:
    """Check that the window begins at a multiple of its length and labels are the next tokens."""
    ids, labels = micro.inputs[row].tolist(), micro.labels[row].tolist()
    where = np.arange((len(plain.stream) - 1) // len(ids)) * len(ids)
    for place, token in enumerate(ids):
        where = where[plain.stream.at(where + place) == token]
    for start in where.tolist():
        after = plain.stream.span(start + 1, start + len(ids) + 1)
        hides = run.data.mask_document_starts
        want = [
            -100 if hides and before == plain.separator else token for before, token in zip(ids, after, strict=True)
        ]
        if labels == want:
            return ""
    return "no window of the folder has its tokens and labels"


def _answers(plain: Plain, micro: AnswerBatch, row: int) -> str:
    """Check rows, labels, reference numbers, judgement and partner of every answer in a row."""
    here = sorted({int(each) for each in micro.answers[row]} - {len(micro.rows)})
    for answer in here:
        number = int(micro.rows[answer])
        ids, counted = plain.row(number)
        mask = (micro.answers[row] == answer).nonzero().flatten()
        if micro.inputs[row, mask].tolist() != ids:
            return f"row {number}: its tokens are others"
        if micro.labels[row, mask].tolist() != _labels(ids, counted):
            return f"row {number}: other tokens count"
        if plain.reference is not None and (
            micro.reference is None or float(micro.reference[answer]) != float(plain.reference[number])
        ):
            return f"row {number}: its log-probability under the reference is that of another row"
        if plain.desirable is None and answer % 2 != number % 2:
            return f"row {number}: chosen and rejected answer of a pair are exchanged"
        if isinstance(micro, UnpairedBatch) and (wrong := _judged(plain, micro, row, answer, number)):
            return wrong
    return ""


def _judged(plain: Plain, micro: UnpairedBatch, row: int, answer: int, number: int) -> str:
    assert plain.desirable is not None and plain.begins is not None and plain.prompts is not None
    if bool(micro.desirable[answer]) != bool(plain.desirable[number]):
        return f"row {number}: its judgement is another"
    other = micro.mismatched
    ids = other.inputs[row, (other.answers[row] == answer).nonzero().flatten()].tolist()
    begin = int(plain.begins[number])
    if ids[:begin] != plain.row(number)[0][:begin]:
        return f"row {number}: it meets another's answer after a prompt that is not its own"
    assert plain.lengths is not None
    sizes = plain.lengths - plain.begins
    able = np.flatnonzero((sizes == len(ids) - begin) & (plain.prompts != plain.prompts[number])).tolist()
    if not any(plain.row(each)[0][int(plain.begins[each]) :] == ids[begin:] for each in able):
        return f"row {number}: the answer that its prompt meets is not that of another prompt"
    if plain.reference is not None and (
        other.reference is None or float(other.reference[answer]) != float(plain.reference[len(plain.lengths) + number])
    ):
        return f"row {number}: the reference's number of its prompt with another answer is another row's"
    return ""


def compare_folder(run: RunConfig, precision: str) -> tuple[list[str], bool] | None:
    """Return (lines of the report, True if the rows are the folder's), or None without the data."""
    named = [run.data.path] if run.data.path else list(run.data.mixture or ())
    if not named or not all((Path(str(folder)) / "manifest.json").is_file() for folder in named):
        return None
    try:
        what, wrong = differences(run, precision)
    except DataError as error:
        return [f"  data is not compared: {error}"], True
    lines = [f"  {'FAIL' if wrong else 'PASS'}  data: {what}, read from the files by their definition"]
    return [*lines, *(f"          {each}" for each in wrong[:3])], not wrong
