"""Muon by its definition: sqrt(max(1, outputs / inputs)), however a family stores a map."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor

from llmtrain.base.errors import CheckpointError
from llmtrain.models.language import LanguageModel
from llmtrain.models.skeleton import decoder_layers
from tests.helpers.families import FAMILIES
from tests.helpers.training import Case, assert_agrees, plain_model, plain_pytorch, run_case
from tests.ranks.test_resume import load_and_go_on, save_in_the_middle

_WIDTHS = {
    "vocab_size": 512,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48}
MODELS: dict[str, tuple[dict[str, Any], str, str]] = {
    "gpt2": ({**FAMILIES["gpt2"], "n_layer": 2}, "", "*.c_*.weight"),
    "gpt_oss": ({"model_type": "gpt_oss", **_WIDTHS, **_EXPERTS, "head_dim": 8, "pad_token_id": None},
                "*router.weight *_proj.weight", "*.gate_up_proj *.down_proj"),
    "lfm2": ({"model_type": "lfm2", **_WIDTHS, "intermediate_size": 80, "layer_types": ["conv", "full_attention"],
              "pad_token_id": None}, "*layers.*_proj.weight *.w[123].weight", ""),
}  # fmt: skip
"""Model; patterns of its matrices [outputs, inputs]; of those [inputs, outputs]."""


class PlainMuon(torch.optim.Optimizer):
    """https://kellerjordan.github.io/posts/muon/ on [.., outputs, inputs]; torch's AdamW for the rest."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, sides: Callable[[Tensor], bool | None]) -> None:
        super().__init__(groups, {"lr": lr})
        rest = [{**group, "params": [p for p in group["params"] if sides(p) is None]} for group in groups]
        self._rest = torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=False, foreach=False)
        self._sides, self._lr, self._momentum = sides, lr, {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self._rest.param_groups:
            group["lr"] = self.param_groups[0]["lr"]
        self._rest.step()
        for parameter in self.param_groups[0]["params"]:
            if (turned := self._sides(parameter)) is None:
                continue
            view, gradient = (t.mT if turned else t for t in (parameter, parameter.grad))
            momentum = self._momentum.setdefault(parameter, torch.zeros_like(view))
            momentum.mul_(0.95).add_(gradient, alpha=0.05)
            x = gradient * 0.05 + momentum * 0.95
            x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
            for _ in range(5):
                square = x @ x.mT
                x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
            lr = 0.02 * self.param_groups[0]["lr"] / self._lr
            view.mul_(1 - lr * 0.1).sub_(lr * math.sqrt(max(1, view.shape[-2] / view.shape[-1])) * x)


@pytest.mark.parametrize(
    ("family", "world_size", "form"),
    [
        ("gpt2", 2, {"stage": 2}),
        ("gpt_oss", 2, {"stage": 3}),
        ("lfm2", 1, {"stage": 0}),
    ],
    ids=str,
)
def test_the_update_of_a_map_does_not_depend_on_how_it_is_stored(pools, small_data, family, world_size, form):
    """GPT-2's maps and GPT-OSS's experts are [inputs, outputs]; LFM2's kernels are no maps. fp32 in another order of
    summation moves Newton-Schulz of a small singular value by 1e-6; with the sides swapped the losses were 4e-3 off."""
    model, plain, turned = MODELS[family]
    case = Case(data=small_data, model=model, optimizer="muon", attention="eager", clip=math.inf)
    hf = plain_model(case)
    names = {parameter: name for name, parameter in hf.named_parameters()}

    def sides(parameter: Tensor) -> bool | None:
        of = [any(fnmatchcase(names[parameter], p) for p in patterns.split()) for patterns in (plain, turned)]
        return of[1] if any(of) else None

    want = plain_pytorch(case, model=hf, build=lambda groups, lr: PlainMuon(groups, lr, sides))
    got = pools(world_size).run(run_case, replace(case, **form))[0]
    assert_agrees(got, want, loss=1e-5, parameters=2e-5)


def test_vectors_train_beside_muon_with_fp32_sums(pools, small_data):
    """DeepSpeed lost the gradient of a vector that lies before a matrix in a bucket. Sums in fp32 and in bf16 of the
    same gradients are bf16's rounding apart, 2^-8; a step of AdamW is mostly their sign."""
    case = Case(data=small_data, optimizer="muon", precision="bf16", stage=2)
    begin = dict(plain_model(case).named_parameters())
    want, got = (
        pools(2).run(run_case, replace(case, extra=extra))[0].parameters
        for extra in ({}, {"data_types": {"grad_accum_dtype": "fp32"}})
    )
    vectors = [name for name, value in want.items() if value.dim() == 1]
    moved = {name: float((got[name] - want[name]).norm() / (want[name] - begin[name]).norm()) for name in vectors}
    assert len(moved) > 8 and max(moved.values()) < 0.1, moved


def momentum_of_kernels(case: Case, folder: str) -> str:
    """Save with Muon's momentum for each tensor of two and more dimensions, as it once was; the error of a resume."""
    right = LanguageModel.matrices
    LanguageModel.matrices = lambda model: (
        (p, *p.shape[-2:], False) for p in decoder_layers(model.hf).parameters() if p.dim() > 1
    )
    try:
        _, path = save_in_the_middle(case, folder)
    finally:
        LanguageModel.matrices = right
    try:
        load_and_go_on(case, path)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_checkpoint_with_muons_momentum_of_kernels_is_refused_in_words(pools, small_data, tmp_path):
    case = Case(data=small_data, model=MODELS["lfm2"][0], optimizer="muon", steps=4)
    (told,) = pools(1).run(momentum_of_kernels, case, str(tmp_path))
    assert "Muon" in told and "model.layers.0.conv.conv.weight" in told
