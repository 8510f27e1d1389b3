"""`llmtrain checkpoint to-hf --push`, against a local server that speaks the Hub's routes."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from llmtrain.cli import main
from tests.helpers.hf_folders import checkpoint_of, new_model
from tests.helpers.hub_server import TOKEN, Hub
from tests.unit.storage.test_hub import OTHER, fetched

PAGE = Path(__file__).parents[3] / "docs/publishing.md"


def test_push(hub: Hub, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    checkpoint = checkpoint_of(new_model("llama"), tmp_path / "run")

    def push(name: str, *more: str) -> tuple[int, str]:
        code = main(["checkpoint", "to-hf", str(checkpoint), "out", "--check", "none", "--push", name, *more])
        told = capsys.readouterr()
        return code, told.out + told.err

    code, unset = push("me/mine")
    assert code == 2 and "HF_TOKEN" in unset
    monkeypatch.setenv("HF_TOKEN", "hf_" + "c" * 34)
    code, wrong = push("me/mine")
    assert code == 2 and "token" in wrong and wrong != unset
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    code, told = push("mine")
    assert code == 2 and "--push mine" in told
    for words, says in {
        ("out", "--public"): "--public: ",
        (f"file://{tmp_path}/x", "--push", "a/b"): "--push a/b: ",
    }.items():
        assert main(["checkpoint", "to-hf", str(checkpoint), *words]) == 2 and says in capsys.readouterr().err
    assert not Path("out").exists()
    monkeypatch.setenv("HF_TOKEN", OTHER)
    code, told = push("me/mine")
    assert code == 2 and "me/mine" in told and Path("out/config.json").exists() and OTHER not in told
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    code, told = push("me/mine")
    assert code == 0, told
    assert f"pushed      {hub.url}/me/mine/commit/" in told and TOKEN not in told
    repo = hub.repos["models/me/mine"]
    files = repo.commits[repo.branches["main"]]
    assert repo.private and sorted(files) == sorted(set(os.listdir("out")) - {"llmtrain_export.json"})
    assert all(data == Path("out", name).read_bytes() for name, data in files.items())
    push("me/open", "--public")
    assert not hub.repos["models/me/open"].private
    assert fetched("me/mine").folder is not None


def test_the_command_of_the_page(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_of(new_model("llama"), Path("runs/hub"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    program, *words = shlex.split(PAGE.read_text().partition("```bash\n")[2].partition("```")[0])
    assert program == "llmtrain" and main(words) == 0
    assert hub.repos["models/org/tuned"].private
