"""`llmtrain` commands forked from a process that has imported everything: each takes 0.1 s to begin instead of 5 to 10.

For tests that run many commands. What runs is the command line's own main, with the command's arguments, environment,
folder, streams, signals and exit code; only the interpreter's start is shared.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import traceback
from pathlib import Path

from llmtrain.cli import COMMANDS
from tests.helpers.launching import environment, installed_by_make
from tests.helpers.ranks import PRELOAD

_CLIENT = """#!{python} -IS
import json, os, select, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
asked = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(asked).to_bytes(4, "little")], [0, 1, 2])
server.sendall(asked)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: server.send(bytes([number])))
code = int.from_bytes(server.recv(4), "little", signed=True)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


class WarmCommands:
    """A folder for PATH whose `llmtrain` asks a process that has imported everything. Use as a context manager.

    The process has what `make train` installs: a command that needs more fails here as in a user's clone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = installed_by_make(folder / "venv")
        path = folder / "socket"
        client = folder / "llmtrain"
        client.write_text(_CLIENT.format(python=self.python, path=str(path)))
        client.chmod(client.stat().st_mode | stat.S_IXUSR)
        argv = [self.python, "-m", "tests.helpers.warm", str(path)]
        self._server = subprocess.Popen(argv, env=environment(), cwd=Path(__file__).parents[2], stdout=subprocess.PIPE)
        assert self._server.stdout is not None and self._server.stdout.readline() == b"ready\n"

    def __enter__(self) -> WarmCommands:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.kill()
        self._server.wait()

    def environment(self, **extra: str) -> dict[str, str]:
        """That of `launching.environment`, with these commands first in PATH."""
        env = environment(**extra)
        return {**env, "PATH": f"{self.folder}:{self.python.parent}:{env['PATH']}"}


def _serve(path: str) -> None:
    """Until it is killed."""
    for name in (*PRELOAD, *(module for module, _ in COMMANDS.values())):
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(16)
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            if not os.fork():
                listener.close()
                _attend(connection)
            connection.close()


def _attend(connection: socket.socket) -> None:
    """Fork the command, pass signals on to it, and tell its exit code; a client that is gone takes it along."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, _, _ = socket.recv_fds(connection, 4, 3)
    asked = b""
    while len(asked) < int.from_bytes(size, "little"):
        asked += connection.recv(1 << 20)
    child = os.fork()
    if not child:
        connection.close()
        _become(streams, *json.loads(asked))
    ended = os.pidfd_open(child)
    while True:
        ready, _, _ = select.select([connection, ended], [], [])
        if ended in ready:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            with contextlib.suppress(OSError):
                connection.send(code.to_bytes(4, "little", signed=True))
            os._exit(0)
        number = connection.recv(1)
        os.kill(child, number[0] if number else signal.SIGKILL)


def _become(streams: list[int], arguments: list[str], folder: str, env: dict[str, str]) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.argv = ["llmtrain", *arguments]
    from llmtrain.cli import main

    code = 1
    try:
        code = main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else error.code is not None
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1])
