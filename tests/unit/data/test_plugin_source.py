"""`prepare --plugin`: records of a user's source, by any number of processes, from Python and by the command."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

import llmtrain
from llmtrain.base.errors import UserError
from llmtrain.cli import main
from llmtrain.config import plugin_import, plugins
from tests.helpers.launching import REPO

CSV = str(REPO / "examples/csv_source.py")
BAD = """
from dataclasses import dataclass
from llmtrain import Source, bounded

@dataclass(kw_only=True)
class Bad(Source, entry="bad"):
    count: int = bounded(3, at_least=1)

    def parts(self, words):
        return [] if words == "none" else [words]

    def records(self, part):
        yield "A text of some length to begin with."
        if part == "raises":
            raise KeyError("as asked")
        if part == "leaves":
            raise SystemExit(3)
        yield {"number": 3, "array": [3.0], "wrong": 7}[part]
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        with open(f"t{number}.csv", "w", newline="") as file:
            rows = csv.writer(file, delimiter=";")
            rows.writerow(["id", "body"])
            rows.writerows([row, f'Row {row} of "table" {number}; {"word " * (row % 7)}\nends.'] for row in range(80))
    (tmp_path / "bad.py").write_text(BAD)
    yield
    plugin_import.use([])


def test_rows_of_csv_files_become_documents_however_many_processes_there_are(tmp_path: Path) -> None:
    words = ["--plugin", CSV, "--source", "csv:t*.csv", "--csv.delimiter", ";", "--field", "body"]
    words += ["--vocab-size", "300", "--shard-bytes", "5000"]
    assert main(["prepare", *words, "--out", "a", "--processes", "1"]) == 0
    made = llmtrain.prepare(
        "csv:t*.csv",
        "b",
        plugin=CSV,
        fields={"csv": {"delimiter": ";"}},
        field="body",
        vocab_size=300,
        shard_bytes=5000,
        processes=2,
    )
    manifests = [json.loads(Path(out, "manifest.json").read_text()) for out in ("a", "b")]
    assert manifests[0] == manifests[1] and len(list(Path("a").glob("train-*.bin"))) > 1
    for shard in Path("a").glob("*.bin"):
        assert shard.read_bytes() == (Path("b") / shard.name).read_bytes()
    assert sum(made.documents.values()) == 240 and made.settings["plugins"] == plugins.hashes()
    (tmp_path / "csv_source.py").write_text(Path(CSV).read_text() + "\n# changed\n")
    with pytest.raises(UserError, match="plugins"):
        llmtrain.prepare(
            "csv:t*.csv",
            "b",
            plugin="csv_source.py",
            fields={"csv": {"delimiter": ";"}},
            field="body",
            vocab_size=300,
            shard_bytes=5000,
        )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--plugin bad.py --source bad:raises", "bad:raises: records: bad.py line 15: KeyError: 'as asked'"),
        ("--plugin bad.py --source bad:leaves", "bad:leaves: records: bad.py line 17: SystemExit: 3"),
        ("--plugin bad.py --source bad:unknown", "bad:unknown: records: bad.py line 18: KeyError"),
        ("--plugin bad.py --source bad:number", "a record is int, not a text or a map"),
        ("--plugin bad.py --source bad:none", "parts of bad returned []; it must return one or more texts"),
        ("--plugin bad.py --source bad:number --bad.count 0", "must be at least 1"),
        ("--plugin bad.py --source bad:number --bad.count many", "must be a whole number"),
        ("--plugin bad.py --source t0.csv --format text", "no --source reads from it; write --source bad:WORDS"),
        ("--source bad:number", "for a source of your own give its file, --plugin FILE.py"),
        ("--plugin nowhere.py --source t0.csv", "--plugin nowhere.py: no such file"),
    ],
)
def test_a_wrong_source_is_named(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", *words.split(), "--out", "out", "--vocab-size", "260"]) == 2
    assert told in capsys.readouterr().err


def test_the_options_of_a_source_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["prepare", "--plugin", CSV, "--help"])
    assert 'Character between two columns. (text; default: ",")' in " ".join(capsys.readouterr().out.split())
    with pytest.raises(UserError, match="vocabsize"):
        llmtrain.prepare("stdlib", "out", vocabsize=3)
