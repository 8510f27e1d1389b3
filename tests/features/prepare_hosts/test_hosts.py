"""The driver of `llmtrain prepare --on`, and what is behind its links."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llmtrain.base.errors import DataError
from llmtrain.commands.prepare import prepare
from llmtrain.data.kinds import RowKind
from llmtrain.data.prepare import pools
from llmtrain.data.prepare.pools import Link, Place
from llmtrain.data.prepare.sources import Unit
from llmtrain.data.prepare.worker import UNFINISHED, WorkerSettings
from llmtrain.features.prepare_hosts import hosts
from tests.helpers.chat import KINDS, write_tokenizer


def settings_in(folder: Path) -> WorkerSettings:
    (folder / UNFINISHED).mkdir()
    (folder / UNFINISHED / "plan.json").write_text("{}")
    write_tokenizer(folder / "tokenizer", KINDS["chatml"])
    return WorkerSettings(
        out=str(folder),
        here=str(folder),
        kind=RowKind.of("text"),
        dtype="<u2",
        max_document_bytes=1,
        validation_fraction=0.1,
        cut_bytes=1,
        reject_limit=1,
    )


def test_this_host_in_a_hostfile_makes_the_bytes_of_its_own_workers(tmp_path: Path) -> None:
    """Without ssh: its pool of workers is a process here."""
    source, listed = tmp_path / "a.jsonl", tmp_path / "hosts"
    source.write_text("".join(f'{{"text": "sentence number {i} {i * i}"}}\n' for i in range(2000)))
    listed.write_text("localhost slots=1\n")
    words: dict[str, Any] = {"vocab_size": 300, "shard_bytes": 20_000, "processes": 2}
    prepare(source, tmp_path / "alone", **words)
    assert prepare(source, tmp_path / "set", on=listed, **words).tokens["train"] > 0
    alone, made = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.bin")}
        for folder in (tmp_path / "alone", tmp_path / "set")
    )
    assert len(alone) > 2 and made == alone
    with pytest.raises(DataError, match="`llmtrain prepare --help`"):
        prepare(source, tmp_path / "other", hosts=listed)


def test_a_host_that_falls_silent_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its connection stays open: frozen, or without power. What it had is done elsewhere, if there is an elsewhere."""
    monkeypatch.setattr(pools, "BEAT_S", 0.05)
    monkeypatch.setattr(pools, "_SILENT_S", 0.3)
    says_hello = "import sys, time; print('{\"hello\": 1}', flush=True); time.sleep(99)"
    silent = Place(partial(Link, "node-2", [sys.executable, "-c", says_hello]), workers=None, starts=2)
    never = lambda *_: pytest.fail("nothing was done")  # noqa: E731
    with pytest.raises(DataError, match="no host is left"):
        pools.run_units([Unit(index=0, pieces=())], settings_in(tmp_path), [silent], never, never)
    said = capsys.readouterr()
    assert (said.out + said.err).count("node-2 has said nothing for") == 2


@pytest.mark.slow
def test_an_idle_host_says_that_it_is_there(tmp_path: Path) -> None:
    greeting: dict[str, Any] = {**asdict(settings_in(tmp_path)), "plan": "{}"}
    words = [sys.executable, "-P", "-m", hosts.__name__, str(tmp_path), "1"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(greeting) + "\n")
        process.stdin.flush()
        assert [json.loads(process.stdout.readline()) for _ in range(2)] == [{"hello": 1}, {"alive": True}]
        process.stdin.close()
        assert process.wait(20) == 0
