"""The command line of `llmtrain doctor`: it takes a run as every command does, and passes its variables on."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain import cli
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
    assert [name for name in cli.commands() if cli._passes_on(name)] == ["launch", "doctor"]
