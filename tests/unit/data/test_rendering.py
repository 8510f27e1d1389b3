"""A stranger's chat template: bounded in time, memory and output, in a process of its own that ends."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain.base.errors import DataError
from llmtrain.commands.prepare import main
from llmtrain.data.chat import rendering
from llmtrain.data.row import RefusedError
from tests.helpers.chat import CHATML, KINDS, RowMaker, write_tokenizer
from tests.helpers.marks import slow

RECORD = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


@pytest.fixture(autouse=True)
def bounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small ones, so that nothing here takes long."""
    for name, value in (("CPU_SECONDS", 1), ("MEMORY_MIB", 256), ("CHARACTERS", 5000)):
        monkeypatch.setattr(rendering, name, value)
    rendering.close()
    yield
    rendering.close()


def encoder(folder: Path, hostile: str) -> RowMaker:
    write_tokenizer(folder, replace(KINDS["chatml"], template=hostile + CHATML))
    return RowMaker(folder, stop_tokens=("<|im_end|>",))


@pytest.mark.parametrize(
    ("hostile", "reason"),
    [
        slow(
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "takes more than 1 s of processor time",
            id="ranges",
        ),
        ("{% set x = 7 ** (7 ** 9) %}", "takes more than 1 s of processor time"),  # within one operation
        ("{% set x = 'x' * 10 ** 10 %}", "takes more than 256 MiB of memory"),
        slow("{% set x = '%10000000000d' % 1 %}", "takes more than 256 MiB of memory", id="format"),
        ("{{ 'x' * 6000 }}", "one rendering has 60.. characters, more than 5000"),
    ],
    ids=lambda value: value[:20],
)
def test_what_a_template_may_take_is_bounded(tmp_path: Path, hostile: str, reason: str) -> None:
    one = encoder(tmp_path, hostile)
    with pytest.raises(RefusedError, match=reason):
        one.rows(json.dumps(RECORD))
    # The next template is rendered as if nothing had been.
    assert encoder(tmp_path / "right", "").rows(json.dumps(RECORD))


def test_a_template_that_goes_beyond_its_bounds_is_given_up(tmp_path: Path) -> None:
    one = encoder(tmp_path, "{% set x = 'x' * 10 ** 10 %}")
    for _ in range(2):
        with pytest.raises(RefusedError):
            one.rows(json.dumps(RECORD))
    with pytest.raises(DataError, match=r" 3 records.*--chat-template"):
        one.rows(json.dumps(RECORD))


def test_its_process_ends_with_it_and_holds_nothing_between_templates(tmp_path: Path) -> None:
    one = encoder(tmp_path, "{% set x = namespace(n=1) %}")
    assert one.rows(json.dumps(RECORD))
    child = rendering._PROCESS._child
    assert child is not None and child.pid != os.getpid() and child.code is None
    rendering.close()
    assert child.code is not None


def test_a_templates_own_words_reach_no_terminal_as_they_are(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Through the command; `\\x1b]0;` would set the window's title."""
    folder = tmp_path / "model"
    encoder(folder, "{{ raise_exception('\x1b]0;owned\x07\x1b[2J') }}")
    (tmp_path / "in.jsonl").write_text(json.dumps(RECORD) + "\n")
    given = ["--source", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out"), "--tokenizer", str(folder)]
    assert main([*given, "--format", "chat", "--processes", "1"]) == 2
    told = capfd.readouterr()
    assert "\\x1b]0;owned\\x07\\x1b[2J" in told.err and "\x1b" not in told.err + told.out
