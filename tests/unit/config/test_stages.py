"""data.stages: what it means, in every form in which it may be written, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmtrain.base.errors import ConfigError
from llmtrain.commands.config import main, summary
from llmtrain.config.load import load, parse
from llmtrain.config.reader import saved_stages
from llmtrain.config.run import Run
from llmtrain.config.strict_yaml import dump
from llmtrain.parity.plain import rate_of_step
from tests.helpers.config_workplace import write
from tests.helpers.prepared import write_prepared

STAGES: list[dict[str, Any]] = [
    {"from_step": 40, "path": "data/y"},
    {"from_step": 60, "sequence_length": 256, "train": {"accumulation": 4}},
    {"from_step": 80, "path": "data/x", "sequence_length": 128, "schedule": {"name": "linear", "min_ratio": 0}},
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    write_prepared(tmp_path / "data/y", train=[[[4] * 5000]], validation=[[[4] * 600]], vocab_size=512)
    return tmp_path


def loaded(here: Path, stages: Any, *argv: str, **sections: Any) -> Run:
    write(here, {"data": {"stages": stages}, "schedule": {"name": "constant"}, **sections})
    return load(["--config", "run.yaml", *argv], 2)


def test_a_stage_changes_what_it_names_and_keeps_the_rest(here: Path) -> None:
    stages = loaded(here, STAGES).stages
    told = [
        (
            s.first_step,
            s.data.path,
            s.batch.sequence_length,
            s.batch.global_batch,
            s.batch.micro_batch,
            s.batch.accumulation,
        )
        for s in stages
    ]
    assert told == [
        (0, "data/x", 128, 8, 2, 2),
        (40, "data/y", 128, 8, 2, 2),
        (60, "data/y", 256, 16, 2, 4),
        (80, "data/x", 128, 16, 2, 4),
    ]
    assert [stages.number(step) for step in (0, 39, 40, 59, 60, 79, 80, 99)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert stages.tokens(70) == 60 * 8 * 128 + 10 * 16 * 256
    assert stages.sharing(3) == [0, 3] and stages.sequences(90, [0, 3]) == 40 * 8 + 10 * 16


def test_a_first_stage_is_the_section_itself(here: Path) -> None:
    """The three forms give one run: a list from step 0 on, a list on the command line, and what a run writes down."""
    want = loaded(here, STAGES)
    first = {"from_step": 0, "path": "data/x", "train": {"global_batch": 8}, "schedule": {"name": "constant"}}
    write(here, {"data": {"path": ..., "stages": [first, *STAGES]}, "train": {"global_batch": ...}})
    found = load(["--config", "run.yaml"], 2)
    assert found.config == want.config and found.stages == want.stages
    write(here, {"schedule": {"name": "constant"}})
    assert load(["--config", "run.yaml", "--data.stages", json.dumps(STAGES)], 2).config == want.config
    Path("again.yaml").write_text(dump(want.config))
    again = load(["--config", "again.yaml"], 2)
    assert again.config == want.config and again.stages == want.stages


def test_a_checkpoint_tells_the_same_learning_rates(here: Path) -> None:
    found = loaded(here, STAGES, schedule={"name": "cosine", "warmup_steps": 5})
    saved = saved_stages(json.loads(json.dumps(asdict(found.config))))
    assert [saved.factor(step, 100) for step in range(100)] == [found.stages.factor(step, 100) for step in range(100)]


@pytest.mark.parametrize(
    ("schedule", "steps", "want"),
    [  # by the sentences of docs/training.md
        ({"name": "constant"}, 1, [1]),
        ({"name": "constant", "warmup_steps": 1}, 3, [1 / 2, 1, 1]),
        ({"name": "linear"}, 1, [1]),
        ({"name": "linear"}, 3, [1, 0.6, 0.2]),
        ({"name": "linear", "warmup_steps": 1}, 2, [1 / 2, 1]),
        ({"name": "linear", "warmup_steps": 1}, 4, [1 / 2, 1, 0.6, 0.2]),
        ({"name": "cosine"}, 1, [1]),
        ({"name": "cosine"}, 3, [1, 0.6, 0.2]),
        ({"name": "cosine", "warmup_steps": 1}, 2, [1 / 2, 1]),
        ({"name": "cosine", "warmup_steps": 1}, 4, [1 / 2, 1, 0.6, 0.2]),
        ({"name": "wsd"}, 1, [0.2]),
        ({"name": "wsd"}, 3, [1, 1, 0.2]),
        ({"name": "wsd", "decay_steps": 2}, 4, [1, 1, 0.6, 0.2]),
        ({"name": "wsd", "warmup_steps": 1, "decay_steps": 1}, 2, [1 / 2, 0.2]),
        ({"name": "wsd", "warmup_steps": 1, "decay_steps": 2}, 4, [1 / 2, 1, 0.6, 0.2]),
    ],
)
def test_the_rates_of_each_schedule(here: Path, schedule: dict[str, Any], steps: int, want: list[float]) -> None:
    """Of a run, of a stage with so many steps, and by parity's own definition."""
    given = schedule if schedule["name"] == "constant" else {**schedule, "min_ratio": 0.2}
    alone = loaded(here, [], schedule=given, train={"max_steps": steps})
    assert [alone.stages.factor(step, steps) for step in range(steps)] == pytest.approx(want)
    assert [rate_of_step(alone.config.schedule, step + 1, steps) for step in range(steps)] == pytest.approx(want)
    stage = loaded(here, [{"from_step": 5, "schedule": given}], train={"max_steps": 5 + steps})
    assert [stage.stages.factor(5 + step, 5 + steps) for step in range(steps)] == pytest.approx(want)
    first = loaded(here, [{"from_step": steps, "schedule": {"name": "constant"}}], schedule=given)
    assert [first.stages.factor(step, 100) for step in range(steps + 1)] == pytest.approx([*want, 1])


