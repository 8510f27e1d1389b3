"""MLflow as a tracker: `trackers.mlflow`."""

from __future__ import annotations

from llmtrain.features import Feature
from llmtrain.features.mlflow.sink import MLflow


class MLflowFeature(Feature):
    entries = (MLflow,)


FEATURE = MLflowFeature()
