"""TensorBoard as a tracker: `trackers.tensorboard`."""

from __future__ import annotations

from llmtrain.features import Feature
from llmtrain.features.tensorboard.sink import TensorBoard


class TensorBoardFeature(Feature):
    entries = (TensorBoard,)


FEATURE = TensorBoardFeature()
