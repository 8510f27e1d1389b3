"""A file that appears asks the job to leave."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from llmtrain.engine.ranks.stop_requests import StopRequests


def reason_within(requests: StopRequests, seconds: float) -> str | None:
    until = time.monotonic() + seconds
    while requests.stop_reason is None and time.monotonic() < until:
        time.sleep(0.05)
    return requests.stop_reason


def test_the_preempt_file_is_noticed_when_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    file = tmp_path / "spot notice"
    with StopRequests(str(file)) as requests:
        assert reason_within(requests, 1.5) is None
        file.touch()
        assert reason_within(requests, 20) == f"preempt file {file} is on {socket.gethostname()}"


def test_one_rank_of_a_host_looks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    (tmp_path / "notice").touch()
    with StopRequests(str(tmp_path / "notice")) as requests:
        assert reason_within(requests, 2.5) is None
