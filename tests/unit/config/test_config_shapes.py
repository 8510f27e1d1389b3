"""DeepSpeed files in the shapes that public projects have: each is taken as it is, or refused for a true reason."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from llmtrain import features
from llmtrain.cli import main
from tests.helpers.config_workplace import write


@dataclass
class Shape:
    """A file; the words of its refusal, or none; the words of a note; the ranks; what the YAML says for it."""

    name: str
    ds: dict[str, Any]
    refused: list[str] = field(default_factory=list)
    noted: str = ""
    ranks: int = 8
    run: dict[str, Any] = field(default_factory=dict)
    feature: str = ""
    """The feature that takes it."""


SHAPES = [Shape(**json.loads(line)) for line in (Path(__file__).parents[2] / "data/deepspeed_shapes.jsonl").open()]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_a_public_shape(
    shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if shape.feature and shape.feature not in features.features():
        pytest.skip(f"the feature {shape.feature} has been removed")
    batch: dict[str, Any] = {"train": {"global_batch": 16, "micro_batch": 1}}
    sizes = {shape.ds.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu")}
    if sizes != {"auto"}:
        batch = {"train": {"global_batch": ..., "micro_batch": ...}}  # the JSON says it
    write(tmp_path, {**batch, **shape.run}, json.dumps(shape.ds, indent=2))
    monkeypatch.chdir(tmp_path)
    code = main(["config", "check", "run.yaml", f"--world-size={shape.ranks}"])
    told = capsys.readouterr()
    if not shape.refused:
        assert (code, told.err) == (0, ""), told.err
        assert shape.noted in told.out
        return
    assert (code, told.out) == (2, ""), told.out
    for words in (*shape.refused, "rule:", "remedy:"):
        assert words in told.err, f"{words!r} is not in:\n{told.err}"


def test_there_are_enough_shapes() -> None:
    assert len({shape.name for shape in SHAPES}) == len(SHAPES) >= 40
    assert sum(shape.name.startswith("NVMe: ") for shape in SHAPES) >= 20
