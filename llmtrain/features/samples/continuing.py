"""Continuations of texts by a run's engine, in any form: greedy, a forward pass for each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from llmtrain.base.errors import DataError
from llmtrain.data.batches import MicroBatch
from llmtrain.data.kinds import RowKind
from llmtrain.data.sequences import IGNORED, TokenSequence
from llmtrain.data.stream.loader import Dealt, batches_of
from llmtrain.data.stream.train_data import TrainData
from llmtrain.data.tokenize import Encoder
from llmtrain.models import compiler
from llmtrain.models.head import Head
from llmtrain.models.loss import IGNORE

if TYPE_CHECKING:
    from llmtrain.training.setup import Setup

_ROUND = 16
"""A row's tokens are a multiple of this, times the ranks that share it."""


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prompts of a run in its data's tokenizer."""

    encoder: Encoder
    texts: list[str]
    ids: list[list[int]]
    ends: set[int]
    """Tokens at which a continuation ends."""
    tokens: int
    """Longest continuation, in tokens."""

    @classmethod
    def of(cls, texts: Sequence[str], tokens: int, data: TrainData) -> Prompts:
        """Raises DataError: one is too long, or has no token. `tokens`: most of a continuation."""
        # As the run's texts begin; without any, as `llmtrain generate` begins a prompt.
        bare = any(manifest.chat is None for manifest in data.manifests) and not data.first_tokens
        encoder = Encoder(data.tokenizer_dir, bare=bare)
        begin = encoder.begin.tolist()
        ids = [[*begin, *text.tolist()] if len(text) else [] for text in encoder.encode(list(texts))]
        for text, tokens_of in zip(texts, ids, strict=True):
            if not tokens_of or len(tokens_of) + tokens > data.sequence_length:
                raise DataError(
                    f"samples.prompts {text[:40]!r}: has {len(tokens_of)} tokens; it needs 1 or more, and with "
                    f"samples.tokens {tokens} at most data.sequence_length {data.sequence_length}"
                )
        stops = [token for manifest in data.manifests if manifest.chat for token in manifest.chat.stop_tokens]
        ends = {data.separator_id, *(number for token in stops if (number := encoder.id_of(token)) is not None)}
        return cls(encoder=encoder, texts=list(texts), ids=ids, ends=ends, tokens=tokens)

    def text(self, row: int, new: list[int]) -> str:
        before = self.encoder.decode(self.ids[row])
        return self.encoder.decode(self.ids[row] + new)[len(before) :]


class NextWord:
    """The likeliest next token of each row, to continue texts with any engine. The figures are the ids: an engine sums
    figures over all ranks, so each rank gets all ids."""

    def __init__(self, rows: int) -> None:
        """`rows`: number over all micro-batches on all ranks; a sequence is the number of a row."""
        self.figures: tuple[str, ...] = ("loss", *(f"row {index}" for index in range(rows)))

    def weight(self, micro: MicroBatch) -> int:
        return len(micro.sequences)

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """[1 + rows]: 0 for the loss, then the ids of this micro-batch's rows; fp32 is exact for integers below
        2^24."""
        at = head.own(micro.labels != IGNORE)
        words = head.top_words(hidden[at], 1, 1.0).words[:, 0]
        samples = torch.tensor([0, *micro.sequences], device=hidden.device)[1:]
        rows = samples[at.nonzero()[:, 0]] + 1
        return torch.zeros(len(self.figures), device=hidden.device).index_add(0, rows, words.float())

    def ids(self, figures: dict[str, float], weight: int) -> list[int]:
        """Return the id of each row, from an engine's figures and their weight."""
        return [round(figures[name] * weight) for name in self.figures[1:]]


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

        def read(index: int, rows: list[list[int]] = rows) -> TokenSequence:
            ids = rows[index]  # of which the last counts; what comes after it changes nothing before it
            inputs = np.full(length, setup.data.first.separator_id, dtype=np.int64)
            inputs[: len(ids)] = ids
            labels = np.full(length, IGNORED, dtype=np.int64)
            labels[len(ids) - 1] = 0
            isolated = setup.run.config.data.isolate_documents
            return TokenSequence(inputs=inputs, labels=labels, positions=np.arange(length) if isolated else None)

        dealt = Dealt(setup.mesh.place.data, batch.data_parallel, setup.ranks.device.type == "cuda")
        micros = batches_of(RowKind.of("text"), read, len(rows), batch.micro_batch, dealt)
        with compiler.uncompiled():
            figures = setup.engine.evaluate(micros, objective)
            next_ids = objective.ids(*figures)
        going -= {row for row in going if next_ids[row] in prompts.ends}
        for row in going:
            new[row].append(next_ids[row])
        if not going:
            break
    return [prompts.text(row, continuation) for row, continuation in enumerate(new)]
