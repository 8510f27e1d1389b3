"""A job on its hosts: the process that starts it, signals to its ranks, its end, and its guardian.

The starting process (host.py, pdsh or srun) has its own session, and its output is read line by line. All other
processes are found by the launch's mark, never by name: DeepSpeed itself uses `pkill -f`, which ends every DeepSpeed
job of the user on those hosts (multinode_runner.py). The guardian, `python -m llmtrain.cluster.launch.job`, takes over
if launch is killed, so that the ranks save and leave: without it, rank 0 would die at its next print into a pipe that
nobody reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llmtrain import features
from llmtrain.base import log, untrusted
from llmtrain.base.rank import messages
from llmtrain.cluster.hosts.hostfile import is_here
from llmtrain.cluster.hosts.ssh import Answer, on_hosts
from llmtrain.cluster.hosts.variables import remove

TRAIN = ("llmtrain", "train")
"""Arguments of `python -m` for a rank, before --config, both in a clone and with an installed wheel."""
_REST_S = 12.0
"""Seconds to wait for output after the process has ended: a host's agent may still report a fault."""
_REACH_S = 15.0

# A rank is found by process id, rank number and mark together, so that a reused id is never signalled.
_SIGNAL = r"""
while read -r pid rank; do
  e="/proc/$pid/environ"
  grep -qzxF "LLMTRAIN_LAUNCH=$1" "$e" 2>/dev/null && grep -qzxF "RANK=$rank" "$e" && kill -"$2" "$pid" && echo "$rank"
done
true
"""

# The agent first, which would take the end of its ranks for a fault. Its folder, which has the mark in its name, is
# removed when no process of the launch is left to use it.
_END = r"""
of_job() { grep -lzxF "LLMTRAIN_LAUNCH=$mark" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3; }
mark=$1 tries=$2 agent=$3
while [ "$tries" -gt 0 ] && [ -n "$(of_job)" ]; do sleep 0.5; tries=$((tries - 1)); done
ended=$(of_job)
for p in $ended; do
  [ -n "$agent" ] && grep -qzxF "$agent" "/proc/$p/cmdline" 2>/dev/null && kill -9 "$p" 2>/dev/null
done
tries=10
while p=$(of_job) && [ -n "$p" ] && [ "$tries" -gt 0 ]; do kill -9 $p 2>/dev/null; sleep 0.3; tries=$((tries - 1)); done
echo $ended
[ -z "$(of_job)" ] || exit 1
for base in /dev/shm "${TMPDIR:-/tmp}"; do rm -rf "$base/llmtrain-watch-$(id -u)-"*"-$mark"; done
"""


def on_terminal() -> bool:
    return sys.stdout.isatty() and sys.stderr.isatty()


def message_or_line(raw: bytes, launch: str) -> dict[str, Any] | bytes:
    """Return the message in a line of a job's output, or the line for the user. `launch`: the launch's mark."""
    message = messages.parse(raw.decode("utf-8", "replace"), launch)
    return raw if message is None else message


def say(text: str) -> None:
    print(untrusted.shown(text, lines=True), file=sys.stderr, flush=True)


class Job:
    """A started job, which a Ctrl-C in the terminal does not reach. Its context kills what is left of the job's
    session."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], mark: str) -> None:
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._mark = mark
        self._process = subprocess.Popen(
            argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            # On a terminal, standard error must not write into the live line.
            stderr=subprocess.STDOUT if on_terminal() else None,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read_output, name="job-output", daemon=True)
        self._reader.start()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.wait()

    @property
    def output(self) -> int:
        """Descriptor of the job's output pipe, for `Guardian`; this process reads it."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for raw in stream:
                line = message_or_line(raw, self._mark)
                if isinstance(line, dict):
                    self._messages.put(line)
                    continue
                with contextlib.suppress(OSError, ValueError):  # without a terminal the job goes on
                    if on_terminal():
                        log.pass_on(line.decode("utf-8", "replace"))
                    else:
                        sys.stdout.buffer.write(line)
                        sys.stdout.buffer.flush()

    def take(self, wait_s: float) -> list[dict[str, Any]]:
        """Return the messages since the last call, after waiting at most `wait_s` for the first one."""
        messages: list[dict[str, Any]] = []
        with contextlib.suppress(queue.Empty):
            messages.append(self._messages.get(timeout=wait_s))
            while True:
                messages.append(self._messages.get_nowait())
        return messages

    def code(self) -> int | None:
        """Return the exit code (negative: the signal), None while the process runs. Only `__exit__` reaps it, so that
        `kill` cannot hit another process."""
        if self._process.returncode is not None:
            return self._process.returncode
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def rest(self) -> list[dict[str, Any]]:
        """Return the messages that were still in the pipe when the process ended."""
        self._reader.join(_REST_S)
        return self.take(0.0)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End the process with everything in its session: ranks on this host, or pdsh with its connections."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def signal_ranks(hosts: Sequence[str], mark: str, ranks: Iterable[dict[str, Any]], number: int) -> int:
    """Send a signal to all ranks in the message `place`, at once. Returns how many got it."""
    text = "".join(f"{int(rank['pid'])} {int(rank['rank'])}\n" for rank in ranks)
    local, answers = _everywhere(hosts, _SIGNAL, (mark, str(number)), text, _REACH_S)
    outputs = [local, *(answer.stdout for answer in answers)]
    return len({word for text in outputs for word in text.split()})


