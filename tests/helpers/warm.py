"""Commands forked from a process that has imported everything: each begins in 0.1 s instead of 3 to 10.

What runs is the command's own main, with its arguments, environment, folder, streams, process group, signals and exit
code, and in /proc its own command line and variables; only the interpreter's start is shared. Commands that start
others (`llmtrain launch`, DeepSpeed's launcher) start these in the same way. Everything else begins as always: shells,
pdsh, ssh, the agent of the watch, the writer of checkpoints.

Three ways in:

- `popen` in the place of subprocess.Popen: the command is a child of the test's process;
- `environment`: a PATH whose `llmtrain` and `deepspeed` are clients of the process, for shells. A client stays until
  its command ends, hands signals on and exits as it does; the command runs in the client's namespaces;
- `on_hosts`: the same for the hosts of a lab, with a `python` for what ssh starts there.

Each entry point has tests in which its interpreter starts for real:

- `llmtrain`, in a user's environment and of a wheel: tests/runs/test_wheel.py, test_newcomer.py;
- `llmtrain launch` on this host, with DeepSpeed's launcher and its ranks: tests/runs/test_console.py, test_wheel.py;
- `llmtrain launch` over ssh, with DeepSpeed's launcher and its ranks: tests/cluster/test_restart.py;
- a task of Slurm: tests/runs/test_wheel.py;
- `deepspeed --hostfile ... launch/train.py`: tests/runs/test_training.py, the fixture `undisturbed`;
- `llmtrain parity` and its ranks: tests/runs/test_parity_command.py, Ctrl-C;
- the workers of `llmtrain prepare`: tests/unit/data/test_data_prepare.py;
- `llmtrain doctor`, its probes and fabric workers: tests/features/doctor/test_doctor.py.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from llmtrain.cluster.launch.placement import HOST
from tests.helpers.launching import REPO, environment, installed_by_make
from tests.helpers.ranks import PRELOAD
from tools.lab.namespaces import NAMESPACES, die_with_parent, enter

_RANKS = (
    *("llmtrain.parity.trainer", "tests.helpers.faulty_worker"),
    *("llmtrain.training.output_columns", "llmtrain.cluster.launch.slurm"),
    "llmtrain.data.prepare.worker",
)
MODULES = ("llmtrain", "deepspeed.launcher.runner", "deepspeed.launcher.launch", HOST, *_RANKS)
"""What `python -m` forks; the others import little."""
SCRIPTS = ("/launch/train.py", "/bin/deepspeed", "/bin/llmtrain", "/tools/right_answers.py", "mine.py")
_STARTS_NONE = (*_RANKS, "/launch/train.py", "/tools/right_answers.py")
_OPTIONAL = ("wandb", "peft")
_AT_IMPORT = ("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "LD_", "TRANSFORMERS_", "PYTHON")
"""Variables that are read at the start or by an import: with another value a command starts as always."""
_NOT_READ = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")
"""Of these what is imported does not depend on. A host of the lab has none of them."""

_CLONE_PARENT, _CLONE3 = 0x8000, 435
_PDEATHSIG, _SET_NAME, _SET_MM, _SET_MM_MAP = 1, 15, 35, 14
_HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_OURS = 600  # descriptors from here on are this module's, below are the command's
_libc = ctypes.CDLL(None, use_errno=True)

_CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
command = {before!r} + sys.argv[1:]
handed_on = {handed_on!r}
signal.pthread_sigmask(signal.SIG_BLOCK, handed_on)
ignored = [number for number in handed_on if signal.getsignal(number) == signal.SIG_IGN]
asked = dict(argv=command, executable={executable!r}, cwd=os.getcwd(), env=dict(os.environ), ignored=ignored)
asked = json.dumps(asked).encode()
server = socket.socket(socket.AF_UNIX)
server.connect("/proc/self/fd/%d/socket" % os.open({folder!r}, os.O_PATH))  # a socket's path has at most 107 bytes
socket.send_fds(server, [len(asked).to_bytes(4, "little")], [0, 1, 2])
server.sendall(asked)
for number in handed_on:
    if number not in ignored:
        signal.signal(number, lambda number, _: server.send(bytes([number])))
is_refused = server.recv(1) != b"+"
signal.pthread_sigmask(signal.SIG_UNBLOCK, handed_on)
if is_refused:
    os.execv(command[0], command)
code = int.from_bytes(server.recv(4), "little", signed=True)
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


class WarmCommands:
    """The process that has imported everything. Use as a context manager."""

    def __init__(self, folder: Path, python: Path | None = None) -> None:
        """`python`: by default one with what `make train` installs, so that a command that needs more fails here as in
        a user's clone."""
        self.folder, self.hosts = folder, folder / "hosts"
        self.python = python or installed_by_make(folder / "venv")
        self.hosts.mkdir()
        for place in (self.folder, self.hosts):
            for name in ("llmtrain", "deepspeed"):
                _write_client(place, name, [str(self.python), str(self.python.parent / name)], self)
        _write_client(self.hosts, "python", [str(self.python)], self)
        ours, theirs = socket.socketpair()
        code = f"from tests.helpers import warm; warm.serve({theirs.fileno()}, {str(folder)!r})"
        argv = [str(self.python), "-c", code]
        self._server = subprocess.Popen(
            argv, env=environment(), cwd=REPO, stdout=subprocess.PIPE, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self._nursery = _Nursery(ours, self.python, folder)
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

    def on_hosts(self, **extra: str) -> dict[str, str]:
        """The same for a host of a lab, and for those that the command reaches from there."""
        env = environment(**extra)
        return {**env, "PATH": f"{self.hosts}:{env['PATH']}"}

    def popen(self, *args: Any, **options: Any) -> subprocess.Popen[str]:
        """subprocess.Popen, whose command is forked if it is one of these."""
        with self._nursery.used():
            return subprocess.Popen(*args, **options)


def _write_client(folder: Path, name: str, before: Sequence[str], of: WarmCommands) -> None:
    path = folder / name
    executable = str(folder / "python") if folder == of.hosts else None
    path.write_text(
        _CLIENT.format(
            python=of.python,
            before=before,
            executable=executable,
            folder=str(of.folder),
            handed_on=[int(number) for number in _HANDED_ON],
        )
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


# What a command line starts


def _forked(argv: Sequence[str]) -> tuple[list[str], str] | None:
    """(flags, module or script) of a command line that is forked."""
    flags = [argv[1]] if argv[1:2] and argv[1] in ("-u", "-P") else []
    first, *more = [*argv[1 + len(flags) :], ""]
    if first == "-m" and more[0] in MODULES:
        return flags, more[0]
    if (first == "-c" and len(more) > 1) or first == "-":
        return flags, first
    return (flags, first) if first.endswith(SCRIPTS) else None


def _begins_alike(asked: Mapping[str, Any]) -> bool:
    """True if the command's own start would import what this process has imported."""
    env = asked["env"]
    theirs, ours = (
        {name: value for name, value in each.items() if name.startswith(_AT_IMPORT) and name not in _NOT_READ}
        for each in (env, _BEFORE)
    )
    places = [*filter(None, env.get("PYTHONPATH", "").split(":")), asked["cwd"]]
    others = [place for place in places if Path(place, "llmtrain").is_dir() and Path(place).resolve() != REPO]
    found = _forked(asked["argv"]) if _able else None
    return found is not None and not others and ("deepspeed" in found[1] or theirs == ours)


_BEFORE = dict(os.environ)
_able = True
"""This kernel lets a process show other words and variables in /proc."""


# The process, and one beside each command that starts others


class _Nursery:
    """A process that has imported everything and done nothing. What it forks is a child of the process that asks."""

    def __init__(self, door: socket.socket, python: Path, clients: Path | None = None) -> None:
        self._door, self._lock = door, threading.Lock()
        self._python, self._folders = str(python), (python.parent, clients)
        self._usual = subprocess._fork_exec  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def used(self) -> Any:
        """subprocess asks it for the commands that it can fork."""
        subprocess._fork_exec = self._fork_exec  # type: ignore[attr-defined]
        try:
            yield
        finally:
            subprocess._fork_exec = self._usual  # type: ignore[attr-defined]

    def _fork_exec(self, *given: Any) -> int:
        """In the place of subprocess._fork_exec, with its arguments."""
        words, _, close_fds, kept, cwd, variables = given[:6]
        reads, _, _, writes, _, errors, _, told = given[6:14]
        _, session, group, gid, gids, uid, umask, before = given[14:22]
        dies = getattr(before, "args", None) == (_PDEATHSIG, signal.SIGKILL)  # with its parent, as llmtrain's ranks do
        plain = close_fds and (gid, gids, uid, umask) == (None, None, None, -1) and (before is None or dies)
        env = dict(os.environ)
        if variables is not None:
            env = dict(os.fsdecode(each).split("=", 1) for each in variables)
        argv = [os.fsdecode(word) for word in words]
        found = shutil.which(argv[0], path=env.get("PATH")) or ""
        if Path(found).parent in self._folders and os.path.basename(found) in ("llmtrain", "deepspeed"):
            argv = [self._python, f"{self._folders[0]}/{os.path.basename(found)}", *argv[1:]]
        if plain and argv[0] in (sys.executable, self._python) and _forked(argv) is not None:
            streams = [number if number >= 0 else usual for usual, number in enumerate((reads, writes, errors))]
            kept = [number for number in kept if number != told]
            ignored = [int(n) for n in _HANDED_ON if signal.getsignal(n) == signal.SIG_IGN]
            asked = {
                "argv": argv,
                "executable": None if self._folders[1] else sys.executable,
                "cwd": os.fsdecode(cwd) if cwd is not None else os.getcwd(),
                "env": env,
                "ignored": ignored,
                "session": bool(session),
                "group": group,
                "kept": kept,
                "dies": dies,
            }
            with contextlib.suppress(OSError), self._lock:
                _send(self._door, asked, [*streams, *kept])
                if pid := int.from_bytes(self._door.recv(4), "little"):
                    return pid
        return self._usual(*given)


def _send(door: socket.socket, asked: Mapping[str, Any], streams: Sequence[int]) -> None:
    text = json.dumps(asked).encode()
    socket.send_fds(door, [len(text).to_bytes(4, "little")], streams)
    door.sendall(text)


def _receive(door: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request, with its descriptors. Raises EOFError when nobody asks any more."""
    size, streams, _, _ = socket.recv_fds(door, 4, 64)
    text = b""
    while size and len(text) < int.from_bytes(size, "little"):
        text += door.recv(1 << 20)
    if not size:
        raise EOFError
    return json.loads(text), [_high(stream) for stream in streams]


def _high(stream: int) -> int:
    """The same descriptor above those of a command."""
    moved = fcntl.fcntl(stream, fcntl.F_DUPFD_CLOEXEC, _OURS)
    os.close(stream)
    return moved


def _fork_sibling() -> int:
    """os.fork, but the child is one of this process's parent, which can wait for it."""
    arguments = (ctypes.c_uint64 * 8)(_CLONE_PARENT)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = ctypes.PyDLL(None).syscall(_CLONE3, arguments, ctypes.c_size_t(64))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return pid


def _tend(door: socket.socket, listener: socket.socket | None = None) -> None:
    """Serve the process that holds the other end of `door`, and clients, until that process ends."""
    for number in _HANDED_ON:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    places: list[Any] = [door] if listener is None else [door, listener]
    while True:
        ready, _, _ = select.select(places, [], [])
        if listener is not None and listener in ready:
            connection, _ = listener.accept()
            if not os.fork():
                door.close()
                listener.close()
                _attend(connection)
            connection.close()
        if door in ready:
            asked, streams = _receive(door)
            alike = _begins_alike(asked)
            if (pid := _fork_sibling() if alike else -1) == 0:
                door.close()
                if listener is not None:
                    listener.close()
                _become(asked, streams)
            for stream in streams:
                os.close(stream)
            door.send(max(pid, 0).to_bytes(4, "little"))


def _attend(connection: socket.socket) -> NoReturn:
    """Fork the command where the client is, hand signals on to it, and tell its exit code; a client that is gone takes
    it along."""
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    asked, streams = _receive(connection)
    if not _begins_alike(asked):
        connection.send(b"-")
        os._exit(0)
    connection.send(b"+")
    client, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if any(os.readlink(f"/proc/{client}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}") for kind in NAMESPACES):
        enter(client)
    child = os.fork()
    if not child:
        connection.close()
        _become({**asked, "session": True, "group": -1, "kept": [], "dies": True}, streams)
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(child)
    while True:
        ready, _, _ = select.select([connection, ended], [], [])  # type: ignore[type-var]
        if ended in ready:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            with contextlib.suppress(OSError):
                connection.send(code.to_bytes(4, "little", signed=True))
            os._exit(0)
        number = connection.recv(1)
        os.kill(child, number[0] if number else signal.SIGKILL)


# The command


def _become(asked: Mapping[str, Any], streams: Sequence[int]) -> NoReturn:
    """What exec would have made of this process."""
    argv, code = asked["argv"], 1
    try:
        if asked["dies"]:
            die_with_parent()
        if asked["session"]:
            os.setsid()
        if asked["group"] >= 0:
            os.setpgid(0, asked["group"])
        starts_none = "train" in argv[:5] or any(word.endswith(_STARTS_NONE) for word in argv[1:4])
        nursery = None if starts_none else _nursery(streams)
        for number, stream in zip((0, 1, 2, *asked["kept"]), streams, strict=True):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["env"])
        sys.executable = asked["executable"] or _EXECUTABLE
        os.execv = _execv  # type: ignore[assignment]
        with nursery.used() if nursery else contextlib.nullcontext():
            while argv:
                _as_at_start(argv, asked["ignored"])
                argv, code = _run(argv)
    except BaseException:
        traceback.print_exc()
    finally:
        for text in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                text.flush()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)


class _Executed(BaseException):
    """The command goes on as another one of these."""


def _execv(path: str, argv: Sequence[str]) -> NoReturn:
    if path == sys.executable and _forked(argv) is not None:
        raise _Executed(*argv)
    os.execve(path, list(argv), os.environ)


def _as_at_start(argv: Sequence[str], ignored: Sequence[int]) -> None:
    """Signals, /proc and the streams of Python."""
    for each in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError):
            signal.signal(each, signal.SIG_IGN if each in ignored else signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _in_proc(argv, os.environ)
    _as_imported(os.environ)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    for number, kind in ((1, "stdout"), (2, "stderr")):
        raw, at_once = io.FileIO(number, "w", closefd=False), argv[1] == "-u"
        written = io.TextIOWrapper(
            raw if at_once else io.BufferedWriter(raw),
            write_through=at_once,
            line_buffering=number == 2 or os.isatty(number),
            errors="backslashreplace" if number == 2 else "strict",
        )
        setattr(sys, kind, written)
        setattr(sys, f"__{kind}__", written)


def _nursery(streams: Sequence[int]) -> _Nursery:
    """A process beside this one, before it has done anything. It ends with it."""
    ours, theirs = (socket.socket(fileno=_high(end.detach())) for end in socket.socketpair())
    if not os.fork():
        die_with_parent()
        ours.close()
        for stream in streams:
            os.close(stream)
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        with contextlib.suppress(EOFError):
            _tend(theirs)
        os._exit(0)
    theirs.close()
    return _Nursery(ours, Path(_EXECUTABLE))


def _run(argv: Sequence[str]) -> tuple[list[str], int]:
    """(the command that it has become, its exit code; below 0: the signal that it is to die of)."""
    flag, *words = argv[1:] if argv[1] in ("-u", "-P") else ("", *argv[1:])
    if words[0] == "-":  # the program is on the standard input, as doctor sends its probe
        words = ["-c", sys.stdin.read(), *words[1:]]
    kind, module, *rest = words if words[0] in ("-m", "-c") else ("", *words)
    first = {"-m": os.getcwd(), "-c": ""}.get(kind, str(Path(module).resolve().parent))
    added = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    sys.path[:] = [*(() if flag == "-P" else (first,)), *added, *_PATH]
    sys.argv = [kind or module, *rest]
    try:
        if kind == "-m":
            if module != "llmtrain":
                sys.modules.pop(module, None)  # else runpy warns of a second copy
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(module, "<string>", "exec"), vars(sys.modules["__main__"]))
        else:
            runpy.run_path(module, run_name="__main__")
    except _Executed as other:
        return [*map(str, other.args)], 0
    except SystemExit as error:
        code = (error.code if isinstance(error.code, int) else int(error.code is not None)) & 0xFF
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        code = 1
    else:
        code = 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return [], code


