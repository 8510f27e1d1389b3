"""Each command that takes a run takes it in the same words: RUN.yaml or --config RUN.yaml, overrides in any place."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain import cli

REPO = Path(__file__).parents[3]
RECIPE = "launch/recipes/quickstart.yaml"
HOSTS = ("--hostfile", "{hosts}")
COMMANDS = {
    "train": ("train",),
    "config check": ("config", "check"),
    "config show": ("config", "show"),
    "launch": ("launch", *HOSTS),
    "parity": ("parity",),
    "reference": ("reference",),
    "doctor": ("doctor", *HOSTS),
    "sites plan": ("sites", "plan", "--rate", "100mbit", "--rtt", "50ms"),
}
FORMS = {
    "RUN.yaml": ("{run}", "{key}", "{value}"),
    "RUN.yaml last": ("{key}", "{value}", "{run}"),
    "--config RUN.yaml": ("--config", "{run}", "{key}", "{value}"),
    "--config=RUN.yaml last": ("{key}={value}", "--config={run}"),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "hosts").write_text("localhost slots=1\n")


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, form: str, run: str, **words: str) -> str:
    """The message of a command that ends with exit code 2."""
    given = [*COMMANDS[command], *FORMS[form]]
    code = cli.main([word.format(hosts=tmp_path / "hosts", run=run, **words) for word in given])
    message = capsys.readouterr().err
    assert code == 2, message
    return message


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("command", COMMANDS)
def test_an_override_arrives(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, form: str) -> None:
    message = refused(tmp_path, capsys, command, form, RECIPE, key="--optim.lr", value="-1")
    assert "optim.lr" in message and "-1" in message and "command line" in message


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("command", COMMANDS)
def test_the_named_file_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, form: str) -> None:
    run = tmp_path / "mine.yaml"
    run.write_text((REPO / RECIPE).read_text().replace("  lr:", "  lrr:"))
    message = refused(tmp_path, capsys, command, form, str(run), key="--train.max_steps", value="3")
    assert "mine.yaml" in message and "optim.lrr" in message
    assert "command line" not in message
