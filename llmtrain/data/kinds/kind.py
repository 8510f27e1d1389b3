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
    """What the rows of a prepared folder are; a class for each `--format`. The defaults are those of conversations.

    A plugin's kind is a frozen dataclass with a name (`class Ranked(RowKind, format="ranked")`), `answers` and `parse`.
    """

    KEYWORD: ClassVar[str] = "format"
    own_methods: ClassVar[frozenset[str]] = frozenset(
        {"conversations", "encoder", "encode_all", "identity", "marks", "counted"}
    )
    """Public methods that a plugin does not replace."""

    title: ClassVar[str] = "rows of a plugin's format"
    """What folders of this kind hold, for messages and --help."""
    unit: ClassVar[str] = "row"
    """Word for the rows of a record, which stay together, in messages."""
    columns: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Sets of field names. A record that has all fields of a set is of this kind."""
    also: ClassVar[tuple[str, ...]] = ()
    """Other values of --format that mean this kind."""
    mark: ClassVar[str] = ""
    """Key in the manifest's section `chat` by which versions before 0.1 recognise this kind."""

    answers: ClassVar[tuple[str, ...]] = ()
    """Names of the answers in a record that an objective compares, in order; empty: it trains on each counted token."""
    mismatched: ClassVar[bool] = False
    """Each sequence comes with a second one: the same prompts, each with the answer to another prompt."""
    never_trains: ClassVar[str] = ""
    """Reason and remedy if no run can train on this kind; empty: runs can."""
    measures: ClassVar[bool] = False
    """True if all records are for evaluation."""
    tokenizer: ClassVar[str] = "a chat model's, or any with --chat-template FILE"
    """What --tokenizer must name, in words for a message; empty: the option may be left out."""
    asks: ClassVar[bool] = False
    """True if records are prompts without an answer."""
    templated: ClassVar[bool] = True
    """True if a chat template renders the records."""
    has_rows: ClassVar[bool] = True
    """True if shards have a file of rows that says which tokens count; False: texts, in which all tokens count."""
    reads_records: ClassVar[bool] = True
    """True if `parse` gets complete records; False: only the text in one field is read."""
    of_ids: ClassVar[bool] = False
    """True if sources may also be files of token ids (prepare/token_corpora.py)."""
    entry: ClassVar[np.dtype | None] = None
    """Type of the values that a shard keeps for each row beside its tokens; None: it keeps none."""

    format: str = field(init=False)

    def __init_subclass__(cls, *, format: str | None = None, **others: Any) -> None:
        super().__init_subclass__(choice=format, **others)

    @classmethod
    def named(cls, format: str) -> type[RowKind]:
        """Return the class for a value of --format. Raises KeyError: there is none."""
        also = (name for name, kind in cls.CHOICES.items() if format in kind.also)
        named: type[RowKind] = cls.CHOICES[format if format in cls.CHOICES else next(also, format)]
        return named

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RowKind:
        """Return the kind from its `asdict`, read back from JSON."""
        options = {name: value for name, value in values.items() if name != "format"}
        return cls.of(values["format"], **options | {"stop_tokens": tuple(values["stop_tokens"])})

    @property
    def together(self) -> int:
        """Number of rows that a record becomes."""
        return max(1, len(self.answers))

    # --- llmtrain prepare

    @abstractmethod
    def parse(self, record: dict[str, Any]) -> list[tuple[list[Any], int]]:
        """Return (messages, number of prompt messages at their beginning) for each of `answers`.

        Raise RefusedError for a record that is not of this kind.
        """
        raise NotImplementedError

    def entry_of(self, record: dict[str, Any], row: Row) -> tuple[Any, ...] | None:
        """Return the row's entry, a tuple with the fields of the type `entry`."""
        return None

    def conversations(self, record: dict[str, Any]) -> list[Conversation]:
        """Return the conversation of each answer. Raises RefusedError."""
        from llmtrain.data.chat.conversation import conversation_of  # a run makes none

        names = {self.field, *(name for names in self.columns for name in names)}
        return [conversation_of(record, names, *parsed, asks=self.asks) for parsed in self.parse(record)]

    def encoder(self, folder: Path, dtype: np.dtype, bare: bool) -> Any:
        """Make the object that `encode` encodes with, once for each worker. Raises DataError.

        Args:
            folder: the tokenizer's folder.
            dtype: type of the ids in the shards.
            bare: add no special tokens to texts.
        """
        from llmtrain.data.chat.encoder import ChatEncoder

        return ChatEncoder(folder, self)

    def encode(self, encoder: Any, record: dict[str, Any]) -> list[Row]:
        """Return the rows of a record. Raises RefusedError."""
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
        """Return for each record, given as a JSON object, its rows or the reason why it is refused."""
        encoded: list[list[Row] | str] = []
        for text in texts:
            try:
                encoded.append(self.encode(encoder, encoder.record(text)))
            except RefusedError as error:
                encoded.append(str(error))
        return encoded

    def identity(self) -> dict[str, Any]:
        """Return the options that decide the rows, for the manifest."""
        values = {**asdict(self), "stop_tokens": list(self.stop_tokens)}
        del values["moment"]
        variables = values.pop("variables")
        return values | ({"chat_template_kwargs": variables} if variables else {})

    def marks(self) -> dict[str, bool]:
        """Return the flags by which versions before 0.1 recognise the kind in a manifest."""
        return {
            each.mark: each.format == self.format
            for each in RowKind.CHOICES.values()
            if each.mark and (each.answers or isinstance(self, each))
        }

    # --- a run

    def reader(self, stream: TokenStream, config: DataConfig, manifest: Manifest) -> Any:
        """Return the reader of a split's sequences. Raises DataError."""
        from llmtrain.data.kinds.packing import AnswerReader, RowReader  # a run over texts packs nothing

        reads = AnswerReader if self.answers else RowReader
        return reads(stream, config, manifest.separator_id, self.together)

    def batch(self, sequences: Sequence[Any], numbers: list[int]) -> MicroBatch:
        """Make a micro-batch. Only the first len(numbers) of the reader's `sequences` count; the others fill it up."""
        from llmtrain.data.batches import answer_batch_of, batch_of

        return (answer_batch_of if self.answers else batch_of)(sequences, numbers)

    def alike(self, facts: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
        """Return facts for `count` equal answers to one prompt, from those of a sequence; the proof of an
        objective at a run's start compares such answers."""
        return {name: values[[0] * count] for name, values in facts.items()}

    def invented(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return facts for rows of the synthetic data that `llmtrain parity` trains on."""
        return {}

    def counted(self, stream: TokenStream) -> str:
        """Return the number of records in words, for the last line of `llmtrain prepare`, if the kind `measures`."""
        raise NotImplementedError

    def about(self, stream: TokenStream, index: int) -> str:
        """Return what `data show` prints after the number of a row."""
        return f" ({self.answers[index % self.together]})" if self.together > 1 else ""
