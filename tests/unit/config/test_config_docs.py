"""docs/configuration.md and docs/deepspeed.md say what the program says: files, commands, outputs, generated tables."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from llmtrain import cli
from llmtrain.config.help import entries
from tests.helpers.config_workplace import write
from tools.pages import BEGIN, END, PAGES, of_fields, write_into

PAGE = Path(__file__).parents[3] / "docs/configuration.md"
TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLES = TEXT + PAGE.with_name("deepspeed.md").read_text(encoding="utf-8")
FILES = re.findall(r"```(?:yaml|json) (\S+)\n(.*?)```", EXAMPLES, re.DOTALL)
COMMANDS = re.findall(r"```console\n\$ llmtrain ([^\n]+)\n(.*?)```", EXAMPLES, re.DOTALL)


@pytest.mark.parametrize(("command", "output"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_every_command_on_the_pages(
    command: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    for name, text in FILES:
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    code = cli.main(shlex.split(command))
    told = capsys.readouterr()
    assert told.out + told.err == output
    assert code == (2 if output.startswith("error: ") else 0)


def test_the_pages_show_commands() -> None:
    assert len(COMMANDS) >= 6
    assert {name for name, _ in FILES} >= {"run.yaml", "ds.json"}


@pytest.mark.parametrize("page", PAGES)
def test_what_is_generated_is_in_sync(page: str) -> None:
    text = (PAGE.parent / page).read_text(encoding="utf-8")
    told = text.partition(BEGIN)[2].partition(END)[0].strip()
    assert told == PAGES[page]().strip(), "run: python -m tools.pages docs"


def test_every_field_has_a_line_and_a_meaning() -> None:
    rows = [line for line in of_fields().splitlines() if line.startswith("| `")]
    assert len(rows) == len(entries())
    assert all(len(row.split(" | ")[-1]) > 5 for row in rows)


def test_writing_twice_changes_nothing(tmp_path: Path) -> None:
    copy = tmp_path / PAGE.name
    copy.write_text(TEXT, encoding="utf-8")
    write_into(copy, PAGES[PAGE.name]())
    assert copy.read_text(encoding="utf-8") == TEXT
