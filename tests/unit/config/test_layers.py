"""Several YAMLs of one run, where each value came from, and paths with `~` and `$NAME`."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain import cli
from llmtrain.base.errors import ConfigError
from llmtrain.config import strict_yaml
from llmtrain.config.load import load, parse
from llmtrain.optim.schedules import Constant, Cosine
from tests.helpers.config_workplace import write


def test_the_later_file_wins_key_by_key(here: Path) -> None:
    change = {"optim": {"betas": [0.8, 0.9], "lr": 1e-3}, "model": {"freeze": ["a", "b"]}}
    write(here, change)
    (here / "more.yaml").write_text(
        "model: {config: {hidden_size: 128}}\noptim: {betas: [0.9, 0.99]}\ntrain:\n"
        "data: {path: null, mixture: {data/x: 2}}\n"
    )
    (here / "last.yaml").write_text("data: {mixture: {data/x: 3}}\nmodel: {freeze: [c]}\n")
    layered = load(["run.yaml", "--config", "more.yaml", "last.yaml", "--optim.lr", "2e-3"], 2)
    change = {
        "model": {"config": {"hidden_size": 128}, "freeze": ["c"]},
        "optim": {"betas": [0.9, 0.99], "lr": 2e-3},
        "data": {"path": None, "mixture": {"data/x": 3}},
        "train": {"run_dir": "runs/last"},
    }
    write(here, change)
    alone = load(["run.yaml"], 2)
    assert (layered.config, layered.deepspeed, layered.max_steps) == (alone.config, alone.deepspeed, alone.max_steps)
    assert layered.places["optim.betas"] == "more.yaml, line 2"
    assert layered.places["data.mixture.data/x"] == "last.yaml, line 1"


def test_another_choice_of_a_later_file_drops_the_fields_that_it_has_not(here: Path) -> None:
    write(here, {"schedule": {"name": "cosine", "min_ratio": 0.2}})
    (here / "more.yaml").write_text("schedule: {name: constant}\n")
    parsed = parse(["run.yaml", "more.yaml"])
    assert parsed.config.schedule == Constant() and "schedule.min_ratio" not in parsed.places
    assert any(note.startswith("schedule.min_ratio = 0.2 (run.yaml, line ") for note in parsed.notes)
    (here / "more.yaml").write_text("schedule: {name: constant, min_ratio: null}\n")
    assert parse(["run.yaml", "more.yaml"]).config.schedule == Constant()
    (here / "more.yaml").write_text("schedule: {decay_steps: 3}\n")
    with pytest.raises(ConfigError, match=r"more\.yaml, line 1", check=lambda e: e.keys == {"schedule.decay_steps"}):
        parse(["run.yaml", "more.yaml"])
    (here / "more.yaml").write_text("schedule:\nmodel: null\n")  # a section without contents says nothing
    assert parse(["run.yaml", "more.yaml"]).config.schedule == Cosine(min_ratio=0.2)


def test_show_tells_where_each_value_came_from(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, {"train": {"sample_prompt": "x # y " + "long " * 400}}, {"gradient_clipping": 0.5})
    (here / "more.yaml").write_text("\noptim:\n  lr: 1e-3\nmodel: {config: {hidden_size: 128}}\n")
    words = ["run.yaml", "more.yaml", "--train.log_every=3", "--model.config.vocab_size", "640"]
    assert cli.main(["config", "show", *words, "--world-size", "2"]) == 0
    shown, _, exact = capsys.readouterr().out.partition("\n# ds.json")
    assert '"train_batch_size": 8' in exact
    came = {line.split(":")[0].strip(): line.rpartition("  # ")[2] for line in shown.splitlines() if "  # " in line}
    wanted = {
        "deepspeed": "run.yaml:1",
        "lr": "more.yaml:3",
        "hidden_size": "more.yaml:4",
        "log_every": "--train.log_every",
        "vocab_size": "--model.config.vocab_size",
        "accumulation": "computed",
        "betas": "default",
        "keep": "default",
        "clip_norm": "ds.json, gradient_clipping",
        "run_dir": "computed",
    }
    assert {key: came[key] for key in wanted} == wanted
    assert strict_yaml.parse(shown, "shown").tree == strict_yaml.parse(strict_yaml.dump(load(words, 2).config), "").tree


def test_home_and_variables_in_paths(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.setenv("OUT", "runs/of me")
    write(here, {"deepspeed": "~/ds.json", "data": {"path": None, "mixture": {"${HOME}/data/x": 1}}})
    run = load(["run.yaml", "--train.run_dir=$OUT/1", "--train.sample_prompt", "$OUT"], 2)
    config = run.config
    assert (config.deepspeed, config.data.mixture) == (f"{here}/ds.json", {f"{here}/data/x": 1.0})
    assert (config.train.run_dir, config.train.sample_prompt) == ("runs/of me/1", "$OUT")
    assert any("train.run_dir" in note and "$OUT/1" in note and "runs/of me/1" in note for note in run.notes)
    (here / "~").mkdir()
    (here / "~/ds.json").write_text((here / "ds.json").read_text())  # what is there as it is written is meant
    assert load(["run.yaml"], 2).config.deepspeed == "~/ds.json"


def test_one_folder_under_two_names_is_a_mistake(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("D", "data")
    write(here, {"data": {"path": None, "mixture": {"data/x": 1, "$D/x": 2}}})
    with pytest.raises(ConfigError, match="data/x", check=lambda e: e.keys == {"data.mixture.$D/x"}):
        parse(["run.yaml"])