def test_a_schedule_lasts_until_the_next_one(here: Path) -> None:
    """Its steps count from its stage's first: cosine to 80 as if the run ended there, then a line to 0."""
    found = loaded(here, STAGES, schedule={"name": "cosine", "warmup_steps": 10, "min_ratio": 0.1})
    rate = found.stages.factor
    assert rate(0, 100) == pytest.approx(1 / 11) and rate(10, 100) == 1
    assert rate(79, 100) == pytest.approx(0.1)
    assert rate(80, 100) == 1 and rate(99, 100) == pytest.approx(0) and rate(89, 100) == pytest.approx(1 - 9 / 19)
    assert any("0.1 to 1 of optim.lr at step 80" in note for note in found.notes)


TOKENS = 60 * 8 * 128
"""Of the steps before the second stage."""


@pytest.mark.parametrize(
    ("tokens", "steps"), [(40 * 8 * 128, 40), (TOKENS + 1, 61), (TOKENS + 5 * 16 * 256, 65), (TOKENS, 60)]
)
def test_tokens_are_counted_stage_by_stage(here: Path, tokens: int, steps: int) -> None:
    found = loaded(here, STAGES[:2], train={"max_steps": ..., "max_tokens": tokens})
    assert found.max_steps == steps and found.stages.tokens(steps) >= tokens > found.stages.tokens(steps - 1)


def test_epochs_are_those_of_the_last_stages_data(here: Path) -> None:
    write(
        here,
        {
            "data": {"stages": [{"from_step": 10, "path": "data/y"}, {"from_step": 20, "path": "data/x"}]},
            "schedule": {"name": "constant"},
            "train": {"max_steps": ..., "epochs": 2},
        },
    )
    found = load(["--config", "run.yaml"], 2, epoch=lambda data: {"data/x": 100}[str(data.path)])
    assert found.max_steps == 35  # 200 sequences of data/x, 80 of them before step 10
    write(
        here,
        {
            "data": {"stages": [{"from_step": 10, "mixture": {"./data/x": 2.0}, "train": {"global_batch": 4}}]},
            "schedule": {"name": "constant"},
            "train": {"max_steps": ..., "epochs": 2},
        },
    )
    assert load(["--config", "run.yaml"], 2, epoch=lambda _: 100).max_steps == 40  # by whatever name


def test_a_run_that_ends_before_a_stage_says_so(here: Path) -> None:
    found = loaded(here, STAGES, train={"max_steps": 60})
    assert [note for note in found.notes if "not reached" in note] == [
        "stage 2, from step 60, is not reached: the run ends at step 60",
        "stage 3, from step 80, is not reached: the run ends at step 60",
    ]


