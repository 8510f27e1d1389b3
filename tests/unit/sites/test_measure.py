"""The line between two sites, measured: `doctor --sites` beside `sites measure --listen`, and what both refuse."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest

from llmtrain.base.errors import UserError
from llmtrain.cluster.doctor import site_links as lines
from llmtrain.commands import doctor
from llmtrain.commands.sites import main, measured
from tests.helpers.launching import free_port


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of half a second."""
    monkeypatch.setattr(lines, "_WINDOW_S", 0.5)


def test_doctor_measures_a_line_for_the_plan(short, tmp_path, capsys) -> None:
    """Through both commands. A loopback has more than 100 Mbit/s and less than 50 ms."""
    at, out = f"127.0.0.1:{free_port()}", tmp_path / "line.json"
    ended: list[int] = []
    answering = threading.Thread(
        target=lambda: ended.append(main(["measure", "--listen", at, "--for-s", "8"])), daemon=True
    )
    answering.start()
    time.sleep(0.2)
    assert doctor.main(["--sites", at, at, "--out", str(out)]) == 0
    assert "round trip" in capsys.readouterr().out
    found = json.loads(out.read_text())["lines"]
    assert [each["site"] for each in found] == [at, at]
    line = measured(str(out))
    assert line.rate > 12.5e6 and 0 < line.rtt_s < 0.05
    assert line.rate == min(each[key] for each in found for key in ("up", "down", "both_up", "both_down")) / 8
    answering.join(10)
    assert ended == [0], "it ends by itself"
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", int(at.rpartition(":")[2])), 1):
        pass


def test_a_site_that_does_not_answer_is_named_with_the_command_to_start(tmp_path) -> None:
    at, out = f"127.0.0.1:{free_port()}", tmp_path / "line.json"
    with pytest.raises(UserError, match=f"--sites {at}: .*llmtrain sites measure --listen {at}"):
        doctor.main(["--sites", at, "--out", str(out)])
    assert not out.exists()


def test_something_else_that_listens_there_is_no_measurement() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        at = f"127.0.0.1:{other.getsockname()[1]}"
        threading.Thread(target=lambda: other.accept()[0].sendall(b"SSH-2.0-OpenSSH\r\n"), daemon=True).start()
        began_s = time.monotonic()
        with pytest.raises(UserError, match=f"--sites {at}: no measurement"):
            doctor.main(["--sites", at])
        assert time.monotonic() - began_s < 15


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--listen", "0.0.0.0:29511"], "0.0.0.0 is no private address"),
        (["--listen", "8.8.8.8:29511"], "8.8.8.8 is no private address"),
        (["--listen", "29511"], "must be HOST:PORT"),
        (["--listen", "127.0.0.1:99999"], "must be HOST:PORT"),
        (["--listen", "127.0.0.1:29511", "--for-s", "nan"], "--for-s"),
        (["--listen", "127.0.0.1:29511", "--for-s", "1e9"], "--for-s"),
    ],
)
def test_what_must_not_listen_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        main(["measure", *words])


def test_doctor_wants_a_hostfile_or_sites() -> None:
    with pytest.raises(SystemExit):
        doctor.main([])
    with pytest.raises(UserError, match=r"--sites 10\.0\.0\.1: must be HOST:PORT"):
        doctor.main(["--sites", "10.0.0.1"])
