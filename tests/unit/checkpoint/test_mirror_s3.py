"""Checkpoints in S3, as a local server plays it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtrain.base.errors import CheckpointError
from llmtrain.checkpoint.mirror import Mirrored, fetch_newest
from tests.helpers.checkpoints import write_checkpoint
from tests.unit.checkpoint.test_mirror import contents, mirroring

pytestmark = [pytest.mark.slow, pytest.mark.needs("moto", "s3fs")]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0)
    server.start()
    _, port = server.get_host_and_port()
    for name, value in {"AWS_ACCESS_KEY_ID": "an-id", "AWS_SECRET_ACCESS_KEY": "a-secret-of-forty-letters",
                        "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                        "AWS_MAX_ATTEMPTS": "1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="bucket")
    yield "s3://bucket/runs/one"
    server.stop()


def test_what_is_mirrored_comes_back(bucket: str, tmp_path: Path) -> None:
    mirror, told = mirroring(tmp_path, Mirrored(bucket), keep=1)
    for step in (1, 2):
        folder = write_checkpoint(tmp_path, step, seed=step)
        mirror.go_on()
    assert [kind for kind, _ in told] == ["mirrored", "mirrored"], told
    assert list(Mirrored(bucket).complete()) == [2]
    fetched = fetch_newest(bucket, tmp_path / "elsewhere", "run", lambda: None)
    assert fetched is not None and contents(fetched) == contents(folder)


def test_a_bucket_that_is_not_there_is_told_without_a_secret(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, 1, seed=1)
    mirror, told = mirroring(tmp_path, Mirrored("s3://another/run"))
    mirror.go_on()
    assert [kind for kind, _ in told] == ["mirror_failed"]
    assert "a-secret" not in str(told)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody listens
    Mirrored(bucket).store._files.clear_instance_cache()
    with pytest.raises(CheckpointError, match=r"checkpoint\.mirror s3://bucket/runs/one: cannot be read") as error:
        fetch_newest(bucket, tmp_path / "a", "run", lambda: None)
    assert "a-secret" not in str(error.value)
