"""The agent: a small process on each host that watches the host's ranks. `begin` (base/rank/watch.py) starts it, and it
ends after the ranks. When it ends a job, it ends the ranks of its host, all processes below them, and all processes
with the job's mark in their environment (such as a data worker whose rank is dead).

The agent on rank 0's host is the root: the other agents report to it once a second, and it decides. Until the ranks
have met, and when the root is lost, each agent decides for its own host. It starts in a tenth of a second, without
torch.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import resource
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmtrain.base import untrusted
from llmtrain.base.files import lock_folder
from llmtrain.base.rank import messages
from llmtrain.base.rank.folder import AGENT, JOB, NAME, RUN, own, read_json, write_json
from llmtrain.base.rank.heartbeat import read
from llmtrain.base.rank.processes import Process, identify, pids, words
from llmtrain.features.watch.causes import explain
from llmtrain.features.watch.facts import Explanation, HostFacts, JobFacts, RankFacts
from llmtrain.features.watch.observe import HostRanks, captured, descendants, has_mark, oom_kills, with_answer
from llmtrain.features.watch.verdict import SILENT_S, Judge, Pauses, Stragglers, Verdict

_LONGEST = 4 << 20
_HELLO_S, _HELLO_BYTES = 5.0, 4 << 10
_STRANGERS, _AT_ONCE = 32, 1024
"""Most connections that have not yet sent the token, and most that are accepted in one round."""
_GENTLE_S = 2.0
"""Seconds that programs other than Python get to end by themselves; they may have sockets to remove."""
_WITHIN_S = 8.0
_LAUNCHER_LEAVES_S = 40.0
_STALE_S = 600.0
_LAUNCHERS = ("deepspeed.launcher.launch", "deepspeed/launcher/launch.py", "llmtrain.cluster.launch.host")
_HUSH = signal.SIGRTMIN + 5
"""Signal from an agent to its keeper: close your output, as the agent closes its own."""
_JOB = ("--world_info=", "--master_addr=", "--master_port=")


class Line:
    """One connection. No method waits for the peer or raises; `closed` is True after the connection has ended."""

    def __init__(self, connected: socket.socket) -> None:
        """Raises OSError when the other side has gone already."""
        self._socket = connected
        self._socket.setblocking(False)
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.address = str(self._socket.getpeername()[0]).removeprefix("::ffff:")
        self._in = bytearray()
        self._out = bytearray()
        self.longest = _LONGEST
        self.closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message, and give the kernel as much as it takes now."""
        if self.closed:
            return
        self._out += json.dumps(message, separators=(",", ":")).encode() + b"\n"
        if len(self._out) > _LONGEST:
            self.close()
        self.flush()

    def flush(self) -> None:
        while self._out and not self.closed:
            try:
                del self._out[: self._socket.send(self._out)]
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self.close()

    def receive(self) -> list[dict[str, Any]]:
        self.flush()
        while not self.closed:
            try:
                data = self._socket.recv(1 << 16)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self.close()
                break
            if not data:
                self.close()
            self._in += data
            if self.longest < _LONGEST and b"\n" in data:
                break  # a stranger's first line; the long report after it is read once its token is known
            if len(self._in) > self.longest:
                self.close()
        *lines, rest = bytes(self._in).split(b"\n")
        self._in = bytearray(rest)
        messages: list[dict[str, Any]] = []
        for line in lines:
            try:
                message = untrusted.loads(line)
            except ValueError:
                self.close()
                return messages
            if isinstance(message, dict):
                messages.append(message)
        return messages

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.close()


