"""Continuations of `train.sample_prompts` by a run's engine, in any form: greedy, a forward pass for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmtrain.data.stream.loader import batches_of
from llmtrain.data.stream.train_data import Prompts
from llmtrain.data.stream.windows import IGNORED, Window
from llmtrain.engine.losses.likeliest import NextWord
from llmtrain.models import compiler

if TYPE_CHECKING:
    from llmtrain.training.setup import Setup

_ROUND = 16
"""A row's tokens are a multiple of this, times the ranks that share it."""


def continuations(setup: Setup, prompts: Prompts) -> list[str]:
    """Return the text after each prompt. All ranks call it together, with the same prompts; each continues some."""
    batch, shared = setup.run.batch, _ROUND * setup.run.mix.degrees.sequence
    longest = max(map(len, prompts.ids)) + prompts.tokens
    length = min(-(-longest // shared) * shared, setup.run.config.data.sequence_length)
    new: list[list[int]] = [[] for _ in prompts.ids]
    going = set(range(len(new)))
    for _ in range(prompts.tokens):
        rows = [ids + more for ids, more in zip(prompts.ids, new, strict=True)]
        objective = NextWord(len(rows))

        def read(index: int, rows: list[list[int]] = rows) -> Window:
            ids = rows[index]  # of which the last counts; what comes after it changes nothing before it
            inputs = np.full(length, setup.data.first.separator_id, dtype=np.int64)
            inputs[: len(ids)] = ids
            labels = np.full(length, IGNORED, dtype=np.int64)
            labels[len(ids) - 1] = 0
            return Window(inputs, labels, np.arange(length) if setup.run.config.data.isolate_documents else None)

        dealt = (batch.micro_batch, setup.mesh.place.data, batch.data_parallel, setup.ranks.device.type == "cuda")
        with compiler.uncompiled():
            found = objective.ids(*setup.engine.evaluate(batches_of(read, len(rows), *dealt), objective))
        going -= {row for row in going if found[row] in prompts.ends}
        for row in going:
            new[row].append(found[row])
        if not going:
            break
    return [prompts.text(row, each) for row, each in enumerate(new)]
