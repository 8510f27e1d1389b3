"""Answers judged alone: what is told of a row, and whose answer a prompt meets besides its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from llmtrain.data.shards import JUDGED

if TYPE_CHECKING:
    from llmtrain.data.chat.encoder import Row


def judged(rows: Iterable[Row]) -> np.ndarray:
    """JUDGED [rows]. What precedes the first counted token is a row's prompt."""
    begins = [(row, int(row.counted.argmax())) for row in rows]
    told = [(xxhash.xxh3_64_intdigest(row.ids[:at].tobytes()), at, bool(row.desirable)) for row, at in begins]
    return np.array(told, dtype=JUDGED)


def partners(prompts: np.ndarray) -> np.ndarray | None:
    """For each row the row whose answer its prompt meets: of another prompt, and each answer once. int64 [rows].

    A function of the hashes [rows] alone. None: more than half of the rows have the same prompt.
    """
    order = np.argsort(prompts, kind="stable")
    _, counts = np.unique(prompts, return_counts=True)
    most = int(counts.max(initial=0))
    if 2 * most > len(prompts):
        return None
    found = np.empty(len(prompts), dtype=np.int64)
    found[order] = np.roll(order, -most)  # rows of a prompt are neighbours in `order`, and no prompt has more of them
    return found
