"""torch_autocast of DeepSpeed's JSON at each ZeRO stage, against plain PyTorch under torch.autocast: 2 ranks.

Each case trains, saves, becomes a Hugging Face folder, and goes on in a new engine. More than 20 CPU s: so for each
ZeRO stage, with an adapter, with recomputed layers and with an optimizer on the host.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llmtrain.checkpoint.hf.exporting import export_hf
from tests.helpers.config_workplace import merged
from tests.helpers.plain import mean_cross_entropy
from tests.helpers.ranks import RankFailed
from tests.helpers.training import Case, Trace, make_engine, plain_model, plain_pytorch, run_case
from tests.ranks.test_keys import HALF, case_of, off, prove, zero

AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
"""As a JSON has it."""

FIRST_LOSS = 1e-6
"""Of the first loss, in nats. Products of bf16 numbers are exact in fp32 sums, so two orders of summation differ by
fp32's rounding, and by one of bf16's 2^-9 in the few products that lie between two bf16 numbers; the mean over 384
tokens differs by 1e-7. Products in fp32 give another loss by 5e-5."""
COMPILED = 1e-5
"""The same, where a compiled kernel keeps a value in fp32 that PyTorch rounds to bf16 between two operators."""
LOSS = 2e-4
"""Of later losses, in nats: weights have moved by gradients that were rounded to bf16 in other places."""
NORM = 2**-8
"""Of the gradient norm, as a share: the gradient of each token's own logit is about the same number, whose rounding to
bf16 is up to 2^-8 and no accident: PyTorch's is divided by the tokens before it is rounded, ours after."""
MOVEMENT = 0.07
"""Of what all parameters have moved, as a share: AdamW moves by the sign of a gradient, which rounding decides where
the gradient is that small. 0.017 is seen after four steps and 0.035 after two, twice that is tolerated."""


def plainly(case: Case) -> Trace:
    """One process, parameters and AdamW in fp32, and torch.autocast around the forward pass."""
    model = plain_model(case)
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    return plain_pytorch(case, lambda logits, labels: mean_cross_entropy(logits.float(), labels), model, (0, HALF))


OFFLOAD = merged(AUTOCAST, zero(offload_optimizer={"device": "cpu", "pin_memory": False}))
KEPT = {"layers": "all", "keep": "attention"}
CASES = {
    **{f"ZeRO {stage}": case_of(stage, AUTOCAST) for stage in (1, 0, 2, 3)},
    **{f"ZeRO {stage}, recomputed": case_of(stage, AUTOCAST, recompute=KEPT) for stage in (1, 3)},
    **{f"ZeRO {stage}, offload": case_of(stage, OFFLOAD) for stage in (2, 3)},
    "ZeRO 3, compiled": case_of(3, AUTOCAST, compile_layers=True),
}


def losses_and_norms(case: Case) -> tuple[list[float], list[float]]:
    trace = run_case(case)
    return trace.losses, trace.norms


def test_the_listed_modules_alone_are_sent_in_bf16(pools: Any, small_data: str) -> None:
    """With an empty list ZeRO 1 and 3 compute what ZeRO 0 does, which sends fp32."""
    lists: tuple[Any, ...] = (None, [], ["torch.nn.Embedding"])
    norms = {}
    for stage in (0, 1, 3):
        for index, safe in enumerate(lists):
            tree = merged(AUTOCAST, {"torch_autocast": {"lower_precision_safe_modules": safe}})
            case = replace(case_of(stage, tree), data=small_data, steps=1)
            norms[stage, index] = pools(2).run(losses_and_norms, case)[0][1][0]
    exact = norms[0, 0]
    assert all(abs(norms[stage, 1] / exact - 1) < 1e-6 for stage in (0, 1, 3)), norms
    assert all(1e-6 < abs(norms[stage, index] / exact - 1) < 1e-3 for stage in (1, 3) for index in (0, 2)), norms


def test_a_module_that_there_is_not_is_named(pools: Any, small_data: str) -> None:
    tree = merged(AUTOCAST, {"torch_autocast": {"lower_precision_safe_modules": ["torch.nn.Linaer"]}})
    with pytest.raises(RankFailed, match=r"ConfigError: .*lower_precision_safe_modules.*torch\.nn\.Linaer"):
        pools(2).run(make_engine, replace(case_of(1, tree), data=small_data))


def test_an_engine_after_one_with_autocast_has_none(pools: Any, small_data: str) -> None:
    """DeepSpeed keeps that a process had one with autocast, and then ignores communication_data_type."""
    plain = replace(
        case_of(
            1,
            {"bf16": {"enabled": True}, "communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}},
        ),
        data=small_data,
        steps=2,
    )
    before = pools(2).run(losses_and_norms, plain)
    pools(2).run(losses_and_norms, replace(case_of(1, AUTOCAST), data=small_data, steps=1))
    assert pools(2).run(losses_and_norms, plain) == before


@pytest.mark.parametrize("name", CASES)
def test_a_run_with_autocast_is_plain_pytorch_under_autocast(pools: Any, small_data: str, tmp_path: Path, name: str):
    case = replace(CASES[name], data=small_data)
    want = plainly(case)
    ranks = 1 if case.compile_layers else 2  # each would compile for a minute
    got, path = pools(ranks).run(prove, case, str(tmp_path / "run"))[0]
    export_hf(Path(path), tmp_path / "hf", None, check="none")
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    losses = [abs(a - b) for a, b in zip(got.losses, want.losses, strict=True)]
    norm = max(abs(a / b - 1) for a, b in zip(got.norms, want.norms, strict=True))
    moved = off(got.parameters, want.parameters, want.kept[0])
    moved_then = off(exported, want.kept[HALF], want.kept[0])
    assert {values.dtype for values in exported.values()} == {torch.float32}
    assert losses[0] < (COMPILED if case.compile_layers else FIRST_LOSS) and max(losses) < LOSS, losses
    assert norm < NORM
    assert max(moved, moved_then) < MOVEMENT, (moved, moved_then)
