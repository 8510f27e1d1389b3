"""Resuming from the command line: checkpoints that were damaged, folders that cannot be written, weights alone.

More than 20 CPU s: each checkpoint is resumed by a launch of its own.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from llmtrain import cli
from llmtrain.checkpoint.format import complete_checkpoints, step_folder
from tests.helpers import forked
from tests.helpers.checkpoints import flip
from tests.helpers.launching import losses, resumed, rows, write_recipe
from tests.helpers.stored import machine

CONSTANT = ("--schedule.name", "constant")
FORMAT_1 = Path(__file__).parents[1] / "data" / "checkpoints-1"
FORMS = {
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero2": {"zero_optimization": {"stage": 2}},
    "zero3": {"zero_optimization": {"stage": 3}},
    "pp2": {"zero_optimization": {"stage": 1}, "pipeline": {"stages": 2}},
}


@pytest.mark.parametrize(
    ("saved", "form"),
    [
        ("zero1", "pp2"),
        ("zero3", "zero3"),
        ("zero3", "zero1"),
        ("pp2", "zero3"),
        ("zero1-muon", "zero1"),
        ("zero1-muon", "zero2"),
    ],
)
def test_checkpoints_that_earlier_code_made_go_on_as_it_would_have(tmp_path, saved, form):
    """Two more steps; the README of the folder says which code."""
    shutil.copytree(FORMAT_1 / saved / "checkpoints", tmp_path / "run" / "checkpoints")
    recipe, file = tmp_path / "recipe.yaml", tmp_path / "ds.json"
    file.write_text(json.dumps(FORMS[form]))
    tree = yaml.safe_load((FORMAT_1 / saved / "recipe.yaml").read_text())
    tree["data"]["path"], tree["train"]["run_dir"] = str(FORMAT_1 / "data"), str(tmp_path / "run")
    recipe.write_text(yaml.safe_dump({**tree, "deepspeed": str(file)}))
    forked.train(recipe, "--train.max_steps", "5")
    assert resumed(tmp_path / "run") == [3]
    want = json.loads((FORMAT_1 / "losses.json").read_text())
    got = losses(tmp_path / "run")
    if saved.startswith(form) and machine() == want["machine"]:
        assert [got[4], got[5]] == want[saved]
    assert [got[4], got[5]] == pytest.approx(want[saved], rel=1e-6)


@pytest.fixture(scope="module")
def trained(small_data, tmp_path_factory) -> tuple[Path, Path]:
    """The recipe and the folder of a run with checkpoints of steps 2, 4, ... 16."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = write_recipe(folder, small_data)
    every = ("--checkpoint.every_steps", "2", "--checkpoint.keep", "8")
    forked.train(recipe, *CONSTANT, "--train.max_steps", "16", *every)
    return recipe, folder / "run"


def test_auto_walks_back_past_every_kind_of_damage(trained, small_data, tmp_path):
    """Each is named, none is taken, and what follows is what was there before, digit for digit."""
    recipe, run = trained
    other = write_recipe(tmp_path, small_data)
    forked.train(other, *CONSTANT, "--train.max_steps", "8", "--train.seed", "1")
    before, at = losses(run), {step: step_folder(run / "checkpoints", step) for step in range(2, 18, 2)}
    assert complete_checkpoints(run / "checkpoints") == [at[step] for step in range(16, 0, -2)]
    flip(at[16] / "rank-00001.safetensors", -3000)
    flip(at[14] / "rank-00000.safetensors", 40)
    with open(at[12] / "rank-00000.safetensors", "r+b") as file:
        file.truncate(20_000)
    (at[10] / "rank-00001.safetensors").unlink()
    shutil.copy(step_folder(tmp_path / "run" / "checkpoints", 8) / "manifest.json", at[8])
    flip(at[6] / "trainer.json", 100)
    flip(at[4] / "manifest.json", 100)

    output = forked.train(recipe, *CONSTANT, "--train.max_steps", "16", "--checkpoint.keep", "8")
    said = {line.split(":")[0][-2:]: line for line in output.splitlines() if line.startswith("skipped step-")}
    assert list(said) == ["16", "14", "12", "10", "08", "06", "04"]
    files = {step: re.search(r"(rank-\d+|trainer|manifest)\.", line)[1] for step, line in said.items()}
    tensors = {"16": "rank-00001", "14": "rank-00000", "12": "rank-00000", "10": "rank-00001"}
    assert files == {**tensors, "08": "trainer", "06": "trainer", "04": "manifest"}, said
    assert "20000 bytes" in said["12"] and "missing" in said["10"]
    assert str(at[2]) in output and resumed(run) == [2]
    assert losses(run) == before
    names = {p.name for p in (run / "checkpoints").iterdir()}
    assert {f"{at[step].name}.damaged" for step in range(4, 18, 2)} <= names


def test_a_damaged_checkpoint_that_is_named_is_refused(trained, tmp_path):
    recipe, run = trained
    copied = shutil.copytree(complete_checkpoints(run / "checkpoints")[0], tmp_path / "copied")
    flip(copied / "rank-00000.safetensors", -3000)
    to = ("--train.run_dir", str(tmp_path / "to"), "--resume", str(copied))
    code, output = forked.finish(recipe, *CONSTANT, *to, world_size=1)
    assert code == 2 and "Traceback" not in output and output.count("error:") == 1
    assert "copied: rank-00000.safetensors" in output, output
    assert copied.is_dir() and not rows(tmp_path / "to")


