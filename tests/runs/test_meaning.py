"""Weights go on with the function that they were trained for: a configuration that has changed between two launches.

The shapes are the same in all of them. What is refused, where, and what another launch then trains with.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain import cli
from tests.helpers import forked
from tests.helpers.launching import TINY, losses, write_run
from tests.helpers.preference import prepared_preferences

OTHER_ROPE = {"rope_parameters": {"rope_theta": 50.0, "rope_type": "default"}}
HARMLESS = {"eos_token_id": 5, "dtype": "bfloat16", "use_cache": False, "attention_dropout": 0.0, "made_up": 1}
YARN = {"rope_type": "yarn", "factor": 4.0}
STAGES = [{"from_step": 1, "sequence_length": 64, "rope": {"rope_theta": 50.0}}, {"from_step": 2, "rope": YARN}]


def edit(folder: Path, **fields: Any) -> None:
    """The folder's config.json as it was made, with other fields."""
    whole = json.loads((folder / "made.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: value for key, value in (whole | fields).items() if value}))


def play(here: str, prefs: str, _: int) -> None:
    """Launches and edits, one after another in one process; NAME.txt has the exit code of each, and what it said."""
    os.environ["MASTER_PORT"] = "0"  # as in a process that no launcher has started
    os.chdir(here)

    def run(name: str, *words: str, command: str = "train") -> None:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = cli.main([command, *words])
        Path(f"{name}.txt").write_text(f"{code}\n{said.getvalue()}")

    def to(name: str) -> tuple[str, ...]:
        return ("recipe.yaml", "--train.run_dir", name)

    hf, first = Path("hf"), ("--resume", "whole/step-2")
    flat = ("--model.pretrained", "null", "--model.config", "hf")
    adapted = ("--adapter.r", "2", "--train.max_steps")
    staged = ("--data.stages", json.dumps(STAGES), "--train.max_steps", "4")
    answers = ("--data.path", prefs, "--data.isolate_documents", "true", "--data.sequence_length", "192")
    dpo = (*to("dpo"), *answers, "--objective.name", "dpo", "--train.max_steps")
    distill = (*to("taught"), "--objective.name", "distill", "--objective.teacher", "teacher", "--train.max_steps")
    run("whole", *to("whole"))
    run("lora", *to("lora"), *adapted, "1", "--train.export", "true")
    run("column", *dpo, "1", command="reference")
    run("dpo", *dpo, "1")
    run("taught", *distill, "1")
    run("tokenizer", *to("branch"), *first, *answers, "--resume_weights_only", "true", "--objective.name", "simpo")
    edit(Path("teacher"), **OTHER_ROPE, rms_norm_eps=0.05)
    run("teacher", *distill, "2")
    edit(hf, **OTHER_ROPE, rms_norm_eps=0.05)
    run("reference", *dpo, "2")
    shutil.copytree("whole", "same")
    run("full", *to("same"), "--train.max_steps", "4")
    run("data", *to("branch"), *first, "--resume_data", "new", "--data.seed", "1")
    run("weights", *to("branch"), *first, "--resume_weights_only", "true")
    run("beside", *to("lora"), *adapted, "2")
    run("generate", "lora", "--prompt", "a", command="generate")
    run("start", *to("branch"), *adapted, "2", "--adapter.start", "lora/export")
    run(
        "meant",
        *to("meant"),
        *first,
        "--resume_weights_only",
        "true",
        "--resume_model",
        "new",
        "--train.max_steps",
        "1",
    )
    run("unnamed", *to("branch"), "--resume_model", "new")
    edit(hf, hidden_act="relu")
    run("folder", *to("branch"), *first, *flat)
    edit(hf, **HARMLESS, rope_parameters=None, rope_theta=10000)  # as transformers 4 wrote it
    run("harmless", *to("harmless"), *first)
    edit(hf)
    run("staged", *to("staged"), *staged)
    run("resumed", *to("resumed"), *staged, "--resume", "staged/step-3")
    run("peft", *to("peft"), *adapted, "4", *staged[:2], "--train.export", "true")
    run("lost", *to("branch"), "--resume", "staged", "--resume_weights_only", "true")
    run("mean", "average", "whole/step-3", "meant", "mean", command="checkpoint")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, small_data: str) -> Path:
    """The folder of `play`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    here = tmp_path_factory.mktemp("meaning")
    torch.manual_seed(0)
    fields = {key: value for key, value in TINY.items() if key != "model_type"}
    LlamaForCausalLM(LlamaConfig(**fields, max_position_embeddings=48, initializer_range=0.2)).save_pretrained(
        here / "hf"
    )
    shutil.copytree(Path(small_data) / "tokenizer", here / "hf", dirs_exist_ok=True)
    shutil.copy(here / "hf/config.json", here / "hf/made.json")
    shutil.copytree(here / "hf", here / "teacher")
    (here / "hf/tokenizer.json").unlink()  # the preferences are of another tokenizer
    prefs = prepared_preferences(tmp_path_factory.mktemp("prefs"))
    train = {"global_batch": 4, "micro_batch": 4, "max_steps": 3}
    recipe = write_run(
        here,
        small_data,
        {"zero_optimization": {"stage": 1}},
        train,
        model={"pretrained": "hf"},
        checkpoint={"every_steps": 1, "keep": 9},
    )
    forked.finish(recipe, "--help", world_size=1, before=functools.partial(play, str(here), prefs))
    return here


def said(played: Path, name: str, code: int = 2) -> str:
    text = (played / f"{name}.txt").read_text()
    assert text.startswith(f"{code}\n") and "Traceback" not in text, text
    return text


REFUSED = (
    "full",
    "data",
    "weights",
    "beside",
    "folder",
    "lost",
    "mean",
    "generate",
    "start",
    "reference",
    "teacher",
    "tokenizer",
)


@pytest.mark.parametrize("way", REFUSED)
def test_another_function_of_the_same_shapes_is_refused_by_its_keys(played: Path, way: str) -> None:
    text = said(played, way)
    keys = {
        "folder": ['hidden_act: "silu" -> "relu"'],
        "tokenizer": ["tokenizer of the data: "],
        "lost": ['rope_parameters.rope_type: "yarn" -> "default"', "rope_parameters.rope_theta: 50.0 -> 10000.0"],
    }
    for told in keys.get(way, ["rms_norm_eps: 1e-06 -> 0.05", "rope_parameters.rope_theta: 10000.0 -> 50.0"]):
        assert told in text, text
    whose = {"reference": "column", "teacher": "teacher"}
    assert whose.get(way, "") in text
    assert not (played / "branch/checkpoints").exists() or not list((played / "branch/checkpoints").iterdir())


def test_another_function_that_is_meant_is_told_in_one_line(played: Path) -> None:
    [warning] = [line for line in said(played, "meant", 0).splitlines() if "resume_model new" in line]
    assert warning.startswith("warning: ") and "whole/checkpoints/step-00000002" in warning
    assert "resume: PATH" in said(played, "unnamed")


def test_fields_that_decide_nothing_and_another_spelling_are_not_refused(played: Path) -> None:
    """The third step is that of the run that nobody has disturbed, to the last digit."""
    assert "model_config.eos_token_id: 2 -> 5" in said(played, "harmless", 0)
    assert losses(played / "harmless")[3] == losses(played / "whole")[3]


def test_an_adapter_whose_base_has_other_positions_is_exported_with_a_warning(played: Path) -> None:
    text = said(played, "peft", 0)
    assert re.search("warning: peft/export: .*to-hf RUN FOLDER --merge", text), text


def in_its_folder(here: str, rank: int) -> None:
    os.chdir(Path(here, f"host-{rank}"))


def test_hosts_whose_folders_differ_do_not_train_together(played: Path, tmp_path: Path) -> None:
    for rank in range(2):
        shutil.copytree(played / "hf", tmp_path / f"host-{rank}/hf")
    edit(tmp_path / "host-1/hf", rms_norm_eps=0.05)
    words = ("--train.run_dir", str(tmp_path / "run"), "--train.micro_batch", "2")
    code, output = forked.finish(played / "recipe.yaml", *words, before=functools.partial(in_its_folder, str(tmp_path)))
    assert code != 0 and "model.rms_norm_eps" in output and "Traceback" not in output, output


def test_a_resume_makes_the_changes_of_rope_that_the_run_has_made(played: Path) -> None:
    """YaRN of the second border begins with the length that the first one has left, 64, and not the model's 48."""
    for name in ("staged", "resumed"):
        said(played, name, 0)
        state = json.loads((played / name / "checkpoints/step-00000004/trainer.json").read_text())
        assert state["model_config"]["rope_parameters"]["original_max_position_embeddings"] == 64
    assert losses(played / "resumed")[4] == losses(played / "staged")[4]
