"""Preferences: of two answers to a prompt one was chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmtrain.data.kinds.kind import RowKind
from llmtrain.data.row import RefusedError


@dataclass(frozen=True, kw_only=True)
class Preference(RowKind, format="preference"):
    """A chosen and a rejected answer: texts or messages, whose prompt is a field, or their common beginning."""

    title = "preferences"
    unit = "pair"
    columns = (("chosen", "rejected"),)
    mark = "pairs"
    answers = ("chosen", "rejected")
    complete = "all tokens of the two answers count"

    def parse(self, record: dict[str, Any]) -> list[tuple[list[Any], int]]:
        from llmtrain.data.chat.conversation import answer_of, prompt_of

        chosen, rejected, prompt = (
            answer_of(record, "chosen"),
            answer_of(record, "rejected"),
            prompt_of(record, self.field),
        )
        if chosen == rejected:
            raise RefusedError("chosen and rejected are the same: there is nothing to prefer")
        if chosen[0].get("role") == "assistant" == rejected[0].get("role"):
            if not prompt:
                raise RefusedError(
                    "chosen and rejected have no prompt: a field prompt, or messages that both begin with"
                )
            return [([*prompt, *answer], len(prompt)) for answer in (chosen, rejected)]
        pairs = list(zip(chosen, rejected, strict=False))
        shared = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
        if not shared or (prompt and prompt[-1] not in chosen[:shared]):
            whose = "the prompt" if shared else "each other"
            raise RefusedError(f"chosen and rejected do not begin with the messages of {whose}")
        return [(chosen, shared), (rejected, shared)]
