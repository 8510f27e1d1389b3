"""Read the sequences of prepared folders in the run's order; `RunData` is all data that a run reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from llmtrain.base.errors import DataError
from llmtrain.config.run import DataConfig
from llmtrain.data.kinds import RowKind
from llmtrain.data.manifest import SPLITS, Manifest, Split, other_begin
from llmtrain.data.sequences import IGNORED, TokenSequence
from llmtrain.data.shards import FileSum, PreparedSet
from llmtrain.data.stream.order import Mixture, permute, position_of
from llmtrain.data.token_stream import TokenStream
from llmtrain.objectives.by_token import Distill

if TYPE_CHECKING:
    from llmtrain.data.kinds.packing import RowReader
    from llmtrain.data.kinds.text import TextReader
    from llmtrain.data.origins import Origins
    from llmtrain.data.stream.choices import ChoiceSet
    from llmtrain.data.stream.reference_and_teacher import TeacherColumn


@dataclass(frozen=True, kw_only=True)
class _Member:
    """One prepared set of the mixture."""

    prepared: PreparedSet
    train: TextReader | RowReader
    validation: TextReader | RowReader


class TrainData:
    """Endless training sequences 0, 1, 2, ... of one or several prepared folders, and their validation sequences.

    Training sequence k belongs to one set of the mixture. Each set has its own epochs, and each epoch its own order.
    Set and order are pure functions of k and the seed.
    """

    _members: Sequence[_Member] = ()

    def __init__(self, config: DataConfig, *, trains: bool = True) -> None:
        """`trains`: False if the data is only measured; its training split may then be empty.

        Raises DataError: a folder is not prepared, too small, or does not fit the others.
        """
        if (config.path is None) == (not config.mixture):
            raise DataError("data.path and data.mixture: give exactly one of the two")
        weights = config.mixture or {str(config.path): 1.0}
        for folder, weight in weights.items():
            if not 0 < weight < float("inf"):
                raise DataError(
                    f"data.mixture {folder}: {weight}: a weight must be a positive number; or leave the set out"
                )
        if config.sequence_length < 1:
            raise DataError(f"data.sequence_length {config.sequence_length}: must be at least 1")
        self._config = config
        self._mixture = Mixture(list(weights.values()))
        self._members = [_open_member(folder, config) for folder in weights]
        self._check_members(trains)
        self.sequence_length = config.sequence_length
        self.mask_document_starts = config.mask_document_starts
        self.isolate_documents = config.isolate_documents
        self.shares = self._mixture.shares
        """Each set's exact share of the sequences."""
        self.manifests: tuple[Manifest, ...] = tuple(member.prepared.manifest for member in self._members)
        self.kind: RowKind = self._members[0].prepared.kind
        """Kind of the rows. If a mixture has several kinds, they make batches of the same form."""
        self.vocab_size: int = self.manifests[0].vocab_size
        self.separator_id: int = self.manifests[0].separator_id
        self.doubled = any(manifest.doubled for manifest in self.manifests)
        self.first_tokens = next((each.first_tokens for each in self.manifests if each.chat is None), ())
        self.column_models: list[dict[str, Any] | None] = []
        """Configuration of each column's model."""
        self.name: str = self._members[0].prepared.name
        """Path or URL of the first set's folder, for messages."""
        self.tokenizer_dir: Path = self._members[0].prepared.tokenizer_dir
        self._counts = [member.train.count for member in self._members]
        self._validation_counts = [member.validation.count for member in self._members]
        self.sequences_per_epoch: int = min(
            int(count / share) for count, share in zip(self._counts, self.shares, strict=True)
        )
        """Training sequences until the first set of the mixture has been read once."""
        self.validation_sequences: int = self._count_validation()
        """Number of validation sequences. Those of a mixture end when one of its sets ends."""
        sets = [
            [manifest.data_fingerprint, str(share)] for manifest, share in zip(self.manifests, self.shares, strict=True)
        ]
        parts: list[Any] = [sets, self.sequence_length, config.seed, *(() if config.pack else ("unpacked",))]
        self.order = xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())
        self.excluded = frozenset(map(self.place_of, config.exclude or ()))
        """(set, number within the set) of the sequences in data.exclude, which are left out of every epoch."""
        parts += [sorted(self.excluded)] if self.excluded else []
        self.fingerprint = xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())
        """Hash of what decides the sequences: data, length, seed, mixture, exclusions. `order`: without exclusions."""

    def sums(self, *, origins: bool = False) -> list[FileSum]:
        return [file for member in self._members for file in member.prepared.sums(origins=origins)]

    def take_reference(self, precision: str) -> list[str]:
        """Add the reference's log-probabilities to the answers. Returns the hash of its weights for each set.

        Raises DataError: a set's column is missing or of other data.
        """
        from llmtrain.data.kinds.packing import AnswerReader
        from llmtrain.data.stream.reference_and_teacher import read_reference

        hashes = []
        for member in self._members:
            made, columns = read_reference(member.prepared, precision)
            self.column_models.append(made.model)
            for reader, split in zip((member.train, member.validation), SPLITS, strict=True):
                assert isinstance(reader, AnswerReader)
                reader.reference = columns[split]
            hashes.append(made.weights)
        return hashes

    def teacher_columns(
        self,
        objective: Distill,
        vocabulary: int,
        precision: str,
        weights: str = "",
        model: dict[str, Any] | None = None,
    ) -> list[TeacherColumn]:
        """Return what each set's teacher column must be of, without its files. Raises DataError: k is too large."""
        from llmtrain.data.stream.reference_and_teacher import TeacherColumn

        assert objective.top_k is not None
        if objective.top_k > vocabulary:
            raise DataError(
                f"objective.top_k {objective.top_k}: the model has {vocabulary} words; lower it, or leave "
                "it out for the complete distribution, computed at each step"
            )
        return [
            TeacherColumn(
                weights=weights,
                data=member.prepared.manifest.data_fingerprint,
                windows=member.train.context,
                top_k=objective.top_k,
                temperature=objective.temperature,
                vocabulary=vocabulary,
                precision=precision,
                places={"train": member.train.place_count, "validation": member.validation.place_count},
                files={},
                model=model,
            )
            for member in self._members
        ]

    def take_teacher(self, columns: list[TeacherColumn]) -> list[str]:
        """Add the teacher's likeliest tokens to sequences. Returns the hash of the teacher's weights for each set.

        `columns`: from `teacher_columns`. Raises DataError: a set's column is missing or different.
        """
        from llmtrain.data.stream.reference_and_teacher import read_column

        hashes = []
        for member, wanted in zip(self._members, columns, strict=True):
            made, taught = read_column(member.prepared, wanted)
            self.column_models.append(made.model)
            member.train.taught, member.validation.taught = taught["train"], taught["validation"]
            hashes.append(made.weights)
        return hashes

    def places(self, split: Split, index: int) -> np.ndarray:
        """Return the places of a sequence's counted labels in the teacher's column. The run must have one set."""
        reader = self._members[0].train if split == "train" else self._members[0].validation
        own = permute(reader.count, self._config.seed if split == "train" else 0, 0, 0, index)
        return reader.places(own, reader.read(own))

    def _check_members(self, trains: bool) -> None:
        first = min(self._members, key=lambda each: each.prepared.manifest.chat is not None).prepared  # texts, if any
        for member in self._members:
            other = member.prepared
            if other.manifest.tokenizer_fingerprint != first.manifest.tokenizer_fingerprint:
                raise DataError(
                    f"data.mixture: {other.name} and {first.name} were prepared with different tokenizers; "
                    f"prepare one again with --tokenizer {first.tokenizer_dir}"
                )
            if reason := other_begin(first.manifest, other.manifest, (first.name, other.name)):
                raise DataError(f"data.mixture: {reason}")
            if trains and member.train.count == 0:
                raise DataError(
                    f"{other.name}: its {member.train.stream.tokens} training tokens do not fill one sequence of "
                    f"data.sequence_length {self._config.sequence_length}; lower that, or prepare more text"
                )

    def _count_validation(self) -> int:
        counts = self._validation_counts
        # Largest k for which every set has enough sequences, by bisection: the counts grow with k.
        low, high = 0, sum(counts)
        while low < high:
            middle = (low + high + 1) // 2
            if all(count <= have for count, have in zip(self._mixture.counts(middle), counts, strict=True)):
                low = middle
            else:
                high = middle - 1
        return low

    def sequence(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (inputs, labels), int64 [T] each, of training sequence `index` >= 0."""
        sequence = self.sequence_at(index)
        return sequence.inputs, sequence.labels

    def sequence_at(self, index: int) -> TokenSequence:
        member, number = self.place_of(index)
        return self._read(self._members[member].train, number)

    @property
    def in_store(self) -> bool:
        return any(member.prepared.in_store for member in self._members)

    def fetch(self, indices: Sequence[int]) -> None:
        """Read missing parts of training sequences `indices` from stores concurrently. Raises DataError."""
        self._fetch(indices, self.place_of, "train")

    def fetch_validation(self, indices: Sequence[int]) -> None:
        self._fetch(indices, self._validation_place, "validation")

    def _fetch(self, indices: Sequence[int], place: Callable[[int], tuple[int, int]], split: Split) -> None:
        if not self.in_store:
            return
        places = [place(index) for index in indices]
        for number, member in enumerate(self._members):
            reader = member.train if split == "train" else member.validation
            reader.fetch([sequence for of, sequence in places if of == number])

    def shards_in_store(self, split: Split) -> list[tuple[str, str]]:
        return [shard for member in self._members for shard in member.prepared.shards_in_store(split)]

    def shards_next(self, index: int, sequences: int) -> list[tuple[str, str]]:
        """Return (URL, file) of the shards in which the next `sequences` training sequences begin, in order of need."""
        found: dict[tuple[str, str], None] = {}
        urls = [next(iter(member.prepared.shards_in_store("train")), ("", ""))[0] for member in self._members]
        for member, number in map(self.place_of, range(index, index + sequences) if any(urls) else ()):
            if url := urls[member]:
                reader = self._members[member].train
                found[url, reader.stream.shard_of(reader.begin(number))] = None
        return list(found)

    def place_of(self, index: int) -> tuple[int, int]:
        """Return the set of training sequence `index` >= 0, and the sequence's number within the set."""
        member, own_index = self._mixture.locate(index)
        epoch, position = divmod(own_index, self._counts[member])
        return member, permute(self._counts[member], self._config.seed, epoch, member, position)

    def sequences_with(self, member: int, number: int, until: int) -> Iterator[int]:
        """Yield the training sequences below `until` with `number` in a set: one in each of the set's epochs."""
        size = self._counts[member]
        for epoch in count():
            position = position_of(size, self._config.seed, epoch, member, number)
            index = self._mixture.sequence(member, epoch * size + position)
            if index < until:
                yield index
            if self._mixture.sequence(member, (epoch + 1) * size) >= until:
                return

    def origins_of(self, member: int, split: Split = "train") -> Origins:
        """Return the documents' origins of a set. Raises DataError: it was prepared without them."""
        return self._members[member].prepared.origins(split)

    def reader_of(self, member: int) -> TextReader | RowReader:
        return self._members[member].train

    def validation_sequence(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (inputs, labels), int64 [T] each, of validation sequence `index` < validation_sequences."""
        sequence = self.validation_sequence_at(index)
        return sequence.inputs, sequence.labels

    def validation_sequence_at(self, index: int) -> TokenSequence:
        """Return validation sequence `index` < validation_sequences.

        Their order is shuffled, so that the first few hundred represent all of them, and the same for every seed.
        """
        member, number = self._validation_place(index)
        return self._read(self._members[member].validation, number)

    def check_counted(self, sequences: int) -> None:
        """Raise DataError if no token of the first `sequences` validation sequences counts: they would have no loss."""
        first = range(0 if self.in_store else min(sequences, self.validation_sequences))
        if first and all((self.validation_sequence(index)[1] == IGNORED).all() for index in first):
            raise DataError(
                f"{self.name}: no token of its first {len(first)} validation sequences is counted, so they "
                "have no loss; raise train.eval_sequences or eval.sequences, or leave it out"
            )

    def _validation_place(self, index: int) -> tuple[int, int]:
        member, position = self._mixture.locate(index)
        return member, permute(self._validation_counts[member], 0, 0, member, position)

    def epochs(self, sequences: int) -> list[tuple[str, float, int]]:
        """Return for each set its folder, how many epochs `sequences` of the run are, and its training tokens."""
        counts = self._mixture.counts(sequences)
        return [
            (member.prepared.name, count / size, member.prepared.manifest.tokens["train"])
            for member, count, size in zip(self._members, counts, self._counts, strict=True)
        ]

    def streams(self, split: Split) -> list[TokenStream]:
        return [(member.train if split == "train" else member.validation).stream for member in self._members]

    def _read(self, reader: TextReader | RowReader, index: int) -> TokenSequence:
        sequence = reader.read(index)
        if (largest := int(max(sequence.inputs.max(), sequence.labels.max()))) >= self.vocab_size:
            # A wrong id would read past the embedding: on a GPU an assertion that kills the process without a name.
            raise DataError(
                f"{self.name}: holds the id {largest}, outside the vocabulary [0, {self.vocab_size}): "
                "a shard is damaged; copy the folder again, or delete it and prepare it again"
            )
        if reader.taught is None:
            return sequence
        counted, found = sequence.labels != IGNORED, reader.taught.read(reader.places(index, sequence))
        words, logs = (np.zeros((self.sequence_length, each.shape[1]), dtype=each.dtype) for each in found)
        words[counted], logs[counted] = found
        return replace(sequence, by_token={"words": words, "logs": logs})


class EvalSet(TrainData):
    """A set of `eval.sets`: its validation split is measured or, if that is too short, its training split."""

    def __init__(self, folder: str, config: DataConfig) -> None:
        """`config`: the section `data` of the run. Raises DataError."""
        super().__init__(replace(config, path=folder, mixture=None, seed=0, exclude=None), trains=False)
        self.whole = self.validation_sequences == 0
        """True if the training split is measured, because there is no validation split."""
        if self.whole:
            self.validation_sequences = self.sequences_per_epoch
        if self.validation_sequences == 0:
            raise DataError(
                f"{folder}: neither of its splits fills one sequence of data.sequence_length {config.sequence_length}; "
                "lower that, or prepare more text"
            )

    def validation_sequence_at(self, index: int) -> TokenSequence:
        return self.sequence_at(index) if self.whole else super().validation_sequence_at(index)

    def fetch_validation(self, indices: Sequence[int]) -> None:
        if self.whole:
            self.fetch(indices)
        else:
            super().fetch_validation(indices)


def _open_member(folder: str, config: DataConfig) -> _Member:
    prepared = PreparedSet(folder, config.cache)
    folder, kind, manifest = prepared.name, prepared.kind, prepared.manifest
    if kind.never_trains:
        raise DataError(f"{folder} holds {kind.title}, {kind.never_trains}")
    if kind.has_rows and not config.isolate_documents:
        raise DataError(
            f"data.isolate_documents is false, and {folder} holds {kind.title}: those that share a sequence would "
            "read each other; set data.isolate_documents to true"
        )
    if not kind.has_rows and not config.pack:
        raise DataError(
            f"data.pack is false, and {folder} holds {kind.title}, which are one stream without rows; remove data.pack"
        )
    if manifest.chat is not None and manifest.chat.longest > config.sequence_length:
        longest = manifest.chat.longest
        raise DataError(
            f"data.sequence_length {config.sequence_length}: the longest {kind.unit} of {folder} has {longest} "
            f"tokens, and rows are not cut; raise it, or prepare the data with --max-tokens {config.sequence_length}"
        )
    train, validation = (kind.reader(prepared.split(split), config, manifest) for split in SPLITS)
    return _Member(prepared=prepared, train=train, validation=validation)


def counted_bytes(data: TrainData, sequences: int, lengths: np.ndarray) -> int:
    """Return the bytes of the counted labels in the first `sequences` validation sequences."""
    total, indices = 0, range(min(sequences, data.validation_sequences))
    data.fetch_validation(indices)
    for index in indices:
        _, labels = data.validation_sequence(index)
        total += int(lengths[labels[labels != IGNORED]].sum())
    return total


@dataclass(frozen=True, kw_only=True)
class RunData:
    """All data of a run, with the columns that its objective needs."""

    stages: tuple[TrainData, ...]
    """Data of each stage; stages with the same data share one object."""
    sets: dict[str, EvalSet] = field(default_factory=dict)
    """The sets of the section `eval`, by name."""
    choices: dict[str, ChoiceSet] = field(default_factory=dict)
    """Sets of multiple-choice questions, by name."""
    references: list[str] | None = None
    """Distinct hashes of the weights that computed the reference's log-probabilities; None: no reference column."""
    teachers: list[str] = field(default_factory=list)
    """Distinct hashes of the weights that computed the teacher's columns."""
    teacher_config: dict[str, Any] | None = None
    """Configuration of the teacher; None: there is no teacher, or its columns do not name one."""

    @property
    def first(self) -> TrainData:
        return self.stages[0]
