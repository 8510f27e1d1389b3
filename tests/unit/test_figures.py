"""tools/figures.py counts what is in the working tree, and compares it with a commit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import figures


def test_the_figures_of_a_tree_and_of_its_last_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "REPO", tmp_path)
    monkeypatch.setattr("sys.argv", ["figures.py"])
    written = {
        "llmtrain/a.py": '"""One."""\n\nasync def f() -> int:\n    """Two words."""\n',
        "llmtrain/config/b.py": "x = 1\n",
        "tests/helpers/h.py": "y = 1\ny = 2\n",
        "tests/unit/test_a.py": "z = 1\n",
        "docs/a.md": "three more wörds\n",
    }
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "llmtrain/c.py").write_text("def g():\n    pass\n")
    (tmp_path / "docs/a.md").write_text("two words\n")
    figures.main()
    told = {
        line.split(":")[0].strip(): " ".join(line.split(":")[1].split())
        for line in capsys.readouterr().out.splitlines()
    }
    assert told == {
        "package lines": "7 (+2 since HEAD)", "package files": "3 (+1 since HEAD)", "config/ lines": "1",
        "functions": "2 (+1 since HEAD)", "words of docstrings": "3", "test lines": "1", "test helper lines": "2",
        "words of docs": "2 (-1 since HEAD)",
    }  # fmt: skip
    (tmp_path / ".git").rename(tmp_path / "gone")
    figures.main()
    assert "since" not in capsys.readouterr().out, "there is no history to compare with"
