"""Checkpoints in S3, as a local server plays it."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmtrain.base.errors import CheckpointError
from llmtrain.features.mirror.upload import Mirrored, fetch_newest
from tests.features.mirror.test_mirror import mirroring
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.s3 import s3

pytestmark = [pytest.mark.slow, pytest.mark.needs("moto", "s3fs")]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3(monkeypatch):
        yield "s3://bucket/runs/one"


def test_rights_that_are_missing_are_told_without_a_secret(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3

    bucket += "-with-rights"  # moto's servers share one state
    iam, server = boto3.client("iam"), os.environ["AWS_ENDPOINT_URL"]
    iam.create_user(UserName="reader")
    rights = {"Effect": "Allow", "Action": ["s3:Get*", "s3:List*"], "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [rights]})
    iam.put_user_policy(UserName="reader", PolicyName="reads", PolicyDocument=policy)
    key = iam.create_access_key(UserName="reader")["AccessKey"]
    write_checkpoint(tmp_path, 1, seed=1)
    mirroring(tmp_path, mirror := Mirrored(bucket))[0].go_on()
    write_checkpoint(tmp_path, 2, seed=2)

    def ask(name: str, secret: str) -> tuple[str, Any]:
        type(mirror.store._files).clear_instance_cache()
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", name)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        tries, told = mirroring(tmp_path, Mirrored(bucket))
        tries.go_on()
        try:
            found: Any = fetch_newest(bucket, tmp_path / name, "run", lambda: None)
        except CheckpointError as error:
            found = str(error)
        assert secret not in f"{told} {found}"
        assert [kind for kind, _ in told] == ["mirror_failed"]
        return told[0][1]["error"], found

    def enforce(after: bytes) -> None:
        """Moto asks for rights after so many calls."""
        asked = urllib.request.Request(f"{server}/moto-api/reset-auth", after, {"Content-Type": "text/plain"})
        urllib.request.urlopen(asked).close()

    enforce(b"0")
    try:
        wrong = ask(key["AccessKeyId"], "a-wrong-secret-of-forty-letters-in-all-x")
        assert all("signature we calculated does not match" in text for text in wrong)
        assert all("does not exist in our records" in text for text in ask("AKIANOBODY", key["SecretAccessKey"]))
        refused, found = ask(key["AccessKeyId"], key["SecretAccessKey"])
        assert "Access Denied" in refused and found.name == "step-00000001"
    finally:
        enforce(b"inf")
