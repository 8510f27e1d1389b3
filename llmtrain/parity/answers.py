"""Preference data for a comparison, and each objective over answers in plain PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.config.run import RunConfig
from llmtrain.data.stream.train_data import TrainData
from llmtrain.data.stream.windows import IGNORED, Window
from llmtrain.objectives.objective import Objective
from llmtrain.objectives.preferences import Answers as OfPairs
from llmtrain.objectives.preferences import Pairs
from llmtrain.parity.tokens import SEED

_MOST = 4
"""Maximum number of rows in a window."""


class Answers(TrainData):
    """Windows of two or four rows: pairs, or single answers; window k depends on k alone. Reference log-probabilities
    are below an untrained model's, so that kto's z is not 0."""

    def __init__(self, config: RunConfig, vocab_size: int) -> None:  # the base class opens folders
        assert vocab_size >= 8, vocab_size
        self.sequence_length, self.vocab_size = config.data.sequence_length, vocab_size
        self.mask_document_starts, self.isolate_documents = False, True
        self.separator_id = vocab_size - 1
        self._unpaired = config.objective.data == "unpaired"

    def rows(self, index: int, *, mismatched: bool = False) -> list[tuple[np.ndarray, int, float, bool]]:
        """Return (ids, start of the answer, reference, desired) of each row."""
        draw = np.random.default_rng((SEED, index, mismatched))
        made = []
        for row in range(_MOST if index % 3 else 2):
            length = int(draw.integers(4, self.sequence_length // _MOST + 1))
            ids = draw.integers(0, self.separator_id, length)
            ids[2:] = np.where(draw.random(length - 2) < 0.5, (ids[1:-1] * 7 + 3) % self.separator_id, ids[2:])
            begin = int(draw.integers(1, length - 1))
            made.append((ids, begin, -float(length - begin) * 8 + float(draw.normal()), bool((row + index) % 2)))
        return made

    def sequence(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (inputs, labels), int64 [T] each."""
        return self.window_at(index)[:2]

    def window_at(self, index: int) -> Window:
        window = self._window(index)
        if not self._unpaired:
            return window._replace(desirable=None)
        return window._replace(mismatched=self._window(index, mismatched=True))

    def _window(self, index: int, *, mismatched: bool = False) -> Window:
        inputs = np.full(self.sequence_length, self.separator_id, dtype=np.int64)
        labels, positions = np.full_like(inputs, IGNORED), np.arange(self.sequence_length)
        at, rows = 0, self.rows(index, mismatched=mismatched)
        for ids, begin, _, _ in rows:
            end = at + len(ids)
            inputs[at:end], labels[at + begin - 1 : end - 1] = ids, ids[begin:]
            positions[end:] -= end - at
            at = end
        return Window(
            inputs,
            labels,
            positions,
            rows=np.arange(len(rows)) + _MOST * index,
            reference=np.array([row[2] for row in rows], dtype=np.float32),
            desirable=np.array([row[3] for row in rows]),
        )


PLAIN = ("dpo", "robust", "ipo", "dpo_norm", "rpo", "simpo", "orpo", "kto", "reward")
"""Objectives over answers that this module defines."""


def plain_loss(
    model: Any, config: Objective, answers: Answers, windows: list[int], z: float, base: Any = None
) -> Tensor:
    """Sum the loss over the pairs, or answers, of some windows; each row goes through the model alone. `base`: the
    initial model where it is the reference."""
    o = vars(config)
    if config.name == "reward":
        rows = [torch.from_numpy(ids) for window in windows for ids, _, _, _ in answers.rows(window)]
        each = [model(input_ids=ids[None].to(model.device), use_cache=False).logits[0, 0].float() for ids in rows]
        rw, rl = torch.stack(each).view(-1, 2).T  # transformers reads the last token where a row comes alone
        return (torch.log1p((rl - rw).exp()) + o["centering"] * (rw + rl) ** 2).sum()
    s, d, n, desired = _scored(model, answers, windows, base)
    beta = o["beta"]
    if config.name == "kto":
        wanted = o["desirable_weight"] * (1 - torch.sigmoid(beta * (d - z)))
        return torch.where(desired, wanted, o["undesirable_weight"] * (1 - torch.sigmoid(beta * (z - d)))).sum()
    if isinstance(config, Pairs) and config.name not in PLAIN:  # a plugin's own formula is its definition
        log_probs, tokens, references = (each.view(-1, 2) for each in (s, n, s - d))
        return config.losses(OfPairs(log_prob=log_probs, tokens=tokens, reference=references,
                                     log_sigmoid=F.logsigmoid))[0].sum()  # fmt: skip
    (sw, sl), (dw, dl), (nw, nl) = ((each[::2], each[1::2]) for each in (s, d, n))
    right, wrong = F.logsigmoid(beta * (dw - dl)), F.logsigmoid(beta * (dl - dw))
    losses = {
        "dpo": lambda: -(1 - o["smoothing"]) * right - o["smoothing"] * wrong,
        "robust": lambda: (o["smoothing"] * wrong - (1 - o["smoothing"]) * right) / (1 - 2 * o["smoothing"]),
        "ipo": lambda: (dw / nw - dl / nl - 1 / (2 * beta)) ** 2,
        "dpo_norm": lambda: -F.logsigmoid(beta * (dw / nw - dl / nl)),
        "rpo": lambda: -right - o["alpha"] * sw / nw,
        "simpo": lambda: -F.logsigmoid(beta * (sw / nw - sl / nl) - o["gamma"]),
        "orpo": lambda: -sw / nw - beta * F.logsigmoid(torch.logit((sw / nw).exp()) - torch.logit((sl / nl).exp())),
    }
    return losses[config.name]().sum()


def divergence(model: Any, answers: Answers, windows: list[int], base: Any = None) -> float:
    """Return kto's z for a global batch."""
    with torch.no_grad():
        return max(0.0, float(_scored(model, answers, windows, base, mismatched=True)[1].mean()))


def _log_prob(model: Any, tokens: Tensor, begin: int) -> Tensor:
    logits = model(input_ids=tokens[None, :-1], use_cache=False).logits[0].float()
    return -F.cross_entropy(logits[begin - 1 :], tokens[begin:], reduction="sum")


def _scored(
    model: Any, answers: Answers, windows: list[int], base: Any, *, mismatched: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (log-probability, its difference from the reference's, counted tokens, desired) per row."""
    found = []
    for window in windows:
        for ids, begin, reference, desired in answers.rows(window, mismatched=mismatched):
            tokens = torch.from_numpy(ids).to(model.device)
            s, r = _log_prob(model, tokens, begin), float(np.float32(reference))
            if base is not None:
                with torch.no_grad():
                    r = float(_log_prob(base, tokens, begin))
            found.append((s, s - r, s.new_tensor(len(ids) - begin), desired))
    s, d, n = (torch.stack(column) for column in list(zip(*found, strict=True))[:3])
    return s, d, n, torch.tensor([row[3] for row in found], device=s.device)
