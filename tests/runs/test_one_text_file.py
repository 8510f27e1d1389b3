"""One text file without validation data. With it, by the quickstart alone: test_newcomer.py."""

from __future__ import annotations

import os
import re
import shlex
from functools import partial
from pathlib import Path

import pytest

from llmtrain.cli import main
from llmtrain.data.shards import PreparedSet
from tests.helpers import forked
from tests.helpers.launching import rows
from tests.helpers.play import write_play

ROOT = Path(__file__).resolve().parents[2]
SMALL = shlex.split(
    "--model.config.hidden_size 32 --model.config.num_hidden_layers 2 --optim.name adamw --optim.muon_lr null "
    "--schedule.warmup_steps 1 --train.max_steps 6 --train.eval_every 3 --train.eval_sequences 8 "
    "--tracking.wandb disabled"
)


def go_to(folder: Path, rank: int) -> None:
    os.chdir(folder)


def commands() -> list[list[str]]:
    """The first block of the quickstart's section "Your own text", word by word, without the program's name."""
    section = (ROOT / "docs/quickstart.md").read_text().partition("## Your own text")[2].partition("\n## ")[0]
    block = re.search(r"^```bash\n(.*?)^```", section, flags=re.M | re.S)
    assert block is not None
    lines = [shlex.split(line, comments=True) for line in block[1].replace("\\\n", " ").splitlines()]
    return [words[1:] for words in lines if words and words[0] == "llmtrain"]


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a clone, with one text file where the quickstart has "my_text"."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("launch", "ds_configs"):
        (folder / name).symlink_to(ROOT / name)
    source = option(next(words for words in commands() if words[0] == "prepare"), "--source")
    path = folder / re.sub(r"\*\*/", "", source).replace("*", "input")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_play(path)
    return folder


def train(clone: Path, arguments: list[str]) -> tuple[int, str]:
    recipe = clone / option(arguments, "--config")
    (clone / "logs").mkdir(exist_ok=True)
    launch = forked.Launch(
        recipe, *arguments[3:], world_size=1, before=partial(go_to, clone), log_folder=clone / "logs"
    )
    code = launch.wait(180)[0]
    assert code is not None, launch.output()
    return code, launch.output()


def test_without_validation_data_config_check_and_train_agree_and_eval_off_trains(
    clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(clone)
    source = option(commands()[0], "--source")
    prepare = ["prepare", "--source", source, "--vocab-size", "300", "--out", "data/all", "--validation-fraction", "0"]
    assert main(prepare) == 0
    assert PreparedSet("data/all").manifest.documents == {"train": 1, "validation": 0}
    recipe = "launch/recipes/quickstart.yaml"
    fields = ["--data.path", "data/all", "--train.run_dir", "runs/all", *SMALL]
    said = (
        "its validation split (0 tokens) does not fill one sequence of data.sequence_length 128",
        "--validation-source FILE, or set train.eval to off",
    )
    capsys.readouterr()
    assert main(["config", "check", recipe, *fields]) == 2
    error = capsys.readouterr().err
    assert all(words in error for words in said), error
    code, output = train(clone, ["train", "--config", recipe, *fields])
    assert code == 2 and all(words in output for words in said) and not (clone / "runs/all").exists(), output
    off = [*fields, "--train.eval", "off"]
    assert main(["config", "check", recipe, *off]) == 0
    code, output = train(clone, ["train", "--config", recipe, *off])
    assert code == 0 and "no validation loss: train.eval is off" in output, output
    run = clone / "runs/all"
    assert [row["step"] for row in rows(run)] == [6] and not any("eval/loss" in row for row in rows(run))
    kinds = [event["kind"] for event in rows(run, "events.jsonl")]
    assert "export" in kinds and "sample" in kinds and "baselines" not in kinds
    assert re.search(r"^  eval: false$", (run / "config.yaml").read_text(), flags=re.M)
    assert main(["report", str(run)]) == 0
    assert "Validation loss" not in (run / "report/index.html").read_text()
