"""`trackers.tensorboard` in a run's YAML."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from llmtrain.base.errors import ConfigError
from llmtrain.config.load import parse
from llmtrain.config.strict_yaml import dump
from tests.helpers.config_workplace import write


@pytest.mark.parametrize("missing", [None, "tensorboard"])
def test_without_its_package_it_is_refused_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str | None
) -> None:
    write(tmp_path, {"trackers": {"tensorboard": {}}})
    found, there = importlib.util.find_spec, {"tensorboard"} - {missing}

    def find_spec(name: str, package: str | None = None) -> object:
        return object() if name in there else None if name == missing else found(name, package)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    if missing is None:
        parse(["run.yaml"])
    else:
        with pytest.raises(ConfigError, match="tensorboard") as refused:
            parse(["run.yaml"])
        assert refused.value.keys == {"trackers.tensorboard"} and "'llmtrain[tensorboard]'" in str(refused.value)
    assert "path: tensorboard" in dump(parse(["run.yaml"], check_paths=False).config)


def test_a_near_name_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"trackers": {"tensorbord": {}}})
    with pytest.raises(ConfigError, match=r"trackers\.tensorboard\?"):
        parse(["run.yaml"])
    write(tmp_path)
    with pytest.raises(ConfigError, match=r"--trackers\.tensorboard\?"):
        parse(["run.yaml", "--trackers.tensorbord"])
