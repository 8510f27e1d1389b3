"""Log-probabilities of answers as lm-eval's harness has them. Skipped by name where it is not installed.

`make test-peers` has it. With 0.4.13 ten answers of -19 to -163 nats were at most 1.5e-5 nats apart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.config.run import DataConfig
from llmtrain.data.stream.loader import AnswerBatch, batches_of
from llmtrain.data.stream.train_data import TrainData
from llmtrain.engine.losses.answers import answers_of
from llmtrain.models.language import LanguageModel
from tests.helpers.preference import Plain, prepared_preferences
from tests.helpers.training import LLAMA

pytestmark = [pytest.mark.long, pytest.mark.needs("lm_eval")]


def test_an_answers_log_probability_is_that_of_lm_eval(tmp_path: Path) -> None:
    """Each alone there, packed here. fp32: a few roundings of sums of up to 160."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    fields = {**LLAMA, "num_hidden_layers": 2, "max_position_embeddings": 256}
    torch.manual_seed(1)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    hf: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    folder = prepared_preferences(tmp_path, 60)
    data = TrainData(DataConfig(path=folder, sequence_length=192, isolate_documents=True))
    micro = next(batches_of(data.window_at, 4, 4, 0, 1, False))
    assert isinstance(micro, AnswerBatch)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    harness: Any = HFLM(pretrained=hf.eval(), tokenizer=tokenizer, backend="causal", batch_size=4, device="cpu")
    rows, asked = Plain(None, folder).rows, []
    for row in micro.rows.tolist():
        ids, counted = rows[row]
        begin = int(counted.argmax())
        # As ids: of text, the harness would count the line's end before the answer as the answer's.
        asked.append((("", ""), ids[:begin].tolist(), ids[begin:].tolist()))
    want = torch.tensor([value for value, _ in harness._loglikelihood_tokens(asked, disable_tqdm=True)])
    with torch.no_grad():
        got = LanguageModel(hf, 40)(
            micro.inputs, lambda head, hidden: torch.stack(answers_of(head, hidden, micro)), micro.positions
        )[0]
    print(f"{len(asked)} answers, {got.min():.2f} to {got.max():.2f} nats, {(got - want).abs().max():.1e} apart")
    assert torch.allclose(got, want, rtol=1e-5, atol=0)