class Server:
    """Listens for agents of other hosts; drops connections without the token."""

    def __init__(self) -> None:
        """Raises OSError."""
        try:
            self._socket = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        except (OSError, ValueError):  # no IPv6 here
            self._socket = socket.create_server(("", 0), backlog=1024)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self.token = secrets.token_hex(16)
        self._strangers: list[tuple[Line, float]] = []
        self.lines: dict[str, Line] = {}
        """Connections by host name."""
        self.peers: dict[str, tuple[str, str, int]] = {}
        """Host name, address and port of each agent that has connected."""

    def accept(self, now: float) -> None:
        """Accept connections. The first message must be {"token", "host"}; anyone may send anything else."""
        for _ in range(_AT_ONCE):
            try:
                connected, _ = self._socket.accept()
            except OSError:
                break
            with contextlib.suppress(OSError):
                line = Line(connected)
                line.longest = _HELLO_BYTES
                self._strangers.append((line, now))
            if len(self._strangers) > _STRANGERS:
                self._greet(now)
        self._greet(now)

    def _greet(self, now: float) -> None:
        waiting = []
        for line, since in self._strangers:
            hello = next(iter(line.receive()), None)
            if hello is None:
                if now - since > _HELLO_S:
                    line.close()
                if not line.closed:
                    waiting.append((line, since))
            elif hmac.compare_digest(str(hello.get("token")).encode(errors="replace"), self.token.encode()):
                line.longest = _LONGEST
                name = host = str(hello.get("host"))
                if host in self.lines and not self.lines[host].closed:  # containers may share a host name
                    name = f"{host} ({line.address})"
                self.lines[name] = line
                self.peers[name] = (host, line.address, int(hello.get("port") or 0))
            else:
                line.close()
        while len(waiting) > _STRANGERS:
            waiting.pop(untrusted.to_end([line.address for line, _ in waiting]))[0].close()
        self._strangers = waiting

    def turn_away(self, seconds: float) -> None:
        """Close new connections at once for `seconds`, because a peer takes an open connection without messages for a
        lost host."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            wait([], left_s, [self._socket.fileno()])
            with contextlib.suppress(OSError):
                self._socket.accept()[0].close()

    def close(self) -> None:
        for line in [*self.lines.values(), *(line for line, _ in self._strangers)]:
            line.close()
        self._socket.close()


def call(address: str, port: int, hello: dict[str, Any], timeout_s: float) -> Line:
    """Connect and send the first message. Raises OSError."""
    line = Line(socket.create_connection((address, port), timeout=timeout_s))
    line.send(hello)
    return line


def answers(address: str, port: int, timeout_s: float = 1.0) -> bool:
    try:
        with socket.create_connection((address, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def wait(lines: Sequence[Line], seconds: float, others: Sequence[int] = ()) -> None:
    """Wait until a line, or a file descriptor of `others`, has something to read, or the time is over."""
    poll = select.poll()
    for handle in (*(line.fileno() for line in lines if not line.closed), *others):
        poll.register(handle, select.POLLIN)
    poll.poll(seconds * 1000)


_TICK_S, _SOONEST_S = 0.5, 0.1
"""Longest and shortest pause between two rounds of `Agent.run`; the shortest bounds the work of a root with 1,000
hosts."""
_REPORT_S = 1.0
_ROOT_LOST_S = 12.0
"""Seconds of silence after which the root is lost: more than verdict.SILENT_S, so that the root decides first."""
_UNREACHED_S = 30.0
_LOST_S, _BUSY_S = 4.0, 30.0
"""Seconds that the ssh connections of `deepspeed` get to end by themselves: if a host is lost, and if all answer."""
_PEERS = 8
"""Peers whose addresses the root sends to each agent."""
_ANSWERS_S = 5.0  # for the stacks of other hosts, and their GPUs' state
_ENDED_S = 5.0
"""Seconds that the other hosts get to end their ranks."""


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
"""First and longest pause in seconds before an agent that ended before its ranks is started again; pauses double."""
_NOTE_WITHIN_S = 9.5
"""Time limit in seconds of a process that writes an event; a tracker may need some of them."""


class _Notes:
    """Writes an agent's events, each in a process of its own, so that a full disk or a tracker cannot block the
    agent."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._open: list[tuple[subprocess.Popen[bytes], float]] = []

    def write(self, kind: str, event: dict[str, Any], run: dict[str, Any] | None = None) -> None:
        """Start to write an event to events.jsonl, and to the trackers if `run` (the content of the file RUN) is
        given."""
        if not os.path.isdir(self._run_dir):
            return
        content = {"run_dir": self._run_dir, "kind": kind, "event": event, "run": run or {}}
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "llmtrain.features.watch.note"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            assert process.stdin is not None
            process.stdin.write(json.dumps(content).encode())
            process.stdin.close()
        except OSError:
            return
        self._open.append((process, time.monotonic()))

    def reap(self) -> None:
        """Reap processes that have finished, and kill late ones, with all their children. Must be called often."""
        still = []
        for process, began_s in self._open:
            if process.poll() is None and time.monotonic() - began_s < _NOTE_WITHIN_S:
                still.append((process, began_s))
                continue
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._open = still

    def finish(self) -> None:
        while self._open:
            self.reap()
            time.sleep(0.05)


