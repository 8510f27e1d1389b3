"""Every command of docs/data.md, run as it stands there."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from llmtrain.config.run import DataConfig
from llmtrain.data.stream.train_data import TrainData
from tests.helpers.play import write_play
from tests.helpers.warm import WarmCommands

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "data.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, flags=re.M | re.S)


def form(line: str) -> str:
    """A line of output without its figures."""
    return re.sub(r"[\d.]+[kMs%]?", "#", line)


def test_every_command_of_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: WarmCommands) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "code" / "deep").mkdir(parents=True)
    for index in range(40):
        (tmp_path / "notes" / f"{index}.txt").write_text(f"note {index}: " + "some words to learn from " * 20)
        (tmp_path / "code" / "deep" / f"{index}.py").write_text(f"x = {index}\n" * 50)
    with gzip.open(tmp_path / "corpus.jsonl.gz", "wt") as stream:
        for index in range(400):
            stream.write(json.dumps({"body": f"record {index} " * 100}) + "\n")
    write_play(tmp_path / "play.txt")
    env = warm.environment(PYTHONPATH=str(ROOT))
    commands, printed = blocks("bash"), []
    assert len(commands) == 5
    for command in commands:
        if "--source corpora" in command:  # bare ids of 2 bytes
            (tmp_path / "corpora").mkdir()
            shutil.copy(tmp_path / "data/stdlib/train-00000.bin", tmp_path / "corpora/a.npy")
        done = subprocess.run(["bash", "-ec", command], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stderr)
        printed += [form(line) for line in done.stdout.splitlines()]
    for shown in blocks("text"):
        assert form(shown.strip()) in printed, printed
    monkeypatch.chdir(tmp_path)
    for block in blocks("yaml"):
        here = block.replace("s3://bucket/", f"file://{tmp_path}/data/").replace("/scratch", f"{tmp_path}/scratch")
        data = TrainData(DataConfig(**yaml.safe_load(here)["data"]))
        assert data.sequences_per_epoch > 0 and data.vocab_size == 4096
        assert len(data.sequence(10**9)[0]) == 1024
