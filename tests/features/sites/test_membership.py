"""torchft's side of a site, against a lighthouse of its own."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from torchft import coordination

from tests.helpers.launching import environment

ENDS_WITHIN_A_HEARTBEAT = """
import sys, time
from llmtrain.features.sites import membership
membership._HEARTBEAT_S = 0.01
site = membership.TorchftMembers(sys.argv[1], "north:0123abcd", 10.0)
site._start_heartbeats()
time.sleep(0.3)
site.close()
"""


@pytest.fixture
def far_coordinator() -> Iterator[str]:
    """HOST:PORT of a lighthouse whose answers take 0.3 s."""
    server = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
    port = int(server.address().rpartition(":")[2])

    def hand_on(come: socket.socket, go: socket.socket, after_s: float) -> None:
        with contextlib.suppress(OSError):
            while data := come.recv(1 << 16):
                time.sleep(after_s)
                go.sendall(data)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                here, there = listener.accept()[0], socket.create_connection(("127.0.0.1", port))
                for come, go, after_s in ((here, there, 0.0), (there, here, 0.3)):
                    threading.Thread(target=hand_on, args=(come, go, after_s), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    server.shutdown()


def test_a_process_that_ends_during_a_heartbeat_ends_well(far_coordinator: str) -> None:
    """It was aborted ("FATAL: exception not rethrown"): a complete run over sites counted as failed."""
    command = [sys.executable, "-c", ENDS_WITHIN_A_HEARTBEAT, far_coordinator]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
