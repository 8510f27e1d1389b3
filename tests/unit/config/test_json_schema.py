"""The JSON Schema for editors takes and refuses what the program does, as far as types, bounds and choices go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmtrain.cli import main
from llmtrain.config import strict_yaml
from llmtrain.config.help import json_schema
from llmtrain.config.schema import choices, schema
from tests.helpers.config_workplace import RUN, merged, value_of

pytestmark = pytest.mark.needs("jsonschema")
RECIPES = sorted(Path("launch/recipes").glob("*.yaml"))


def mistakes(tree: Any) -> list[str]:
    import jsonschema

    return [error.message for error in jsonschema.Draft202012Validator(json_schema()).iter_errors(tree)]


def test_the_command_prints_a_valid_schema(capsys: pytest.CaptureFixture[str]) -> None:
    import jsonschema

    assert main(["config", "schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json_schema()
    jsonschema.Draft202012Validator.check_schema(printed)
    assert main(["config", "schema", "run.yaml"]) == 2


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_valid(path: Path) -> None:
    assert not mistakes(strict_yaml.parse(path.read_text(), str(path)).tree)


def test_every_field_is_there_with_its_meaning() -> None:
    made = json_schema()["properties"]
    for key in schema():
        *sections, name = key.split(".")
        known = made
        for section in sections:
            known = known[section]["properties"]
        assert name in known, key
    assert made["train"]["properties"]["max_steps"]["description"] == "Stop after this many optimizer steps."
    assert made["optim"]["properties"]["lr"]["default"] == 3e-4


@pytest.mark.parametrize(
    "change",
    [
        {"deepspeed": ...},
        {"optimm": {}},
        {"train": {"max_stepz": 3}},
        {"train": {"max_steps": 0}},
        {"train": {"max_steps": "three"}},
        {"train": {"micro_batch": "most"}},
        {"data": {"mixture": {"x": -1}}},
        {"eval": {"sets": {"x": 3}}},
        {"train": {"stop_early": {"metric": "eval/loss", "patience": 0}}},
        {"checkpoint": {"keep_best": {"metrics": "eval/loss"}}},
        {"optim": {"lr": 0}},
        {"optim": {"betas": [0.9]}},
        {"optim": {"betas": [0.9, 1.0]}},
        {"optim": {"name": "adamw", "muon_lr": 0.1}},
        {"optim": {"name": "lion", "eps": 0.1}},
        {"schedule": {"decay_steps": 5}},
        {"schedule": {"name": "wsd", "decay_steps": 0}},
        {"schedule": {"name": "constant", "min_ratio": 0.1}},
        {"schedule": {"name": "sine"}},
    ],
    ids=str,
)
def test_wrong_runs_are_refused(change: dict[str, Any]) -> None:
    assert mistakes(merged(RUN, change))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"optim": None, "schedule": {"name": None, "decay_steps": None}},
        {"optim": {"muon_lr": 0.1}},  # the JSON may say muon
        {"schedule": {"name": "wsd", "decay_steps": 5, "min_ratio": 0}},
        {"optim": {"name": "muon", "muon_lr": 0.1, "betas": [0.9, 0.99]}},
        {"data": {"path": None, "mixture": {"x": 1}}},
    ],
    ids=str,
)
def test_right_runs_are_taken(change: dict[str, Any]) -> None:
    assert not mistakes(merged(RUN, change))


def test_every_foreign_field_is_refused() -> None:
    for section, base in choices().items():
        for choice, chosen in base.CHOICES.items():
            for field in {name for other in base.CHOICES.values() for name in other.own()} - chosen.own():
                tree = merged(RUN, {section: {base.SELECTOR: choice, field: value_of(base, field)}})
                assert mistakes(tree), (section, choice, field)
