"""`llmtrain prepare --on HOSTFILE`: the bytes of one machine, whatever happens to the hosts."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmtrain.commands.prepare import main
from tests.helpers.launching import environment
from tools.lab.host import LabHost
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
    for pool in running(lab3.hosts[1], "prepare_hosts.hosts"):  # out of memory, say: the whole host starts again
        pool.kill()
    lab3.hosts[2].kill()
    said = process.communicate(timeout=200)[0]
    assert process.returncode == 0, said
    assert "node-2" in said and "node-3" in said and "Traceback" not in said, said
    assert contents(out) == contents(corpus / "alone")


def running(host: LabHost, module: str) -> list[psutil.Process]:
    """Processes of a module on a host of the lab; others come and go meanwhile."""
    found = []
    for each in host.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            if module in " ".join(each.cmdline()):
                found.append(each)
    return found


def test_a_host_that_does_not_see_the_folder_and_one_that_is_not_there_are_named(
    lab3: Lab, corpus: Path, tmp_path: Path
) -> None:
    process = lab3.hosts[0].popen(
        ["llmtrain", "prepare", *words(corpus), "--out", "/tmp/own/set", "--on", str(lab3.hostfile())],
        env=environment(),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 2 and re.search(r"\bnode-[23] .*/tmp/own/set", said) and "Traceback" not in said, said
    (tmp_path / "hosts").write_text("node-1 slots=1\nnode-9 slots=1\n")
    process = prepare(lab3, corpus, tmp_path / "set", "--on", str(tmp_path / "hosts"))
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 2 and "--on: node-9: " in said and "Traceback" not in said, said
    assert all(not host.processes() for host in lab3.hosts)


@pytest.fixture
def bucket(lab3: Lab) -> Iterator[Any]:
    """An S3 server on node-1 with a bucket, which each host is told of by its own files; a client of it there."""
    address = f"http://{lab3.hosts[0].address}:5555"
    for host in lab3.hosts:
        (host.home / ".aws").mkdir(exist_ok=True)
        (host.home / ".aws/config").write_text(f"[default]\nregion = us-east-1\nendpoint_url = {address}\n")
        (host.home / ".aws/credentials").write_text(
            "[default]\naws_access_key_id = an-id\naws_secret_access_key = a-secret\n"
        )
    server = lab3.hosts[0].popen(
        [sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", "5555"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def client(code: str) -> str:
        """Standard output of a program on node-1 with `s3`."""
        given = f"import sys, boto3; s3 = boto3.client('s3'); {code}"
        return lab3.hosts[0].run([sys.executable, "-c", given]).stdout

    deadline = time.monotonic() + 60
    while "made" not in client(
        "\ntry: s3.create_bucket(Bucket='bucket'); print('made')\nexcept Exception as e: print(e)"
    ):
        assert time.monotonic() < deadline and server.poll() is None
    yield client
    server.kill()
    server.wait()


@pytest.mark.slow
@pytest.mark.needs("moto", "s3fs")
def test_hosts_that_share_nothing_prepare_from_a_bucket_into_a_bucket(
    lab3: Lab, bucket: Any, corpus: Path, tmp_path: Path
) -> None:
    bucket(f"s3.upload_file('{corpus}/a.jsonl', 'bucket', 'corpus/a.jsonl')")
    own = lab3.hosts[0].tmp / "own"
    own.mkdir()
    (own / "hosts").write_text("".join(f"{host.name} slots=1\n" for host in lab3.hosts))
    command = ["llmtrain", "prepare", *words(corpus), "--out", "s3://bucket/set", "--processes", "2", "--on", "hosts"]
    command[command.index("--source") + 1] = "s3://bucket/corpus"
    process = lab3.hosts[0].popen(
        command, env=environment(), cwd="/tmp/own", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    names = "[x['Key'] for x in s3.list_objects_v2(Bucket='bucket', Prefix='set/').get('Contents', [])]"
    deadline = time.monotonic() + 120
    while bucket(f"print({names})").count("unfinished/unit-") < 5:
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()[0]
    lab3.hosts[2].kill()
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0 and "node-3" in said and "Traceback" not in said, said
    get = f"[s3.download_file('bucket', k, '{tmp_path}/' + k[4:].replace('/', '+')) for k in {names}]"
    bucket(get)
    alone = {path.name: path.read_bytes() for path in (corpus / "alone").glob("*-*.bin")}
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*-*.bin")} == alone and alone
    assert {path.name for path in tmp_path.iterdir() if "+" in path.name and "tokenizer" not in path.name} == set()
    assert not [path for host in lab3.hosts[:2] for path in host.tmp.glob("llmtrain-prepare-*")]
