"""Losses of a unigram and a bigram model at the end of a run, to compare its validation loss with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from llmtrain.features import Feature

if TYPE_CHECKING:
    from llmtrain.config.run import RunConfig
    from llmtrain.data.stream.train_data import TrainData
    from llmtrain.tracking.tracker import Tracker


class NgramsFeature(Feature):
    def asked(self, config: RunConfig) -> bool:
        from llmtrain.objectives.by_token import NextToken

        return config.train.eval and isinstance(config.objective, NextToken)

    def at_end(self, data: TrainData, tracker: Tracker) -> Iterable[tuple[str, str]]:
        from llmtrain.features.ngrams.counting import tell

        tell(data, tracker)
        return ()


FEATURE = NgramsFeature()
