"""A section whose class is selected by a name: its own fields are taken, those of other choices are refused."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from llmtrain.base.choice import Bound
from llmtrain.base.errors import ConfigError
from llmtrain.cli import main
from llmtrain.config.load import load, parse
from llmtrain.config.schema import choices
from llmtrain.optim.optimizers import Muon, Optimizer
from llmtrain.optim.schedules import Constant, Cosine, Wsd
from tests.helpers.config_workplace import value_of, write

FOREIGN = [
    (section, next(name for name, chosen in base.CHOICES.items() if field not in chosen.own()), field)
    for section, base in choices().items()
    for field in sorted({f for other in base.CHOICES.values() for f in other.own()})
    if any(field not in chosen.own() for chosen in base.CHOICES.values())
]
"""Each field that is not of all choices, with the first choice that lacks the field."""


@pytest.mark.parametrize(("section", "choice", "field"), FOREIGN)
def test_a_field_of_another_choice_is_refused_in_the_yaml_and_on_the_command_line(
    section: str, choice: str, field: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = choices()[section]
    value = value_of(base, field)
    rule, remedy = base.refusal(field)
    write(here, {section: {base.SELECTOR: choice, field: value}})
    assert main(["config", "check", "run.yaml", "--world-size=2"]) == 2
    told = capsys.readouterr().err
    assert f"{section}.{field} = {json.dumps(value)}  (run.yaml, line " in told
    assert f"rule:   {rule}\n    remedy: {remedy}" in told
    assert all(owner in rule and owner in remedy for owner in base.owners(field))
    write(here)
    argv = [f"--{section}.{field}", str(value), f"--{section}.{base.SELECTOR}", choice]
    assert main(["config", "check", "run.yaml", "--world-size=2", *argv]) == 2
    told = capsys.readouterr().err
    assert f"{section}.{field} = " in told and f"(command line)\n    rule:   {rule}" in told


def test_there_are_fields_to_refuse() -> None:
    assert {section for section, _, _ in FOREIGN} >= {"schedule", "optim", "objective"}


SWITCHED = [("optim", "adamw", "muon_lr"), ("schedule", "constant", "decay_steps")]


@pytest.mark.parametrize(("section", "choice", "field"), SWITCHED)
def test_another_choice_of_the_command_line_drops_the_fields_that_it_has_not_with_a_note(
    section: str, choice: str, field: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = choices()[section]
    write(here, {section: {base.SELECTOR: base.owners(field)[0], field: value_of(base, field)}})
    argv = ["config", "check", "run.yaml", "--world-size=2", f"--{section}.{base.SELECTOR}", choice]
    assert main(argv) == 0
    assert re.search(
        rf"{section}\.{field} = .* \(run.yaml, line \d+\) is dropped: {section}\.{base.SELECTOR} {choice} "
        "has no such field",
        capsys.readouterr().out,
    )
    assert main([*argv, f"--{section}.{field}", "null"]) == 0
    assert "is dropped" not in capsys.readouterr().out
    assert main([*argv, f"--{section}.{field}", str(value_of(base, field))]) == 2, "of one layer"


@pytest.mark.parametrize(("choice", "field"), [each[1:] for each in FOREIGN if each[0] == "optim"])
def test_a_parameter_of_another_optimizer_is_refused_in_the_json(choice: str, field: str, here: Path) -> None:
    params = {
        item.name: item.metadata["json"]
        for item in fields(Optimizer.CHOICES[Optimizer.owners(field)[0]])
        if item.metadata.get("json", "").startswith("optimizer.params.")
    }
    kind, name = Optimizer.CHOICES[choice].json_types[-1], params[field].rpartition(".")[2]
    write(here, None, {"optimizer": {"type": kind, "params": {name: 0.5}}})
    rule, remedy = Optimizer.refusal(field)
    with pytest.raises(ConfigError) as told:
        load(["run.yaml"], 2)
    assert f"{params[field]} = 0.5  (ds.json)\n    rule:   {rule}\n    remedy: {remedy}" in str(told.value)


def test_the_json_selects_the_class_of_an_optimizer_without_a_name(here: Path) -> None:
    write(here, {"optim": {"muon_lr": 0.03}}, {"optimizer": {"type": "muon", "params": {"lr": 1e-3}}})
    optim = load(["run.yaml"], 2).config.optim
    assert optim == Muon(
        lr=1e-3, muon_lr=0.03, muon_momentum=0.95, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip_norm=0.0
    )
    write(here, {"optim": {"eps": 1e-6}}, {"optimizer": {"type": "Lion"}})
    with pytest.raises(ConfigError, match=r"optim\.name", check=lambda e: e.keys == {"optim.eps"}):
        load(["run.yaml"], 2)


def test_the_command_line_selects_the_class_before_its_fields_are_read(here: Path) -> None:
    write(here, {"schedule": {"name": "cosine", "min_ratio": 0.2}})
    argv = ["run.yaml", "--schedule.decay_steps", "5", "--schedule.name", "wsd"]
    assert parse(argv).config.schedule == Wsd(decay_steps=5, min_ratio=0.2)
    assert parse(["run.yaml", "--schedule.name", "constant"]).config.schedule == Constant()
    assert parse(["run.yaml", "--schedule.name=constant", "--schedule.min_ratio=null"]).config.schedule == Constant()


def test_null_is_the_default(here: Path) -> None:
    write(here, {"schedule": {"name": None, "min_ratio": None, "decay_steps": None}})
    assert parse(["run.yaml"]).config.schedule == Cosine()


def test_a_foreign_field_is_told_beside_other_mistakes(here: Path) -> None:
    write(here, {"schedule": {"decay_steps": 5, "warmup_steps": -1}, "train": {"seed": -3}})
    with pytest.raises(ConfigError) as refused:
        parse(["run.yaml"])
    assert refused.value.keys == {"schedule.decay_steps", "schedule.warmup_steps", "train.seed"}


def test_the_words_of_a_bound() -> None:
    said = {
        "greater than 0": Bound(above=0),
        "greater than 0 and at most 1e9": Bound(above=0, at_most=1e9),
        "0 or greater": Bound(at_least=0),
        "at least 2": Bound(at_least=2),
        "from 0 to 1": Bound(at_least=0, at_most=1),
        "from 0 to just under 0.5": Bound(at_least=0, below=0.5),
        "from 0 to 2^63 - 1": Bound(at_least=0, at_most=2**63 - 1),
    }
    assert {bound.words: bound for bound in said.values()} == said
    edges = [(bound, edge) for bound in said.values() for edge in vars(bound).items() if edge[1] is not None]
    for bound, (limit, value) in edges:
        assert bound.holds(value) == (limit in ("at_least", "at_most"))
    assert Bound(at_least=0, below=1).holds((0.0, 0.99)) and not Bound(at_least=0, below=1).holds((0.0, 1.0))


def test_every_class_has_the_fields_of_its_section_and_a_name() -> None:
    for base in choices().values():
        shared = {item.name for item in fields(base) if item.init}
        for choice, chosen in base.CHOICES.items():
            assert shared <= chosen.own() and chosen.selected() == choice
