"""The padding token of an exported reward model: transformers must not take an answer's end for padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.checkpoint.hf.proofs import Report
from llmtrain.checkpoint.hf.serving import pad_apart
from tests.helpers.training import LLAMA

END = 9


def scored(pad: int | None, eos: Any = END) -> Any:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    fields = {key: value for key, value in LLAMA.items() if key != "model_type"} | {"num_hidden_layers": 1}
    config = AutoConfig.for_model("llama", num_labels=1, pad_token_id=pad, eos_token_id=eos, **fields)
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config).eval()


def score(hf: Any, ids: list[int], padding: int = 0, side: str = "right") -> float:
    fill, held = [hf.config.pad_token_id] * padding, [1] * len(ids)
    row, mask = (fill + ids, [0] * padding + held) if side == "left" else (ids + fill, held + [0] * padding)
    with torch.no_grad():
        return float(hf(input_ids=torch.tensor([row]), attention_mask=torch.tensor([mask])).logits)


@pytest.mark.parametrize("eos", [END, [3, END]])
def test_a_padding_token_that_ends_answers_is_left_out(tmp_path: Path, eos: Any) -> None:
    hf, plain, report = scored(END, eos), scored(None, eos), Report(tmp_path)
    hf.load_state_dict(plain.state_dict())
    answer = [5, 6, 7, END]
    before, right = score(plain, answer[:-1]), score(plain, answer)
    assert abs(before - right) > 1e-3
    assert score(hf, answer) == pytest.approx(before, abs=1e-6)  # what transformers reads: the score before the end
    pad_apart(hf.config, report)
    assert hf.config.pad_token_id is None and "pad_token_id 9" in report.lines[0]
    assert score(hf, answer) == pytest.approx(right, abs=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_another_padding_token_stays_and_changes_no_score(tmp_path: Path, side: str) -> None:
    """The score is that of the last token which does not pad: neither of one before it, nor of the padding."""
    hf, report, answer = scored(4), Report(tmp_path), [5, 6, 7, END]
    pad_apart(hf.config, report)
    assert hf.config.pad_token_id == 4 and not report.lines
    right = score(hf, answer)
    assert abs(right - score(hf, answer[:-1])) > 1e-3 and abs(right - score(hf, [*answer, 8])) > 1e-3
    assert score(hf, answer, padding=3, side=side) == pytest.approx(right, abs=1e-6)
