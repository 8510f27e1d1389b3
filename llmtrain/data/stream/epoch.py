"""Count the sequences of an epoch, from which the length of a run with train.epochs follows."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict

from llmtrain.config.run import DataConfig


def sequences_of_epoch(data: DataConfig) -> int:
    """Return how many training sequences pass until one set of the data has been read once. Raises DataError."""
    return _count(json.dumps(asdict(data)))


@functools.lru_cache(maxsize=1)
def _count(data: str) -> int:
    from llmtrain.data.stream.train_data import TrainData

    return TrainData(DataConfig(**json.loads(data))).sequences_per_epoch
