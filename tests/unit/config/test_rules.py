"""Rules between settings: each example is refused with the keys, the reason and the remedy of its row."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from llmtrain.base.choice import Entry, Rule
from llmtrain.base.errors import ConfigError
from llmtrain.config.help import all_rules
from llmtrain.config.load import load, parse
from llmtrain.config.problems import show
from llmtrain.config.resolve import resolve
from llmtrain.config.rules import OF_STARTS
from tests.helpers.config_workplace import write
from tools.pages import BASE, RANKS, example_of, texts


@dataclass
class Metric:
    """A metric of a plugin."""


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: " ".join(rule.example))
def test_an_example_is_refused_with_keys_reason_and_remedy(
    rule: Rule, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(Entry.SECTIONS, "metrics", {"NAME": Metric})
    write(here, *example_of(rule))
    reason, remedy = texts(rule)
    with pytest.raises(ConfigError) as refused:
        resolve(parse(["run.yaml"], check_paths=rule in OF_STARTS).config, RANKS)
    assert reason in str(refused.value) and remedy in str(refused.value)
    given = {
        key: value for key, value in rule.example.items() if key in rule.keys and not isinstance(value, (dict, list))
    }
    assert all(f"{key} = " in str(refused.value) for key in rule.keys), refused.value
    assert all(f"{key} = {show(value)}" in str(refused.value) for key, value in given.items()), refused.value


def test_the_run_that_examples_change_is_right(here: Path) -> None:
    write(here)
    assert load(["run.yaml"], RANKS).config.data.path == BASE["data"]["path"]


def test_a_rule_is_applied_once_and_not_to_a_value_that_is_wrong_by_itself(here: Path) -> None:
    write(here, {"model": {"fp8": "rowwise", "mlp_tile_tokens": -100, "freeze": ["a"], "train_only": ["b"]}})
    with pytest.raises(ConfigError) as refused:
        load(["run.yaml"], RANKS)
    told = str(refused.value)
    assert told.count("model.mlp_tile_tokens = -100") == 1
    assert told.count("cannot be combined with model.freeze") == 1


def test_a_mistake_about_one_stage_silences_no_rule_of_another(here: Path) -> None:
    stages = [{"from_step": -1, "path": "data/x"}, {"from_step": 9}, {"from_step": 8, "path": "data/x"}]
    write(here, {"data": {"stages": stages}})
    with pytest.raises(ConfigError) as refused:
        load(["run.yaml"], RANKS)
    assert refused.value.keys >= {"data.stages[0].from_step", "data.stages[2].from_step"}
    assert str(refused.value).count("data.stages[0].from_step = -1") == 1


def test_a_blank_of_a_name_is_seen(here: Path) -> None:
    write(here, {"eval": {"sets": {"x ": "data/x"}}})
    with pytest.raises(ConfigError, match=r'"eval.sets.x " = "data/x"'):
        load(["run.yaml"], RANKS)