def _in_proc(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Show the command's own words and variables in /proc, where the watch and `ps` read them."""
    global _shown
    texts = [
        b"".join(os.fsencode(word) + b"\0" for word in words)
        for words in (argv, (f"{name}={value}" for name, value in env.items()))
    ]
    _shown = [ctypes.create_string_buffer(text, len(text)) for text in texts]
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start_code, end_code, start_stack = map(int, fields[23:26])
    start_data, end_data, start_brk = map(int, fields[42:45])
    _libc.sbrk.restype = ctypes.c_void_p
    (words_at, words_end), (env_at, env_end) = ((at := ctypes.addressof(buffer), at + len(buffer)) for buffer in _shown)
    told = struct.pack(
        "12QIi",
        start_code,
        end_code,
        start_data,
        end_data,
        start_brk,
        _libc.sbrk(0),
        start_stack,
        words_at,
        words_end,
        env_at,
        env_end,
        0,
        0,
        -1,
    )
    if _libc.prctl(_SET_MM, _SET_MM_MAP, told, ctypes.c_ulong(len(told)), 0):
        raise OSError(ctypes.get_errno(), "prctl: PR_SET_MM_MAP")
    _libc.prctl(_SET_NAME, os.path.basename(argv[1] if argv[1].endswith(SCRIPTS[1:]) else argv[0]).encode(), 0, 0, 0)


_shown: list[Any] = []


def _as_imported(env: Mapping[str, str]) -> None:
    """What modules have read of the environment when they were imported."""
    tempfile.tempdir = None
    import huggingface_hub.constants
    import torch

    huggingface_hub.constants.HF_HUB_OFFLINE = env.get("HF_HUB_OFFLINE", "0") in ("1", "true", "True")
    if "OMP_NUM_THREADS" in env:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))


def serve(door: int, folder: str) -> None:
    """Until the process that holds the other end of `door` has ended."""
    from llmtrain.cli import commands

    global _able
    die_with_parent()
    try:
        _in_proc(sys.orig_argv, os.environ)
    except OSError:
        _able = False
    for name in (*PRELOAD, *MODULES[1:], *(module for module, _ in commands().values())) if _able else ():
        importlib.import_module(name)
    for name in _OPTIONAL if _able else ():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    os.chdir(folder)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        listener.listen(64)
        os.chdir("/")
        print("ready", flush=True)
        with contextlib.suppress(EOFError):
            _tend(socket.socket(fileno=door), listener)


_EXECUTABLE = sys.executable
_PATH = sys.path[1:]
