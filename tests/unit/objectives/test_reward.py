"""Where a score is read, what a run of a reward model may ask for, and the values that it begins with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from llmtrain.base.errors import ModelError
from llmtrain.config.run import DataConfig, ModelConfig
from llmtrain.data.batches import AnswerBatch
from llmtrain.data.shards import PreparedSet
from llmtrain.data.stream.loader import Dealt, batches_of
from llmtrain.data.stream.train_data import TrainData
from llmtrain.engine.losses.answers import last_tokens
from llmtrain.models.source import SafetensorsSource, refuse_other_shapes
from llmtrain.models.spec import ModelSpec
from tests.helpers.preference import prepared_preferences, rows_read
from tests.helpers.training import LLAMA

MODEL = {**LLAMA, "num_hidden_layers": 1}


def test_the_score_is_read_at_the_last_token_of_each_row(tmp_path: Path) -> None:
    folder = prepared_preferences(tmp_path, 40)
    data = TrainData(DataConfig(path=folder, sequence_length=192, isolate_documents=True))
    stream = PreparedSet(folder).split("train")
    ends = stream.row_lengths().cumsum()
    read = 0
    for batch in batches_of(
        data.kind, data.sequence_at, 5, 3, Dealt()
    ):  # the last micro-batch has a row that only pads
        assert isinstance(batch, AnswerBatch)
        places, tokens = last_tokens(batch), batch.inputs.flatten()
        stops = [int(stream.read(int(ends[row]) - 1, 1)[0]) for row in batch.rows]
        assert tokens[places].tolist() == stops
        assert all(batch.answers.flatten()[places] == torch.arange(len(stops)))
        following = batch.positions.flatten().roll(-1)[places]  # type: ignore[union-attr]
        assert bool((following == 0).all())  # a row begins behind it
        read += len(stops)
    assert read == len(rows_read(data.sequence_at(index) for index in range(5)))


def saved(folder: Path, **fields: Any) -> str:
    torch.manual_seed(5)
    given = {key: value for key, value in {**MODEL, **fields}.items() if key != "model_type"}
    kind = AutoModelForSequenceClassification if "num_labels" in fields else AutoModelForCausalLM
    kind.from_config(AutoConfig.for_model("llama", **given)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("tied", [False, True])
def test_a_new_score_is_drawn_and_the_head_of_words_left_out(tmp_path: Path, tied: bool) -> None:
    model = ModelConfig(pretrained=saved(tmp_path, tie_word_embeddings=tied), attention="eager")
    spec = ModelSpec.of(model, scores=True)
    first, again, other = (spec.initial_weights(seed, torch.device("cpu")) for seed in (1, 1, 2))
    refuse_other_shapes(first, spec.shapes)
    values = [source.read("score.weight", 0, 64) for source in (first, again, other)]
    assert torch.equal(values[0], values[1]) and not torch.equal(values[0], values[2])
    assert 0.01 < float(values[0].std()) < 0.03  # initializer_range 0.02
    name = "model.layers.0.mlp.up_proj.weight"
    held = SafetensorsSource(tmp_path, spec.layout)
    assert torch.equal(first.read(name, 5, 50), held.read(name, 5, 50))


def test_a_reward_model_trains_on_and_is_no_language_model(tmp_path: Path) -> None:
    model = ModelConfig(pretrained=saved(tmp_path, num_labels=1), attention="eager")
    spec = ModelSpec.of(model, scores=True)
    source = spec.initial_weights(1, torch.device("cpu"))
    refuse_other_shapes(source, spec.shapes)
    held = SafetensorsSource(tmp_path, spec.layout)
    assert torch.equal(source.read("score.weight", 0, 64), held.read("score.weight", 0, 64))
    with pytest.raises(ModelError, match=r"LlamaForSequenceClassification.*objective\.name"):
        ModelSpec.of(model)


def test_a_family_without_such_a_class_is_refused() -> None:
    fields = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    with pytest.raises(ModelError, match=r"ForSequenceClassification.* mamba"):
        ModelSpec.of(replace(ModelConfig(attention="eager"), config=fields), scores=True)
