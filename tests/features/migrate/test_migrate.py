"""docs/migrate.md: every option of usual TRL scripts and of files of other stacks is on it; what it names is real, and
the error about an unknown key says it."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from llmtrain import cli
from llmtrain.config.answers import unknown
from llmtrain.config.deepspeed.keys import KEYS
from llmtrain.config.load import parse
from llmtrain.config.problems import Problems, closest
from llmtrain.config.resolve import resolve
from llmtrain.config.run import RunConfig
from llmtrain.config.schema import schema
from llmtrain.features.migrate.rows import options, tables, with_tables
from tests.helpers.launching import REPO

PAGE = (REPO / "docs/migrate.md").read_text()
SCRIPTS = sorted((REPO / "tests/data/migrate").glob("*.py"))
FILES_OF = {stack: REPO / f"tests/data/migrate/{stack}.yaml" for stack in ("llamafactory", "axolotl")}
FILES = ("config.json", "manifest.json", "metrics.jsonl", "dataset_info.json")
INSTEAD = ("not here", "always", "the variable ", "config.json", "by itself", "in the JSON", "template's affair")
"""What an answer without a key of ours says."""
COMMON = "transformers.TrainingArguments"


def by_class() -> dict[str, dict[str, str]]:
    """Class, such as trl.SFTConfig -> its options -> our answers."""
    found: dict[str, dict[str, str]] = {}
    for name, option, row in options():
        of_class = found.setdefault(name, {})
        assert option not in of_class, f"{name}: {option} stands twice"
        of_class[option] = row.answer
    return found


TABLES = by_class()
ROWS = [(row.names, row.answer) for table in tables() for row in table.rows]


def test_the_page_has_the_tables_of_the_rows() -> None:
    """`python -m llmtrain.features.migrate.rows docs/migrate.md` writes them."""
    assert with_tables(PAGE) == PAGE


def answer(owner: str, option: str) -> str | None:
    """What the page says to an option of a class, such as trl.SFTConfig."""
    trains = owner in FILES_OF or (owner.startswith("trl.") and owner.endswith("Config"))
    return TABLES[owner].get(option) or (TABLES[COMMON].get(option) if trains else None)


def keywords(script: Path) -> list[tuple[str, str]]:
    """(class, keyword) of each argument that a script gives to a class of TRL or PEFT, and to `train`."""
    tree = ast.parse(script.read_text())
    home = {
        alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in ("trl", "trl.experimental.gkd", "peft")
        for alias in node.names
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = []
    for call in calls:
        if isinstance(call.func, ast.Name) and call.func.id in home:
            found += [(home[call.func.id], str(each.arg)) for each in call.keywords]
        elif isinstance(call.func, ast.Attribute) and call.func.attr == "train":
            found += [(COMMON, str(each.arg)) for each in call.keywords]
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_every_argument_of_a_script_of_trl_is_on_the_page(script: Path) -> None:
    given = keywords(script)
    assert len(given) >= 14, given
    assert [(owner, option) for owner, option in given if answer(owner, option) is None] == []


@pytest.mark.parametrize("stack", FILES_OF)
def test_every_option_of_a_file_is_on_the_page_and_in_the_error(stack: str) -> None:
    """A user who copies a line of it into our YAML reads what it is here."""
    given = yaml.safe_load(FILES_OF[stack].read_text())
    assert len(given) > 30 and [option for option in given if answer(stack, option) is None] == []
    for option in given:
        said = told(option)
        key = next((code for code in re.findall(r"`([^`]+)`", answer(stack, option) or "")), "")
        assert "lists every field" not in said and (key in said or answer(COMMON, option)), (option, said)


def told(key: str, value: Any = 1) -> str:
    """The error about a key that there is not."""
    problems = Problems()
    unknown(RunConfig, key, value, problems)
    return str(problems.error())


def test_a_name_of_other_stacks_is_answered_from_the_page_and_no_unrelated_word_is_proposed() -> None:
    """By likeness of letters alone these were max_steps, sites.max_alone_steps, optim.eps, train.export, rpo, ..."""
    for key, ours in {
        "eval_steps": "train.eval_every",
        "logging_steps": "train.log_every",
        "epochs": "train.epochs",
        "report_to": "tracking.wandb",
        "data.validation": "`llmtrain prepare --validation-source`",
        "train.profile": "profile.steps",
        "lora_r": "adapter.r?",
        "train.num-train-epochs": "train.epochs",
        "temperature": "objective.temperature?",
        "train_bach_size": "train.global_batch?",
        "max_train_steps": "train.max_steps?",
        "optimm": "did you mean optim?",
        "training": "did you mean train?",
        "tp": "tensor_parallel.autotp_size",
        "seed": "did you mean train.seed?",
    }.items():
        assert ours in told(key), told(key)
    for word in ("foo", "gpu", "evaluate_at", "mixin", "tagging", "seeed_x", "profiling"):
        assert "did you mean" not in told(word), told(word)
    for asked, known in (
        ("grpo", "rpo"),
        ("ppo", "dpo"),
        ("epochs", "eps"),
        ("report_to", "export"),
    ):
        assert closest(asked, [known]) is None
    for asked, known in (("lrr", "lr"), ("sgae", "sage"), ("ofline", "offline"), ("warmup_steps", "warmup_num_steps")):
        assert closest(asked, ["unlike", known]) == known


@pytest.mark.parametrize(
    ("key", "value", "ours"),
    [
        ("loss_type", "nll", "`nll` is `next_token`"),  # SFT's table
        ("loss_type", "ipo", "`ipo` is `ipo`"),  # DPO's
        ("loss_type", ["sigmoid", "sft"], "`[sigmoid, sft]` is `rpo`"),
        ("loss_type", "kto", "`kto` is `kto`"),  # KTO's
        ("loss_type", "sppo_hard", "others: not here"),
        ("use_peft", True, "adapter.r?"),
        ("dataset_train_split", "train", "`llmtrain prepare --source`: `hf:ORG/NAME/data/train-*`"),
        ("hub_strategy", "end", "`llmtrain checkpoint to-hf --push`"),
        ("save_safetensors", True, "remove it: always"),
        ("predict_with_generate", True, "samples.prompts?"),
        ("plugin", "mine.py", "--plugin mine.py"),
        ("local_rank", 0, "the launcher gives it"),
    ],
)
def test_a_name_of_several_tables_is_answered_by_the_one_with_its_value(key: str, value: Any, ours: str) -> None:
    assert ours in told(key, value), told(key, value)


def test_a_value_of_transformers_is_answered_by_the_part_that_is_ours(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(REPO / "launch/recipes/quickstart.yaml")
    for words, said in {
        ("--optim.name", "adamw_torch_fused"): "did you mean adamw?",
        ("--optim", "adamw_torch_fused"): "write --optim.name adamw\n",
        ("--schedule.name", "cosine_with_restarts"): "did you mean cosine?",
        ("--plugn", "mine.py"): "did you mean --plugin?",
    }.items():
        assert cli.main(["config", "check", recipe, *words]) == 2
        assert said in capsys.readouterr().err, words


def is_json_key(dotted: str) -> bool:
    level: Any = KEYS
    for word in dotted.split("."):
        if not isinstance(level, dict) or word not in level:
            return False
        level = level[word]
    return True


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """`llmtrain COMMAND --help`."""
    try:
        cli.main([*command.split(), "--help"])
    except SystemExit as done:
        assert not done.code, command
    return capsys.readouterr().out


def test_every_key_and_flag_that_the_page_names_exists(capsys: pytest.CaptureFixture[str]) -> None:
    """Names with a dot are keys; `llmtrain ...` is a command, and a flag that follows is one of its own."""
    keys = {key for key in schema() if "." in key}
    helps: dict[str, str] = {}
    named = 0
    for theirs, ours in ROWS:
        command = ""
        for code in re.findall(r"`([^`]+)`", ours):
            if code in FILES:
                continue
            if code.startswith("llmtrain "):
                command = re.match(r"llmtrain ((?:checkpoint )?[a-z-]+)", code)[1]  # type: ignore[index]
                helps.setdefault(command, help_of(command, capsys))
            for flag in re.findall(r"--[a-z-]+", code):
                assert re.search(rf"{flag}\b(?!-)", helps[command]), (theirs, command, flag)
                named += 1
            if re.fullmatch(r"[a-z_]+\.[a-z0-9_]+", code):
                assert code in keys or is_json_key(code), (theirs, code)
                named += 1
    assert named > 120, named


def test_every_value_that_the_page_names_is_one_of_its_key() -> None:
    """`theirs` is `ours`: ours is a value of the first key of the line."""
    checked = 0
    for theirs, ours in ROWS:
        for value in re.findall(r"\bis `([^`]+)`", ours):
            key = re.findall(r"`([a-z_]+\.[a-z_]+)`", ours)[0]
            if key == "adapter.targets":
                assert value == "all-linear"
            else:
                legal = {each for kind in (schema()[key], *get_args(schema()[key])) for each in get_args(kind)}
                assert value in legal, (theirs, key, value)
            checked += 1
    assert checked >= 20, checked


def test_every_line_of_a_table_answers() -> None:
    for theirs, ours in ROWS:
        codes = re.findall(r"`([^`]+)`", ours)
        keyed = any(code in schema() or is_json_key(code) or code.startswith("llmtrain ") for code in codes)
        assert keyed or any(words in ours for words in INSTEAD), (theirs, ours)


def test_the_yaml_of_the_page_is_the_script_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    section = PAGE.partition("## A script and its YAML")[2]
    script, text = (re.search(rf"```{kind}\n(.*?)```", section, re.S)[1] for kind in ("python", "yaml"))  # type: ignore[index]
    (tmp_path / "talks.yaml").write_text(text)
    parsed = parse(["--config", str(tmp_path / "talks.yaml")], check_paths=False)
    config = resolve(parsed.config, 8, places=parsed.places).config
    given = {
        each.arg: each.value.value
        for each in ast.walk(ast.parse(script))
        if isinstance(each, ast.keyword) and isinstance(each.value, ast.Constant)
    }
    ours = {
        "model": config.model.pretrained,
        "r": config.adapter.r,
        "lora_alpha": config.adapter.alpha,
        "target_modules": config.adapter.targets[0],
        "output_dir": config.train.run_dir,
        "max_length": config.data.sequence_length,
        "packing": config.data.isolate_documents,
        "per_device_train_batch_size": config.train.micro_batch,
        "gradient_accumulation_steps": config.train.accumulation,
        "learning_rate": config.optim.lr,
        "lr_scheduler_type": config.schedule.name,
        "warmup_steps": config.schedule.warmup_steps,
        "max_steps": config.train.max_steps,
        "logging_steps": config.train.log_every,
        "save_steps": config.checkpoint.every_steps,
    }
    assert {option: given[option] for option in ours} == ours
    assert given.keys() - ours.keys() == {"assistant_only_loss", "deepspeed", "data_files", "split"}
    assert f"--max-tokens {given['max_length']} " in PAGE and "--format chat" in PAGE  # answers alone are counted


def options_of(owner: str) -> tuple[set[str], set[str]]:
    """(options that are the class's own, all that it takes), as installed."""
    module, _, name = owner.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    if dataclasses.is_dataclass(cls):
        every = {field.name for field in dataclasses.fields(cls)}
        return {option for option in every if option in inspect.get_annotations(cls)}, every
    every = set(inspect.signature(cls.__init__).parameters) - {"self"}
    return every, every


OLD = {name for _, name, row in options() if "(before" in row.theirs}
"""Options of earlier versions."""
MOVED = {"peft_version"}
"""PEFT's own notes in a file, and no option."""


@pytest.mark.parametrize(
    "owner", [pytest.param(owner, marks=pytest.mark.needs(owner.partition(".")[0])) for owner in TABLES if "." in owner]
)
def test_the_tables_have_the_options_of_the_installed_libraries(owner: str) -> None:
    """None that a class of transformers, TRL or PEFT adds lacks, and none is made up."""
    own, every = options_of(owner)
    stated = TABLES[owner].keys()
    trainers = {name for other in TABLES if other.endswith("Trainer") for name in TABLES[other]}
    assert stated - every - OLD <= (trainers if owner.endswith("Trainer") else set())
    assert {option for option in own - MOVED if answer(owner, option) is None} == set()
