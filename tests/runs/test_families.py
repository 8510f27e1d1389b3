"""A sample of `python -m tools.families`: whole families through parity and training, as users start them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launching import REPO
from tools.families.table import read, text_of


def outcomes(folder: Path, families: str, forms: str, *words: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    results = folder / "results.jsonl"
    command = [sys.executable, "-m", "tools.families", "--families", families, "--forms", forms, *words]
    done = subprocess.run([*command, "--results", str(results)], cwd=REPO, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return {(row["family"], row["form"], row["command"]): row for row in read(results)}


def test_a_family_passes_both_commands_or_is_refused_by_both(tmp_path: Path) -> None:
    """CTRL scales its embeddings in place and has a bias in its tied head: only the pipeline went wrong, in silence."""
    rows = outcomes(tmp_path, "ctrl,falcon_mamba", "pp2")
    got = {(family, command): row["outcome"] for (family, _, command), row in rows.items()}
    assert {got["ctrl", command] for command in ("train", "parity")} == {"passes"}, rows
    assert {got["falcon_mamba", command] for command in ("train", "parity")} == {"refused"}, rows
    page = text_of(rows)
    assert "| ctrl | not run | yes | not run | not run | - |" in page and "(1)" in page


def test_the_page_says_what_the_results_say() -> None:
    rows = {(row["family"], row["form"], row["command"]): row for row in read(REPO / "docs/developers/families.jsonl")}
    assert (REPO / "docs/developers/families.md").read_text() == text_of(rows)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["pp2", "zero3", "tp2", "sp2", "ep2"])
def test_the_other_forms(tmp_path: Path, form: str) -> None:
    rows = outcomes(
        tmp_path,
        "gemma2,qwen3_moe,cohere2,granite,falcon,deepseek_v2,jetmoe,longcat_flash,moshi,glm4_moe,zamba,zamba2",
        form,
    )
    assert {row["outcome"] for row in rows.values()} <= {"passes", "refused"}, rows
