"""tools/prose.py finds replaced words on the lines that a change adds, and only there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import prose


def test_words_on_added_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prose, "REPO", tmp_path)
    monkeypatch.setattr("sys.argv", ["prose.py"])
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "a.py").write_text('"""An old line stands."""\n')
    (tmp_path / "gone.py").write_text("x = 1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *words], check=True)

    (tmp_path / "gone.py").unlink()
    (tmp_path / "a.py").write_text(
        '"""An old line stands."""\nstands = beside = f"{beside}"\n\n\ndef f():\n    """Returns a whole number."""\n'
    )
    assert prose.main() == 0, "names in the code and a whole number are fine"

    (tmp_path / "a.py").write_text('"""An old line stands."""\n\nx = 1  # computed anew\n"""What is left."""\n')
    (tmp_path / "new.md").write_text("One beside `beside`.\n```\nbeside\n```\n")
    capsys.readouterr()
    assert prose.main() == 1
    assert [line.partition(": write")[0] for line in capsys.readouterr().out.splitlines()] == [
        "a.py:3: 'anew'",
        "a.py:4: begins with 'What': begin with a verb or a noun",
        "new.md:1: 'beside'",
    ]
