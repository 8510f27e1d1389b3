"""`llmtrain parity --against`: where a changed library is named, and what an environment without one gets to read.

More than 20 CPU s: each comparison starts ranks in two environments.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llmtrain import cli
from llmtrain.base.errors import UserError
from llmtrain.features.environments.command import main
from tests.helpers.launching import write_run
from tests.helpers.other_library import other_library

ZERO1, ZERO3 = {"zero_optimization": {"stage": 1}}, {"zero_optimization": {"stage": 3}}


@dataclass(frozen=True, kw_only=True)
class Seed:
    """A line of a library that another version might have, and what must be named."""

    file: str
    was: str
    is_now: str
    named: str
    by: str
    ranks: int = 1
    model: str = "llama"


LLAMA = "transformers/models/llama/modeling_llama.py"
SEEDS = {
    "attention_scale": Seed(
        file=LLAMA, was="self.head_dim**-0.5", is_now="1.001 * self.head_dim**-0.5",
        named="input of model.layers.0.self_attn.o_proj", by="LlamaAttention of transformers.models.llama"),
    "norm_epsilon": Seed(
        file=LLAMA, was="self.variance_epsilon = eps", is_now="self.variance_epsilon = 2 * eps",
        named="output of model.layers.0.input_layernorm", by="LlamaRMSNorm of transformers.models.llama"),
    "rotary_base": Seed(
        file=LLAMA, was="1.0 / (base **", is_now="1.0 / ((1.001 * base) **",
        named="output of model.rotary_emb", by="LlamaRotaryEmbedding of transformers.models"),
    "activation": Seed(
        file="transformers/activations.py", was='"silu": SiLUActivation', is_now='"silu": GELUTanh',
        named="output of model.layers.0.mlp.act_fn", by="SiLUActivation of transformers.activations, there GELUTanh"),
    "bias": Seed(
        file="torch/nn/modules/linear.py", was="F.linear(input, self.weight, self.bias)",
        is_now="F.linear(input, self.weight, None)", model="qwen2",
        named="output of model.layers.0.self_attn.q_proj", by="Linear of torch.nn.modules.linear"),
    "bias_correction": Seed(
        file="torch/optim/adam.py", was="torch._foreach_add_(device_state_steps, 1)",
        is_now="torch._foreach_add_(device_state_steps, 2)",
        named="update of model.embed_tokens.weight", by="the optimizer"),
    "division_by_the_ranks": Seed(
        file="deepspeed/runtime/comm/coalesced_collectives.py", was=".div_(world_sz)", is_now=".div_(1.01 * world_sz)",
        named="first moment of model.embed_tokens.weight", by="reduction, clipping or betas", ranks=2),
}  # fmt: skip


def changed(folder: Path, seed: Seed) -> Path:
    return other_library(folder, seed.file, seed.was, seed.is_now)


def against(folder: Path, python: Path, ds: dict[str, Any], ranks: int = 1, model: str = "llama") -> tuple[int, str]:
    """The exit code and the output of two steps without clipping, which would hide a factor of all gradients."""
    recipe = write_run(folder, "not/there", ds, {"max_steps": 9, "micro_batch": 2}, optim={"clip_norm": 0.0})
    words = ["--model.config.model_type", model, "--ranks", str(ranks), "--steps", "2", "--device", "cpu"]
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        code = cli.main(["parity", str(recipe), *words, "--against", str(python)])
    return code, told.getvalue()


@pytest.mark.parametrize(
    "name", [name if name == "attention_scale" else pytest.param(name, marks=pytest.mark.slow) for name in SEEDS]
)
def test_a_changed_library_is_named(name: str, tmp_path: Path) -> None:
    seed = SEEDS[name]
    python = changed(tmp_path / "venv", seed)
    code, told = against(tmp_path, python, ZERO3 if seed.ranks > 1 else ZERO1, seed.ranks, seed.model)
    assert code == 1, told
    assert f"FAIL  fp32 parts at step 1: {seed.named} (rank 0, by {seed.by}" in told, told


@pytest.mark.slow
def test_another_rounding_is_no_difference(tmp_path: Path) -> None:
    """Each product as a sum of two halves."""
    halves = "F.linear(input[..., ::2], self.weight[:, ::2]) + F.linear(input[..., 1::2], self.weight[:, 1::2])"
    seed = Seed(
        file="torch/nn/modules/linear.py", was="F.linear(input, self.weight, self.bias)", is_now=halves, named="", by=""
    )
    code, told = against(tmp_path, changed(tmp_path / "venv", seed), {"bf16": {"enabled": True}, **ZERO1})
    assert code == 0, told
    for precision in ("fp32", "bf16"):
        found = re.search(rf"PASS  {precision}: (\d+) of (\d+) values equal .*\n.* the others within rounding", told)
        assert found and int(found[1]) < int(found[2]), told


def test_a_library_that_does_not_load_is_no_answer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seed = Seed(
        file="deepspeed/__init__.py", was="import os\n", is_now="raise ImportError('libgone.so')\n", named="", by=""
    )
    python = changed(tmp_path / "venv", seed)
    code, told = against(tmp_path, python, ZERO1)
    assert code == 3 and f"NO ANSWER  {python}: rank 0" in told and "ImportError: libgone.so" in told, told


def test_what_is_no_environment(tmp_path: Path) -> None:
    """Refused before any rank starts."""
    recipe = str(write_run(tmp_path, "not/there", ZERO1, {"max_steps": 9}))
    venv.create(tmp_path / "bare", symlinks=True)
    (tmp_path / "silent").write_text("#!/bin/sh\n")
    (tmp_path / "silent").chmod(0o755)
    old = tmp_path / "old"
    facts = json.dumps([False, dict.fromkeys(["torch", "transformers", "deepspeed", "numpy"], "1")])
    old.write_text(f"#!/bin/sh\necho '{facts}'\n")
    old.chmod(0o755)
    for given, said in {
        "nowhere": "no Python answers there: .*No such file",
        "bare": "the environment has no torch, transformers, deepspeed, numpy",
        "silent": "no Python answers there",
        "old": "the environment has no Python 3.11",
    }.items():
        with pytest.raises(UserError, match=f"(?s)--against = .*{given}.*{said}"):
            main([recipe, "--device", "cpu", "--against", str(tmp_path / given)])
