"""The table of optimizers against the schema, the table of legal mixes and torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from llmtrain.base.errors import ConfigError
from llmtrain.config import topology
from llmtrain.config.resolve import resolve
from llmtrain.config.run import DataConfig, ModelConfig, OptimConfig, ResolvedRun, RunConfig, TrainConfig
from llmtrain.optim.optimizers import OPTIMIZERS, Form, Optimizer, OptimizerName, Refusal, norm_of


@pytest.mark.parametrize("entry", OPTIMIZERS.values(), ids=lambda entry: entry.name)
def test_an_entry_names_what_there_is(entry: Optimizer) -> None:
    assert OPTIMIZERS[entry.name] is entry and entry.name in get_args(OptimizerName)
    assert set(entry.params.values()) <= OptimConfig.__dataclass_fields__.keys()
    assert {kind.lower() for kind in entry.json_types}.isdisjoint(
        kind.lower() for other in OPTIMIZERS.values() if other is not entry for kind in other.json_types
    )
    assert set(entry.refuses) <= set(get_args(Form))


def test_every_name_has_an_entry_and_every_field_a_user() -> None:
    assert set(get_args(OptimizerName)) == set(OPTIMIZERS)
    used = {field for entry in OPTIMIZERS.values() for field in entry.params.values()}
    assert used == OptimConfig.__dataclass_fields__.keys() - {"name", "decay", "clip_norm"}


def test_adamw_keeps_what_torch_keeps() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    assert set(optimizer.state[weight]) - {"step"} == set(OPTIMIZERS["adamw"].state)


def resolved(here: Path, tree: dict[str, Any], optim: dict[str, Any]) -> ResolvedRun:
    path = here / "ds.json"
    path.write_text(json.dumps(tree))
    run = RunConfig(
        deepspeed=str(path),
        model=ModelConfig(config={"model_type": "llama"}),
        data=DataConfig(path="x"),
        optim=OptimConfig(**optim),
        train=TrainConfig(max_steps=4),
    )
    return resolve(run, 1)


def test_another_optimizer_is_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name in the JSON, its parameters, its default of clip_norm and what it refuses: from the entry alone."""
    why = Refusal(reason="signs have no norm", remedy="set optim.clip_norm to 0")
    lion: Any = replace(
        OPTIMIZERS["adamw"], name="lion", title="Lion", json_types=("Lion",), fixed={"use_triton": False},
        params={"lr": "lr", "betas": "betas", "weight_decay": "weight_decay"}, refuses={"clipping": why},
    )  # fmt: skip
    monkeypatch.setitem(OPTIMIZERS, "lion", lion)
    monkeypatch.setattr(topology, "RULES", (*topology.RULES, topology._refused(lion, "clipping")))
    tree: dict[str, Any] = {"optimizer": {"type": "lion", "params": {"lr": 1e-4, "use_triton": False}}}
    run = resolved(tmp_path, tree, {})
    assert (run.optim.name, run.optim.lr, run.optim.clip_norm) == ("lion", 1e-4, 0.0)
    with pytest.raises(ConfigError, match="signs have no norm"):
        resolved(tmp_path, {**tree, "gradient_clipping": 1.0}, {})
    tree["optimizer"]["params"] = {"amsgrad": False, "use_triton": True}
    with pytest.raises(ConfigError, match=r"llmtrain's Lion has use_triton = false") as refused:
        resolved(tmp_path, tree, {})
    assert "has such a parameter, Lion has not" in str(refused.value)  # amsgrad
    tree["optimizer"] = {"type": "Lamb"}
    with pytest.raises(ConfigError, match=r"trains with Adam, AdamW, Muon or Lion"):
        resolved(tmp_path, tree, {})


@pytest.mark.parametrize(
    ("name", "zero", "norm"),
    [("muon", True, "update"), ("muon", False, "gradient"), ("adamw", True, "gradient"), (None, True, "gradient")],
)
def test_what_the_norm_is_of(name: str | None, zero: bool, norm: str) -> None:
    assert norm_of(name, zero=zero) == norm


def test_nothing_of_a_resolved_optimizer_or_batch_is_missing(tmp_path: Path) -> None:
    run = resolved(tmp_path, {}, {})
    assert None not in {*vars(run.optim).values(), *vars(run.batch).values()}
    assert {name: getattr(run.run.optim, name) for name in vars(run.optim)} == vars(run.optim)
