"""The optimizers against the schema, the table of legal mixes and torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from llmtrain.base.choice import NOT_NEGATIVE, Rule, joined
from llmtrain.base.errors import ConfigError
from llmtrain.config.resolve import resolve
from llmtrain.config.run import DataConfig, ModelConfig, Run, RunConfig, TrainConfig
from llmtrain.optim.optimizers import AdamW, Muon, Optimizer, norm_of


@pytest.mark.parametrize("entry", Optimizer.CHOICES.values(), ids=lambda entry: entry.selected())
def test_a_class_names_what_there_is(entry: type[Optimizer]) -> None:
    others = [other for other in Optimizer.CHOICES.values() if other is not entry]
    assert {kind.lower() for kind in entry.json_types}.isdisjoint(kind.lower() for o in others for kind in o.json_types)
    assert entry.own() >= {"lr", "betas", "weight_decay", "decay", "clip_norm"}


def test_adamw_keeps_what_torch_keeps() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    assert set(optimizer.state[weight]) - {"step"} == set(AdamW.state)


def resolved(here: Path, tree: dict[str, Any], optim: Optimizer) -> Run:
    path = here / "ds.json"
    path.write_text(json.dumps(tree))
    config = RunConfig(
        deepspeed=str(path),
        model=ModelConfig(config={"model_type": "llama"}),
        data=DataConfig(path="x"),
        optim=optim,
        train=TrainConfig(max_steps=4),
    )
    return resolve(config, 1)


def test_another_optimizer_is_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name in the JSON, its parameters, its default of clip_norm and what it refuses: from the class alone."""
    monkeypatch.setattr(Optimizer, "CHOICES", dict(Optimizer.CHOICES))

    @dataclass(frozen=True, kw_only=True)
    class Sign(Optimizer, choice="sign"):
        title = "Sign"
        json_types = ("SignSGD",)
        fixed: ClassVar = {"use_triton": False}
        rules = (Rule(("optim.clip_norm",), lambda m: m.clip_norm, "signs have no norm", "set it to 0", {}),)
        clip_norm: float = joined(0.0, "gradient_clipping", NOT_NEGATIVE, "0")

    tree: dict[str, Any] = {"optimizer": {"type": "signsgd", "params": {"lr": 1e-4, "use_triton": False}}}
    run = resolved(tmp_path, tree, Sign())
    assert (run.config.optim.name, run.config.optim.lr, run.config.optim.clip_norm) == ("sign", 1e-4, 0.0)
    with pytest.raises(ConfigError, check=lambda e: e.keys == {"optim.clip_norm"}):
        resolved(tmp_path, {**tree, "gradient_clipping": 1.0}, Sign())
    tree["optimizer"]["params"] = {"amsgrad": False, "use_triton": True}
    with pytest.raises(ConfigError, match="use_triton = false") as refused:
        resolved(tmp_path, tree, Sign())
    assert refused.value.keys == {"optimizer.params.amsgrad", "optimizer.params.use_triton"}
    assert Optimizer.refusal("eps")[0] in str(refused.value)  # those that have amsgrad, too
    tree["optimizer"] = {"type": "Lamb"}
    with pytest.raises(ConfigError, match="SignSGD", check=lambda e: e.keys == {"optimizer.type"}):
        resolved(tmp_path, tree, Sign())


@pytest.mark.parametrize(
    ("params", "optim", "want"),
    [
        ({"muon_lr": 0.01, "momentum": 0.9}, Muon(), (0.01, 0.9)),
        ({"muon_lr": 0.01}, Muon(muon_momentum=0.8), (0.01, 0.8)),
    ],
)
def test_muons_own_values_may_stand_in_the_json(
    tmp_path: Path, params: dict[str, float], optim: Muon, want: tuple[float, float]
) -> None:
    run = resolved(tmp_path, {"optimizer": {"type": "Muon", "params": params}}, optim)
    assert isinstance(run.config.optim, Muon) and (run.config.optim.muon_lr, run.config.optim.muon_momentum) == want
    assert run.config.optim.clip_norm == 0.0


@pytest.mark.parametrize(
    ("name", "zero", "norm"),
    [("muon", True, "update"), ("muon", False, "gradient"), ("adamw", True, "gradient"), (None, True, "gradient")],
)
def test_what_the_norm_is_of(name: str | None, zero: bool, norm: str) -> None:
    assert norm_of(name, zero=zero) == norm


def test_nothing_of_a_resolved_optimizer_or_batch_is_missing(tmp_path: Path) -> None:
    run = resolved(tmp_path, {}, AdamW())
    assert None not in [*vars(run.config.optim).values(), *vars(run.batch).values()]
