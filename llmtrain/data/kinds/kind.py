"""`RowKind`: what `llmtrain prepare` makes of a record, and what a run reads of it.

    records -> parse -> encode -> rows in shards, with an entry each -> reader -> batch -> an objective's `facts`

A kind is named by its `format`, which a user gives to --format; the manifest of a folder has it. Nothing else says what
the rows of a folder are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from llmtrain.base.choice import Choice
from llmtrain.config.run import DataConfig
from llmtrain.data.manifest import Manifest
from llmtrain.data.row import RefusedError, Row, RowOptions
from llmtrain.data.token_stream import TokenStream

if TYPE_CHECKING:
    from llmtrain.data.batches import MicroBatch
    from llmtrain.data.chat.conversation import Conversation


@dataclass(frozen=True, kw_only=True)
class RowKind(RowOptions, Choice, section="prepare", selector="format"):
    """Rows of conversations that a chat template renders; a class for each `--format`.

    A plugin's kind is a frozen dataclass with a name (`class Ranked(RowKind, format="ranked")`), `answers` and `parse`.
    """

    KEYWORD: ClassVar[str] = "format"
    own_methods: ClassVar[frozenset[str]] = frozenset(
        {"conversations", "encoder", "encode_all", "identity", "marks", "counted"}
    )
    """Public methods that a plugin does not replace."""

    title: ClassVar[str] = "rows of a plugin's format"
    """What its folders hold, for messages and --help."""
    unit: ClassVar[str] = "row"
    """Name of the rows of a record that stay together."""
    columns: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Sets of fields; a record that has all fields of one of these sets is of this kind."""
    also: ClassVar[tuple[str, ...]] = ()
    """Other values of --format that mean this kind."""
    mark: ClassVar[str] = ""
    """Key in the manifest's section `chat` by which versions before 0.1 recognise this kind."""

    answers: ClassVar[tuple[str, ...]] = ()
    """Names of the answers in a record that an objective compares, in order; empty: it trains on each counted token."""
    mismatched: ClassVar[bool] = False
    """Each of its sequences comes with a second one: the same prompts, each with the answer to another prompt."""
    never_trains: ClassVar[str] = ""
    """Reason and remedy, if no run can train on it."""
    measures: ClassVar[bool] = False
    """All of its records are for evaluation."""
    tokenizer: ClassVar[str] = "a chat model's, or any with --chat-template FILE"
    """What --tokenizer must name, in words for a message; empty: the option may be left out."""
    asks: ClassVar[bool] = False
    """Its records are prompts without an answer."""
    templated: ClassVar[bool] = True
    """A chat template renders the records."""
    has_rows: ClassVar[bool] = True
    """Its shards have a file of rows with the counted tokens; False: texts, which all count, each with a separator."""
    reads_records: ClassVar[bool] = True
    """It reads complete records; False: the text in one field."""
    of_ids: ClassVar[bool] = False
    """Its records may also be token ids in files of their own layout."""
    entry: ClassVar[np.dtype | None] = None
    """Type of what a shard has of each row beside its tokens."""

    format: str = field(init=False)

    def __init_subclass__(cls, *, format: str | None = None, **others: Any) -> None:
        super().__init_subclass__(choice=format, **others)

    @classmethod
    def named(cls, format: str) -> type[RowKind]:
        """The class for a value of --format. Raises KeyError: there is none."""
        also = (name for name, kind in cls.CHOICES.items() if format in kind.also)
        named: type[RowKind] = cls.CHOICES[format if format in cls.CHOICES else next(also, format)]
        return named

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RowKind:
        """The kind whose `asdict` was written as JSON."""
        options = {name: value for name, value in values.items() if name != "format"}
        return cls.of(values["format"], **options | {"stop_tokens": tuple(values["stop_tokens"])})

    @property
    def together(self) -> int:
        """Rows of a record."""
        return max(1, len(self.answers))

    # --- llmtrain prepare

    @abstractmethod
    def parse(self, record: dict[str, Any]) -> list[tuple[list[Any], int]]:
        """(messages, how many of the first are the prompt) for each of `answers`. Raise RefusedError for a record that
        is none."""
        raise NotImplementedError

    def entry_of(self, record: dict[str, Any], row: Row) -> tuple[Any, ...] | None:
        """The row's entry, of the type `entry`."""
        return None

    def conversations(self, record: dict[str, Any]) -> list[Conversation]:
        """Raises RefusedError."""
        from llmtrain.data.chat.conversation import conversation_of  # a run makes none

        names = {self.field, *(name for names in self.columns for name in names)}
        return [conversation_of(record, names, *parsed, asks=self.asks) for parsed in self.parse(record)]

    def encoder(self, folder: Path, dtype: np.dtype, bare: bool) -> Any:
        """What `encode` computes with, for one worker. Raises DataError.

        Args:
            folder: with the tokenizer.
            dtype: type of the ids in the shards.
            bare: texts get no special tokens.
        """
        from llmtrain.data.chat.encoder import ChatEncoder

        return ChatEncoder(folder, self)

    def encode(self, encoder: Any, record: dict[str, Any]) -> list[Row]:
        """The rows of a record. Raises RefusedError."""
        named = zip(self.answers, self.conversations(record), strict=True)
        rows: list[Row] = [encoder.row_of(conversation, name) for name, conversation in named]
        begins = [int(row.counted.argmax()) for row in rows]
        for name, row, begin in zip(self.answers, rows, begins, strict=True):
            if begin != begins[0] or not np.array_equal(row.ids[:begin], rows[0].ids[:begin]):
                first = self.answers[0]
                raise RefusedError(f"the template writes another prompt for the {name} answer than for the {first} one")
        if len({row.ids.tobytes() for row in rows}) < len(rows):
            raise RefusedError(f"the template writes the same for {' and '.join(self.answers)}")
        size = sum(len(row.ids) for row in rows)
        if self.max_tokens is not None and size > self.max_tokens:
            what = f"its {len(rows)} rows have" if len(rows) > 1 else "it has"
            raise RefusedError(f"{what} {size} tokens, --max-tokens is {self.max_tokens}")
        return [Row(row.ids, row.counted, self.entry_of(record, row)) for row in rows]

    def encode_all(self, encoder: Any, texts: list[str]) -> list[list[Row] | str]:
        """The rows of each record, a JSON object, or the reason for none."""
        encoded: list[list[Row] | str] = []
        for text in texts:
            try:
                encoded.append(self.encode(encoder, encoder.record(text)))
            except RefusedError as error:
                encoded.append(str(error))
        return encoded

    def identity(self) -> dict[str, Any]:
        """The options that decide the rows, for the manifest."""
        values = {**asdict(self), "stop_tokens": list(self.stop_tokens)}
        del values["moment"]
        variables = values.pop("variables")
        return values | ({"chat_template_kwargs": variables} if variables else {})

    def marks(self) -> dict[str, bool]:
        """What versions before 0.1 read in the manifest instead of the format."""
        return {
            each.mark: each.format == self.format
            for each in RowKind.CHOICES.values()
            if each.mark and (each.answers or isinstance(self, each))
        }

    # --- a run

    def reader(self, stream: TokenStream, config: DataConfig, manifest: Manifest) -> Any:
        """The sequences of a split. Raises DataError."""
        from llmtrain.data.kinds.packing import AnswerReader, RowReader  # a run over texts packs nothing

        reads = AnswerReader if self.answers else RowReader
        return reads(stream, config, manifest.separator_id, self.together)

    def batch(self, windows: Sequence[Any], sequences: list[int]) -> MicroBatch:
        """Micro-batch of windows of the reader, of which the first len(sequences) count."""
        from llmtrain.data.batches import answer_batch_of, batch_of

        return (answer_batch_of if self.answers else batch_of)(windows, sequences)

    def alike(self, facts: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
        """The facts of `count` equal answers to one prompt, made of those of a sequence: for the proof of an objective
        before the first step."""
        return {name: values[[0] * count] for name, values in facts.items()}

    def invented(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Facts for rows of synthetic data, for parity."""
        return {}

    def counted(self, stream: TokenStream) -> str:
        """The number of records of a kind that `measures`, for the last line of `llmtrain prepare`."""
        raise NotImplementedError

    def about(self, stream: TokenStream, index: int) -> str:
        """What `data show` says of a row behind its number."""
        return f" ({self.answers[index % self.together]})" if self.together > 1 else ""
