"""`--plugin`: a user's file brings choices and entries to the YAML; a wrong one is named with its line."""

from __future__ import annotations

import ast
import inspect
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import llmtrain
from llmtrain import Request
from llmtrain.base.choice import Entry
from llmtrain.base.errors import ConfigError, ModelError
from llmtrain.cli import main
from llmtrain.config import plugin_import, plugins
from llmtrain.config.help import json_schema, run_parser
from llmtrain.config.load import parse
from llmtrain.config.strict_yaml import dump
from llmtrain.objectives.objective import Objective
from llmtrain.optim.schedules import Schedule
from tests.helpers.config_workplace import write
from tests.helpers.launching import REPO, write_recipe

HEAD = """from dataclasses import dataclass
from llmtrain import ByToken, Metric, Optimizer, Part, Schedule, Sink, bounded
"""
FROZEN = "@dataclass(frozen=True, kw_only=True)\n"
MINE = f"""{HEAD}
@dataclass(frozen=True, kw_only=True)
class Steep(Schedule, choice="steep"):
    \"\"\"Steep.\"\"\"
    power: float = bounded(2.0, above=0)
    \"\"\"Exponent.\"\"\"
    def after_warmup(self, step, max_steps):
        return (1 + step) ** -self.power

@dataclass(kw_only=True)
class Count(Part, entry="count"):
    every: int = bounded(10, at_least=1)
    names: str | None = None
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


@pytest.fixture(autouse=True)
def forgotten() -> object:
    yield
    plugin_import.use([])


def test_a_plugins_classes_are_fields_of_the_run(here: Path) -> None:
    config = parse(
        [
            "run.yaml",
            "--plugin",
            "mine.py",
            "--schedule.name=steep",
            "--schedule.power",
            "3",
            "--parts.count.every",
            "4",
        ]
    ).config
    assert config.schedule.factor(1, None) == 2.0**-3 and config.parts["count"].every == 4
    (here / "dumped.yaml").write_text(dump(config))
    again = parse(["--plugin=mine.py", "--config", "dumped.yaml"]).config
    assert dump(again) == dump(config) and yaml.safe_load(dump(config))["parts"] == {
        "count": {"every": 4, "names": None}
    }
    assert re.search(
        r"--parts.count.every EVERY\s[^-]*at least 1\)\s+\(type: int,\s+default: 10\)", run_parser().format_help()
    )
    assert json_schema()["properties"]["parts"]["properties"]["count"]["properties"]["every"]["minimum"] == 1
    parse(["run.yaml"])
    assert (
        "steep" not in Schedule.CHOICES
        and Entry.SECTIONS["parts"] == {}
        and "--parts.count" not in run_parser().format_help()
    )


@pytest.mark.parametrize(
    ("change", "words", "told"),
    [
        ({"parts": {"count": {"every": 0}}}, "", "parts.count.every = 0  (run.yaml, line "),
        ({"parts": {"count": {"evry": 3}}}, "", "did you mean parts.count.every?"),
        ({"parts": {"count": {"every": "often"}}}, "", "parts.count.every = "),
        ({"parts": {"cuont": None}}, "", "did you mean parts.count?"),
        ({"parts": {"count": 3}}, "", "is a section"),
        ({"parts": ["count"]}, "", "is a section"),
        ({"schedule": {"name": "steep", "min_ratio": 0.1}}, "", "schedule.min_ratio = 0.1"),
        ({"schedule": {"name": "steep", "power": -1}}, "", "schedule.power = -1.0"),
        ({}, "--plugin", "write --plugin FILE.py"),
        ({}, "--plugin --train.max_steps 3", "write --plugin FILE.py"),
        ({}, "--plugin-changed yes", "write --plugin-changed ok"),
        ({}, "--plugin nowhere.py", "--plugin nowhere.py: "),
        ({}, "--plugin mien.py", "Did you mean mine.py?"),
        ({}, "--plugn mine.py", "did you mean --plugin?"),
        ({}, "--plugin no_such_module", "llmtrain.plugins"),
        ({}, "--plugin sys", "llmtrain.plugins"),
        ({}, "--plugin ./mine.py", "--plugin ./mine.py: "),
    ],
)
def test_a_wrong_field_of_a_plugin_is_a_mistake_like_any_other(
    change: dict[str, object], words: str, told: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here, change)
    assert main(["config", "check", "run.yaml", "--world-size=2", "--plugin", "mine.py", *words.split()]) == 2
    assert told in capsys.readouterr().err


def test_a_part_that_no_yaml_names_is_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = "parts.count of a plugin is not used: the run does not enable it (--parts.count does)"
    assert told in parse(["run.yaml", "--plugin", "mine.py"]).notes
    assert parse(["run.yaml", "--plugin", "mine.py", "--parts.count"]).notes == ()
    assert parse(["run.yaml"]).notes == ()


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import nothing_like_it", "line 3: ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("x = 1 / 0", "line 3: ZeroDivisionError"),
        ("def broken(:", "line 3: SyntaxError"),
        ("raise SystemExit(0)", "line 3: SystemExit"),
        ("class A(Part, entry='a'):\n    every: int = 3", "class A has the field every "),
        ("@dataclass(kw_only=True)\nclass A(Part, entry='a'):\n    every: int", "field every has no default"),
        ("class A(Schedule, choice='cosine'): pass", "line 3: ValueError: the name 'cosine' of class A "),
        ("from llmtrain import Prat", "ImportError: cannot import name 'Prat'"),
        (
            "class A(Part, entry='a'):\n    def on_step_end(self, done): pass",
            "on_step_end. Part has after_step, before_update, ",
        ),
        ("class A(Part, entry='a'):\n    def after_steps(self, done): pass", "Did you mean after_step? Part has"),
        ("class A(Part, entry='a'):\n    def after_step(self): pass", "class A: llmtrain calls after_step(done)"),
        ("class A(Sink, entry='a'):\n    def log(self, row): pass", "llmtrain calls log(row, *, more)"),
        (
            f"{FROZEN}class A(Schedule, choice='a'):\n    def factor(self, step, max_steps): return 1.0",
            "no method after_warmup(step, max_steps)",
        ),
        ("class A(Metric, entry='a'):\n    def compute(self, nll, labels): return nll", "compute. Metric has values; "),
        ("class A(Metric, entry='a'): pass", "no method values(nll, labels)"),
        ("x = 1", "Part, Schedule, ByToken"),
        ("class TrainerCallback: pass\nclass A(TrainerCallback): pass", "TrainerCallback of transformers"),
        (
            "class A(Part): pass",
            'class A has no name, and no configuration can select it. Write class A(Part, entry="a',
        ),
        (f"{FROZEN}class A(ByToken):\n    def terms(self, nll): return nll", 'Write class A(ByToken, choice="a")'),
        ("@dataclass(frozen=True, kw_only=True)\nclass A(ByToken, choice='a'): pass", "no method terms(nll)"),
    ],
)
def test_a_wrong_plugin_is_named_with_its_line(code: str, told: str, here: Path) -> None:
    (here / "mine.py").write_text(f"{HEAD}{code}\n")
    with pytest.raises(ConfigError) as error:
        parse(["run.yaml", "--plugin", "mine.py"])
    assert str(error.value).startswith("--plugin mine.py: ") and told in str(error.value)


FORMULAS = f"""{HEAD}
@dataclass(frozen=True, kw_only=True)
class Loss(ByToken, choice="loss"):
    def terms(self, nll):
        return nll / self.missing

