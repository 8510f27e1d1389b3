"""The built-in trackers in a run's YAML."""

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
        assert "has a secret, which config.yaml" in told and "[redacted]" in told and secret not in told
    write(tmp_path, {"trackers": {"mlflow": {"uri": "databricks://profile"}}})  # a name in ~/.databrickscfg
    assert "has a secret" not in capsys.readouterr().err


@pytest.mark.parametrize("missing", [None, "alembic", "tensorboard"])
def test_a_tracker_whose_package_is_missing_is_refused_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str | None
) -> None:
    (tmp_path / "ds.json").write_text("{}")
    (tmp_path / "run.yaml").write_text(
        f"deepspeed: {tmp_path}/ds.json\nmodel: {{config: {{model_type: llama}}}}\ntrain: {{max_steps: 1}}\n"
        "data: {path: x}\ntrackers:\n  tensorboard:\n  mlflow: {experiment: mine}\n"
    )
    found = importlib.util.find_spec
    there = {"alembic", "mlflow", "sqlalchemy", "tensorboard"} - {missing}

    def find_spec(name: str, package: str | None = None) -> object:
        return object() if name in there else None if name == missing else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(ConfigError) as refused:
        parse([str(tmp_path / "run.yaml")])
    extra = {"alembic": "mlflow", "tensorboard": "tensorboard"}.get(str(missing))
    assert ("needs" in str(refused.value)) == (missing is not None)
    assert extra is None or (f"pip install 'llmtrain[{extra}]'" in str(refused.value) and "line" in str(refused.value))
    config = parse([str(tmp_path / "run.yaml")], check_paths=False).config
    assert "experiment: mine" in dump(config) and "path: tensorboard" in dump(config)