def end_all(hosts: Sequence[str], mark: str, grace_s: float = 0.0) -> list[str]:
    """End every process of the launch that has not ended after `grace_s`. Returns a line for each host with a fault."""
    arguments = (mark, str(round(2 * grace_s)), features.agent())
    _, answers = _everywhere(hosts, _END, arguments, "", _REACH_S + grace_s)
    lines = []
    for answer in answers:
        if answer.code is None and answer.trouble is not None:
            lines.append(
                f"{answer.host}: {answer.trouble.text}; its processes end themselves when they find themselves alone"
            )
        elif answer.code != 0:
            lines.append(f"{answer.host}: processes of this run cannot be ended: {answer.stdout.strip()}")
    return lines


def _everywhere(
    hosts: Sequence[str], script: str, arguments: Sequence[str], text: str, timeout_s: float
) -> tuple[str, list[Answer]]:
    """Run a script on this host and all others. Returns (its output on this host, the answers of the others)."""
    command = ("/bin/sh", "-c", script, "sh", *arguments)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(text)
        process.stdin.close()
        others = [name for name in hosts if not is_here(name)]
        answers = on_hosts(others, command, input=text, timeout_s=timeout_s) if others else {}
        return process.stdout.read(), list(answers.values())


AGENTS_LEAVE_S = 12.0
"""Seconds for the agents to end after the ranks: after a fault they report to trackers."""
_SAVES_S = 1800.0
"""Seconds for the ranks to save and leave, when nobody is left to end a rank that hangs."""


class Guardian:
    """A context in which the guardian process guards an attempt."""

    def __init__(self, hosts: Sequence[str], mark: str, secret: str | None, output: int) -> None:
        """`secret`: path that `deliver` returned; `output`: descriptor of the job's output."""
        self._process = subprocess.Popen(
            (sys.executable, "-m", "llmtrain.cluster.launch.job", str(output)),
            stdin=subprocess.PIPE,
            pass_fds=(output,),
            start_new_session=True,  # a signal to launch's process group does not reach it
        )
        self._send_facts(hosts=list(hosts), mark=mark, secret=secret)

    def __enter__(self) -> Guardian:
        return self

    def __exit__(self, *_: object) -> None:
        self._send_facts(ended=True)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def met(self, ranks: Sequence[dict[str, Any]]) -> None:
        self._send_facts(ranks=[{"pid": rank["pid"], "rank": rank["rank"]} for rank in ranks])

    def _send_facts(self, **facts: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the guardian was killed
            self._process.stdin.write(json.dumps(facts).encode() + b"\n")
            self._process.stdin.flush()


def take_over(facts: dict[str, Any], output: int) -> None:
    """Act for a killed launch: ask the ranks to save and leave, as at a first Ctrl-C, then clean up."""
    hosts, mark = facts["hosts"], facts["mark"]
    ranks = facts.get("ranks", [])
    if ranks:
        reached = signal_ranks(hosts, mark, ranks, signal.SIGTERM)
        _print(f"launch was killed: {reached} of {len(ranks)} ranks were asked to save and leave")

        def print_output() -> None:
            """Print the job's output until no process is left to write."""
            with open(output, "rb") as stream:
                for raw in stream:
                    if isinstance(line := message_or_line(raw, mark), bytes):
                        with contextlib.suppress(OSError):
                            os.write(1, line)

        printing = threading.Thread(target=print_output, daemon=True)
        printing.start()
        printing.join(_SAVES_S)
    for line in end_all(hosts, mark, AGENTS_LEAVE_S if ranks else 0.0):
        _print(f"warning: {line}")
    if facts["secret"] is not None:
        remove(hosts, facts["secret"])


def _print(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def main(output: int) -> int:
    """Read facts, as JSON lines, from standard input until launch has ended; if it was killed, take over."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it must outlive launch
    facts: dict[str, Any] = {}
    for line in sys.stdin:
        with contextlib.suppress(ValueError):  # launch was killed while it wrote
            facts.update(json.loads(line))
    if "mark" in facts and not facts.get("ended"):
        take_over(facts, output)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
