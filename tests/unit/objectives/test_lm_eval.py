"""Log-probabilities of answers and of choices as lm-eval's harness has them. Skipped by name where it is not installed.

`make test-peers` has it. With 0.4.13 ten answers of -19 to -163 nats were at most 1.5e-5 nats apart.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from llmtrain.config.run import DataConfig
from llmtrain.data.batches import AnswerBatch
from llmtrain.data.stream.choices import ChoiceSet
from llmtrain.data.stream.loader import Dealt, batches_of
from llmtrain.data.stream.train_data import TrainData
from llmtrain.data.tokenize import SEPARATOR, train_bpe
from llmtrain.engine.losses.answers import LogProbs, answers_of
from llmtrain.models.language import LanguageModel
from tests.helpers.preference import Plain, prepared_preferences
from tests.helpers.questions import prepared_choices, questions
from tests.helpers.training import LLAMA

pytestmark = [pytest.mark.long, pytest.mark.needs("lm_eval")]
LONGEST = 48
"""Tokens that a model sees at once."""


def test_an_answers_log_probability_is_that_of_lm_eval(tmp_path: Path) -> None:
    """Each alone there, packed here. fp32: a few roundings of sums of up to 160."""
    from lm_eval.models.huggingface import HFLM

    fields = {**LLAMA, "num_hidden_layers": 2, "max_position_embeddings": 256}
    torch.manual_seed(1)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    hf: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    folder = prepared_preferences(tmp_path, 60)
    data = TrainData(DataConfig(path=folder, sequence_length=192, isolate_documents=True))
    micro = next(batches_of(data.kind, data.sequence_at, 4, 4, Dealt()))
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


@pytest.mark.parametrize("begins", [False, True])
def test_multiple_choice_is_scored_as_lm_eval_does_it(tmp_path: Path, begins: bool) -> None:
    """Tokens, what is cut off of a long question, and log-probabilities; `begins`: the tokenizer begins each text with
    a token, as Llama's does. fp32: a few roundings of sums of up to 200 nats."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    asked = questions()
    texts = [f"{record['question']} {choice}" for record in asked for choice in record["choices"]]
    train_bpe(texts, 310, tmp_path / "tokenizer")
    if begins:
        file, settings = (tmp_path / "tokenizer" / name for name in ("tokenizer.json", "tokenizer_config.json"))
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.post_processor = TemplateProcessing(single=f"{SEPARATOR} $A", special_tokens=[(SEPARATOR, 0)])
        tokenizer.save(str(file))
        settings.write_text(json.dumps({**json.loads(settings.read_text()), "bos_token": SEPARATOR}))
    choices = ChoiceSet(prepared_choices(tmp_path, tmp_path / "tokenizer", asked), sequence_length=LONGEST)
    assert 0 < choices.cut < choices.rows
    fields = {**LLAMA, "num_hidden_layers": 2, "max_position_embeddings": 256}
    torch.manual_seed(1)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    hf: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model, found, got = LanguageModel(hf, 40), LogProbs(), torch.zeros(choices.rows)
    with torch.no_grad():
        for micro in (micro for some in choices.batches(512, 0, 1) for micro in some):
            model(micro.inputs, functools.partial(found.sums, micro=micro))
    for rows, values in found.found:
        got[rows] = values
    own = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    harness: Any = HFLM(pretrained=hf, tokenizer=own, backend="causal", batch_size=4, device="cpu", max_length=LONGEST)
    requests = [
        Instance("loglikelihood", record, (record["question"], f" {choice}"), 0)
        for record in asked
        for choice in record["choices"]
    ]
    want = torch.tensor([value for value, _ in harness.loglikelihood(requests, disable_tqdm=True)])
    print(f"{len(got)} choices, {got.min():.2f} to {got.max():.2f} nats, {(got - want).abs().max():.1e} apart")
    assert torch.allclose(got, want, rtol=1e-5, atol=0)
