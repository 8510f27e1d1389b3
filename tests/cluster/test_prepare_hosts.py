"""`llmtrain prepare --on HOSTFILE`: the bytes of one machine, whatever happens to the hosts."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from llmtrain.commands.prepare import main
from tests.helpers.launching import environment
from tools.lab.lab import Lab


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some seconds of work for six processes, in 60 shards; and what one machine makes of it, in `alone`."""
    folder = tmp_path_factory.mktemp("corpus")
    with open(folder / "a.jsonl", "w") as stream:
        for index in range(6000):
            stream.write(json.dumps({"text": f"document {index}: " + "some words to learn from " * 40}) + "\n")
    assert main([*words(folder), "--out", str(folder / "alone")]) == 0
    return folder


def words(folder: Path) -> list[str]:
    return ["--source", str(folder / "a.jsonl"), "--vocab-size", "300", "--shard-bytes", "100000"]


def contents(folder: Path) -> dict[str, bytes]:
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    manifest = json.loads(files.pop("manifest.json"))
    assert manifest["tokens"]
    return {**files, "manifest": json.dumps(manifest).encode()}


def prepare(lab: Lab, corpus: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    command = ["llmtrain", "prepare", *words(corpus), "--out", str(out), "--processes", "2", *more]
    return lab.hosts[0].popen(
        command, env=environment(), cwd=out.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def test_a_host_that_dies_costs_its_shards_under_way_and_no_byte(lab3: Lab, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "set"
    process = prepare(lab3, corpus, out, "--on", str(lab3.hostfile()))
    deadline = time.monotonic() + 120
    while len(list((out / "unfinished").glob("unit-*.json"))) < 5:
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    for worker in lab3.hosts[1].processes():  # the kernel's, out of memory: the whole host starts again
        if "pools" in " ".join(worker.cmdline()):
            worker.kill()
    lab3.hosts[2].kill()
    said = process.communicate(timeout=200)[0]
    assert process.returncode == 0, said
    assert "under way will be done again" in said and "Traceback" not in said, said
    assert contents(out) == contents(corpus / "alone")


def test_a_host_that_does_not_see_the_folder_and_one_that_is_not_there_are_named(
    lab3: Lab, corpus: Path, tmp_path: Path
) -> None:
    process = lab3.hosts[0].popen(
        ["llmtrain", "prepare", *words(corpus), "--out", "/tmp/own/set", "--on", str(lab3.hostfile())],
        env=environment(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 2 and "does not see /tmp/own/set" in said and "Traceback" not in said, said
    (tmp_path / "hosts").write_text("node-1 slots=1\nnode-9 slots=1\n")
    process = prepare(lab3, corpus, tmp_path / "set", "--on", str(tmp_path / "hosts"))
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 2 and "--on: node-9: " in said and "Traceback" not in said, said
    assert all(not host.processes() for host in lab3.hosts)
