"""Signals and ends the processes of a launch on its hosts. They are found by the launch's mark, never by name.

DeepSpeed itself uses `pkill -f`, which ends every DeepSpeed job of the user on those hosts (multinode_runner.py), and
its launcher passes signals on to one rank after another, up to 30 s apart (launch.py).
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from typing import Any

from llmtrain.cluster.hosts.hostfile import is_here
from llmtrain.cluster.hosts.ssh import Answer, on_hosts

_REACH_S = 15.0

# A rank is identified by its id, its number and the mark together: a reused id is never hit.
_SIGNAL = r"""
while read -r pid rank; do
  e="/proc/$pid/environ"
  grep -qzxF "LLMTRAIN_LAUNCH=$1" "$e" 2>/dev/null && grep -qzxF "RANK=$rank" "$e" && kill -"$2" "$pid" && echo "$rank"
done
true
"""

# The agent first: it would take the end of its ranks for a fault. Its folder, with the mark in its name, is removed
# when no process of the launch is left to use it.
_END = r"""
of_job() { grep -lzxF "LLMTRAIN_LAUNCH=$mark" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3; }
mark=$1 tries=$2
while [ "$tries" -gt 0 ] && [ -n "$(of_job)" ]; do sleep 0.5; tries=$((tries - 1)); done
ended=$(of_job)
for p in $ended; do
  grep -qzxF llmtrain.cluster.watch.agent "/proc/$p/cmdline" 2>/dev/null && kill -9 "$p" 2>/dev/null
done
tries=10
while p=$(of_job) && [ -n "$p" ] && [ "$tries" -gt 0 ]; do kill -9 $p 2>/dev/null; sleep 0.3; tries=$((tries - 1)); done
echo $ended
[ -z "$(of_job)" ] || exit 1
for base in /dev/shm "${TMPDIR:-/tmp}"; do rm -rf "$base/llmtrain-watch-$(id -u)-"*"-$mark"; done
"""


def signal_ranks(hosts: Sequence[str], mark: str, ranks: Iterable[dict[str, Any]], number: int) -> int:
    """Send a signal to all ranks of the message `place` at once; returns the number that got it."""
    text = "".join(f"{int(each['pid'])} {int(each['rank'])}\n" for each in ranks)
    here, answers = _everywhere(hosts, _SIGNAL, (mark, str(number)), text, _REACH_S)
    said = [here, *(answer.stdout for answer in answers)]
    return len({word for text in said for word in text.split()})


def end_all(hosts: Sequence[str], mark: str, grace_s: float = 0.0) -> list[str]:
    """End every process of the launch that is still there after `grace_s`, on `hosts` and here.

    Returns a line for each host that could not be asked, or on which the kernel holds a process.
    """
    arguments = (mark, str(round(2 * grace_s)))
    _, answers = _everywhere(hosts, _END, arguments, "", _REACH_S + grace_s)
    lines = []
    for answer in answers:
        if answer.code is None and answer.trouble is not None:
            lines.append(
                f"{answer.host}: {answer.trouble.text}; what runs there ends itself when it finds itself alone"
            )
        elif answer.code != 0:
            lines.append(f"{answer.host}: processes of this run cannot be ended: {answer.stdout.strip()}")
    return lines


def _everywhere(
    hosts: Sequence[str], script: str, arguments: Sequence[str], text: str, timeout_s: float
) -> tuple[str, list[Answer]]:
    """Run a script here and on all other hosts: (its output here, the answers of the others)."""
    command = ("/bin/sh", "-c", script, "sh", *arguments)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(text)
        process.stdin.close()
        others = [name for name in hosts if not is_here(name)]
        answers = on_hosts(others, command, input=text, timeout_s=timeout_s) if others else {}
        return process.stdout.read(), list(answers.values())