def test_figures_that_decide_across_other_data_are_told(here: Path) -> None:
    best = {"checkpoint": {"keep_best": {"metric": "eval/loss"}}, "eval": {"sets": {"web": "data/x"}}}
    steps = {"max_steps": 60, "eval_every": 10}
    told = [note for note in loaded(here, STAGES, **best, train=steps).notes if "keep_best" in note]
    assert len(told) == 1 and "step 40" in told[0] and "eval/loss" in told[0]
    best["checkpoint"]["keep_best"]["metric"] = "eval/web/loss"
    assert not [note for note in loaded(here, STAGES, **best, train=steps).notes if "keep_best" in note]
    best["checkpoint"]["keep_best"]["metric"] = "eval/loss"
    assert not [note for note in loaded(here, STAGES, **best, train={**steps, "max_steps": 40}).notes if "best" in note]


def test_config_show_says_the_stages_and_where_they_stand(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = loaded(here, STAGES)
    assert main(["show", "run.yaml", "--world-size", "2"]) == 0
    output = capsys.readouterr().out
    line = next(each for each in output.splitlines() if "from_step: 60" in each)
    number = 1 + next(n for n, each in enumerate(Path("run.yaml").read_text().splitlines()) if "from_step: 60" in each)
    assert f"# run.yaml:{number}" in line
    assert "stage 2: from step 60: data/y, sequences of 256, global_batch 16 = " in output
    assert "stage 3: from step 80: data/x, sequences of 128" in summary(found)


WRONG: list[tuple[Any, dict[str, Any], str, tuple[str, ...]]] = [
    ("data/y", {}, "data.stages", ("list",)),
    ([{"from_step": 5, "path": "data/none"}], {}, "data.stages[0].path", ('= "data/none"', "line ")),
    (
        [{"from_step": 5, "mixture": {"data/x": 1, "data/none": 1}}, {"from_step": 6, "sequence_length": 64}],
        {},
        "data.stages[0].mixture.data/none",
        ("folder",),
    ),
    ([{"from_step": 5, "lenght": 4}], {}, "data.stages[0].lenght", ("= 4", "field")),
    ([{"path": "data/y"}], {}, "data.stages[0].from_step", ("= null", "optimizer steps")),
    ([{"from_step": 5, "mixture": {"data/x": -1}}], {}, "data.stages[0].mixture.data/x", ("= -1.0", " 0")),
    ([{"from_step": 5, "sequence_length": 1}], {}, "data.stages[0].sequence_length", ("= 1", " 2")),
    ([{"from_step": 5, "train": {"max_steps": 7}}], {}, "data.stages[0].train.max_steps", ("= 7", "during a run")),
    ([{"from_step": 5, "train": {"global_batch": 6}}], {}, "train.global_batch", ("6", "data.stages[0].train")),
    ([{"from_step": 5, "schedule": {"name": "cosinus"}}], {}, "data.stages[0].schedule.name", ("cosine", "linear")),
    ([{"from_step": 0, "path": "data/y"}], {}, "data.stages[0].path", ('data.path = "data/x"',)),
    (
        [{"from_step": 9, "schedule": {"name": "linear"}}],
        {"schedule": {"name": "cosine", "warmup_steps": 9}},
        "schedule.warmup_steps",
        ("= 9", "9 steps, 0 to 9"),
    ),
]


@pytest.mark.parametrize(("stages", "sections", "key", "values"), WRONG, ids=[case[2] for case in WRONG])
def test_what_a_stage_cannot_say(
    here: Path, stages: Any, sections: dict[str, Any], key: str, values: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(here, stages, **sections)
    assert refused.value.keys == {key}
    for value in values:
        assert value in str(refused.value)


def test_lengths_of_stages_are_checked_as_those_of_runs(here: Path) -> None:
    write(here, {"data": {"stages": [{"from_step": 5, "sequence_length": 129}]}}, {"sequence_parallel_size": 2})
    with pytest.raises(ConfigError, match="129", check=lambda e: e.keys == {"data.stages[0].sequence_length"}):
        load(["--config", "run.yaml"], 2)


def test_the_schema_of_the_yaml_knows_stages(here: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    from llmtrain.config.help import json_schema

    loaded(here, STAGES)
    tree = yaml.safe_load(Path("run.yaml").read_text())
    jsonschema.validate(tree, json_schema())
    tree["data"]["stages"][0]["from_step"] = "five"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tree, json_schema())
    assert parse(["--config", "run.yaml"]).config.data.stages[0].from_step == 40
