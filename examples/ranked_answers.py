"""A kind of row, and an objective over it: three answers to a prompt, ranked from the best to the worst.

    llmtrain prepare --plugin examples/ranked_answers.py --format ranked --source ranked.jsonl --tokenizer FOLDER \
      --out data/ranked

and a run with `data.path: data/ranked`, `data.isolate_documents: true` and `objective: {name: plackett_luce}`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from llmtrain import Figure, OverAnswers, RowKind, bounded
from llmtrain.data.row import RefusedError


@dataclass(frozen=True, kw_only=True)
class Ranked(RowKind, format="ranked"):
    """Records such as {"prompt": "2 + 2?", "ranked": ["4", "5", "fish"]}."""

    title = "ranked answers"
    unit = "ranking"
    columns = (("prompt", "ranked"),)
    answers = ("first", "second", "third")
    complete = "all tokens of the answers count"

    def parse(self, record: dict[str, Any]) -> list[tuple[list[Any], int]]:
        prompt, ranked = record.get("prompt"), record.get("ranked")
        if not isinstance(ranked, list) or len(ranked) != len(self.answers):
            raise RefusedError(f"ranked is not a list of {len(self.answers)} answers")
        asked = {"role": "user", "content": prompt}
        return [([asked, {"role": "assistant", "content": answer}], 1) for answer in ranked]


@dataclass(frozen=True, kw_only=True)
class PlackettLuce(OverAnswers, choice="plackett_luce"):
    """The probability of a ranking by R. Plackett (1975) and R. D. Luce (1959): the best answer is drawn first, then
    the best of the others. An answer's score is beta times its log-probability per token."""

    unit = "nats/ranking"
    data = "ranked"
    figures = (
        Figure(name="ranked/accuracy", unit="0 to 1", meaning="Share of rankings that the scores have in this order."),
        Figure(name="ranked/tokens", unit="tokens/answer", meaning="Counted tokens of an answer, in the mean."),
    )

    beta: float = bounded(2.0, above=0)
    """Factor on the log-probability per token."""

    def terms(self, answers: Any) -> tuple[Tensor, ...]:
        scores = self.beta * answers.mean  # [rankings, 3]
        left = scores.flip(1).logcumsumexp(1).flip(1)  # of this answer and those after it
        ordered = (scores[:, :-1] > scores[:, 1:]).all(1)
        return (left - scores).sum(1), ordered.float(), answers.tokens.mean(1)
