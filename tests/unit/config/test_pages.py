"""What goes with what: the table of docs/adapters.md, the resolver and the tests on ranks tell the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmtrain.base.errors import ConfigError
from llmtrain.config.problems import Problems
from llmtrain.config.reader import read_saved
from llmtrain.config.resolve import resolve
from llmtrain.config.rules import check_values
from llmtrain.config.run import AdapterConfig, DataConfig, ModelConfig, RunConfig, TrainConfig
from llmtrain.config.topology import Mix
from llmtrain.objectives.objective import Objective
from tools.pages import ADAPTERS, FORMS, OPTIONS, against, markdown, pair, refusals

ROWS = {
    **{name: ("next_token", adapter) for name, adapter in ADAPTERS.items()},
    **{name: (name, AdapterConfig()) for name in Objective.CHOICES},
    **{f"{name} with LoRA": (name, AdapterConfig(r=8)) for name in Objective.CHOICES},
}


def json_of(form: Mix) -> dict[str, Any]:
    """A DeepSpeed JSON that asks for it."""
    zero: dict[str, Any] = {"stage": form.zero_stage}
    zero |= {"offload_optimizer": {"device": "cpu"}} if form.offload_optimizer else {}
    zero |= {"offload_param": {"device": "cpu"}} if form.offload_param else {}
    degrees = form.degrees
    asked: dict[str, tuple[int, Any]] = {
        "pipeline": (degrees.pipeline, {"stages": degrees.pipeline}),
        "tensor_parallel": (degrees.tensor, {"autotp_size": degrees.tensor}),
        "sequence_parallel_size": (degrees.sequence, degrees.sequence),
        "expert_parallel": (degrees.expert, {"enabled": True, "autoep_size": degrees.expert}),
    }
    more = {"activation_checkpointing": {}} if form.recomputes else {}
    return {"zero_optimization": zero, **{key: value for key, (degree, value) in asked.items() if degree > 1}, **more}


@pytest.mark.parametrize("form", FORMS)
def test_the_resolver_refuses_what_the_table_refuses(form: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(json_of(FORMS[form])))
    (tmp_path / "config.json").write_text("{}")  # of a teacher
    for name, (objective, adapter) in ROWS.items():
        teacher = {"teacher": str(tmp_path)} if objective == "distill" else {}
        config = RunConfig(
            deepspeed=str(path),
            adapter=adapter,
            model=ModelConfig(config={"model_type": "llama"}),
            objective=Objective.of(objective, **teacher),
            data=DataConfig(path="data", sequence_length=128),
            train=TrainConfig(global_batch=4, micro_batch=1, max_steps=10),
        )
        expected = [rule for rule, _ in refusals(adapter, FORMS[form])]
        try:
            resolve(config, 2)
        except ConfigError as error:
            told = str(error).replace(str(path), "the JSON").replace(f"objective.name {objective}", "the objective")
            assert expected and all(rule in told for rule in expected), (name, told)
        else:
            assert not expected, (name, expected)


@pytest.mark.parametrize("one", [*OPTIONS][:-1])
def test_the_resolver_refuses_the_pairs_that_the_table_refuses(one: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    (tmp_path / "config.json").write_text("{}")  # of the model, of a teacher and of an adapter to begin with
    for other in [*OPTIONS][[*OPTIONS].index(one) + 1 :]:
        sections = pair(one, other)
        if sections is None:
            continue
        expected = [rule for rule, _ in against(sections)]
        given = json.loads(json.dumps(sections).replace("FOLDER", str(tmp_path)))
        config = RunConfig(
            deepspeed=str(tmp_path / "ds.json"),
            model=ModelConfig(pretrained=str(tmp_path), **given.get("model", {})),
            adapter=AdapterConfig(**given.get("adapter", {})),
            objective=read_saved(Objective, given.get("objective", {"name": "next_token"})),
            data=DataConfig(path="data", sequence_length=128),
            train=TrainConfig(global_batch=4, micro_batch=1, max_steps=10),
        )
        try:
            check_values(config, problems := Problems())
            problems.raise_if_any()
            resolve(config, 2)
        except ConfigError as error:
            assert expected and all(rule in str(error) for rule in expected), (one, other, str(error))
        else:
            assert not expected, (one, other, expected)


def test_every_option_of_these_sections_stands_in_the_table_of_pairs() -> None:
    """A new field of the adapter needs a column, or a reason to have none: these change no rule."""
    without = {"alpha", "targets"}
    fields = {name for name in vars(AdapterConfig()) if name not in without}
    assert fields == {key for option in OPTIONS.values() for key in option.get("adapter", {})}
    assert {"online", "column"} == {
        option.get("objective", {}).get("reference", "column") for option in OPTIONS.values()
    }


def test_every_objective_stands_in_the_table() -> None:
    (line,) = [line for line in markdown().splitlines() if "`dpo`" in line]
    assert line.split(" | ")[0].strip("| ").replace("`", "").split(", ") == [*Objective.CHOICES][1:]
