"""`llmtrain prepare` from a bucket and into one: the bytes of local folders, whatever happens to the network."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from llmtrain.commands.prepare import main
from tests.helpers.chat import workers_here
from tests.helpers.s3 import SECRET, Network, contents, s3
from tests.unit.data.test_data_prepare import contents as files_of
from tests.unit.data.test_stored_sources import lines

pytestmark = [pytest.mark.slow, pytest.mark.needs("moto", "s3fs")]
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Network]]:
    with s3(monkeypatch) as made:
        yield made


def words(source: str, out: Path | str, *more: str) -> list[str]:
    given = ["--vocab-size", "300", "--shard-bytes", "60000", "--processes", "2", *more]
    return ["--source", source, "--out", str(out), *given]


def shards(found: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in found.items() if name.endswith(".bin")}


def start(argv: list[str], **values: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "llmtrain.cli", "prepare", *argv],
        env={**os.environ, **values},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_preparation_goes_on_after_a_kill_on_another_machine_over_a_bad_network(
    bucket: tuple[Any, Network], tmp_path: Path
) -> None:
    client, network = bucket
    (tmp_path / "a.jsonl").write_bytes(lines(0, 20000))
    client.upload_file(str(tmp_path / "a.jsonl"), "bucket", "corpus/a.jsonl")
    with workers_here():
        assert main(words(str(tmp_path), tmp_path / "here")) == 0
    network.cuts, network.after_bytes = 6, 30000  # in the middle of ranges that come, and of shards that go
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    first = start(words("s3://bucket/corpus/*.jsonl", "s3://bucket/set"), TMPDIR=str(tmp_path / "one"))
    deadline = time.monotonic() + 120
    while sum(name.startswith("unit-") for name in contents(client, "set/unfinished/")) < 3:
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()
        time.sleep(0.05)
    first.kill()
    first.communicate()
    assert "manifest.json" not in contents(client, "set/")
    second = start(words("s3://bucket/corpus/*.jsonl", "s3://bucket/set"), TMPDIR=str(tmp_path / "two"))
    said = second.communicate(timeout=300)[0]
    assert second.returncode == 0 and re.search(r"\d+ of \d+ shards", said) and network.cuts == 0, said
    there = contents(client, "set/")
    assert shards(there) == shards(files_of(tmp_path / "here")) and "manifest.json" in there
    assert not [name for name in there if name.startswith("unfinished")] and not list((tmp_path / "two").iterdir())


def test_a_network_that_stays_bad_ends_it_with_a_message(
    bucket: tuple[Any, Network], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    client, network = bucket
    (tmp_path / "a.jsonl").write_bytes(lines(0, 3000))
    client.upload_file(str(tmp_path / "a.jsonl"), "bucket", "corpus/a.jsonl")
    network.cuts, network.after_bytes = 1 << 30, 40000
    assert main(words("s3://bucket/corpus", tmp_path / "set")) == 2
    said = capfd.readouterr().err
    assert "s3://bucket/corpus/a.jsonl: " in said and "command again" in said, said
    assert "Traceback" not in said and SECRET not in said and not (tmp_path / "set/manifest.json").exists()


def test_the_command_of_the_docs(bucket: tuple[Any, Network], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = re.findall(r"^```sh\n(llmtrain prepare .*)\n```", (ROOT / "docs/data.md").read_text(), flags=re.M)
    client, _ = bucket
    client.put_object(Bucket="bucket", Key="corpus/a.jsonl.zst", Body=zstandard.compress(lines(0, 300)))
    monkeypatch.chdir(tmp_path)
    with workers_here():
        (tmp_path / "a.jsonl").write_bytes(lines(0, 300))
        assert main(["--source", "a.jsonl", "--vocab-size", "300", "--out", "data/stdlib"]) == 0
        assert len(command) == 1 and main(shlex.split(command[0])[2:]) == 0
    assert "manifest.json" in contents(client, "prepared/")
