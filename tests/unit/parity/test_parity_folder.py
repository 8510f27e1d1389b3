"""The rows of a run's own folder: what a loader gives is held against the files, and a fault of reading is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmtrain.config.run import DataConfig, RunConfig
from llmtrain.data.kinds import judged, packing, text
from llmtrain.data.manifest import SPLITS
from llmtrain.data.shards import PreparedSet
from llmtrain.data.stream import reference_and_teacher
from llmtrain.data.stream.reference_and_teacher import numbers, write_reference
from llmtrain.objectives.objective import Objective
from llmtrain.parity.untrained import compare_folder, differences
from tests.helpers.preference import prepared_preferences, prepared_unpaired


def with_column(folder: str) -> str:
    prepared = PreparedSet(folder)
    draw = np.random.default_rng(0)
    columns = {split: draw.normal(-9, 3, numbers(prepared, split)).astype(np.float32) for split in SPLITS}
    write_reference(prepared, "w", "fp32", columns, {})  # type: ignore[arg-type]
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, small_data: str) -> dict[str, str]:
    return {
        "dpo": with_column(prepared_preferences(tmp_path_factory.mktemp("pairs"))),
        "kto": with_column(prepared_unpaired(tmp_path_factory.mktemp("judged"))),
        "next_token": small_data,
    }


def run_of(folders: dict[str, str], name: Any) -> RunConfig:
    texts = name == "next_token"
    data = DataConfig(path=folders[name], sequence_length=32 if texts else 192, isolate_documents=True)
    return RunConfig(deepspeed="ds.json", objective=Objective.of(name), data=data)


@pytest.mark.parametrize("name", ["dpo", "kto", "next_token"])
def test_the_rows_of_a_run_are_those_of_its_files(folders: dict[str, str], name: str) -> None:
    what, wrong = differences(run_of(folders, name), "fp32")
    assert not wrong and " sequences of" in what, (what, wrong)


def late_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference_and_teacher.read_reference
    monkeypatch.setattr(
        reference_and_teacher,
        "read_reference",
        lambda *a: (right(*a)[0], {s: np.roll(c, 1) for s, c in right(*a)[1].items()}),
    )


def own_partner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judged, "partners", lambda prompts: np.arange(len(prompts)))


def late_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    right = packing.RowReader._row
    monkeypatch.setattr(
        packing.RowReader, "_row", lambda self, row: (right(self, row)[0], np.roll(right(self, row)[1], 1))
    )


def late_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    right = text.labels_of
    monkeypatch.setattr(text, "labels_of", lambda *a: (right(*a)[0], np.roll(right(*a)[1], 1)))


def exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    right = packing.RowReader._rows
    monkeypatch.setattr(
        packing.RowReader, "_rows", lambda self, index: right(self, index).reshape(-1, 2)[:, ::-1].reshape(-1)
    )


@pytest.mark.parametrize(
    ("fault", "name", "words"),
    [
        (late_reference, "dpo", "its log-probability under the reference is that of another row"),
        (late_reference, "kto", "its log-probability under the reference is that of another row"),
        (own_partner, "kto", "its mismatched answer is no answer to another prompt"),
        (late_mask, "dpo", "other tokens count"),
        (exchanged, "dpo", "the answers of a record are exchanged"),
        (late_labels, "next_token", "no sequence of the folder has its tokens and labels"),
    ],
)
def test_a_fault_of_reading_is_named(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, fault: Any, name: str, words: str
) -> None:
    fault(monkeypatch)
    report = compare_folder(run_of(folders, name), "fp32")
    assert report is not None and not report[1] and "  FAIL  data" in report[0][0], report
    assert words in report[0][1], report


def test_a_folder_that_is_not_there_is_not_compared(folders: dict[str, str], tmp_path: Path) -> None:
    assert compare_folder(run_of({"dpo": str(tmp_path)}, "dpo"), "fp32") is None
