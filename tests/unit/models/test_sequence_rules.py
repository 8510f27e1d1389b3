"""What sequence parallelism refuses, from the configuration alone or from the model's structure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmtrain.base.errors import ConfigError, ModelError
from llmtrain.config.load import load
from llmtrain.config.run import ModelConfig
from llmtrain.models.parallel.sequence import check_attention
from llmtrain.models.skeleton import load_config, skeleton
from tests.helpers.config_workplace import write
from tests.helpers.families import FAMILIES

HEADS = {"model": {"config": {"num_attention_heads": 12}}}


@pytest.mark.parametrize(
    ("run", "ds", "ranks", "said"),
    [
        ({"data": {"sequence_length": 130}}, {}, 4, ["sequence_length = 130", "parallel_size = 4", "128 or 132"]),
        (HEADS, {"sequence_parallel_size": 8}, 8, ["sequence_parallel_size = 8", "1, 2, 3, 4, 6, 12"]),
        ({"model": {"config": {"model_type": "gpt2", "n_head": 6}}}, {}, 4, ["1, 2, 3, 6"]),
    ],
    ids=["length", "heads", "gpt2's name for heads"],
)
def test_what_cannot_be_shared_is_refused_before_torch_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any, ds: Any, ranks: int, said: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, run, {"sequence_parallel_size": 4, **ds})
    with pytest.raises(ConfigError) as error:
        load(["--config", "run.yaml"], ranks)
    assert all(words in str(error.value) for words in said), error.value


def test_ranks_that_share_rows_are_one_for_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, HEADS, {"sequence_parallel_size": 4})
    run = load(["--config", "run.yaml"], 8)
    assert (run.mix.degrees.sequence, run.mix.degrees.data, run.config.train.accumulation) == (4, 2, 2)
    assert "sequence_parallel_size" not in run.deepspeed


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_of_every_family_can_be_shared(family: str) -> None:
    check_attention(skeleton(load_config(ModelConfig(config=FAMILIES[family]))))


_TINY: dict[str, Any] = {"vocab_size": 512, "n_embd": 32, "n_layer": 2, "n_head": 4}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "bloom", "hidden_size": 32, **_TINY}, "takes no positions"),
        (
            {"model_type": "gpt_neo", "vocab_size": 512, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
            | {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64},
            "code of its own",
        ),
        (
            {"model_type": "recurrent_gemma", "vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 3}
            | {"num_attention_heads": 4, "intermediate_size": 64},
            "reach each other outside attention",
        ),
        (
            {"model_type": "gpt_oss", "vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8}
            | {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "num_local_experts": 4},
            "a parameter of its own (sinks)",
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_other_models_are_refused_with_the_reason(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError) as error:
        check_attention(skeleton(load_config(ModelConfig(config=fields))))
    assert reason in str(error.value) and "sequence_parallel_size" in str(error.value)
