"""`llmtrain doctor` takes a run as every command does and passes its variables on; a launch asks it once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmtrain import cli, features
from llmtrain.base.errors import ConfigError
from llmtrain.config.load import load
from llmtrain.features.doctor import preflight
from llmtrain.features.doctor.checks import Finding, Needs
from tests.features.doctor.test_doctor_checks import healthy
from tests.helpers.launching import write_recipe
from tests.unit import test_cli


def test_it_takes_a_run_as_every_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    test_cli.test_every_command_takes_a_run_alike("doctor --hostfile hosts", tmp_path, monkeypatch, capsys)


def test_a_wrong_flag_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line, rule = "doctor --hostfile hosts --quikc run.yaml", "is no flag of `llmtrain doctor`"
    test_cli.test_flags_of_a_command_and_of_its_run(line, rule, "did you mean --quick?", tmp_path, monkeypatch, capsys)


def test_variables_that_go_to_other_hosts_are_the_users() -> None:
    test_cli.test_threads_of_a_command_sleep_while_they_wait("doctor", {}, None, None)
    assert [name for name in cli.commands() if cli._passes_on(name)] == ["launch", "doctor", "doctor --versions"]


def test_a_launch_gets_the_first_hosts_address_or_does_not_start(
    tmp_path: Path, small_data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, asked = ["--config", str(write_recipe(tmp_path, small_data))], list[Needs]()
    red = Finding(host="node-2", check="disk", level="red", what="it is full", fix="empty it")
    report = preflight.Report(survey=healthy(), findings=(), checked=frozenset({"disk"}), elapsed_s=1.0)

    def examined(_: Any, run: Needs, **__: Any) -> preflight.Report:
        asked.append(run)
        return report

    monkeypatch.setattr(preflight, "preflight", examined)
    given = (load(words, 2, "the hosts' slots"), words, healthy().hosts, 29500)
    assert features.before_launch(*given) == report.address is not None
    assert asked[0].files[0] == words[1] and asked[0].folders[0].key == "data.path"
    report = preflight.Report(survey=healthy(), findings=(red,), checked=frozenset({"disk"}), elapsed_s=1.0)
    with pytest.raises(ConfigError, match="`llmtrain doctor`"):
        features.before_launch(*given)
    assert red.what in capsys.readouterr().err
