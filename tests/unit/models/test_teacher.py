"""Which teachers a student may have, and what is loaded of one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.base.errors import ConfigError, ModelError
from llmtrain.config.run import ModelConfig
from llmtrain.models.spec import ModelSpec
from llmtrain.models.teacher import check_teacher, load_teacher, teacher_checksums, teacher_model
from llmtrain.objectives.objective import Objective
from tests.helpers.chat import KINDS, write_tokenizer
from tests.helpers.hf_folders import new_model

SIZES = {"vocab_size": 300, "eos_token_id": None, "pad_token_id": None, "bos_token_id": None}


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    folder = tmp_path / "teacher"
    new_model("llama", **SIZES).save_pretrained(folder)
    write_tokenizer(folder, KINDS["chatml"])
    return folder


def of(folder: Path) -> ModelConfig:
    return teacher_model(Objective.of("distill", teacher=str(folder)), student().model)


def student(**fields: Any) -> ModelSpec:
    return ModelSpec.of(ModelConfig(config={**new_model("llama", **SIZES).config.to_dict(), **fields}))


def test_logits_are_those_of_transformers(teacher: Path) -> None:
    """Also of two documents in a row, where the second begins anew; in the precision that is asked for."""
    hf = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32, attn_implementation="eager")
    ours = load_teacher(of(teacher), "fp32", torch.device("cpu"))
    ids = torch.randint(0, 300, (2, 10), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, apart = hf(input_ids=ids).logits, hf(input_ids=ids[:, 4:]).logits
    got = ours.logits(ids, None)
    assert torch.allclose(got(slice(0, 20)), whole.flatten(0, 1), atol=1e-5)
    assert torch.allclose(got(slice(7, 13)), whole.flatten(0, 1)[7:13], atol=1e-5)
    assert not got(slice(0, 20)).requires_grad
    positions = torch.tensor([[*range(4), *range(6)]] * 2)
    isolated = ours.logits(ids, positions)(slice(0, 20)).view(2, 10, -1)
    assert torch.allclose(isolated[:, 4:], apart, atol=1e-5) and not torch.allclose(whole[:, 4:], apart, atol=1e-2)
    rough = load_teacher(of(teacher), "bf16", torch.device("cpu")).logits(ids, None)(slice(0, 20))
    assert 0 < (rough - whole.flatten(0, 1)).abs().max() < 0.05


def test_checksums_do_not_depend_on_how_ranks_share_them(teacher: Path) -> None:
    whole = teacher_checksums(of(teacher), 0, 1)
    shared = [teacher_checksums(of(teacher), rank, 3) for rank in range(3)]
    assert len(whole) == sum(map(len, shared)) and whole == {k: v for each in shared for k, v in each.items()}


def test_other_words_are_refused(teacher: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)300.*400", check=lambda e: e.keys == {"objective.teacher"}):
        check_teacher(of(teacher), student(vocab_size=400), teacher, {})
    (teacher / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        check_teacher(of(teacher), student(), teacher, {})


def test_a_folder_that_is_not_whole_is_refused(teacher: Path) -> None:
    config = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps({**config, "num_hidden_layers": config["num_hidden_layers"] + 1}))
    with pytest.raises(ModelError, match=r"objective\.teacher"):
        check_teacher(of(teacher), student(), teacher, {})


def test_ranks_that_share_rows_share_the_teachers_heads(teacher: Path) -> None:
    """Of a teacher without heads nothing is asked where nobody shares a row."""
    check_teacher(of(teacher), student(), teacher, {}, sequence=2)
    shared = "sequence_parallel_size = 3"
    with pytest.raises(ConfigError, match=shared, check=lambda e: e.keys == {"objective.teacher"}):
        check_teacher(of(teacher), student(), teacher, {}, sequence=3)
    mamba = AutoConfig.for_model("mamba", **SIZES, hidden_size=16, state_size=4, num_hidden_layers=1)
    AutoModelForCausalLM.from_config(mamba).save_pretrained(teacher)
    check_teacher(replace(of(teacher), attention="eager"), student(), teacher, {})
