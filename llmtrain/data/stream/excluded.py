"""Windows of sequences that count no token: data.exclude, data.skip_steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmtrain.data.stream.train_data import TrainData
from llmtrain.data.stream.windows import IGNORED, Window


def reader_without(data: TrainData, sequences: range, *, whole: bool) -> tuple[Callable[[int], Window], int]:
    """Return (reader of a step's sequences, number of emptied sequences). `whole`: empty all sequences."""
    left_out = {index for index in sequences if whole or data.place_of(index) in data.excluded}

    def window(index: int) -> Window:
        found = data.window_at(index)
        return emptied(found, data.separator_id) if index in left_out else found

    return window, len(left_out)


def emptied(window: Window, separator_id: int) -> Window:
    """Return a window of separators with the shapes of another, without a counted token or an answer.

    The model reads these tokens, and the balancing loss of experts counts them, instead of the excluded ones.
    """
    given = {name: value for name, value in window._asdict().items() if isinstance(value, np.ndarray)}
    made = {name: value[:0] for name, value in given.items() if name in ("rows", "reference", "desirable")}
    made |= {name: np.zeros_like(value) for name, value in given.items() if name in ("words", "logs")}
    if window.positions is not None:
        made["positions"] = np.arange(len(window.inputs))
    other = None if window.mismatched is None else emptied(window.mismatched, separator_id)
    return window._replace(inputs=np.full_like(window.inputs, separator_id),
                           labels=np.full_like(window.labels, IGNORED), mismatched=other, **made)  # fmt: skip
