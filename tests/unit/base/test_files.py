from __future__ import annotations

import multiprocessing as mp
import os
from pathlib import Path

import pytest

from llmtrain.base.files import content_of, replace_file

_SIZE, _COUNT = 100_000, 150


def _replace(path: Path, letter: bytes) -> None:
    for _ in range(_COUNT):
        replace_file(path, letter * _SIZE)


def test_two_writers_of_a_file_neither_fail_nor_tear_it(tmp_path: Path) -> None:
    """They shared the name of the temporary file: every fifth write failed, and a reader met a half."""
    path = tmp_path / "plan.json"
    replace_file(path, b"a" * _SIZE)
    writers = [mp.get_context("fork").Process(target=_replace, args=(path, letter)) for letter in (b"a", b"b")]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        content = path.read_bytes()
        assert content in (b"a" * _SIZE, b"b" * _SIZE)
    assert [writer.exitcode for writer in writers] == [0, 0] and os.listdir(tmp_path) == ["plan.json"]


def test_a_link_that_another_user_has_laid_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "plan.json.tmp").symlink_to(victim)
    replace_file(tmp_path / "plan.json", b"new")
    assert victim.read_text() == "mine" and (tmp_path / "plan.json").read_bytes() == b"new"


def test_a_pipe_in_the_place_of_a_file_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        content_of(tmp_path / "pipe")
