"""What tensor-parallel ranks can shard: degrees, words, experts. No process group."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from llmtrain.base.errors import ModelError
from llmtrain.config.run import ModelConfig
from llmtrain.models.parallel.tensor import _counts, _drops, _expert_shards, _expert_width, _map_shards, check_degree
from llmtrain.models.skeleton import load_config, skeleton
from llmtrain.models.structure.decoder_parts import anatomy_of
from llmtrain.models.structure.projections import Projections, projections
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
        whole="",
    )


def test_a_degree_that_divides_everything_is_taken():
    check_degree(shared(32, 8, 14336), 8)
    check_degree(shared(6, 3, 96, 48), 3, {"experts": 24})


@pytest.mark.parametrize(
    ("given", "degree", "experts", "says"),
    [
        (shared(32, 8, 14336), 16, {}, ("16 ranks", "8 key/value heads", "one of 2, 4, 8;")),
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


@pytest.mark.parametrize(("total", "degree"), [(512, 4), (50257, 8), (13, 4), (3, 3)])
def test_every_word_has_one_rank(total, degree):
    counts = _counts(total, degree)
    assert sum(counts) == total
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


def test_the_ranks_have_all_of_each_map_and_nothing_twice():
    """Fused weights, stored the other way round (GPT-2): regions of all ranks cover each tensor once."""
    hf = skeleton(load_config(ModelConfig(config=dict(FAMILIES["gpt2"]))))
    found = projections(hf, anatomy_of(hf))
    modules = dict(hf.named_modules())
    names = {parameter: name for name, parameter in hf.named_parameters()}
    times = {name: torch.zeros(parameter.numel()) for parameter, name in names.items()}
    for rank in range(2):
        for parameter, (shard, local) in _map_shards(modules, found, rank, 2).items():
            assert shard.region.numel == torch.Size(local).numel() == parameter.numel() // 2
            for position, _, count in shard.region.spans():
                times[names[parameter]][position : position + count] += 1
    cut = {name for name, seen in times.items() if bool((seen == 1).all())}
    assert cut | {name for name, seen in times.items() if bool((seen == 0).all())} == times.keys()
    inner = {"attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_fc.bias"}
    inner |= {"mlp.c_proj.weight"}
    assert cut == {f"transformer.h.{layer}.{name}" for layer in range(4) for name in inner}


def test_experts_are_cut_by_their_width():
    hf = skeleton(load_config(ModelConfig(config=dict(FAMILIES["mixtral"]))))
    experts = hf.get_submodule("model.layers.0.mlp.experts")
    assert _expert_width("experts", experts) == 48
    (into, _), (down, _) = _expert_shards(experts, 1, 2).values()
    assert [shard.shape for shard in (into, down)] == [(4, 96, 32), (4, 32, 48)]
    assert next(iter(into.region.spans()))[0] == 24 * 32  # the second half of the first expert's gate
    assert next(iter(down.region.spans()))[0] == 24


def test_experts_of_another_form_are_refused():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wi = nn.Parameter(torch.empty(4, 8, 8))

    with pytest.raises(ModelError, match=r"experts \(Odd\) .* Remove the key"):
        _expert_width("experts", Odd())


@pytest.mark.parametrize(
    ("fields", "drops"), [({}, False), ({"attn_pdrop": 0.1}, True), ({"resid_pdrop": 0.1}, True)], ids=str
)
def test_dropout_is_noticed(fields, drops):
    hf = skeleton(load_config(ModelConfig(config={**FAMILIES["gpt2"], **fields})))
    assert _drops(hf.modules()) is drops


def test_dropout_of_attention_alone_is_noticed():
    assert _drops(skeleton(load_config(ModelConfig(config={**FAMILIES["llama"], "attention_dropout": 0.1}))).modules())
    assert not _drops(skeleton(load_config(ModelConfig(config=dict(FAMILIES["llama"])))).modules())
