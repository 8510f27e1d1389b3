"""Conversations: a run trains on each counted token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmtrain.data.kinds.kind import RowKind
from llmtrain.data.row import Row


@dataclass(frozen=True, kw_only=True)
class Chat(RowKind, format="chat"):
    """Conversations, in the usual forms."""

    title = "conversations"
    columns = (
        ("messages",),
        ("conversations",),
        ("instruction", "output"),
        ("prompt", "completion"),
    )
    hint = ", and with --vocab-size --chat-template DIR/launch/templates/turns.jinja, which `llmtrain init DIR` writes"

    def parse(self, record: dict[str, Any]) -> list[tuple[list[Any], int]]:
        from llmtrain.data.chat.conversation import messages_of

        return [messages_of(record, self.field)]

    def encode(self, encoder: Any, record: dict[str, Any]) -> list[Row]:
        rows: list[Row] = encoder.rows_of(*self.conversations(record))
        return rows
