"""python -m tools.lab.enter PID CWD ARGV...: run a command in the namespaces of a process; ends as the command ends.

A process cannot move into another process id namespace, only its child can. So this one stays as the parent: it hands
signals on, and the command dies with it.
"""

from __future__ import annotations

import os
import signal
import sys

from tools.lab.namespaces import die_with_parent, enter

HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Never returns: exits with the command's code, or dies of the command's signal."""
    pid, cwd, *argv = sys.argv[1:]
    enter(int(pid))
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDED_ON)
        run(cwd, argv)
    for number in HANDED_ON:
        signal.signal(number, lambda got, _frame: os.kill(child, got))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDED_ON)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


def run(cwd: str, argv: list[str]) -> None:
    """The child: becomes the command, or says why it cannot and exits with 127 as a shell does."""
    die_with_parent()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.chdir(cwd if os.path.isdir(cwd) else "/")
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


if __name__ == "__main__":
    main()