class Agent:
    def __init__(self, settings: dict[str, Any], server: Server | None = None, keeper: int = 0) -> None:
        """`server`: the server of an earlier agent of this job. `keeper`: process id of `kept`. Raises OSError."""
        self.folder = Path(settings["folder"])
        self.host = str(settings["host"])
        self.notes = _Notes(str(settings["run_dir"]))
        self.stall_s = float(settings["stall_s"])
        self.launcher: Process | None = identify(int(settings["launcher"]))
        self.started_by = job_of(int(settings["launcher"]))
        self.ranks = HostRanks(self.folder, self.host, int(settings["local_size"]), float(settings["connects_s"]))
        self.judge = Judge(self.stall_s, time.monotonic())
        self.stragglers = Stragglers()
        self.pauses = Pauses(self.stall_s)
        self.own: dict[int, tuple[int, float]] = {}
        self.server = server or Server()
        self.keeper = keeper
        self.job: dict[str, Any] | None = None
        self.line: Line | None = None
        self.peers: list[list[Any]] = []
        self.met_s: float | None = None
        self.root_heard_s = self.reported_s = self.called_s = 0.0
        self.oom_before = oom_kills()
        self.about: dict[str, Any] = {}
        """What `base.rank.watch.describe` says of the run; empty until the ranks have called it."""
        self.warned_of_removal = False
        self._lock_folder()

    @property
    def is_root(self) -> bool:
        return self.job is not None and bool(self.job["is_root"])

    def run(self) -> None:
        """Watch until the ranks of this host have ended; as the root, until those of all hosts have."""
        now = 0.0
        while True:
            lines = [*self.server.lines.values(), *([self.line] if self.line else [])]
            endings = self.ranks.endings()
            began = time.monotonic()
            wait([], max(0.0, now + _SOONEST_S - began), endings)
            wait(lines, _TICK_S, endings)
            now = time.monotonic()
            if now - began > SILENT_S / 2:  # no wait is this long: the machine has slept
                self.judge.woke(now)
            self._check_folder()
            reports = self.ranks.observe(now)
            finished = self._finished()
            now = time.monotonic()  # new reports are not older
            self._hear_ranks(reports, finished, now)
            if self.job is None:
                self.job = read_json(self.folder / JOB)  # written by local rank 0
                if self.job is not None and not self.is_root:
                    self.judge, self.met_s = Judge(self.stall_s, now, silent_s=_ROOT_LOST_S), now
            order = None
            if self.is_root:
                self._hear_hosts(now)
            else:
                order = self._report(reports, finished, now)
            if order is not None:
                self._end_here(lost=bool(order.get("lost")))
                return
            verdict = self.judge.decide(now)
            if verdict is not None and verdict.trigger == "silent_host" and self._lost_the_watch_alone(now):
                verdict = None
            heard = self.line is not None and not self.line.closed and now - self.root_heard_s <= _ROOT_LOST_S
            if verdict is not None and (self.is_root or self.job is None or not heard):
                self._act_on(verdict)
                return
            if finished:
                unexplained = any(report["state"] == "dead" for report in reports) and not self.judge.ended
                if not unexplained and not (self.is_root and self.judge.waits(now)):
                    return
            if self.job is None or self.is_root:
                self._name_stragglers(now)
                self._report_pauses(now)
            self.notes.reap()

    def _check_folder(self) -> None:
        """Notice if somebody has removed the folder. Open heartbeats stay readable; the other files are made again."""
        if not self.about.get("run_id"):  # rank 0 writes them twice, the second time with the id
            self.about = read_json(self.folder / RUN) or self.about
        removed = not os.fstat(self.lock).st_nlink
        if (removed or self.ranks.nameless()) and not self.warned_of_removal:
            self.warned_of_removal = True
            watched = "and stays watched" if self.ranks.complete() else "but not all of its ranks are watched any more"
            _say(
                f"warning: something outside the run has removed the files in {self.folder}, its heartbeats (systemd "
                f"does at a log-out, with RemoveIPC=yes). The run continues, {watched}"
            )
        if removed:
            with contextlib.suppress(OSError):
                self._lock_folder()

    def _lock_folder(self) -> None:
        """Lock the folder and write the agent's address into it. Raises OSError."""
        own(self.folder)
        self.lock = lock_folder(self.folder)
        write_json(self.folder / AGENT, {"port": self.server.port, "token": self.server.token, "pid": os.getpid()})

    def _finished(self) -> bool:
        launcher_gone = self.launcher is None or not self.launcher.alive()
        return self.ranks.gone() and (launcher_gone or self.ranks.complete() or self.warned_of_removal)

    def _hear_ranks(self, reports: list[dict[str, Any]], finished: bool, now: float) -> None:
        message = {"ranks": reports, "oom_kills": oom_kills() - self.oom_before, "finished": finished}
        self.judge.hear(self.host, message, now)
        self._note_own(reports)

    def _note_own(self, reports: list[dict[str, Any]]) -> None:
        for report in reports:
            if report["state"] == "running":
                self.own[int(report["rank"])] = (int(report["timed_steps"]), float(report["own_s"]))
            else:
                self.own.pop(int(report["rank"]), None)

    def _hear_hosts(self, now: float) -> None:
        """As the root, take the other hosts' reports, and once a second send these hosts the addresses of peers."""
        self.server.accept(now)
        self._take_reports(now)  # stacks that arrive now are too late
        if now - self.reported_s >= _REPORT_S:
            self.reported_s = now
            peers = list(self.server.peers.values())[:_PEERS]
            for line in self.server.lines.values():
                line.send({"do": "go on", "peers": peers})

    def _take_reports(self, now: float) -> dict[str, Any]:
        """Pass the other hosts' reports to the judge; return their answers of `captured`, by host."""
        answers = {}
        for host, line in list(self.server.lines.items()):
            for message in line.receive():
                if "stacks" in message:
                    answers[host] = message
                    continue
                try:
                    self.judge.hear(host, message, now)
                    self._note_own(message["ranks"])
                except (TypeError, KeyError, ValueError):
                    line.close()
            if line.closed:
                del self.server.lines[host]
                self.judge.close(host, now)
        return answers

    def _report(self, reports: list[dict[str, Any]], finished: bool, now: float) -> dict[str, Any] | None:
        """Report to the root; return its order to end, if one has come."""
        if self.job is None:
            return None
        root = self.job["root"]
        if (self.line is None or self.line.closed) and now - self.called_s >= _REPORT_S and not finished:
            self.called_s = now
            self._call_root(now)
        if self.line is None:
            return None
        if finished or now - self.reported_s >= _REPORT_S or any(r["state"] == "dead" for r in reports):
            self.reported_s = now
            oom = oom_kills() - self.oom_before
            self.line.send({"ranks": reports, "oom_kills": oom, "finished": finished})
        order = None
        for message in self.line.receive():
            self.root_heard_s = now
            self.judge.heard(root["host"], now)
            if message.get("do") == "stacks":
                self.line.send(captured(self.ranks, self.stall_s, ends=bool(message.get("ends"))))
            elif message.get("do") == "go on":
                self.peers = message["peers"]
            elif message.get("do") == "end":
                order = message
        if self.line.closed:
            self.judge.close(root["host"], now)
        return order

    def _call_root(self, now: float) -> None:
        """Connect to the root. Once an agent has been connected, a silent root counts as a lost host."""
        assert self.job is not None
        root, ranks = self.job["root"], self.job["hosts"]
        first = self.line is None
        hello = {"token": root["token"], "host": self.host, "port": self.server.port}
        try:
            self.line = call(root["address"], root["port"], hello, _REPORT_S)
        except OSError as error:
            if first and self.met_s is not None and now - self.met_s > _UNREACHED_S:
                self.met_s = None  # once is enough
                _say(
                    f"warning: {self.host} cannot reach the watch of {root['host']} ({root['address']} port "
                    f"{root['port']}: {error.strerror}): a lost host will be noticed by fault.timeout_s alone"
                )
            return
        if first:
            placed = [RankFacts(rank=r, host=root["host"], state="unknown") for r in ranks.get(root["host"], [])]
            self.judge.expect(root["host"], placed, now)
            self.root_heard_s = now

    def _act_on(self, verdict: Verdict) -> None:
        if verdict.trigger == "leave":
            if verdict.text:
                _say(f"{verdict.text}; the other ranks are ended")
            self._end_everywhere(lost=False)
            return
        facts = self._facts(verdict)
        explanation = explain(facts)
        _say(f"error: {explanation.text}")
        messages.emit("fault", **explanation.to_json())
        self._note_fault(explanation, facts)
        lost = any(h.silent_s > 0 or h.closed for h in facts.hosts) or any(r.state == "unknown" for r in facts.ranks)
        self._end_everywhere(lost)
        self.notes.finish()

    def _facts(self, verdict: Verdict) -> JobFacts:
        ends = verdict.trigger != "pause"
        if self.is_root:
            for line in self.server.lines.values():
                line.send({"do": "stacks", "ends": ends})
        now = time.monotonic()
        silent = self.judge.host_facts(now)
        answers = {self.host: captured(self.ranks, self.stall_s, ends=ends)}
        deadline, mute = now + _ANSWERS_S, {host.name for host in silent if host.silent_s or host.closed}
        while self.is_root and self.server.lines.keys() - answers.keys() - mute and time.monotonic() < deadline:
            wait(list(self.server.lines.values()), 0.1)
            answers |= self._take_reports(time.monotonic())  # the job may continue: no report may be lost
        ranks = {r.rank: r for r in self.judge.ranks()}
        for host, answer in answers.items():
            for report in answer["stacks"]:
                with contextlib.suppress(TypeError, KeyError, ValueError):
                    facts = RankFacts.from_json({**report, "host": host})
                    ranks[facts.rank] = facts
        ranks |= {r.rank: r for r in self._unheard() if r.rank not in ranks}
        hosts = silent if self.is_root else self._second_opinion(silent)
        return JobFacts(
            trigger=verdict.trigger,
            ranks=tuple(ranks[number] for number in sorted(ranks)),
            hosts=tuple(with_answer(host, answers.get(host.name, {})) for host in hosts),
            again=str(self.about.get("again") or "The same command"),
            alike=bool(self.about.get("alike", True)),
            here=self.host,
            interface=(interface := str((self.job or {}).get("interface", ""))),
            interface_down=bool(interface) and _is_down(interface),
            stalled_s=verdict.stalled_s,
            experts=bool(self.about.get("experts")),
            zero_stage=int(self.about.get("zero_stage") or 0),
            memory=dict(self.about.get("memory") or {}),
        )

    def _unheard(self) -> list[RankFacts]:
        """Return the ranks of hosts whose agent has not connected to this root yet."""
        hosts = self.job["hosts"] if self.job is not None and self.is_root else {}
        return [RankFacts(rank=rank, host=host, state="unknown") for host, ranks in hosts.items() for rank in ranks]

    def _second_opinion(self, hosts: tuple[HostFacts, ...]) -> tuple[HostFacts, ...]:
        """Decide whether a silent root is lost or this host is cut off, in which case no peer answers either."""
        others = [(str(address), int(port)) for host, address, port in self.peers if host != self.host]
        if any(h.silent_s > 0 for h in hosts) and others and not any(answers(*other) for other in others[:3]):
            return tuple(replace(h, silent_s=_ROOT_LOST_S if h.name == self.host else 0.0, closed=False) for h in hosts)
        return hosts

    def _lost_the_watch_alone(self, now: float) -> bool:
        """Return True if only agents are lost: their connections are closed, but the hosts still answer at the watch's
        port or at the port of rank 0's store, so that their ranks are alive."""
        ports = {name: (address, port) for name, (_, address, port) in self.server.peers.items()}
        if self.job is not None and not self.is_root and (store := self.job.get("store")):
            ports[self.job["root"]["host"]] = (self.job["root"]["address"], store)
        lost = [host for host in self.judge.host_facts(now) if host.silent_s or host.closed]
        if not all(host.closed and host.name in ports and answers(*ports[host.name]) for host in lost):
            return False
        for host in lost:
            self.judge.heard(host.name, now)
            self.judge.close(host.name, now)
        return True

    def _note_fault(self, explanation: Explanation, facts: JobFacts) -> None:
        if self.job is not None and not self.is_root:
            root = self.job["root"]["host"]
            others = [host for host in self.job["hosts"] if host != root]
            if explanation.cause == "cut_off" or self.host != others[0]:
                return  # one host writes, where the folder is shared
        self.notes.write("fault", _event(explanation, facts), self.about)

    def _end_everywhere(self, lost: bool) -> None:
        """End the job on all hosts at once. `lost`: True if a host does not answer."""
        for line in self.server.lines.values():
            line.send({"do": "end", "lost": lost})
            line.flush()
        self._end_here(lost)
        deadline = time.monotonic() + _ENDED_S
        lines = self.server.lines
        while any(not line.closed for line in lines.values()) and time.monotonic() < deadline:
            wait(list(lines.values()), 0.1)
            for line in lines.values():
                line.receive()

    def _end_here(self, lost: bool) -> None:
        stay = end_host(self.ranks.processes(), self.launcher, str(self.folder))
        if stay:
            _say(f"error: on {self.host} these processes cannot be ended, the kernel holds them: {stay}")
        if self.line is not None:
            self.line.close()
        close_output()
        if self.keeper and os.getppid() == self.keeper:
            os.kill(self.keeper, _HUSH)
        if self.started_by is not None:
            end_ssh(self.started_by, _LOST_S if lost else _BUSY_S)

    def _name_stragglers(self, now: float) -> None:
        for rank, (seconds, others) in self.stragglers.feed(self.own, now).items():
            host = next((r.host for r in self.judge.ranks() if r.rank == rank), self.host)
            _say(
                f"warning: straggler: rank {rank} on {host} needs {seconds:.3g} s a step for itself, the others "
                f"{others:.3g} s (median)"
            )
            event = {"rank": rank, "host": host, "own_s_per_step": seconds, "others_s_per_step": others}
            self.notes.write("straggler", event)

    def _report_pauses(self, now: float) -> None:
        change, lasted_s = self.pauses.feed(self.judge.stalled_s(now))
        if change == "begins":
            facts = self._facts(Verdict("pause", stalled_s=lasted_s))
            explanation = explain(facts)
            _say(
                f"warning: {explanation.text} The job is ended after {self.stall_s:.0f} s without progress "
                "(fault.stall_timeout_s)."
            )
            self.notes.write("pause", _event(explanation, facts))
        elif change == "over":
            _say(f"the ranks make progress again, after {lasted_s:.0f} s without progress")
            self.notes.write("pause_over", {"lasted_s": round(lasted_s, 1)})

    def close(self) -> None:
        if self.line is not None:
            self.line.flush()
            self.line.close()
        self.server.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def end_host(ranks: list[Process], launcher: Process | None, mark: str) -> list[int]:
    """End all processes of the job on this host; return the ids of those that stay."""
    deadline = time.monotonic() + _WITHIN_S
    began = time.monotonic()
    family: set[Process] = set(ranks)
    is_launcher = launcher is not None and _is_launcher(words(launcher.pid))
    while True:
        family |= _family(family, mark)
        alive = [process for process in family if process.alive()]
        if not alive or time.monotonic() > deadline:
            break
        for process in alive:
            waits = time.monotonic() - began < _GENTLE_S and not _is_python(process.pid)
            process.send(signal.SIGTERM if waits else signal.SIGKILL)
        time.sleep(0.1)
    if launcher is not None and is_launcher:
        # It sees them dead within a second and exits with their code. After a signal `deepspeed` would exit with 0, as
        # it looks for codes above 0 (launcher/runner.py main); a SIGTERM during its Python's shutdown also gives 0.
        deadline = time.monotonic() + _LAUNCHER_LEAVES_S
        while launcher.alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        launcher.send(signal.SIGKILL)
    return sorted(process.pid for process in family if process.alive())


