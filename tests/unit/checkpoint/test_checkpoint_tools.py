"""`llmtrain checkpoint ls|verify|diff|prune`, as a user calls them; and which checkpoints retention takes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmtrain.base.errors import CheckpointError
from llmtrain.checkpoint import retain, save
from llmtrain.checkpoint.format import MANIFEST, TRAINER, complete_checkpoints
from llmtrain.checkpoint.listing import best_checkpoints, find_checkpoints, layout_words
from llmtrain.checkpoint.retain import Best, keep_newest, outdated
from llmtrain.checkpoint.save import will_lack
from llmtrain.checkpoint.trainer_state import TrainerState
from tests.helpers.checkpoints import SHAPES, at, flip, resign, tensors, write_checkpoint
from tests.helpers.prepared import write_prepared

Say = Callable[..., tuple[int, str, str]]
UP = "model.layers.0.mlp.up_proj.weight"


# ls


def test_ls_shows_all_that_lies_there(run: Path, say: Say) -> None:
    for name in ("step-00000400.tmp", "step-00000050.damaged", "step-00000040", "step-00000030.trash", "notes"):
        (run / "checkpoints" / name).mkdir()
    (at(run, 200) / "rank-00001.safetensors").unlink()
    flip(at(run, 100) / TRAINER, 40)
    code, out, _ = say("ls", run)
    heading, *lines = out.splitlines()
    states = [(line.split()[0], line[heading.index("STATE") : heading.index("FOLDER")].strip()) for line in lines]
    assert code == 0
    assert [step for step, _ in states] == ["400", "300", "200", "100", "50", "40", "30"]
    assert [text.partition(":")[0] for _, text in states] == [
        "tmp",
        "complete",
        "damaged",
        "damaged",
        "set aside",
        "incomplete",
        "trash",
    ]
    assert "rank-00001.safetensors" in states[2][1] and "trainer.json" in states[3][1]
    assert "307k" in lines[1] and "ZeRO 1 x 2 ranks, fp32" in lines[1] and str(at(run, 300)) in lines[1]


@pytest.mark.parametrize("command", ["ls", "verify", "to-hf"])
def test_a_data_folder_is_told_from_a_checkpoint(tmp_path: Path, say: Say, command: str) -> None:
    write_prepared(tmp_path / "data", [[[1, 2, 3]]], [[[1, 2]]], vocab_size=8)
    code, _, err = say(command, tmp_path / "data", *([tmp_path / "out"] if command == "to-hf" else []))
    assert code == 2 and str(tmp_path / "data") in err and "`llmtrain data show`" in err


def test_the_layout_in_words() -> None:
    words = {"world_size": 8, "zero_stage": 1, "precision": "bf16"}
    assert layout_words(words, False) == "ZeRO 1 x 8 ranks, bf16"
    degrees = {"pipeline": 2, "tensor": 2}
    assert layout_words({**words, **degrees}, False) == "ZeRO 1 x 8 ranks (pipeline 2, tensor 2), bf16"


def test_ls_as_json(run: Path, say: Say) -> None:
    code, out, _ = say("ls", run, "--json")
    rows = json.loads(out)
    assert code == 0 and [row["step"] for row in rows] == [300, 200, 100]
    assert rows[0]["state"] == "complete" and rows[0]["tokens"] == 300 * 1024 and not rows[0]["weights_only"]
    assert rows[0]["bytes"] == sum(file.stat().st_size for file in at(run, 300).iterdir())
    assert rows[0]["layout"] == {"world_size": 2, "zero_stage": 1, "precision": "fp32"} and rows[0]["age_s"] < 600


@pytest.mark.parametrize("command", ["ls", "verify", "prune"])
def test_looking_loads_no_torch(run: Path, command: str) -> None:
    words = [command, str(run), *(["--keep", "1"] if command == "prune" else [])]
    code = (
        "import sys; from llmtrain.commands.checkpoint import main; main(sys.argv[1:]); "
        "assert not {'torch', 'deepspeed', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["step-200", "checkpoints/step-200", "step-00000200", "checkpoints/step-00000200"])
def test_a_checkpoint_by_any_of_its_names(run: Path, say: Say, name: str) -> None:
    code, out, _ = say("verify", run / name)
    assert (code, out) == (0, f"{at(run, 200)}  intact\n")


def test_what_holds_no_checkpoint(run: Path, tmp_path: Path, say: Say) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "none", run / "step-7"):
        for command in ("ls", "verify"):
            code, _, err = say(command, path)
            assert code == 2 and str(path) in err


# verify


def test_verify_names_file_rank_and_tensor(run: Path, say: Say) -> None:
    path = at(run, 200) / "rank-00001.safetensors"
    before = path.read_bytes()
    begin = 8 + int.from_bytes(before[:8], "little")
    found = json.loads(before[8:begin])[f"exp_avg/{UP}"]["data_offsets"]
    flip(path, begin + found[0] + 9)
    code, out, _ = say("verify", run)
    assert code == 1
    assert out.splitlines() == [
        f"{at(run, 300)}  intact",
        f"{at(run, 200)}  DAMAGED",
        f"  rank-00001.safetensors (rank 1): 1 of 13 tensors are damaged: exp_avg of {UP} [64:128]",
        f"{at(run, 100)}  intact",
    ]


@pytest.mark.parametrize(
    ("file", "how", "words"),
    [
        ("rank-00001.safetensors", "cut", "rank-00001.safetensors (rank 1): has 1000 bytes instead of"),
        ("rank-00001.safetensors", "gone", "rank-00001.safetensors (rank 1): is missing"),
        ("rank-00000.safetensors", 3, "rank-00000.safetensors (rank 0): its header is damaged: the file: its header"),
        ("rank-00000.safetensors", 30, "rank-00000.safetensors (rank 0): "),
        (TRAINER, 20, "trainer.json: its contents differ from the manifest"),
        (TRAINER, "gone", "trainer.json: is missing"),
        (MANIFEST, 300, "manifest.json"),
        (MANIFEST, "cut", "manifest.json cannot be read as a manifest"),
        (MANIFEST, "gone", "it has no manifest.json"),
        (MANIFEST, "another's", "manifest.json seems to belong to another checkpoint"),
    ],
)
def test_verify_finds_each_kind_of_damage(run: Path, say: Say, file: str, how: str | int, words: str) -> None:
    path = at(run, 300) / file
    if isinstance(how, int):
        flip(path, how)
    elif how == "cut":
        os.truncate(path, 1000)
    elif how == "gone":
        path.unlink()
    else:
        path.write_bytes((at(run, 200) / file).read_bytes())
    code, out, _ = say("verify", run)
    assert code == 1 and f"{at(run, 300)}  DAMAGED" in out and words in out, out


def test_verify_compares_the_steps(run: Path, say: Say) -> None:
    at(run, 300).rename(at(run, 999))
    code, out, _ = say("verify", at(run, 999))
    assert code == 1 and "manifest.json" in out and "step 300" in out and "step 999" in out
    trainer = replace(TrainerState.read(at(run, 200)), step=7)
    (at(run, 200) / TRAINER).write_text(json.dumps(trainer.to_json()))
    resign(at(run, 200))
    code, out, _ = say("verify", at(run, 200))
    assert code == 1 and "trainer.json" in out and "step 7" in out and "step 200" in out


# diff


def test_diff_of_equals_and_of_layouts(tmp_path: Path, say: Say) -> None:
    a, b = (write_checkpoint(tmp_path / name, 5, seed=1, ranks=2) for name in "ab")
    assert say("diff", a, b)[:2] == (0, f"A  {a}\nB  {b}\nequal: 13 tensors\n")
    c = write_checkpoint(tmp_path / "c", 5, seed=1, ranks=3)
    code, out, _ = say("diff", a, c)
    assert code == 1
    assert out.splitlines()[2:] == ["layout   world_size: 2 -> 3", "different: 0 of 13 tensors differ in their values"]


def test_diff_says_what_and_where(tmp_path: Path, say: Say) -> None:
    a = write_checkpoint(tmp_path / "a", 5, seed=1)
    changed = {**tensors(1)}
    changed["param", UP][3, 5] += 0.5
    changed["param", UP][2, 1] -= 0.25
    changed["exp_avg", "model.norm.weight"][7] = float("nan")
    changed["exp_avg_sq", "model.norm.weight"][6] = float("-inf")
    run = {"optim": {"name": "adamw", "lr": 0.001}, "train": {"max_steps": 100}}
    b = write_checkpoint(tmp_path / "b", 6, seed=1, values=changed, run=run, versions={"torch": "2.12.0"})
    code, out, _ = say("diff", a, b)
    assert code == 1
    told = out.splitlines()
    for line in (
        "state    step: 5 -> 6",
        "state    tokens: 5120 -> 6144",
        "config   run.optim.lr: 0.003 -> 0.001",
        "config   versions.torch: '2.13.0' -> '2.12.0'",
        f"tensor   param of {UP}: by up to 0.5 at [3, 5], 2 elements",
        "tensor   exp_avg of model.norm.weight: by up to inf at [7], 1 elements",
        "tensor   exp_avg_sq of model.norm.weight: by up to inf at [6], 1 elements",
    ):
        assert line in told, out
    assert told[-1].startswith("different: 3 of 13 tensors differ") and sum("tensor  " in line for line in told) == 3


def test_diff_of_other_tensors(tmp_path: Path, say: Say) -> None:
    a = write_checkpoint(tmp_path / "a", 5, seed=1)
    shapes = {**SHAPES, UP: (8, 16), "lm_head.weight": (2, 2)}
    b = write_checkpoint(tmp_path / "b", 5, seed=1, shapes=shapes)
    code, out, _ = say("diff", a, b)
    assert code == 1
    assert re.search(r"lm_head\.weight: .*\bB$", out, re.MULTILINE)
    assert f"tensor   exp_avg of {UP}: shape (16, 8) -> (8, 16)" in out


# retention


@pytest.mark.parametrize("given", ["step-999", "checkpoints/step-999"])
def test_a_step_that_is_not_there_is_answered_with_those_that_are(run: Path, given: str) -> None:
    with pytest.raises(CheckpointError, match=f"{run}.* 300, 200, 100"):
        find_checkpoints(run / given)


def test_retention_keeps_the_newest_good_one(run: Path) -> None:
    assert outdated(run / "checkpoints", 2) == [at(run, 100)]
    assert outdated(run / "checkpoints", 0) == [at(run, 200), at(run, 100)]
    os.truncate(at(run, 300) / "rank-00000.safetensors", 10)
    (at(run, 200) / TRAINER).unlink()
    assert outdated(run / "checkpoints", 1) == []
    assert keep_newest(run / "checkpoints", 2) == []
    write_checkpoint(run, 400, seed=4)
    assert keep_newest(run / "checkpoints", 1) == [at(run, 300), at(run, 200), at(run, 100)]
    assert complete_checkpoints(run / "checkpoints") == [at(run, 400)]


def test_the_best_stay_and_are_named(tmp_path: Path, say: Say) -> None:
    settings = {"checkpoint": {"keep_best": {"metric": "eval/loss", "keep": 2, "mode": "min"}}}
    for step, value in ((100, 2.0), (200, 1.0), (300, 1.5), (400, float("nan")), (500, 3.0)):
        told = {"step": step - 50 * (step == 200), "figures": {"eval/loss": value}}  # of 200: an earlier step's
        write_checkpoint(tmp_path, step, seed=step, run=settings, evaluation=told)
    folder, best = tmp_path / "checkpoints", Best(metric="eval/loss", keep=2, mode="min")
    assert outdated(folder, 1, best=best) == [at(tmp_path, 400), at(tmp_path, 200)]
    assert outdated(folder, 3, best=best) == [at(tmp_path, 200)]
    _, out, _ = say("ls", tmp_path)
    assert [line.partition("best: ")[2].split()[:2] for line in out.splitlines()[1:]] == [
        [],
        [],
        ["eval/loss", "1.5000"],
        [],
        ["eval/loss", "2.0000"],
    ]
    assert best_checkpoints(tmp_path)[0] == at(tmp_path, 300)
    code, _, _ = say("prune", tmp_path, "--keep", 1)
    assert code == 0 and complete_checkpoints(folder) == [at(tmp_path, step) for step in (500, 300, 100)]
    os.truncate(at(tmp_path, 300) / "rank-00000.safetensors", 10)
    assert best_checkpoints(tmp_path)[0] == at(tmp_path, 100)
    code, _, err = say("to-hf", at(tmp_path, 500), tmp_path / "out", "--best")
    assert code == 2 and "checkpoint.keep_best" in err


def test_retention_reports_what_the_system_refuses(run: Path, monkeypatch: pytest.MonkeyPatch, say: Say) -> None:
    def refuse(folder: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(retain, "remove_tree", refuse)
    told: list[str] = []
    assert keep_newest(run / "checkpoints", 1, told.append) == []
    assert len(told) == 2 and str(at(run, 200)) in told[0] and "Read-only file system" in told[0]
    assert keep_newest(run / "nowhere", 1, told.append) == [] and len(told) == 2
    code, out, _ = say("prune", run, "--keep", 2)
    assert code == 1 and f"could not delete  {at(run, 100)}" in out


# prune


def test_prune(run: Path, say: Say) -> None:
    (run / "checkpoints/step-00000400.tmp").mkdir()
    size = sum(file.stat().st_size for file in at(run, 100).iterdir())
    code, out, _ = say("prune", run, "--keep", 2, "--dry-run")
    assert code == 0 and at(run, 100).is_dir() and (run / "checkpoints/step-00000400.tmp").is_dir()
    assert f"would delete  {at(run, 100)}  {size / 1024:.4g} KiB" in out.splitlines()
    code, out, _ = say("prune", run, "--keep", 2)
    assert code == 0 and out.splitlines()[-1].endswith("freed, 2 checkpoints kept, step-00000300 verified")
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000200", "step-00000300"]


def test_prune_never_takes_the_newest_that_verifies(run: Path, say: Say) -> None:
    for step in (300, 200):
        path = at(run, step) / "rank-00000.safetensors"
        flip(path, path.stat().st_size - 1)
    code, out, _ = say("prune", run, "--keep", 1)
    assert code == 0 and complete_checkpoints(run / "checkpoints") == [at(run, 300), at(run, 100)]
    assert str(at(run, 300)) in out and "step-00000100" in out
    (at(run, 100) / TRAINER).unlink()
    code, _, err = say("prune", run, "--keep", 1)
    assert code == 2 and str(run) in err and at(run, 100).is_dir()
    code, _, err = say("prune", run, "--keep", 0)
    assert code == 2 and "--keep 0" in err


@pytest.mark.parametrize("whose", ["run", "tmp"])
def test_prune_leaves_alone_what_is_being_written(run: Path, say: Say, whose: str) -> None:
    partial = run / "checkpoints/step-00000400.tmp"
    partial.mkdir()
    handle = os.open(run if whose == "run" else partial, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        assert say("prune", run, "--keep", 1)[0] == 0
        assert partial.is_dir() and not at(run, 200).exists()
    finally:
        os.close(handle)
    assert say("prune", run, "--keep", 1)[0] == 0
    assert not partial.exists()


@pytest.mark.parametrize(("keep", "held", "free_mib", "short"), [(2, 0, 363, 3), (2, 0, 364, 0), (2, 2, 164, 0)])
def test_a_disk_that_is_too_small_is_known_beforehand(tmp_path, monkeypatch, keep, held, free_mib, short):
    """Checkpoints of 100 MiB, of which `keep` and the next one lie there together; 64 MiB stay free."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free_mib << 20))
    monkeypatch.setattr(save, "complete_checkpoints", lambda _: [Path("step")] * held)
    said = will_lack(tmp_path / "run" / "checkpoints", 100 << 20, keep)
    assert (said is not None) == bool(short)
    if said is not None:
        assert f"{short} checkpoints" in said and "100 MiB" in said and "checkpoint.keep 2" in said
