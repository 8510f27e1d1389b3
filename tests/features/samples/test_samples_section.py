"""What the section `samples` is refused for, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.config.load import load
from tests.helpers.config_workplace import write


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (
            {"samples": {"prompts": "prompts.txt"}},
            ('samples.prompts = "prompts.txt"',),
        ),
        ({"samples": {"prompts": ["a"], "tokens": 0}}, ("samples.tokens = 0",)),
        ({"train": {"sample_prompts": ["a"]}}, ("train.sample_prompts", "samples.prompts")),
        ({"train": {"sample_tokens": 8}}, ("train.sample_tokens", "samples.tokens")),
    ],
)
def test_check_names_key_value_and_remedy(
    refused: Callable[[dict[str, Any]], str], run: dict[str, Any], says: tuple[str, ...]
) -> None:
    told = refused(run)
    assert all(words in told for words in says), told


def test_prompts_alone_are_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"train": {"max_steps": 100, "eval": False, "eval_every": 5}, "samples": {"tokens": 4}})
    idle = [note.partition(": no effect")[0] for note in load(["run.yaml"], 2).notes if "no effect" in note]
    assert idle == ["samples.tokens", "train.eval_every"]
    assert not any("no effect" in note for note in load(["run.yaml", "--samples.prompts", "[Once]"], 2).notes)
