"""Lines between a job and its supervisor."""

from __future__ import annotations

import pytest

from llmtrain.cluster import messages


def test_a_message_survives_the_launchers_prefix(capfd, monkeypatch):
    monkeypatch.setenv(messages.SUPERVISED, "1")
    messages.emit("fault", what="dead rank", ranks=[3], text="rank 3 on näh-2\nsaid: {}")
    line = capfd.readouterr().out
    assert line.count("\n") == 1
    expected = {"kind": "fault", "what": "dead rank", "ranks": [3], "text": "rank 3 on näh-2\nsaid: {}"}
    assert messages.parse(line) == expected
    assert messages.parse(f"node-2: {line}") == expected


def test_a_user_without_a_supervisor_sees_nothing(capfd, monkeypatch):
    monkeypatch.delenv(messages.SUPERVISED, raising=False)
    messages.emit("end", status="complete", code=0)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    "line", ["step 3 loss 2.1", "llmtrain:: {", "llmtrain:: [1]", 'llmtrain:: {"kind": "other"}', "llmtrain:: null", ""]
)
def test_other_lines_are_no_messages(line):
    assert messages.parse(line) is None