@dataclass(frozen=True, kw_only=True)
class Detached(Loss, choice="detached"):
    def terms(self, nll):
        return nll.detach() * 2

@dataclass(frozen=True, kw_only=True)
class Infinite(Loss, choice="infinite"):
    def terms(self, nll):
        return 1 / (nll - nll)

@dataclass(frozen=True, kw_only=True)
class Rate(Schedule, choice="rate"):
    def after_warmup(self, step, max_steps):
        return 1.0 if step < max_steps - 1 else None

@dataclass(kw_only=True)
class Value(Metric, entry="value"):
    def values(self, nll, labels):
        return nll.mean()

@dataclass(frozen=True, kw_only=True)
class Steps(Optimizer, choice="steps"):
    pass

from llmtrain.optim.optimizers import Muon

@dataclass(frozen=True, kw_only=True)
class Whole(Muon, choice="whole"):
    pass
"""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--objective.name loss", "objective.name loss: terms: mine.py line 7: AttributeError: "),
        (
            "--objective.name detached",
            "objective.name detached: terms gives a loss of torch.float32 without a gradient",
        ),
        ("--objective.name infinite", "objective.name infinite: terms gives a loss that is not finite for ordinary"),
        ("--schedule.name rate", "schedule.name rate: after_warmup returns None at step "),
        (
            "--optim.name steps",
            "optim.name steps: build: NotImplementedError: an optimizer needs a method build(groups)",
        ),
        ("--optim.name whole", "optim.name whole: it inherits from an optimizer that steps matrices as a whole"),
        ("--metrics.value", "metrics.value: values gives (); it must return a tensor of a value for each token"),
    ],
)
def test_a_plugins_formula_is_tried_at_the_check(
    words: str, told: str, tmp_path: Path, small_data: str, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FORMULAS)
    recipe = write_recipe(tmp_path, small_data)
    assert main(["config", "check", str(recipe), "--plugin", "mine.py", *words.split()]) == 2
    assert told in capsys.readouterr().err


JUDGED = f"""{HEAD}from llmtrain.objectives.preferences import Kto
{FROZEN}class Judged(Kto, choice="judged"):
    raises: bool = False
    def terms(self, answers):
        return answers.missing if self.raises else (answers.log_prob.detach(),) * (1 + len(self.figures))
