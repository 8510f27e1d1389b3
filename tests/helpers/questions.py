"""Multiple-choice questions of random words, prepared as a user does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "Ünïcödé", "hills", "nobody's", "river")


def questions(count: int = 24) -> list[dict[str, Any]]:
    """Two to five choices each, the shortest of one word; every fourth question is longer than 64 tokens."""
    draw = np.random.default_rng(7)

    def text(least: int, most: int) -> str:
        return " ".join(draw.choice(np.array(WORDS), draw.integers(least, most)))

    made = []
    for index in range(count):
        choices = [text(1, 9) for _ in range(2 + index % 4)]
        question = text(60, 80) if index % 4 == 0 else text(3, 12)
        made.append({"question": question, "choices": choices, "answer": int(draw.integers(len(choices)))})
    return made


def prepared_choices(folder: Path, tokenizer: Path | str, records: list[dict[str, Any]]) -> str:
    """A prepared folder of them."""
    from llmtrain.commands.prepare import main

    source = folder / "questions.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    given = ["--source", str(source), "--tokenizer", str(tokenizer), "--out", str(folder / "choices")]
    assert main([*given, "--format", "choices", "--processes", "1"]) == 0
    return str(folder / "choices")
