"""A plugin's optimizer is proved before it trains; what ZeRO would train otherwise is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmtrain.base.errors import ConfigError, ModelError
from llmtrain.config import plugin_import
from llmtrain.engine.deepspeed.optimizers import MOMENTS, build_guarded, moments_of, prove_by_element
from llmtrain.optim.optimizers import Optimizer

HEAD = """
from dataclasses import dataclass
from typing import ClassVar
import torch
from llmtrain import Optimizer

class Base(torch.optim.Optimizer):
    def __init__(self, groups, **defaults):
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, group["lr"], self.state[p])
"""
STEP = {
    "sign": "p -= lr * p.grad.sign()",
    "norm": "p -= lr * p.grad / p.grad.norm()",
    "rows": "p -= lr * p.grad; state['rows'] = p.grad.mean(0)",
    "undeclared": "state['m'] = state.get('m', 0) * 0.9 + p.grad; p -= lr * state['m']",
    "ones": "state.setdefault('m', torch.ones_like(p)).mul_(0.9).add_(p.grad); p -= lr * state['m']",
    "raises": "raise RuntimeError('as asked')",
}


@pytest.fixture(autouse=True)
def forgotten() -> object:
    yield
    plugin_import.use([])


def made(folder: Path, step: str, state: str = "()", build: str = "return Own(groups)") -> Optimizer:
    (folder / "mine.py").write_text(f"""{HEAD}
class Own(Base):
    def one(self, p, lr, state):
        {step}

@dataclass(frozen=True, kw_only=True)
class Mine(Optimizer, choice="mine"):
    state: ClassVar = {state}
    def build(self, groups):
        {build}
""")
    plugin_import.use([str(folder / "mine.py")])
    return Optimizer.of("mine", lr=0.1, betas=(0.9, 0.95), weight_decay=0.0, clip_norm=0.0)


@pytest.mark.parametrize(
    ("step", "state", "build", "told"),
    [
        ("norm", "()", "return Own(groups)", "two halves of a flat tensor, with moments of 0, do not step like"),
        ("rows", "('rows',)", "return Own(groups)", "rows in the optimizer's state is no tensor of the"),
        ("undeclared", "()", "return Own(groups)", "its class says state = (). Write state = ('m',)"),
        ("ones", "('m',)", "return Own(groups)", "do not step like the whole tensor"),
        ("raises", "()", "return Own(groups)", "step: {path} line 20: RuntimeError: as asked"),
        (
            "sign",
            "()",
            "return groups",
            "build returns list, which is no torch.optim.Optimizer. Return one over the groups",
        ),
        ("sign", "()", "return Own(grps)", "build: {path} line 26: NameError: name 'grps' is not defined"),
    ],
)
def test_an_optimizer_that_is_not_by_element_is_refused(step, state, build, told, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ModelError)) as error:
        prove_by_element(made(tmp_path, STEP[step], state, build))
    assert str(error.value).startswith("optim.name mine: ")
    assert told.format(path=tmp_path / "mine.py") in str(error.value)


def test_an_optimizer_without_a_group_is_refused(tmp_path: Path) -> None:
    optim = made(tmp_path, STEP["sign"], build="return Own(groups[:1])")
    groups = [{**optim.group(), "params": [torch.zeros(4, requires_grad=True)]} for _ in range(2)]
    with pytest.raises(ConfigError, match=r"optim.name mine: build returns Own with 1 parameter group, but it gets 2"):
        build_guarded(optim, groups)


def test_one_without_a_counter_gets_one(tmp_path: Path) -> None:
    optim = made(tmp_path, STEP["sign"])
    prove_by_element(optim)
    parameter = torch.zeros(4, requires_grad=True)
    optimizer = build_guarded(optim, [{**optim.group(), "params": [parameter], "weight_decay": 0.0, MOMENTS: {}}])
    assert moments_of(optimizer, parameter, optimizer.param_groups[0]) == {}
    for _ in range(3):
        parameter.grad = torch.ones(4)
        optimizer.step()
    assert float(optimizer.state[parameter]["step"]) == 3 and parameter.tolist() == pytest.approx([-0.3] * 4)