"""


@pytest.mark.parametrize(
    ("raises", "told"),
    [
        (True, r"terms: mine\.py line 8: AttributeError"),
        (False, "terms gives a loss of torch.float32 without a gradient"),
    ],
)
def test_an_objective_over_answers_judged_alone_is_named_in_a_step(
    raises: bool, told: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from llmtrain.engine.losses import answers
    from llmtrain.engine.losses.named import loss_of

    (here / "mine.py").write_text(JUDGED)
    plugin_import.use(["mine.py"])
    log_prob = torch.linspace(-4, -1, 4).requires_grad_()
    monkeypatch.setattr(answers, "answers_of", lambda *_: (log_prob, torch.ones(4)))
    monkeypatch.setattr(answers, "answers_in", lambda micro: micro)
    micro = SimpleNamespace(reference=log_prob.detach(), facts={"desirable": log_prob > -2})
    loss = loss_of(Objective.CHOICES["judged"](raises=raises))
    with pytest.raises(ModelError, match=f"objective.name judged: {told}"):
        loss.sums(SimpleNamespace(once=lambda sums: sums), log_prob, micro)


def test_the_page_has_the_methods_of_each_base() -> None:
    page = (REPO / "docs/extend.md").read_text()
    table = dict(re.findall(r"^\| `([A-Z]\w+)` \| ((?:none; )?`\w+\(.*?) \|$", page, flags=re.M))
    for name, shown in table.items():
        base = getattr(llmtrain, name)
        known = inspect.getmembers(base, inspect.isfunction)
        own = getattr(base, "own_methods", ())
        wanted = {plugin_import._call(method) for word, method in known if word[0] != "_" and word not in own}
        assert set(re.findall(r"`(\w+\([^`]*\))`", shown)) == wanted, name
    assert set(table) == {
        "ByToken",
        "Pairs",
        "OverAnswers",
        "RowKind",
        "Schedule",
        "Optimizer",
        "Metric",
        "Part",
        "Sink",
        "Source",
    }


def test_a_changed_file_is_imported_anew(here: Path) -> None:
    parse(["run.yaml", "--plugin", "mine.py"])
    before = plugins.hashes()
    (here / "mine.py").write_text(MINE.replace("-self.power", "-1"))
    config = parse(["run.yaml", "--plugin", "mine.py", "--schedule.name=steep"]).config
    assert config.schedule.factor(3, None) == 0.25 and plugins.hashes().keys() == before.keys() != plugins.hashes()
    assert plugins.hashes() != before


def test_a_file_that_fails_leaves_no_name_behind(here: Path) -> None:
    (here / "mine.py").write_text(f"{MINE}\nx = 1 / 0\n")
    with pytest.raises(ConfigError):
        parse(["run.yaml", "--plugin", "mine.py"])
    assert "steep" not in Schedule.CHOICES and Entry.SECTIONS["parts"] == {}


def test_the_package_exports_few_names_each_of_which_there_is() -> None:
    assert len(llmtrain.__all__) <= 17
    assert all(getattr(llmtrain, name).__doc__ for name in llmtrain.__all__)
    with pytest.raises(AttributeError, match="'Prat'"):
        _ = llmtrain.Prat


@pytest.mark.parametrize(
    ("file", "most"),
    [
        ("focal_loss", 25),
        ("layer_norms", 35),
        ("host_load", 40),
        ("notify", 20),
        ("sqrt_schedule", 12),
        ("csv_source", 20),
        ("sample_table", 20),
    ],
)
def test_an_example_has_few_lines_of_code(file: str, most: int) -> None:
    tree = ast.parse((REPO / f"examples/{file}.py").read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert [ast.get_docstring(node) is not None for node in classes] == [True]
    lines = sum(len([line for line in ast.unparse(node).splitlines() if line.strip()]) for node in classes)
    assert lines <= most


def test_the_ported_callbacks_of_the_page_take_part(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPO / "docs/extend.md").read_text()
    (block,) = re.findall(r"^### From a TrainerCallback\n.*?```python\n(.*?)```", page, flags=re.M | re.S)
    head = "import time\nfrom dataclasses import dataclass\nfrom llmtrain import Part, Request, bounded\n"
    (here / "ported.py").write_text(head + block)
    hour = time.localtime().tm_hour
    words = ["run.yaml", "--plugin", "ported.py", "--parts.printer", "--parts.until.hour"]
    parts = parse([*words, str(hour)]).config.parts
    parts["printer"].open(None)
    assert capsys.readouterr().out == "Starting training\n" and parts["until"].request() == Request(stop=True)
    assert parse([*words, str((hour + 12) % 24)]).config.parts["until"].request() == Request()


def test_ranks_import_the_files_that_the_launch_has_carried(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["run.yaml", "--plugin", "mine.py", "--schedule.name", "steep"]
    parse(words)
    (variable, packed), *more = plugin_import.carried().items()
    known = plugins.hashes()
    assert variable == plugins.CARRIED and not more and "\n" not in packed
    monkeypatch.setenv(variable, packed)
    plugin_import.use([])
    assert plugin_import.carried() == {}
    for there in (None, f"{MINE}\nraise RuntimeError('of another host')\n"):  # the launch's content counts
        (here / "mine.py").unlink() if there is None else (here / "mine.py").write_text(there)
        plugin_import.use([])
        assert parse(words).config.schedule.factor(1, None) == 2.0**-2 and plugins.hashes() == known


def test_a_file_that_no_variable_can_carry_is_refused(here: Path) -> None:
    (here / "mine.py").write_text(f"{MINE}\nTABLE = {os.urandom(1 << 17)!r}\n")
    parse(["run.yaml", "--plugin", "mine.py"])
    with pytest.raises(ConfigError, match=r"--plugin mine\.py"):
        plugin_import.carried()


def test_a_figure_of_a_plugins_metric_may_decide(here: Path) -> None:
    rare = "@dataclass(kw_only=True)\nclass Rare(Metric, entry='rare'):\n    below: float = 0.01\n"
    rare += "    def values(self, nll, labels):\n        return nll\n"
    (here / "rare.py").write_text(f"{HEAD}from llmtrain import Metric\n{rare}")
    words = ["run.yaml", "--plugin", "rare.py", "--metrics.rare", "--train.eval_every", "4"]
    words += ["--checkpoint.keep_best.metric"]
    assert parse([*words, "eval/rare", "--checkpoint.keep_best.mode", "max"]).config.checkpoint.keep_best.mode == "max"
    with pytest.raises(ConfigError, match=r"checkpoint\.keep_best\.mode"):
        parse([*words, "eval/rare"])
    with pytest.raises(ConfigError, match='"eval/common"', check=lambda e: e.keys == {"checkpoint.keep_best.metric"}):
        parse([*words, "eval/common"])
