"""`llmtrain data where`: what the steps of a run have read, and which steps a document was read in."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from llmtrain import cli
from llmtrain.commands.prepare import main as prepare
from llmtrain.config.stages import DataConfig
from llmtrain.data.origins import Origins
from llmtrain.data.shards import PreparedSet
from llmtrain.data.stream.train_data import TrainData
from llmtrain.data.tokenize import Encoder
from tests.helpers import forked
from tests.helpers.launching import write_recipe


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of 400 lines in `set`; `run`: 12 steps of 2 ranks, twice resumed, after step 8 with twice the batch."""
    folder = tmp_path_factory.mktemp("where")
    with open(folder / "a.jsonl", "w") as stream:
        for number in range(1, 401):
            stream.write(json.dumps({"text": f"line {number} has " + "its own words " * (number % 7)}) + "\n")
    words = ["--source", str(folder / "a.jsonl"), "--vocab-size", "300", "--shard-bytes", "4000"]
    assert prepare([*words, "--out", str(folder / "set")]) == 0
    path = write_recipe(folder, str(folder / "set"))
    tree = yaml.safe_load(path.read_text())
    tree["data"]["stages"] = [{"from_step": 8, "train": {"global_batch": 16}}]
    path.write_text(yaml.safe_dump(tree))
    for steps in ("5", "9", "12"):
        forked.train(path, "--schedule.name", "constant", "--train.max_steps", steps)
    return folder


def where(trained: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert cli.main(["data", "where", str(trained / "set"), "--run", str(trained / "run"), *words]) == 0
    return capsys.readouterr().out


def test_the_documents_of_each_step_are_those_of_its_sequences(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the position that the order of the run has for each step: 8 sequences in steps 1 to 8, then 16."""
    data = TrainData(DataConfig(path=str(trained / "set"), sequence_length=32))
    stream = PreparedSet(trained / "set").split("train")
    encoder, first = Encoder(trained / "set/tokenizer"), 0
    for step in range(1, 13):
        batch = 8 if step <= 8 else 16
        said = where(trained, capsys, "--step", str(step))
        assert said.startswith(f"step {step}: {batch} sequences, {batch} of them from ")
        found = re.split(r"^sequence (\d+)\n", said, flags=re.M)[1:]
        assert [int(number) for number in found[::2]] == list(range(first, first + batch))
        for number, lines in zip(found[::2], found[1::2], strict=True):
            window = data.place_of(int(number))[1]
            ids = stream.read(window * 32, 33)
            text = encoder.decode(ids[:32].tolist())
            for line in re.findall(r"a\.jsonl:(\d+), ", lines)[1:-1]:
                assert f"line {line} has " in text
        ranks = [where(trained, capsys, "--step", str(step), "--rank", str(rank)) for rank in (0, 1)]
        halves = [set(re.findall(r"^sequence (\d+)$", half, flags=re.M)) for half in ranks]
        assert len(halves[0]) == len(halves[1]) == batch // 2 and halves[0] | halves[1] == set(found[::2])
        first += batch


def test_the_steps_of_a_document_are_those_that_name_it(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = {step: where(trained, capsys, "--step", str(step)) for step in range(1, 13)}
    asked = 0
    for number in range(1, 401, 13):
        said = where(trained, capsys, "--source", f"a.jsonl:{number}")
        if "is held out for validation" in said:
            continue
        asked += 1
        naming = [step for step, text in steps.items() if f"a.jsonl:{number}, " in text]
        assert f'"line {number} has ' in said
        assert (f"read in step {', '.join(map(str, naming))}\n" in said) if naming else "not read so far" in said
    assert asked > 20
    held_out = next(Origins(trained / "set", PreparedSet(trained / "set").manifest.shards["validation"]).within(0, 1))
    said = where(trained, capsys, "--source", f"a.jsonl:{held_out.record}")
    assert said == f"a.jsonl:{held_out.record} is held out for validation: no step reads it\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--step", "0"), "--step 0: the run's steps are numbered from 1"),
        (("--step", "99"), "--step 99: the run has done 12 steps"),
        (("--step", "3", "--rank", "2"), "--rank 2: at step 3 the run had ranks 0 to 1"),
        (("--source", "b.jsonl:3"), "--source b.jsonl:3: that record gave no training document of"),
        (("--source", "a.jsonl"), "write FILE:LINE"),
    ],
)
def test_what_is_not_there_is_said(
    words: tuple[str, ...], message: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["data", "where", str(trained / "set"), "--run", str(trained / "run"), *words]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said
