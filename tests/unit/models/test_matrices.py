"""Which parameters are matrices of linear maps, and which of their sides are the outputs: by what is multiplied."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from llmtrain.config.run import ModelConfig
from llmtrain.models.skeleton import construct, decoder_layers, load_config
from llmtrain.models.transformers_private import OperatorMode, loop_over_experts, matrices
from llmtrain.parity import plain
from tests.helpers.launching import REPO
from tools.families.configs import tiny
from tools.families.table import read

_FACTORS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2), "mv": (0, 1)}
_ODD = ("gpt2", "gpt_oss", "dbrx", "zamba", "lfm2", "jamba", "rwkv", "inkling2_text", "aria_text", "kimi_linear",
        "jetmoe", "hy_v4", "recurrent_gemma", "llama4_text", "falcon")  # fmt: skip
"""Families with parameters of two and more dimensions that are none of torch.nn.Linear."""
_UNUSED = re.compile("encoder_attn|cross_attn|adapter|_proj_weight|longcat.*experts")
"""Maps that a text alone does not reach, and Zamba's, whose factors are copies."""


class Products(OperatorMode):
    """The stride of the side that is summed over, by parameter."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.summed: dict[nn.Parameter, set[int]] = {}
        self._of = {parameter.untyped_storage().data_ptr(): parameter for parameter in parameters}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for right, place in enumerate(_FACTORS.get(function.overloadpacket.__name__, ())):
            factor = args[place]
            parameter = self._of.get(factor.untyped_storage().data_ptr())
            side = -2 if right and factor.dim() > 1 else -1
            if parameter is not None and factor.shape[side] > 1:
                self.summed.setdefault(parameter, set()).add(factor.stride(side))
        return function(*args, **(kwargs or {}))


def wrong(family: str) -> list[str]:
    """Parameters of a family's layers that are taken for something else than a run shows."""
    config = load_config(ModelConfig(config=tiny(family)))
    loop_over_experts(config)
    hf = construct(config, "eager", torch.float32).eval()
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.normal_(0, 0.1)
        with Products(list(hf.parameters())) as products:
            hf(input_ids=torch.randint(2, 100, (2, 16), generator=torch.Generator().manual_seed(0)), use_cache=False)
    layers, found = decoder_layers(hf), []
    if products.summed.keys().isdisjoint(layers.parameters()):  # of a tower for images or sound
        return []
    ours, theirs = {p: turned for p, _, _, turned in matrices(layers)}, dict(plain._maps(layers))
    for name, parameter in layers.named_parameters():
        summed = products.summed.get(parameter) if parameter.dim() > 1 else None
        turned = None if summed is None else summed == {parameter.stride(-2)}
        square = parameter.dim() > 1 and parameter.shape[-1] == parameter.shape[-2]
        told = {ours.get(parameter), theirs.get(parameter)}
        if told != {turned} and not (square and None not in told) and not _UNUSED.search(f"{family}.{name}"):
            found.append(f"{family} {name} {tuple(parameter.shape)}: {turned}, not {told}")
    return found


@pytest.mark.parametrize("family", _ODD)
def test_matrices_are_what_multiplies_and_their_sides_are_known(family: str) -> None:
    assert wrong(family) == []


@pytest.mark.slow  # those above have all forms that there are
def test_the_matrices_of_every_family() -> None:
    rows = read(REPO / "docs/developers/families.jsonl")
    trained = {row["family"] for row in rows if row["outcome"] == "passes"} - set(_ODD)
    assert [line for family in sorted(trained) for line in wrong(family)] == []
