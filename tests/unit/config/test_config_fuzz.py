"""No value at any key makes a traceback: it is accepted, or it is a ConfigError with a remedy."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.base.errors import ConfigError, UserError
from llmtrain.config.deepspeed import keys as ds_keys
from llmtrain.config.load import load
from llmtrain.config.schema import schema
from llmtrain.models import skeleton
from llmtrain.training.examine import examine
from tests.helpers.config_workplace import merged, write

pytestmark = pytest.mark.long

WEIRD: list[Any] = [
    None, "", "auto", "null", "[1", "x" * 500, "\0", "{a: b}", -1, 0, 10**30, 1.5, math.inf, math.nan, True,
    [], [[]], [None], [1, 2], {}, {"a": 1}, {"type": 5, "params": []}, {"enabled": None}, {"device": 5},
]  # fmt: skip


def _json_keys(section: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, kind in section.items():
        yield prefix + key
        if isinstance(kind, dict):
            yield from _json_keys(kind, f"{prefix}{key}.")


def _with(base: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return merged(base, value)


@settings(max_examples=80, deadline=None)
@given(
    where=st.sampled_from(
        [("yaml", key) for key in [*schema(), "model", "optim", "data.mixture.q", "model.config.vocab_size"]]
        + [("json", key) for key in [*_json_keys(ds_keys.KEYS), "optimizer.params.lr", "scheduler.params.x"]]
    ),
    value=st.sampled_from(WEIRD),
)
def test_no_value_makes_a_traceback(where: tuple[str, str], value: Any, weird_folder: Path) -> None:
    file, key = where
    write(
        weird_folder,
        _with({}, key, value) if file == "yaml" else None,
        _with({}, key, value) if file == "json" else None,
    )
    try:
        load(["--config", "run.yaml"], 2)
    except ConfigError as error:
        assert "remedy:" in str(error)


LLAMA_FIELDS = [
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "hidden_act", "rms_norm_eps", "tie_word_embeddings", "rope_parameters", "rope_scaling",
    "eos_token_id", "max_position_embeddings", "attention_dropout", "initializer_range", "dtype", "id2label",
    "architectures",
]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(key=st.sampled_from(LLAMA_FIELDS), value=st.sampled_from([*WEIRD, 7, 64, 3.0, "64", {"rope_type": "yarn"}]))
def test_no_value_in_the_model_makes_a_traceback_in_check_or_in_the_model(
    key: str, value: Any, weird_folder: Path
) -> None:
    """Whatever stands in `model.config`: check refuses it, or the model that it lets through computes a loss."""
    write(weird_folder, {"model": {"config": {"num_attention_heads": 4, "intermediate_size": 32, key: value}}})
    try:
        run, _, _ = examine(load(["--config", "run.yaml"], 2))
    except UserError as error:
        assert "Traceback" not in str(error)
        return
    model = skeleton.construct(skeleton.load_config(run.config.model), "sdpa", torch.float32)
    tokens = torch.randint(0, 512, (1, run.config.data.sequence_length))
    model(input_ids=tokens, labels=tokens).loss.backward()


@pytest.fixture(scope="module")
def weird_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("weird")
    with contextlib.chdir(folder):
        yield folder


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="abc:{}[]#&*!|>-'\"\n ,.1\t", max_size=40))
def test_no_text_makes_a_traceback(text: str, weird_folder: Path) -> None:
    for run, ds in ((text, None), (None, text)):
        write(weird_folder, run, ds)
        with contextlib.suppress(ConfigError):
            load(["--config", "run.yaml"], 2)
