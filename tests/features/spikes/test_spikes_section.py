"""What the section `spikes` is refused for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmtrain.cli import main
from tests.helpers.config_workplace import write


@pytest.mark.parametrize(
    ("run", "says"),
    [
        ({"fault": {"pinned": 3}}, ("fault.pinned = 3", "write spikes.pinned")),
        ({"optim": {"skip_outliers": 6.0}}, ("optim.skip_outliers = 6.0", "write spikes.skip_outliers")),
        ({"spikes": {"skip_outliers": 0.0}}, ("spikes.skip_outliers = 0.0", "6 is common")),
        (
            {"spikes": {"skip_outliers": 6.0}, "optim": {"name": "muon"}},
            ("spikes.skip_outliers = 6.0", "by the time that the norm is known", "set it to null"),
        ),
    ],
)
def test_check_names_key_value_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    run: dict[str, Any], says: tuple[str, ...],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write(tmp_path, run)
    assert main(["config", "check", "run.yaml", "--world-size=2"]) == 2
    told = capsys.readouterr().err
    assert all(words in told for words in says), told
