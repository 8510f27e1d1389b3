"""A user's kind of row with an objective over it, in one file: prepared, trained, and compared with plain PyTorch.

More than 20 CPU s: parity starts ranks for each form.
"""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

import pytest
import yaml

from llmtrain.cli import main
from llmtrain.commands.data import main as data
from llmtrain.config import plugin_import
from tests.helpers.forked import train
from tests.helpers.launching import REPO, rows, write_recipe
from tests.helpers.preference import preferences
from tests.helpers.warm import WarmCommands
from tests.runs.test_chat import write_model
from tests.runs.test_kills import llmtrain
from tests.runs.test_plugin import BLOCKS

PLUGIN = ("--plugin", str(REPO / "examples/ranked_answers.py"))
PREPARE, LAUNCH = (shlex.split(line) for block in BLOCKS if "ranked_answers" in block for line in block.splitlines())
"""The commands of docs/extend.md."""
SETTINGS = (*PLUGIN, *LAUNCH[LAUNCH.index("--data.path") + 2 :])
ROWS = 60


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over a folder that the command has prepared, with workers."""
    place = tmp_path_factory.mktemp("ranked")
    write_model(place / "model")
    records = [
        {"prompt": record["prompt"], "ranked": [record["chosen"] + "!", record["chosen"], record["rejected"]]}
        for record in preferences(ROWS)
    ]
    (place / "ranked.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    places = {
        PLUGIN[1].removeprefix(f"{REPO}/"): PLUGIN[1],
        "data/stdlib-chat/tokenizer": "model",
        "data/ranked": "data",
    }
    llmtrain(place, *(places.get(word, word) for word in PREPARE[1:]), "--processes", "1")
    tree = yaml.safe_load(write_recipe(place, str(place / "data")).read_text())
    tree |= {"model": {"pretrained": str(place / "model")}}
    tree["data"]["sequence_length"] = 256
    (path := place / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.timeout(300)
def test_a_users_kind_of_row_is_prepared_and_trained(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each answer of a record is a row of its own, in their order."""
    place, shown = recipe.parent, []
    manifest = json.loads((place / "data/manifest.json").read_text())
    assert sum(manifest["documents"].values()) == 3 * ROWS and manifest["settings"]["format"] == "ranked"
    assert data(["show", str(place / "data"), "--rows", "3", *PLUGIN]) == 0
    shown = capsys.readouterr().out
    for row, answer in enumerate(("first", "second", "third")):
        assert f"row {row} of train ({answer}): " in shown
    train(recipe, *SETTINGS, "--train.max_steps", "3")
    found = [row for row in rows(place / "run") if "loss" in row]
    assert found[0]["loss"] == pytest.approx(math.log(6), rel=0.2)  # six orders, of a model that knows nothing
    assert all(0 <= row["ranked/accuracy"] <= 1 and row["ranked/tokens"] > 1 for row in found)
    plugin_import.use([])
    assert main(["checkpoint", "to-hf", str(place / "run"), str(place / "hf")]) == 0  # what reads a run needs no plugin


def test_without_the_plugin_the_format_is_named(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin_import.use([])
    assert main(["data", "show", str(recipe.parent / "data")]) == 2
    assert "'ranked'" in (told := capsys.readouterr().err) and "plugin" in told


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "form", [{"zero_optimization": {"stage": 3}}, {"pipeline": {"stages": 2}}], ids=["zero3", "pipeline"]
)
def test_an_objective_over_a_users_kind_is_plain_pytorch(
    recipe: Path, form: dict[str, object], warm: WarmCommands
) -> None:
    (recipe.parent / "form.json").write_text(json.dumps(form))
    words = ("--deepspeed", str(recipe.parent / "form.json"), "--steps", "3", "--ranks", "2")
    llmtrain(recipe.parent, "parity", str(recipe), *SETTINGS, *words, warm=warm)  # the exit code is 0 where all agrees
