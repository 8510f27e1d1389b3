"""`trackers.mlflow` in a run's YAML."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from llmtrain.base.errors import ConfigError
from llmtrain.cli import main
from llmtrain.config.load import parse
from llmtrain.config.strict_yaml import dump
from tests.helpers.config_workplace import write


def test_a_password_in_a_trackers_url_is_refused(tmp_path, monkeypatch, capsys):
    """config.yaml, each trainer.json and their mirror would keep it."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"trackers": {"mlflow": {"uri": "https://me:a-secret@mlflow.mine/"}}})
    assert main(["config", "check", "run.yaml", "--world-size", "2"]) == 2
    told = capsys.readouterr().err
    assert 'trackers.mlflow.uri = "https://[redacted]@mlflow.mine/"' in told and "MLFLOW_TRACKING_URI" in told
    assert "a-secret" not in told
    for secret in (
        f"dapi{'0a' * 16}",
        "https://mlflow.mine/x?token=a-secret",
        "https://mlflow.mine/?a=b&api_key=a-secret",
    ):
        uri = secret if "//" in secret else f"databricks://{secret}"
        write(tmp_path, {"trackers": {"mlflow": {"uri": uri}}})
        assert main(["config", "check", "run.yaml", "--world-size", "2"]) == 2
        told = capsys.readouterr().err
        assert "trackers.mlflow.uri = " in told and "[redacted]" in told and secret not in told
    write(tmp_path, {"trackers": {"mlflow": {"uri": "databricks://profile"}}})  # a name in ~/.databrickscfg
    main(["config", "check", "run.yaml", "--world-size", "2"])
    assert "trackers.mlflow.uri" not in capsys.readouterr().err


@pytest.mark.parametrize("missing", [None, "alembic"])
def test_without_its_package_it_is_refused_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str | None
) -> None:
    write(tmp_path, {"trackers": {"mlflow": {"experiment": "mine"}}})
    found, there = importlib.util.find_spec, {"alembic", "mlflow", "sqlalchemy"} - {missing}

    def find_spec(name: str, package: str | None = None) -> object:
        return object() if name in there else None if name == missing else found(name, package)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    if missing is None:
        parse(["run.yaml"])
    else:
        with pytest.raises(ConfigError, match="alembic") as refused:
            parse(["run.yaml"])
        assert refused.value.keys == {"trackers.mlflow"} and "'llmtrain[mlflow]'" in str(refused.value)
    assert "experiment: mine" in dump(parse(["run.yaml"], check_paths=False).config)
