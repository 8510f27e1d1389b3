"""Lines between a job and its supervisor."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from llmtrain.base.errors import ConfigError, UserError
from llmtrain.base.rank import messages, watch
from llmtrain.cluster.launch.attempts import Attempt
from llmtrain.engine.ranks.ranks import AgreedError
from llmtrain.engine.ranks.rendezvous import RanksDiffer, RendezvousError


def test_a_message_survives_the_launchers_prefix(capfd, monkeypatch):
    monkeypatch.setenv(messages.SUPERVISED, "1")
    messages.emit("fault", what="dead rank", ranks=[3], text="rank 3 on näh-2\nsaid: {}")
    line = capfd.readouterr().out
    assert line.count("\n") == 1
    expected = {"kind": "fault", "what": "dead rank", "ranks": [3], "text": "rank 3 on näh-2\nsaid: {}"}
    assert messages.parse(line) == expected
    assert messages.parse(f"node-2: {line}") == expected
    assert messages.parse(line, "another") is None


def test_a_user_without_a_supervisor_sees_nothing(capfd, monkeypatch):
    monkeypatch.delenv(messages.SUPERVISED, raising=False)
    messages.emit("end", status="complete", code=0)
    assert capfd.readouterr().out == ""


def test_a_start_that_fetches_says_so_until_it_has(capfd, monkeypatch):
    """`launch` gives the ranks their time to meet from then on."""
    monkeypatch.setenv(messages.SUPERVISED, "1")
    with messages.waiting(every_s=0.01):
        time.sleep(0.1)
    told = list(map(messages.parse, capfd.readouterr().out.splitlines()))
    assert len(told) > 1 and all(message == {"kind": "wait"} for message in told)
    attempt = Attempt(began_s=1.0)
    attempt.hear({"kind": "wait"}, 400.0)
    assert attempt.began_s == 400.0
    time.sleep(0.05)
    assert capfd.readouterr().out == ""


def test_a_message_arrives_when_the_users_code_has_closed_its_output():
    script = "from llmtrain.base import log\nfrom llmtrain.base.rank import messages\nimport os\n"
    script += "log.keep_output()\nos.close(1)\nmessages.emit('end', status='complete', code=0)\n"
    environment = {**os.environ, messages.SUPERVISED: "1", messages.LAUNCH: "a0"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert messages.parse(done.stdout, "a0") == {"kind": "end", "status": "complete", "code": 0}, done.stderr


@pytest.mark.parametrize(
    "line", ["step 3 loss 2.1", "llmtrain:: {", "llmtrain:: [1]", 'llmtrain:: {"kind": "other"}', "llmtrain:: null", ""]
)
def test_other_lines_are_no_messages(line):
    assert messages.parse(line) is None


@pytest.mark.parametrize(
    ("error", "status"), [(ConfigError, "refused"), (RanksDiffer, "refused"), (RendezvousError, "failed")]
)
def test_only_what_the_hosts_did_may_be_tried_again(
    error: type[UserError], status: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(messages.SUPERVISED, "1")
    with pytest.raises(error), watch.outcome_reported():
        raise error("ranks 4 to 7 had not connected")
    told = messages.parse(capfd.readouterr().out)
    assert told is not None and (told["status"], told["code"]) == (status, 2)
    with pytest.raises(AgreedError), watch.outcome_reported():  # as the loop ends on all ranks alike
        raise AgreedError("the same on all", 3) from error("the same on all")
    told = messages.parse(capfd.readouterr().out)
    assert told is not None and (told["status"], told["code"]) == (status, 3)
