"""The wheel, alone: installed into an empty environment and used from an empty folder, without a clone."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.launching import REPO, rows

SMALL = [
    *("--model.config.hidden_size", "32", "--model.config.intermediate_size", "64"),
    *("--model.config.num_hidden_layers", "2", "--model.config.vocab_size", "300"),
    *("--data.path", "data/mine", "--data.sequence_length", "32", "--train.eval_sequences", "8"),
    *("--train.log_every", "1", "--train.eval_every", "2", "--schedule.warmup_steps", "1"),
    *("--train.export", "false"),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from what git knows, as a user's `pip install` builds it."""
    folder = tmp_path_factory.mktemp("source")
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=REPO, capture_output=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if os.path.lexists(REPO / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, folder / name, follow_symlinks=False)
    code = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    made = subprocess.run(
        [sys.executable, "-c", code, str(folder / "dist")], cwd=folder, capture_output=True, text=True, check=True
    )
    return folder / "dist" / made.stdout.split()[-1]


@pytest.fixture(scope="module")
def place(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """An empty folder, and the environment of a shell in which the wheel's virtual environment is active."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin/python"
    words = ["-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, *words], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # The dependencies of this environment; what it has of llmtrain comes after the wheel's.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK", "LOCAL_RANK", "WORLD_SIZE")}
    path = f"{folder / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    yield tmp_path_factory.mktemp("empty"), {**kept, "PATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def test_the_wheel_holds_all_modules_the_shipped_files_the_licence_and_the_readme(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    modules = {str(path.relative_to(REPO)) for path in (REPO / "llmtrain").rglob("*.py")}
    modules |= {str(path.relative_to(REPO)) for path in (REPO / "llmtrain/features").glob("*/*.yaml")}
    shipped = {
        f"llmtrain/commands/shipped/{path.relative_to(REPO)}"
        for pattern in (
            "launch/train.py",
            "launch/recipes/*.yaml",
            "launch/templates/*.jinja",
            "launch/*.example",
            "launch/*.sbatch",
            "launch/*.yaml",
            "ds_configs/*",
            "docs/*.md",
            "docs/developers/*.md",
            "examples/*.py",
        )
        for path in REPO.glob(pattern)
    }
    assert len(shipped) > 15
    own = {name for name in names if ".dist-info/" not in name}
    assert own == modules | shipped
    assert "License-Expression: Apache-2.0" in metadata and "# llmtrain" in metadata
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_alone_prepares_trains_and_launches(place: tuple[Path, dict[str, str]]) -> None:
    folder, env = place

    def say(*words: str) -> str:
        done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout + done.stderr

    assert str(REPO) not in say("python", "-c", "import llmtrain; print(llmtrain.__file__)")
    told = say("llmtrain", "init", ".")
    for word in re.findall(r"^\S+/", told, flags=re.M):
        assert (folder / word).is_dir()
    assert "launch/recipes/quickstart.yaml" in told
    assert "llmtrain launch -- launch/recipes/quickstart.yaml" in told and "docs/" in told
    (folder / "text").mkdir()
    source = "\n".join(path.read_text() for path in sorted((REPO / "llmtrain/commands").glob("*.py")))
    for index, start in enumerate(range(0, len(source) - 100, 500)):  # the last one is no blank line
        (folder / f"text/{index}.txt").write_text(source[start : start + 500])
    say(
        "llmtrain", "prepare", "--source", "text/*.txt", "--vocab-size", "300", "--out", "data/mine", "--processes", "1"
    )
    recipe = "launch/recipes/quickstart.yaml"
    assert "ok: " in say("llmtrain", "config", "check", recipe, *SMALL)
    say("llmtrain", "train", "--config", recipe, *SMALL, "--train.max_steps", "2")
    wrong = ["llmtrain", "config", "check", recipe, "--cutoff_len", "9"]  # what it is here, docs/migrate.md says
    done = subprocess.run(wrong, cwd=folder, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "`llmtrain prepare --max-tokens`" in done.stderr, done.stderr
    (folder / "launch/train.py").unlink()  # it is for a start by hand
    told = say("llmtrain", "launch", "--", recipe, *SMALL, "--train.max_steps", "4")
    assert "resumed from runs/quickstart/checkpoints/step-00000002" in told
    assert [row["step"] for row in rows(folder / "runs/quickstart") if "loss" in row] == [1, 2, 3, 4]
    script = json.loads((folder / "runs/quickstart/environment.json").read_text())["argv"][0]
    assert script.endswith("site-packages/llmtrain/__main__.py") and script.startswith(env["PATH"].split("/bin:")[0])


def test_a_task_of_slurm_runs_the_wheel(place: tuple[Path, dict[str, str]]) -> None:
    folder, env = place
    task = {"PROCID": "0", "LOCALID": "0", "NODEID": "0", "STEP_NUM_NODES": "1", "STEP_NUM_TASKS": "1"}
    slurm = {f"SLURM_{name}": value for name, value in {**task, "STEP_TASKS_PER_NODE": "1"}.items()}
    words = ["python", "-m", "llmtrain.cluster.launch.slurm", "--config", "none.yaml"]
    done = subprocess.run(words, cwd=folder, env={**env, **slurm}, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "none.yaml" in done.stderr


def test_init_never_replaces_a_users_file(place: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    _, env = place

    def init() -> subprocess.CompletedProcess[str]:
        return subprocess.run(["llmtrain", "init", "new"], cwd=tmp_path, env=env, capture_output=True, text=True)

    assert init().returncode == 0 and init().returncode == 0  # the same files again
    mine = tmp_path / "new/ds_configs/zero3.json"
    mine.write_text("{}")
    (tmp_path / "new/launch/train.py").unlink()
    refused = init()
    assert refused.returncode == 2 and str(mine.relative_to(tmp_path)) in refused.stderr
    assert mine.read_text() == "{}" and not (tmp_path / "new/launch/train.py").exists()
    (tmp_path / "file").write_text("")
    full = subprocess.run(["llmtrain", "init", "file/x"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert full.returncode == 2 and "Traceback" not in full.stderr
    (tmp_path / "half").mkdir()
    (tmp_path / "half/launch").write_text("")
    half = subprocess.run(["llmtrain", "init", "half"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert half.returncode == 2 and "half/launch" in half.stderr
    assert os.listdir(tmp_path / "half") == ["launch"]


NAMED = re.compile(r"(?<![\w/.-])(?:docs|launch|ds_configs|tools|tests)/[\w./-]*\w")


def _strings(file: Path) -> Iterator[str]:
    """Every string of a module that can be shown: all but docstrings; those of configuration fields are help texts."""
    tree = ast.parse(file.read_text())
    documented = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and file.name != "run.py"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            yield node.value


def test_no_message_names_a_file_that_only_a_clone_has() -> None:
    """What `init` says is of files that it has written; all else would be wrong for whoever installed the wheel."""
    package = REPO / "llmtrain"
    allowed = {"commands/init.py"}
    named = [
        (str(file.relative_to(package)), found)
        for file in sorted(package.rglob("*.py"))
        if str(file.relative_to(package)) not in allowed
        for text in _strings(file)
        for found in NAMED.findall(text)
    ]
    assert not named


def test_a_shipped_file_names_shipped_files_only() -> None:
    shipped = REPO / "llmtrain/commands/shipped"
    for file in [*shipped.glob("launch/*.*"), *shipped.glob("launch/recipes/*"), *shipped.glob("ds_configs/*")]:
        for found in NAMED.findall(file.read_text()) if file.is_file() else ():
            assert "NAME" in found or (shipped / found).exists(), (file, found)