@pytest.fixture
def read_only(trained, tmp_path) -> Iterator[Path]:
    """The run's folder, mounted so that nothing can be written in it."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    mounted = subprocess.run(["mount", "--bind", trained[1], folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"needs the right to mount a folder: {mounted.stderr.decode().strip()}")
    subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_weights_alone_from_a_read_only_folder_and_a_restart(trained, read_only, tmp_path):
    """The run begins at step 0 with an identity of its own. The same command again goes on where it came to."""
    recipe, _ = trained
    code, output = forked.finish(recipe, *CONSTANT, "--train.run_dir", str(read_only))
    assert code == 2 and "Traceback" not in output
    assert f"train.run_dir: {read_only} cannot be used: nothing can be written in it" in output

    path, run = complete_checkpoints(read_only / "checkpoints")[0], tmp_path / "tuned"
    command = ("--resume", str(path), "--resume-weights-only", "--train.run_dir", str(run), *CONSTANT)
    output = forked.train(recipe, *command, "--train.max_steps", "4", "--optim.lr", "1e-4", "--data.seed", "3")
    assert f"took the parameters of {path}" in output
    assert sorted(losses(run)) == [1, 2, 3, 4] and losses(run)[1] < losses(trained[1])[1] - 0.01
    state, source = (json.loads((p / "trainer.json").read_text()) for p in (newest(run), path))
    assert state["optimizer_step"] == 4 and state["sample_index"] == 32
    assert state["run_id"] != source["run_id"]

    output = forked.train(recipe, *command, "--train.max_steps", "6", "--optim.lr", "1e-4", "--data.seed", "3")
    assert f"resumed from {run / 'checkpoints' / 'step-00000004'} at step 4" in output
    assert sorted(losses(run)) == [1, 2, 3, 4, 5, 6]
    assert json.loads((newest(run) / "trainer.json").read_text())["run_id"] == state["run_id"]


def newest(run: Path) -> Path:
    return complete_checkpoints(run / "checkpoints")[0]


def test_a_resume_with_another_global_batch_goes_on_at_the_sample_where_the_run_was(small_data, tmp_path):
    """Two steps of 8 sequences, then of 4: the third reads sequences 16 to 19. Its loss is the one that transformers'
    own model has of them, from the weights that were exported (both fp32: 1e-5); step x batch would read 8 to 11."""
    import torch
    from transformers import AutoModelForCausalLM

    from llmtrain.config.run import DataConfig
    from llmtrain.data.stream.train_data import TrainData

    recipe = write_recipe(tmp_path, small_data)
    plain = (*CONSTANT, "--model.config.attention_dropout", "0.0", "--train.export", "true")
    forked.train(recipe, *plain, "--train.max_steps", "2")
    model = AutoModelForCausalLM.from_pretrained(next((tmp_path / "run").glob("export*")))
    forked.train(recipe, *plain, "--train.max_steps", "3", "--train.global_batch", "4")
    data = TrainData(DataConfig(path=small_data, sequence_length=32))

    def loss(first: int) -> float:
        inputs, labels = (
            torch.stack([torch.from_numpy(data.sequence(first + at)[which]) for at in range(4)]) for which in (0, 1)
        )
        with torch.no_grad():
            logits = model(input_ids=inputs).logits
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100))

    got = losses(tmp_path / "run")[3]
    assert abs(got - loss(16)) < 1e-5 < abs(got - loss(8)), (got, loss(16), loss(8))


def train_first(words: list[str], rank: int) -> None:
    os.environ["MASTER_PORT"] = "0"  # as in a process that no launcher has started
    for _ in range(2):  # the second has nothing to do
        assert cli.main(["train", *words, "--train.max_steps", "5"]) == 0


def test_a_second_run_in_one_process_is_longer_and_says_so(small_data: str, tmp_path: Path) -> None:
    """The second `main` met DeepSpeed's groups of the first; a seed of 62 bits was more than torch takes; a run made
    longer jumped to another learning rate in silence; and 30 epochs looked like any other run. `--resume FOLDER`."""
    common = ["--train.seed", str(2**62 + 1), "--data.seed", str(2**63 - 1), "--train.eval", "off"]
    auto = tmp_path / "auto.json"
    auto.write_text(json.dumps({"zero_optimization": {"stage": 1}, "fp16": {"enabled": "auto"}}))
    words = ["--config", str(write_recipe(tmp_path, small_data)), "--deepspeed", str(auto), *common]
    code, output = forked.finish(
        Path(words[1]),
        *words[2:],
        "--train.max_steps",
        "20",
        world_size=1,
        before=functools.partial(train_first, words),
    )
    assert code == 0, output
    assert output.count("max_steps 5 is reached") == 1, output
    assert re.search(r'fp32 \(.*"auto"\), ZeRO 1', output), output
    assert "train.max_steps: 5 -> 20" in output
    told = re.search(r"rate jumps to (\S+) at step 6, where \S+ was planned \(it was (\S+) at step 5\)", output)
    assert told, output
    second, first = told.groups()
    rates = {row["step"]: row["lr"] for row in rows(tmp_path / "run") if "lr" in row}
    assert [float(first), float(second)] == pytest.approx([rates[5], rates[6]], rel=5e-3) and rates[6] > 5 * rates[5]
    assert re.search(r"epochs of \S+, whose training split has", output) is None
    code, output = forked.finish(
        Path(words[1]),
        *words[2:],
        "--train.max_steps",
        "2000",
        "--train.max_minutes",
        "0.001",
        "--resume",
        str(tmp_path / "run"),
        "--train.run_dir",
        str(tmp_path / "b"),
        world_size=1,
    )
    assert code == 0 and resumed(tmp_path / "b") == [20], output
    assert re.search(r"\d+ epochs of \S+, whose training split has \S+ tokens; beyond 4 epochs text", output)
