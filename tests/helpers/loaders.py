"""A loader of one data set, by the numbers of its batch."""

from __future__ import annotations

from typing import Any

from llmtrain.config.stages import Batch, DataConfig, Stage, Stages
from llmtrain.data.stream.loader import Course, TrainLoader
from llmtrain.data.stream.train_data import TrainData
from llmtrain.optim.schedules import Constant


def loader_of(
    data: TrainData, *, global_batch: int, micro_batch: int, accumulation: int, data_parallel: int, **more: Any
) -> TrainLoader:
    batch = Batch(
        global_batch=global_batch,
        micro_batch=micro_batch,
        accumulation=accumulation,
        data_parallel=data_parallel,
        sequence_length=data.sequence_length,
    )
    stage = Stage(first_step=0, data=DataConfig(), batch=batch, schedule=Constant(), schedule_from=0)
    return TrainLoader(Course(Stages((stage,)), [data]), **more)
