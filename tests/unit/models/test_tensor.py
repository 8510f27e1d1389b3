"""What tensor-parallel ranks can shard: degrees, words, experts. No process group."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from llmtrain.base.errors import ModelError
from llmtrain.config.run import ModelConfig
from llmtrain.models.parallel.tensor import _drops, _expert_width, check_degree
from llmtrain.models.skeleton import load_config, skeleton
from llmtrain.models.structure.projections import Projections
from tests.helpers.families import FAMILIES


def shared(heads: int, kv_heads: int, *widths: int) -> Projections:
    return Projections(
        maps=(),
        norms=(),
        entries=(),
        attentions=(),
        local_numbers=(),
        heads=heads,
        kv_heads=kv_heads,
        widths=widths,
        note="",
    )


@pytest.mark.parametrize(
    ("given", "degree", "experts", "says"),
    [
        (shared(32, 8, 14336), 16, {}, ("autotp_size = 16", "8 key/value heads", "one of 2, 4, 8;")),
        (shared(7, 1, 64), 2, {}, ("7 query heads (num_attention_heads)", "No other degree works")),
        (shared(12, 12, 90), 4, {}, ("90 features within an MLP", "one of 2, 3, 6;")),
        (shared(8, 8), 4, {"layers.0.experts": 6}, ("6 features within layers.0.experts", "one of 2;")),
    ],
)
def test_a_degree_that_does_not_is_refused_with_those_that_would(given, degree, experts, says):
    with pytest.raises(ModelError) as raised:
        check_degree(given, degree, experts)
    for words in ("tensor_parallel.autotp_size", *says):
        assert words in str(raised.value)


def test_experts_of_another_form_are_refused():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wi = nn.Parameter(torch.empty(4, 8, 8))

    with pytest.raises(ModelError, match=r"experts \(Odd\) .* Remove the key"):
        _expert_width("experts", Odd())


@pytest.mark.parametrize(
    ("family", "fields", "drops"),
    [
        ("gpt2", {}, False),
        ("gpt2", {"attn_pdrop": 0.1}, True),
        ("gpt2", {"resid_pdrop": 0.1}, True),
        ("llama", {"attention_dropout": 0.1}, True),
    ],
    ids=str,
)
def test_dropout_is_noticed(family, fields, drops):
    hf = skeleton(load_config(ModelConfig(config={**FAMILIES[family], **fields})))
    assert _drops(hf.modules()) is drops
