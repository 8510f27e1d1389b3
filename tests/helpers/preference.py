"""Small preferences, and each objective over pairs as a few lines of plain PyTorch that know only its definition."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from llmtrain.data.kinds.judged import Judged, partners
from llmtrain.data.manifest import Split
from llmtrain.data.sequences import AnswerSequence, TokenSequence
from llmtrain.data.shards import PreparedSet
from tests.helpers.chat import KINDS, Kind, workers_here, write_tokenizer

DEFINITIONS: dict[str, Callable[..., torch.Tensor]] = {
    # s: log-probability of an answer, r: of the reference's, n: counted tokens; w the chosen, l the rejected
    "dpo": lambda sw, sl, rw, rl, nw, nl, beta=0.1, smoothing=0.0: (
        -(1 - smoothing) * F.logsigmoid(beta * (sw - rw - sl + rl))
        - smoothing * F.logsigmoid(-beta * (sw - rw - sl + rl))
    ),
    "robust": lambda sw, sl, rw, rl, nw, nl, beta=0.1, smoothing=0.1: (
        (
            -(1 - smoothing) * F.logsigmoid(beta * (sw - rw - sl + rl))
            + smoothing * F.logsigmoid(-beta * (sw - rw - sl + rl))
        )
        / (1 - 2 * smoothing)
    ),
    "ipo": lambda sw, sl, rw, rl, nw, nl, beta=0.1: ((sw - rw) / nw - (sl - rl) / nl - 1 / (2 * beta)) ** 2,
    "dpo_norm": lambda sw, sl, rw, rl, nw, nl, beta=5.0: -F.logsigmoid(beta * ((sw - rw) / nw - (sl - rl) / nl)),
    "rpo": lambda sw, sl, rw, rl, nw, nl, beta=0.1, alpha=1.0: (
        -F.logsigmoid(beta * (sw - rw - sl + rl)) - alpha * sw / nw
    ),
    "simpo": lambda sw, sl, rw, rl, nw, nl, beta=2.0, gamma=0.5: -F.logsigmoid(beta * (sw / nw - sl / nl) - gamma),
    "orpo": lambda sw, sl, rw, rl, nw, nl, beta=0.1: (
        -sw / nw - beta * F.logsigmoid(torch.logit((sw / nw).exp()) - torch.logit((sl / nl).exp()))
    ),
}


def rows_read(sequences: Iterable[TokenSequence]) -> list[int]:
    """The rows of the split that are the answers of some sequences."""
    return [int(row) for sequence in sequences if isinstance(sequence, AnswerSequence) for row in sequence.rows]


def preferences(count: int, seed: int = 3) -> list[dict[str, Any]]:
    """Answers of unequal lengths."""
    draw, words = random.Random(seed), ["yes", "no", "maybe", "so", "never", "always"]
    made: list[dict[str, Any]] = []
    for index in range(count):
        prompt, chosen, rejected = (" ".join(draw.choices(words, k=draw.randint(1, 5))) for _ in range(3))
        made.append({"prompt": f"{index} {prompt}", "chosen": chosen + "!", "rejected": rejected})
    return made


def prepared_preferences(folder: Path, count: int = 150, kind: Kind = KINDS["chatml"], *more: str) -> str:
    """A prepared folder of them."""
    return _prepared(folder, preferences(count), kind, "--format", "preference", *more)


def _prepared(folder: Path, records: list[dict[str, Any]], kind: Kind, *more: str) -> str:
    from llmtrain.commands.prepare import main

    write_tokenizer(folder / "tokenizer", kind)
    source = folder / "pairs.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    given = ["--source", str(source), "--tokenizer", str(folder / "tokenizer"), "--out", str(folder / "prepared")]
    with workers_here():
        assert main([*given, *more]) == 0
    return str(folder / "prepared")


def kto(s: torch.Tensor, r: torch.Tensor, desired: torch.Tensor, mismatched: torch.Tensor) -> torch.Tensor:
    """Its definition with beta 0.1, weights 1 and 1/4. mismatched: log-ratios of prompts with answers to others."""
    z = mismatched.mean().clamp(min=0).detach()
    wanted = 1 - torch.sigmoid(0.1 * (s - r - z))
    other = 0.25 * (1 - torch.sigmoid(0.1 * (z - (s - r))))
    return torch.where(desired, wanted, other).mean()


def unpaired(count: int) -> list[dict[str, Any]]:
    """Two answers to most prompts, one to the others."""
    made = []
    for index, record in enumerate(preferences(count)):
        sides = [("chosen", True), ("rejected", False)][: 1 + bool(index % 3)]
        made += [{"prompt": record["prompt"], "completion": record[side], "label": label} for side, label in sides]
    return made


def prepared_unpaired(folder: Path, count: int = 90) -> str:
    """A prepared folder of them."""
    return _prepared(folder, unpaired(count), KINDS["chatml"], "--format", "unpaired")


class Plain:
    """A model's answers, each row alone and padded at its end, in one batch."""

    def __init__(self, hf: Any, folder: str | Path, split: Split = "train") -> None:
        self.hf, self.folder = hf, folder
        stream = PreparedSet(folder).split(split)
        counted = stream.counted(0, stream.tokens)
        assert counted is not None
        ends = np.cumsum(stream.row_lengths())[:-1]
        ids = np.split(stream.read(0, stream.tokens).astype(np.int64), ends)
        self.rows = list(zip(ids, np.split(counted, ends), strict=True))

    def mismatched(self, rows: list[int]) -> list[int]:
        """New rows: the prompts of these, each with the answer to another one. Whose it is, is asked of us."""
        partner = partners(PreparedSet(self.folder).split("train").entries(Judged.entry)["prompt"])
        assert partner is not None
        for row in rows:
            (ids, counted), (other, theirs) = self.rows[row], self.rows[int(partner[row])]
            begin, at = int(counted.argmax()), int(theirs.argmax())
            assert ids[:begin].tolist() != other[:at].tolist()
            mask = np.concatenate([np.zeros(begin, bool), theirs[at:]])
            self.rows.append((np.concatenate([ids[:begin], other[at:]]), mask))
        return list(range(len(self.rows) - len(rows), len(self.rows)))

    def answers(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probability, counted tokens) of each row, [rows]."""
        longest = max(len(self.rows[row][0]) for row in rows)
        ids, mask = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest)
        for at, row in enumerate(rows):
            ids[at, : len(self.rows[row][0])] = torch.from_numpy(self.rows[row][0])
            mask[at, : len(self.rows[row][1])] = torch.from_numpy(self.rows[row][1]).float()
        logits = self.hf(input_ids=ids, use_cache=False).logits[:, :-1].float()
        every = -F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        return (every * mask[:, 1:]).sum(1), mask[:, 1:].sum(1)

    def scores(self) -> torch.Tensor:
        """Of a reward model: [rows / 2, 2], the chosen answer's and the rejected one's; each row alone."""
        with torch.no_grad():
            found = [self.hf(input_ids=torch.from_numpy(ids[None])).logits[0, 0] for ids, _ in self.rows]
        return torch.stack(found).view(-1, 2)

    def loss(self, name: str, rows: list[int], reference: dict[int, float], **options: float) -> torch.Tensor:
        """The mean over the pairs: rows are chosen and rejected in turn."""
        s, n = self.answers(rows)
        r = torch.tensor([reference[row] for row in rows])
        return DEFINITIONS[name](s[::2], s[1::2], r[::2], r[1::2], n[::2], n[1::2], **options).mean()
