"""Runs whose ranks have unequal speed, as users start them: what they reach, what they say, how they go on."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from llmtrain.data.where import sequences, spans
from tests.helpers import forked
from tests.helpers.launching import rows, write_run

LONG_S = 0.04
"""Beside which what this machine's other work does to a step is little."""


def of_unequal_speed(rank: int) -> None:
    """Each sequence takes the second rank twice as long."""
    from llmtrain.models.language import LanguageModel

    usual = LanguageModel.forward

    def forward(self: LanguageModel, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(len(inputs) * LONG_S * (1 + rank))
        return usual(self, inputs, *args, **kwargs)

    LanguageModel.forward = forward  # type: ignore[method-assign]


def test_a_run_with_a_slow_rank(small_data: str, tmp_path: Path) -> None:
    """It says what it does. That it trains as with equal shares, also after a resume: test_balance_ranks.py."""
    train = {"micro_batch": 6, "global_batch": 12, "max_steps": 14}
    path = write_run(tmp_path / "run", small_data, {"zero_optimization": {"stage": 1}}, train)
    code, told = forked.finish(path, "--balance.mode", "measured", before=of_unequal_speed)
    assert code == 0, told
    (change,) = (event for event in rows(tmp_path / "run/run", "events.jsonl") if event["kind"] == "shares")
    assert change["step"] == 11 and (change["before"], change["after"]) == ([6, 6], [8, 4]), change
    assert re.search("step 11: .* 8, 4 ", told)
    assert change["ideal_s"] <= change["after_s"] < 0.8 * change["before_s"] == 0.8 * change["equal_s"]
    for step, counts in ((11, [6, 6]), (12, [8, 4]), (14, [8, 4])):  # what `data where --rank` says
        span = next(each for each in spans(tmp_path / "run/run") if each.after < step <= (each.until or step))
        own = [list(sequences(span, step, rank)) for rank in (0, 1)]
        assert [len(each) for each in own] == counts
        assert sorted(own[0] + own[1]) == list(range(12 * (step - 1), 12 * step))
