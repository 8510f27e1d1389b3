"""`llmtrain COMMAND ...`. Imports the chosen command and nothing else: a typo answers in milliseconds."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import select
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from llmtrain.base import log, untrusted
from llmtrain.base.errors import UserError
from llmtrain.commands import completion

CORE: dict[str, tuple[str, str]] = {
    "init": ("llmtrain.commands.init", "write recipes and DeepSpeed files to a folder, to start from"),
    "config": ("llmtrain.commands.config", "check a run's configuration, or show it resolved"),
    "prepare": ("llmtrain.commands.prepare", "make a data folder from text, code, jsonl, parquet"),
    "data": ("llmtrain.commands.data", "show rows of prepared conversations, and their counted tokens"),
    "launch": ("llmtrain.commands.launch", "train on the hosts of a hostfile: start, watch, start again after a fault"),
    "reference": ("llmtrain.commands.reference", "write a reference model's or teacher's figures into prepared data"),
    "train": ("llmtrain.commands.train", "train in this process; on many ranks, `launch` or `deepspeed` starts it"),
    "parity": ("llmtrain.commands.parity", "hold a small copy of a run against plain PyTorch in one process"),
    "generate": ("llmtrain.commands.generate", "print a continuation of a prompt"),
    "checkpoint": ("llmtrain.commands.checkpoint", "list, verify, compare, convert and delete checkpoints"),
}
"""Command -> (module with its `main`, what it does)."""


def commands() -> dict[str, tuple[str, str]]:
    """All commands, those of features among them."""
    from llmtrain import features  # most commands are the core's

    return CORE | features.commands()


def usage() -> str:
    lines = ["usage: llmtrain COMMAND ...", ""]
    lines += [f"  {name:<11} {what}" for name, (_, what) in commands().items()]
    return "\n".join([*lines, "", "`llmtrain COMMAND --help` says more."])


def main(argv: list[str] | None = None) -> int:
    """Run one command. A UserError becomes its message and its exit code; Ctrl-C becomes 130.

    Any other exception is a bug and keeps its traceback.
    """
    try:
        try:
            return _main(sys.argv[1:] if argv is None else argv)
        finally:
            log.reopen()
            sys.stdout.flush()
    except BrokenPipeError:
        # The broken pipe is standard output if `| head` has read enough.
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        if not any(event & select.POLLERR for _, event in poll.poll(0)):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the rest of the buffer
        return 141  # as a program that SIGPIPE ends


def _main(words: list[str]) -> int:
    if completion.ASKED in os.environ:
        command = completion.command_of_line(commands())
        return _command(command)([]) if command in commands() else 0
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"llmtrain {_version()}")
        return 0
    try:
        return _command(_with_flag(words))(words[1:])
    except UserError as error:
        # Before the ranks have met, one voice a host: another host may have another file or another version.
        if log.rank() == 0 or (not error.everywhere and os.environ.get("LOCAL_RANK") == "0"):
            print(f"error: {untrusted.shown(error, lines=True)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of a library in Rust: no Exception, and never exported
            raise
        what = "a tokenizer, or another file that it was given, asks a library for more than it can do"
        print(f"error: {what}: {untrusted.first_line(error, 200)}", file=sys.stderr)
        return UserError.exit_code


def _with_flag(words: list[str]) -> str:
    """Return the command's name, with the flag that hands its words to a feature, such as `init --from`."""
    if words[0] != "train":  # ranks import no more than they need
        flags = {word.partition("=")[0] for word in words[1:]}
        for name in commands():
            command, _, flag = name.partition(" ")
            if command == words[0] and flag in flags:
                return name
    return words[0]


def _command(name: str) -> Callable[[list[str]], int]:
    known = CORE if name in CORE else commands()
    if name not in known:
        from llmtrain.config.problems import closest

        near = closest(name, known)
        remedy = f"did you mean `llmtrain {near}`?" if near else f"one of: {', '.join(known)}"
        raise UserError(f"there is no command {name!r}: {remedy}")
    return importlib.import_module(known[name][0]).main


def _passes_on(command: str = "train") -> bool:
    """True for a command that passes the variables of this process on to other hosts."""
    if command in CORE:
        return command == "launch"
    from llmtrain import features

    return features.passes_on(command)


def _version() -> str:
    try:
        return version("llmtrain")
    except PackageNotFoundError:
        return "(not installed)"


def run(words: list[str] | None = None) -> NoReturn:
    """Run the command line as this process, and end it with the command's exit code.

    The process ends before the interpreter shuts down. A thread that is in torch at that moment (a daemon, or one of a
    pool that Ctrl-C has overtaken) would want the interpreter back, and torch would abort ("terminate called without an
    active exception"): a rank that has saved would count as failed.
    """
    code = [1]
    atexit.register(_end, code)  # the first to be registered is the last to run
    words = sys.argv[1:] if words is None else words
    if not _passes_on(*words[:1]):
        from llmtrain.config.topology import cores_of_a_rank

        # Waiting threads sleep: by default they spin, and 20 steps of the quickstart next to other work took 26 s of
        # CPU time instead of 8 s. One thread for each core of this rank; OpenMP itself knows the affinity. It reads
        # both variables when torch is loaded, and the user's values remain.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        with contextlib.suppress(UserError):  # the command says it
            if (cores := cores_of_a_rank()) < len(os.sched_getaffinity(0)):
                os.environ.setdefault("OMP_NUM_THREADS", str(cores))
    try:
        code[0] = main(words)
    except SystemExit as error:
        code[0] = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    sys.exit(code[0])


def _end(code: list[int]) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader is gone, or it is closed
            stream.flush()
    os._exit(code[0])


if __name__ == "__main__":
    run()