def _is_python(pid: int) -> bool:
    try:
        return os.path.samefile(f"/proc/{pid}/exe", "/proc/self/exe")
    except OSError:  # it has ended
        return True


def _family(family: set[Process], mark: str) -> set[Process]:
    below = descendants({process.pid for process in family if process.alive()})
    marked = {pid for pid in pids() if has_mark(pid, mark)}
    processes = (identify(pid) for pid in (below | marked) - {os.getpid()})
    return {process for process in processes if process is not None}


def end_ssh(job: tuple[str, ...], wait_s: float) -> None:
    """After `wait_s` end the ssh connections that `deepspeed` has opened for the job (`job_of`).

    A connection to a silent host would stay open, and pdsh and `deepspeed` would wait for it.
    """
    deadline = time.monotonic() + wait_s
    while connections := _connections(job):
        if time.monotonic() > deadline:
            for process in connections:
                process.send(signal.SIGTERM)
            return
        time.sleep(0.2)


def _connections(job: tuple[str, ...]) -> list[Process]:
    launch = os.environ.get(messages.LAUNCH, "")  # part of the command, too: two launches may have chosen one port
    connections = []
    for pid in pids():
        argv = words(pid)
        text = " ".join([*argv, ""])
        if argv and os.path.basename(argv[0]) == "ssh" and launch in text and all(f"{word} " in text for word in job):
            connections.append(identify(pid))
    return [process for process in connections if process is not None]


