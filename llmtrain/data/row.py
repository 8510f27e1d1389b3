"""A row of a prepared shard, and the settings by which a record becomes rows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

Count = Literal["assistant", "last", "all"]
TooLong = Literal["reject", "cut", "split"]


class RefusedError(ValueError):
    """Reason for which a record is refused."""


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids and whether each is counted, [tokens] both."""

    ids: np.ndarray
    counted: np.ndarray
    entry: tuple[Any, ...] | None = None
    """Values that the kind of row saves beside the tokens (`RowKind.entry`)."""
    whole: bool = True
    """False if this is a part of a row that was too long."""


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Settings of `llmtrain prepare` that a kind of row is made with."""

    complete: ClassVar[str] = ""
    """Reason why rows of this kind are never cut and `count` has no effect; empty: rows may be cut."""

    field: str = "messages"
    """Field of a record with its messages; for other kinds of row with its token ids or its question."""
    stop_tokens: tuple[str, ...] = ()
    """Texts of the tokens at which generation stops."""
    count: Count = "assistant"
    """Tokens that count for the loss: all answers, the last one, or every token."""
    max_tokens: int | None = None
    """Limit for a row, or for the rows of a record that stay together; `too_long` decides about a longer one."""
    too_long: TooLong = "reject"
    moment: str | None = None
    """Time for a template that writes the date, ISO 8601 in local time; None: the present."""
    variables: dict[str, Any] = dataclasses.field(default_factory=dict)
    """chat_template_kwargs of all records; a record's own override them."""
