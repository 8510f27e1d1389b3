"""The typed reader: what it takes, what it answers, and that saved runs of former versions are read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from llmtrain.base.choice import POSITIVE, HostPath, bounded, mapped
from llmtrain.base.errors import ConfigError
from llmtrain.config.load import load, parse
from llmtrain.config.problems import Problems
from llmtrain.config.reader import WRONG, read, read_saved
from llmtrain.config.run import RunConfig
from llmtrain.optim.schedules import Constant
from tests.helpers.config_workplace import write

TOP = "deepspeed: ds.json\n"


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        (
            "learning_rate: 1e-4\nbf16: true\ngradient_accumulation_steps: 2\noutput_dir: x\n",
            ("learning_rate = 0.0001", "optim.lr?", "deepspeed = null", "train.accumulation?", "`bf16.enabled`"),
        ),
        (f"{TOP}train:\n  max_steps: 4\n  optim:\n    lr: 1e-3\n", ("line 4", "`optim:`", "`train:`")),
        (f"{TOP}optim:\n  lr 1e-3\n", ("line 2", "`lr: 1e-3`")),
        (f"{TOP}optim:\n  lr:1e-3\n", ("line 2", "`lr: 1e-3`")),
        (f"{TOP}optim:\n  lr 1e-3\n  eps: 1e-8\n", ("line 3", "`lr: 1e-3`")),
        (f"{TOP}optim:\n  lr:1e-3\n  eps: 1e-8\n", ("line 3", "`lr: 1e-3`")),
        (f'{TOP}train:\n  run_dir: "my run\noptim:\n  lr: 1e-3\n', ("line 3",)),
        (f"{TOP}train:\n  run_dir: 'my run\noptim:\n  lr: 1e-3\n", ("line 3",)),
        (f"{TOP}optim: {{lr: '0,001'}}\n", ("0.001",)),
        (f"{TOP}schedule: {{min_ratio: 70%}}\n", ("0.7",)),
        (f"{TOP}schedule: {{warmup_steps: 70%}}\n", ("a whole number", "write the number itself, not a share")),
        (f"{TOP}schedule: {{warmup_steps: '1,000'}}\n", ("write 1000, without a comma",)),
        (f"{TOP}optimizer: {{lr: 1e-3}}\n", ("optimizer = ", "optim?")),
        (f"{TOP}train: {{run_dir: “runs”}}\n", ('"runs"',)),
        (f"{TOP}train: {{run_dir: 'C:\\runs\\x'}}\n", ("is a path of Windows", "with slashes")),
        (f'{TOP}train: {{run_dir: "C:\\runs\\x"}}\n', ("a backslash in double quotes", "write single quotes")),
        (f"{TOP}data: {{path: [a, b]}}\n", ("`data.mixture: {a: 1, b: 1}`",)),
        (f"{TOP}plugin: mine.py\n", ("--plugin mine.py",)),
        (f"{TOP}parts: {{mine: {{}}}}\n", ("--plugin FILE.py",)),
        (f"{TOP}optim:\n  - lr: 1\n", ("`name: ...`",)),
    ],
)
def test_a_beginner_is_answered(yaml: str, words: tuple[str, ...], here: Path) -> None:
    write(here)
    (here / "run.yaml").write_text(yaml)
    with pytest.raises(ConfigError) as error:
        parse(["run.yaml"])
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["rum.yaml"], ('--config = "rum.yaml"', "run.yaml?")),
        (["zzz.yaml"], ("no such file", "give the path of a run's YAML")),  # and no other file's
        (["run.yaml", "--plugn", "mine.py"], ("--plugn", "--plugin?")),
        (["run.yaml", "--parts.mien"], ("--parts.mien",)),
        (["run.yaml", "--train.max_tokens", "10q"], ("a whole number",)),
        (["run.yaml", "--optim.betas", "0.9"], ("optim.betas",)),
        (["run.yaml", "--data.path", "[a, b]"], ("`data.mixture: {a: 1, b: 1}`",)),
    ],
)
def test_a_wrong_word_of_the_command_line_is_answered(argv: list[str], words: tuple[str, ...], here: Path) -> None:
    write(here)
    with pytest.raises(ConfigError) as error:
        parse(argv)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_units_switches_and_quoted_numbers_are_read(here: Path) -> None:
    write(here, {"train": {"max_steps": ..., "max_tokens": "10m", "eval": "off"}, "optim": {"lr": "3e-4"}})
    config = parse(["run.yaml", "--train.eval_every=1.5k", "--schedule.warmup_steps", "1e1"]).config
    assert (config.train.max_tokens, config.train.eval_every, config.train.eval) == (10_000_000, 1500, False)
    assert (config.optim.lr, config.schedule.warmup_steps) == (3e-4, 10)


def test_values_that_few_runs_mean_are_noted(here: Path) -> None:
    write(here, {"train": {"max_steps": 4, "max_tokens": 10**6, "eval_every": 1000}, "optim": {"weight_decay": 10}})
    notes = "\n".join(load(["run.yaml"], 2).notes)
    assert "train.eval_every 1000: " in notes and "4 steps" in notes
    assert "train.max_steps 4 and train.max_tokens 1000000: " in notes and "optim.weight_decay 10: 0.1 " in notes
    write(here, {"train": {"eval": False, "eval_every": 1000}})
    notes = "\n".join(load(["run.yaml"], 2).notes)
    assert "train.eval is off" in notes and "train.eval_every 1000" not in notes
    write(here)
    assert not [note for note in load(["run.yaml"], 2).notes if "weight_decay" in note or "max_tokens" in note]


@dataclass(frozen=True, kw_only=True)
class _Inner:
    names: list[str] = field(default_factory=list)
    pair: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class _Outer:
    size: int = bounded(1, POSITIVE, "1 is the default")
    mode: Literal["a", "b"] | None = None
    either: int | Literal["all"] | None = None
    shares: dict[str, float] = mapped("NAME: SHARE", POSITIVE, "remove the line")
    inner: _Inner = field(default_factory=_Inner)
    several: list[_Inner] = field(default_factory=list)
    folder: HostPath | None = None
    rest: dict[str, Any] | None = None


def test_each_kind_of_type_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "/data")
    given = {
        "size": 2.0,
        "mode": "b",
        "either": "all",
        "shares": {"x": 1, "y.z": 0.5},
        "folder": "$WHERE/a",
        "inner": {"names": ["n"], "pair": [1, 2]},
        "several": [{}, {"names": ["m"]}],
        "rest": {"q": [1]},
    }
    inner = _Inner(names=["n"], pair=(1.0, 2.0))
    assert read(_Outer, given, "", problems := Problems()) == _Outer(
        size=2,
        mode="b",
        either="all",
        shares={"x": 1.0, "y.z": 0.5},
        inner=inner,
        several=[_Inner(), _Inner(names=["m"])],
        folder="/data/a",
        rest={"q": [1]},
    )
    assert not problems and problems.notes == ["folder: $WHERE/a is /data/a here"]


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"size": 1.5}, "size"),
        ({"size": True}, "size"),
        ({"size": None}, "size"),
        ({"size": 0}, "size"),
        ({"mode": "c"}, "mode"),
        ({"either": "some"}, "either"),
        ({"either": 1.5}, "either"),
        ({"shares": [1]}, "shares"),
        ({"shares": {"x": "much"}}, "shares.x"),
        ({"shares": {"x": 0}}, "shares.x"),
        ({"shares": {"x": float("nan")}}, "shares.x"),
        ({"inner": 3}, "inner"),
        ({"inner": {"names": "n"}}, "inner.names"),
        ({"inner": {"names": [{}]}}, "inner.names"),
        ({"inner": {"pair": [1]}}, "inner.pair"),
        ({"inner": {"pair": [1, 2, 3]}}, "inner.pair"),
        ({"several": {}}, "several"),
        ({"several": [{}, {"name": 1}]}, "several[1].name"),
        ({"folder": 3}, "folder"),
        ({"folder": ""}, "folder"),
        ({"folder": "$NOT_SET_AT_ALL/x"}, "folder"),
        ({"folder": "a\x1b"}, "folder"),
        ({"rest": {"auto_map": 1}}, "rest.auto_map"),
        ({"rest": {"a": [{"_b": 1}]}}, "rest.a._b"),
        ({"sizes": 3}, "sizes"),
    ],
)
def test_a_wrong_value_is_one_mistake_at_its_key(given: dict[str, Any], key: str) -> None:
    made = read(_Outer, given, "", problems := Problems())
    assert key in problems and len(problems) == 1
    assert made is WRONG or isinstance(made, _Outer)


def test_a_saved_run_of_another_version_is_read(here: Path) -> None:
    write(here, {"schedule": {"name": "constant"}, "data": {"stages": [{"from_step": 3, "sequence_length": 64}]}})
    config = load(["run.yaml"], 2).config
    saved = json.loads(json.dumps(asdict(config)))
    assert read_saved(RunConfig, saved) == config
    saved["schedule"] |= {"min_ratio": 0.3, "decay_steps": None}
    saved["optim"] |= {"muon_lr": 0.02, "gone": 1}
    saved["nobody_knows"] = {"x": 1}
    assert read_saved(RunConfig, saved) == replace(config, schedule=Constant(), optim=config.optim)
    saved["train"]["max_steps"] = "many"
    with pytest.raises(ConfigError, match=r"train\.max_steps"):
        read_saved(RunConfig, saved)


def test_reading_costs_little(here: Path) -> None:
    import time

    write(here)
    parse(["run.yaml"], check_paths=False)
    begin = time.process_time()
    for _ in range(10):
        parse(["run.yaml"], check_paths=False)
    assert (time.process_time() - begin) / 10 < 0.02


def test_a_flag_over_a_section_that_is_no_map_hides_no_mistake(here: Path) -> None:
    (here / "above.yaml").write_text("optim: {lr: 1e-3}\n")
    for section, words in (
        ("optim", ["--optim.lr", "1e-3"]),
        ("optim", ["above.yaml"]),
        ("model.config", ["--model.config.vocab_size", "5"]),
    ):
        write(here, {"optim": 5} if section == "optim" else {"model": {"config": "folder"}})
        with pytest.raises(ConfigError, match=r"run\.yaml, line \d", check=lambda e, key=section: e.keys == {key}):
            parse(["run.yaml", *words])
    (here / "above.yaml").write_text("model: {config: {model_type: gpt2}}\n")  # a path below may be replaced
    assert parse(["run.yaml", "above.yaml"]).config.model.config == {"model_type": "gpt2"}


def test_a_broken_word_of_a_map_is_named_by_its_flag(here: Path) -> None:
    write(here)
    with pytest.raises(ConfigError, match=r"--model\.config\.layer_types\b"):
        parse(["run.yaml", "--model.config.layer_types", "[a"])


def test_a_class_that_refuses_its_values_makes_no_traceback() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Picky:
        size: int = 1

        def __post_init__(self) -> None:
            if self.size == 3:
                raise ValueError("3 is odd")

    assert read(Picky, {"size": 3}, "parts.picky", problems := Problems()) is WRONG
    assert "Picky" in (said := str(problems.error())) and "3 is odd" in said and problems.keys == {"parts.picky"}
    assert read(Picky, {"size": 2}, "parts.picky", Problems()) == Picky(size=2)
