"""The section `sites` in a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain.base.errors import ConfigError
from llmtrain.config.load import load
from tests.helpers.config_workplace import write


def test_keys_of_a_run_that_is_no_site_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"sites": {"method": "diloco", "start_sites": 2}})
    notes = [note.partition(": no effect")[0] for note in load(["run.yaml"], 2).notes if "no effect" in note]
    assert "sites.method, sites.start_sites" in notes


def test_a_wrong_number_of_fragments_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sites = {"name": "a", "coordinator": "h:1", "method": "streaming", "sync_every": 10, "fragments": 0}
    write(tmp_path, {"sites": sites})
    with pytest.raises(ConfigError) as refused:
        load(["run.yaml"], 2)
    assert refused.value.keys == {"sites.fragments"} and "mistakes" not in str(refused.value)
