"""Comparison of two environments: summaries of values, their order in a step, and the first difference."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from llmtrain.features.environments.comparison import _compare, _relative, package_lines, summary, watched


@pytest.mark.parametrize("shape", [(64,), (2, 32, 64), (1024, 64)])
@pytest.mark.parametrize("sums_to_zero", [False, True])
def test_summaries_tell_the_distance(shape: tuple[int, ...], sums_to_zero: bool) -> None:
    """64 sums estimate a square within sqrt(2 / 64), a length within 9 %: twice as much and half are far outside."""
    draw = torch.Generator().manual_seed(7)
    for _ in range(50):
        value, change = torch.randn(shape, generator=draw), 1e-3 * torch.randn(shape, generator=draw)
        if sums_to_zero:  # as a gradient through a softmax
            change = change - change.mean(0, keepdim=True)
        exact = float(change.norm() / value.norm())
        assert exact / 2 < _relative(summary(value + change), summary(value)) < exact * 2


def test_equal_bits_are_equal_and_no_number_is_far() -> None:
    value = torch.tensor([1.0, math.nan, math.inf])
    assert _relative(summary(value.clone()), summary(value)) == 0
    assert _relative(summary(torch.ones(3)), summary(value)) == math.inf
    assert _relative(summary(value), summary(torch.ones(3))) == math.inf
    one = torch.ones(70, dtype=torch.bfloat16)
    one[69] = 1.0078125
    assert 0 < _relative(summary(one), summary(torch.ones(70, dtype=torch.bfloat16))) < 0.01


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        return {"hidden": self.second(2 * self.first(x))}


def test_values_come_in_the_order_of_the_step() -> None:
    block = _Block()
    with watched(block) as kept:
        for _ in range(2):
            block(torch.ones(1, 2), attention_mask=torch.zeros(1))["hidden"].sum().backward()
    block(torch.ones(1, 2), attention_mask=torch.zeros(1))["hidden"].sum().backward()
    names = [(kind, name) for kind, name, number in kept if number == 0]
    assert names == [
        ("input", ""),
        ("input", "first"),
        ("output", "first"),
        ("input", "second"),
        ("output", "second"),
        ("output", ""),
        ("gradient of output", "second"),
        ("gradient of output", ""),
        ("gradient", "second.weight"),
        ("gradient of output", "first"),
        *names[-2:],
    ]
    assert {*names[-2:]} == {("gradient", "first.weight"), ("gradient", "first.bias")}
    assert len(kept) == 2 * len(names), "both micro-batches, and none after the context"
    assert kept["input", "second", 0][0].startswith("_Block of"), "what a module gets is computed by the one above it"
    assert kept["output", "second", 0][0].startswith("Linear of")


def test_the_first_difference_of_all_ranks_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1 parts before rank 0, and both later again; rounding has moved `b`."""

    def write(place: str, *, a: float = 0.0, b: float = 0.0, c: float = 0.0, step: int = 1, rank: int = 0) -> None:
        changes = {"a": a, "b": b, "c": c}
        kept = {("output", n, 0): ("Code", summary(torch.ones(64) * (1 + by))) for n, by in changes.items()}
        torch.save(kept, tmp_path / f"{place}.{step}.{rank}")

    for place in ("here", "there"):
        (tmp_path / place).mkdir()
    for step, rank in ((1, 0), (1, 1), (2, 0), (2, 1)):
        for number in range(4):
            write(f"here/fp32-{number}", b=1e-4 * number, step=step, rank=rank)
        write("there/fp32-0", b=1e-3, step=step, rank=rank)  # 4 x 3e-4 is tolerated
    assert _compare(tmp_path, "fp32", 2, 2)
    told = capsys.readouterr().out
    assert "PASS  fp32: 8 of 12 values equal" in told and "1.0e-03 of 1.2e-03  (step 1, output of b)" in told
    write("there/fp32-0", b=1e-3, c=0.5, step=2, rank=0)
    write("there/fp32-0", b=1.5e-3, c=0.5, step=2, rank=1)
    assert not _compare(tmp_path, "fp32", 2, 2)
    assert "FAIL  fp32 parts at step 2: output of b (rank 1, by Code)" in capsys.readouterr().out


def test_versions_that_differ_are_told() -> None:
    here = {"torch": "2.13.0", "accelerate": "1.15.0", "numpy": "2.4.6", "flash-attn": "3"}
    assert [*package_lines(here, {"torch": "2.11.0", "accelerate": "1.10.0", "numpy": "2.4.6", "apex": "1"})] == [
        "  versions, here | there: torch 2.13.0 | 2.11.0, accelerate 1.15.0 | 1.10.0",
        "  only here: flash-attn",
        "  only there: apex",
    ]
    assert [*package_lines(here, here)] == ["  versions, here | there: equal"]
