"""Sequences that count no token: data.exclude, data.skip_steps."""

from __future__ import annotations

from collections.abc import Callable

from llmtrain.data.stream.train_data import TrainData
from llmtrain.data.windows import Window


def reader_without(data: TrainData, sequences: range, *, whole: bool) -> tuple[Callable[[int], Window], int]:
    """Return (reader of a step's sequences, number of emptied sequences). `whole`: empty all sequences."""
    left_out = {index for index in sequences if whole or data.place_of(index) in data.excluded}

    def window(index: int) -> Window:
        read = data.window_at(index)
        return read.emptied(data.separator_id) if index in left_out else read

    return window, len(left_out)