def job_of(launcher: int) -> tuple[str, ...] | None:
    """Return the arguments that only this job's processes have: its hosts and port.

    None: `launcher` is not a launcher that `deepspeed` started.
    """
    argv = words(launcher)
    arguments = [next((word for word in argv if word.startswith(start)), "") for start in _JOB]
    return tuple(arguments) if _is_launcher(argv) and all(arguments) else None


def _is_launcher(words: list[str]) -> bool:
    return any(word.endswith(_LAUNCHERS) for word in words)


def close_output() -> None:
    """Redirect output to /dev/null, because an ssh connection stays open while a process can write to it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)


def _is_down(interface: str) -> bool:
    """Return True if a network interface is gone or has no link."""
    try:
        return "down" in Path("/sys/class/net", interface, "operstate").read_text()
    except OSError:
        return True


def _event(explanation: Explanation, facts: JobFacts) -> dict[str, Any]:
    return {**explanation.to_json(), "all_ranks": [rank.to_json() for rank in facts.ranks]}


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(untrusted.shown(text, lines=True), file=sys.stderr, flush=True)


def main() -> int:
    # The agent ends after its ranks; SIGUSR1, by which schedulers ask for a save, may reach all processes of a job.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # root only: a starved agent on a busy host would look like a lost host
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    settings = json.loads(sys.argv[1])
    with contextlib.suppress(OSError, ValueError):  # a connection for each host
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sweep(Path(settings["folder"]))
    return kept(settings)


def sweep(this: Path) -> None:
    """Remove folders of killed agents, if launcher and ranks are dead and no process holds the folder's lock.

    The lock is needed because ranks may outlive an agent, and containers that share /dev/shm do not see each other's
    processes.
    """
    for folder in this.parent.glob(f"llmtrain-watch-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            if folder == this or time.time() - folder.stat().st_mtime <= _STALE_S:
                continue
            launcher = NAME.fullmatch(folder.name)
            beats = [beat for path in folder.glob("rank-*.beat") if (beat := read(path)) is not None]
            users = [Process(beat.pid, beat.started) for beat in beats]
            users += [Process(int(launcher["pid"]), int(launcher["started"]))] if launcher else []
            if not any(user.alive() for user in users):
                os.close(lock_folder(folder))
                shutil.rmtree(folder, ignore_errors=True)


def kept(settings: dict[str, Any]) -> int:
    """Run the agent in a child process, and return its exit code.

    If it ends before its ranks while the launcher lives, another agent is started at the same port.
    """
    server, keeper, launcher = Server(), os.getpid(), identify(int(settings["launcher"]))
    signal.signal(_HUSH, lambda *_: close_output())
    said_s, pause_s = 0.0, _FIRST_PAUSE_S
    while True:
        if (child := os.fork()) == 0:
            signal.signal(_HUSH, signal.SIG_IGN)
            agent = Agent(settings, server, keeper)
            agent.run()
            agent.close()
            return 0
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0 or launcher is None or not launcher.alive():
            return code
        if pause_s != said_s:  # only while the pause still grows
            further = ", as after each further end" if pause_s == _LONGEST_PAUSE_S else ""
            _say(
                f"warning: the watch of {settings['host']} has ended with code {code} before its ranks, and starts "
                f"again in {pause_s:g} s{further}"
            )
        server.turn_away(pause_s)
        said_s, pause_s = pause_s, min(2 * pause_s, _LONGEST_PAUSE_S)


if __name__ == "__main__":
    sys.exit(main())
