"""Prompts alone: what a server gets before it generates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmtrain.data.kinds.kind import RowKind
from llmtrain.data.row import RefusedError, Row


@dataclass(frozen=True, kw_only=True)
class Prompts(RowKind, format="prompt"):
    """`prompt`, messages that end with a question or a tool's result, or an instruction without its output."""

    title = "prompts"
    mark = "prompts"
    asks = True
    never_trains = (
        "without counted tokens, so there is nothing to learn; they are for objectives that generate answers. Prepare "
        "conversations, with --format chat"
    )
    complete = "prompts are never cut, and none of their tokens counts"

    def parse(self, record: dict[str, Any]) -> list[tuple[list[Any], int]]:
        from llmtrain.data.chat.conversation import prompt_of

        messages = prompt_of(record, self.field)
        if not messages:
            names = ", ".join(sorted(map(str, record))[:8]) or "none"
            raise RefusedError(f"no prompt in it: prompt, messages or instruction (its fields: {names})")
        return [(messages, len(messages))]

    def encode(self, encoder: Any, record: dict[str, Any]) -> list[Row]:
        [given] = self.conversations(record)
        rows: list[Row] = encoder.prompt_of(given)
        return rows
