"""The attempts of a launch: starts the job, follows it, and after a fault starts it again on the hosts that are
left."""

from __future__ import annotations

import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from llmtrain.base import log, units
from llmtrain.base.errors import ConfigError
from llmtrain.base.rank.processes import Process, identify
from llmtrain.cluster.hosts.hostfile import Host
from llmtrain.cluster.launch.job import Job, say
from llmtrain.cluster.launch.launchers import launcher_of
from llmtrain.cluster.launch.placement import LaunchedRun, Options, Placement, host_of_rank, make_placement, place_lines
from llmtrain.tracking.local import write_event

FAULT_CODE = 1
"""Exit code of a launch that a fault has ended, without a restart."""
PREEMPTED_CODE = 75
"""Exit code after the job was asked from outside to leave. It has saved, and the same command resumes it (EX_TEMPFAIL
of sysexits.h)."""
INTERRUPTED_CODE = 130
"""Exit code after Ctrl-C."""

BACKOFF_S, MAX_BACKOFF_S = 5.0, 300.0
_AT_ONCE = ("killed", "crashed", "host_lost")
"""Causes after which a first restart is made without a wait, since the ranks that ended hold no resources."""
_KILLED = {
    255: "its ssh connection broke",
    137: "it was killed",
    143: "it was terminated",
}

Kind = Literal["complete", "stopped", "preempted", "refused", "fault"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    kind: Kind
    code: int
    """Exit code of the launch if this was the last attempt."""
    step: int = 0
    """Optimizer steps done, as far as is known."""
    signature: str = ""
    """Identifies a fault: equal for the same fault at the same step."""
    text: str = ""


@dataclass
class Attempt:
    """One start of the job, as its messages report it."""

    began_s: float
    """time.monotonic() of the start; moved on while files are downloaded before it."""
    resumes_at: int = 0
    """Step of the newest checkpoint when the attempt started."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """The ranks in the message `place`; empty until the ranks have met."""
    local: list[Process] = field(default_factory=list)
    """The ranks' processes on this host, with start times: an id may later be another job's."""
    met_s: float | None = None
    checkpoint: int | None = None
    """Step of this attempt's newest complete checkpoint."""
    saved_s: float | None = None
    fault: dict[str, Any] | None = None
    end: dict[str, Any] | None = None
    last_word_s: float | None = None
    """Time of the message `fault` or `end`."""
    asked: int | None = None
    """The signal with which the user asked for the end."""

    def hear(self, message: dict[str, Any], now: float) -> None:
        kind = message["kind"]
        if kind == "wait":
            self.began_s = now
        elif kind == "place":
            self.ranks, self.met_s = list(message.get("ranks") or []), now
            started = (identify(int(rank["pid"])) for rank in self.ranks if rank.get("host") == socket.gethostname())
            self.local = [process for process in started if process is not None]
        elif kind == "checkpoint":
            self.checkpoint, self.saved_s = int(message["step"]), now
        elif kind == "fault":
            # If the root is lost, several hosts report the same fault and its echoes: the first message counts.
            self.fault = self.fault or message
            self.last_word_s = self.last_word_s or now
        elif kind == "end":
            self.end = self.end or message
            self.last_word_s = self.last_word_s or now

    @property
    def newest(self) -> int:
        """The step from which another attempt would resume."""
        return self.resumes_at if self.checkpoint is None else self.checkpoint

    def outcome(self, code: int) -> Outcome:
        """Judge a finished attempt. `code`: exit code of `host.py`, pdsh or srun; negative: the signal that ended
        it."""
        end = self.end or {}
        status, step = end.get("status"), self.newest
        if status == "complete":
            return Outcome(kind="complete", code=0, step=step)
        if status == "refused":
            return Outcome(kind="refused", code=int(end.get("code") or 2), step=step, text=str(end.get("reason") or ""))
        if self.asked is not None:
            saved = "saved" if status in ("stopped", "ended") else "ended before it could save"
            interrupted = self.asked == 2
            return Outcome(
                kind="stopped" if interrupted else "preempted",
                code=INTERRUPTED_CODE if interrupted else PREEMPTED_CODE,
                step=step,
                text=f"asked to stop, and {saved}",
            )
        if self.fault is not None:
            at = int(self.fault.get("step") or 0)
            return Outcome(
                kind="fault",
                code=FAULT_CODE,
                step=max(at, step),
                signature=str(self.fault.get("signature") or f"step {at + 1}: {self.fault.get('cause')}"),
                text=str(self.fault.get("text") or "a fault"),
            )
        reason = str(end.get("reason") or "")
        if status == "ended":
            return Outcome(kind="stopped", code=0, step=step, text=reason)
        # The job saves although only its starter died: nobody asked it to leave, unless the starter got SIGHUP or
        # SIGTERM.
        left = "launcher process" not in reason and code not in (137, 255) and code >= 0
        if status == "stopped" and (left or code in (-signal.SIGHUP, -signal.SIGTERM)):
            return Outcome(kind="preempted", code=PREEMPTED_CODE, step=step, text=reason)
        # It ended without a reason from the watch, perhaps after the ranks had saved.
        has_saved = status == "stopped"
        where = "after the ranks had met" if self.ranks else "before the ranks had met"
        why = reason or _KILLED.get(128 - code if code < 0 else code, "no cause was reported")
        return Outcome(
            kind="fault",
            code=PREEMPTED_CODE if has_saved else FAULT_CODE,
            step=self.newest,
            signature=f"step {self.newest + 1}: code {code} {where}",
            text=f"the job {'saved and ' if has_saved else ''}ended with code {code} {where}: {why}",
        )


@dataclass(frozen=True, kw_only=True)
class Decision:
    restart: bool
    wait_s: float = 0.0
    """Seconds to wait before the restart."""
    code: int = 0
    """Exit code of the launch, if there is no restart."""
    text: str = ""


class Supervisor:
    """Decides after each attempt of a launch whether another follows."""

    def __init__(self, max_restarts: int, again: str = "the same command") -> None:
        """`again`: names the command that continues the run, for messages."""
        self._max, self._again = max_restarts, again
        self.restarts = 0
        self.steps_redone = 0
        self.lost_s = 0.0
        self._faults_at_rest = 0  # faults in a row without a new checkpoint, with which the wait grows
        self._newest_step = -1
        self._before = ""
        self._good_until_s: float | None = None

    def met(self, now: float) -> None:
        """Record that the ranks of a restarted attempt have met, which ends the time lost by the fault."""
        if self._good_until_s is not None:
            self.lost_s += now - self._good_until_s
            self._good_until_s = None

    def after(self, attempt: Attempt, outcome: Outcome) -> Decision:
        if outcome.kind != "fault":
            return Decision(restart=False, code=outcome.code, text=outcome.text)
        if attempt.fault is not None and attempt.fault.get("again") is False:
            return self._give_up(f"not restarted: a restart would meet the same fault ({outcome.signature})")
        same_fault = outcome.signature == self._before
        self._before = outcome.signature
        if same_fault:
            rule = "the same step failed twice with the same error, and would fail again"
            return self._give_up(f"not restarted: {rule} ({outcome.signature})", outcome.code)
        if self.restarts >= self._max:
            rule = f"--max-restarts is {self._max}" + (f", and {self.restarts} are used up" if self.restarts else "")
            text = f"not restarted: {rule}; {self._again} continues from step {attempt.newest}"
            return self._give_up(text, outcome.code)
        self.restarts += 1
        self.steps_redone += max(0, outcome.step - attempt.newest)
        if self._good_until_s is None:  # else the attempt had not even met
            self._good_until_s = max(attempt.saved_s or 0.0, attempt.met_s or 0.0, attempt.began_s)
        self._faults_at_rest = 0 if attempt.newest > self._newest_step else self._faults_at_rest + 1
        self._newest_step = max(self._newest_step, attempt.newest)
        at_once = self._faults_at_rest == 0 and (attempt.fault or {}).get("cause") in _AT_ONCE
        wait_s = 0.0 if at_once else min(BACKOFF_S * 2**self._faults_at_rest, MAX_BACKOFF_S)
        return Decision(restart=True, wait_s=wait_s, text=outcome.text)

    def _give_up(self, text: str, code: int = FAULT_CODE) -> Decision:
        return Decision(restart=False, code=code, text=text)

    def summary(self) -> str:
        """Return a line for the end of the launch; "" if there was no restart."""
        if not self.restarts:
            return ""
        restarts, steps = units.counted(self.restarts, "restart"), units.counted(self.steps_redone, "step")
        return f"{restarts}, {steps} done again, {self.lost_s:.0f} s lost"


_POLL_S = 0.2
_LEAVES_S = 60.0
"""Seconds from a job's message `fault` or `end` until the job is ended by force; closing a tracker may take 20 s."""
_MEETS_S = 120.0
"""Seconds added to fault.start_timeout_s, for imports from a cold file system."""
_WAIT_SPARE_S, _WAIT_NEEDED_S = 30.0, 600.0
"""Seconds to wait after a fault for hosts that do not answer: if --min-hosts allows a restart without them, and if
not."""


class Attempts:
    def __init__(self, options: Options, mark: str, run: LaunchedRun) -> None:
        self._run = run
        self._options, self._mark = options, mark
        self._hosts = options.hosts
        self._launcher = launcher_of(options.launcher, mark, run.examine)
        self._wait_for_place_s = run.start_timeout_s + _MEETS_S
        self._run_dir = Path(run.folder)
        self._supervisor = Supervisor(options.max_restarts, run.again)
        self._unfit: set[str] = set()
        """Hosts that a fault has shown to be broken, which no further attempt uses."""
        self._signals: list[int] = []
        """The user's signals so far, in order."""
        self._words = options.words
        self._live: log.LiveLine | None = None

    def run(self) -> int:
        """Run attempts until one ends the launch. Returns the exit code. Raises UserError."""
        # Signals that are ignored, as under nohup or in the background of a shell, stay ignored.
        handled = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._note_signal) for number in handled}
        try:
            while True:
                try:
                    attempt, code = self._run_attempt()
                except ConfigError as error:
                    if self._supervisor.restarts == 0:
                        raise
                    attempt, code = Attempt(began_s=time.monotonic(), resumes_at=self._newest_step()), FAULT_CODE
                    why = f"not started: {error}"
                    attempt.fault = {"step": attempt.resumes_at, "signature": why, "text": str(error)}
                outcome = attempt.outcome(code)
                decision = self._supervisor.after(attempt, outcome)
                if outcome.kind == "fault" and not (attempt.ranks and attempt.fault):
                    say(f"error: {outcome.text}")  # else the watch has printed it
                if not decision.restart:
                    printed = outcome.kind != "fault" and attempt.end is not None
                    return self._end_launch(decision.code, "" if printed else decision.text)  # rank 0 has printed it
                problem = self._prepare_restart(attempt, outcome.signature, decision.wait_s)
                if self._signals:
                    code = INTERRUPTED_CODE if self._signals[0] == signal.SIGINT else PREEMPTED_CODE
                    return self._end_launch(code, "asked to stop before the restart")
                if problem is not None:
                    return self._end_launch(FAULT_CODE, f"not restarted: {problem}")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note_signal(self, number: int, _: FrameType | None) -> None:
        self._signals.append(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    def _end_launch(self, code: int, text: str) -> int:
        if text:
            say(f"launch: {text}")
        if summary := self._supervisor.summary():
            say(f"launch: {summary}")
            event = {"code": code, "restarts": self._supervisor.restarts, "summary": summary}
            write_event(self._run_dir, "launch", event)
        return code

    def _run_attempt(self) -> tuple[Attempt, int]:
        placement = make_placement(self._options, self._hosts, self._mark, self._words)
        resumes_at = self._newest_step()
        with self._launcher.start(placement) as job:
            attempt = Attempt(began_s=time.monotonic(), resumes_at=resumes_at)
            return attempt, self._follow_job(placement, attempt, job)

    def _follow_job(self, placement: Placement, attempt: Attempt, job: Job) -> int:
        """Follow the job to its end. Returns the exit code of the process that started it."""
        answered = 0
        by_force = False
        while (code := job.code()) is None or any(rank.alive() for rank in attempt.local):  # they save
            for message in job.take(_POLL_S):
                self._take_message(placement, attempt, message)
            now = time.monotonic()
            while answered < len(self._signals):
                answered += 1
                by_force = self._answer_signal(placement, attempt, job, answered) or by_force
            if not attempt.ranks and now - attempt.began_s > self._wait_for_place_s:
                say(f"error: the ranks have not met within {self._wait_for_place_s:.0f} s")
                by_force = True
            if by_force or (attempt.last_word_s is not None and now - attempt.last_word_s > _LEAVES_S):
                self._launcher.end(placement, job)
                job.kill()
        if code <= 0 and not attempt.ranks:  # before they have met, ranks have nothing to save
            self._launcher.end(placement, job)
        for message in job.rest():
            self._take_message(placement, attempt, message)
        if self._live is not None:
            self._live.show("", None)
        return code

    def _answer_signal(self, placement: Placement, attempt: Attempt, job: Job, count: int) -> bool:
        """At the first signal ask the ranks to save, at a later Ctrl-C end the job. Returns True to end it by force. A
        repeated SIGTERM changes nothing, since Slurm may send several."""
        attempt.asked = self._signals[0]
        if count > 1 and self._signals[count - 1] != signal.SIGINT:
            return False
        if count > 1 or not attempt.ranks or attempt.fault is not None:
            say("launch: ending all processes")
            return True
        ranks = len(attempt.ranks)
        hint = "; Ctrl-C again ends it at once" if attempt.asked == signal.SIGINT else ""
        say(
            f"launch: {ranks} rank{' is' if ranks == 1 else 's are'} asked to save and leave{hint}"
        )  # before asking, since a host may be slow to answer
        self._launcher.ask_to_leave(placement, job, attempt.ranks, attempt.asked)
        return False

    def _take_message(self, placement: Placement, attempt: Attempt, message: dict[str, Any]) -> None:
        attempt.hear(message, time.monotonic())
        if message["kind"] == "progress":
            self._live = self._live or log.LiveLine()
            self._live.show(str(message.get("text") or ""), message.get("share"))
        if message["kind"] == "place":
            self._supervisor.met(time.monotonic())
            self._launcher.met(attempt.ranks)
            say("\n".join(place_lines(placement, attempt.ranks)))

    def _prepare_restart(self, attempt: Attempt, signature: str, wait_s: float) -> str | None:
        """Wait, and choose the hosts for a restart. Returns why there can be none, or None."""
        when = f"in {wait_s:.0f} s" if wait_s else "now"
        say(f"launch: restart {self._supervisor.restarts} of {self._options.max_restarts} {when}")
        self._sleep(wait_s)
        if attempt.fault and attempt.fault.get("unfit"):
            self._unfit |= {host_of_rank(self._hosts, rank) for rank in attempt.fault.get("ranks", ())} - {""}
        usable = tuple(host for host in self._answering_hosts() if host.name not in self._unfit)
        if self._signals:
            return None
        if len(usable) < self._options.min_hosts:
            absent = [host.name for host in self._options.hosts if host not in usable and host.name not in self._unfit]
            reasons = {"no answer": absent, "unfit after a fault of their own": sorted(self._unfit)}
            because = "; ".join(f"{reason}: {', '.join(names)}" for reason, names in reasons.items() if names)
            left = units.counted(len(usable), "host")
            return f"{left} left, and --min-hosts is {self._options.min_hosts} ({because})"
        step = max(attempt.newest, self._newest_step())
        words = self._options.words
        if step and self._run.resume != "auto":
            others = ("--resume_weights_only", "false", "--resume_data", "same", "--resume_model", "same")
            words = (*words, "--resume", "auto", *others)
        chosen, self._words, why = self._hosts_that_can_train(usable, words)
        if not chosen:
            return f"the run cannot continue with {units.counted(len(usable), 'host')}: {why}"
        dropped = [host.name for host in self._options.hosts if host not in chosen]
        self._hosts = chosen
        size = f"{units.counted(len(chosen), 'host')}, {units.counted(sum(host.slots for host in chosen), 'rank')}"
        without = f", without {', '.join(dropped)}" if dropped else ""
        say(f"launch: restarting from step {step} on {size}{without}")
        event = {
            "restart": self._supervisor.restarts,
            "step": step,
            "after": signature,
            "hosts": [host.name for host in chosen],
            "dropped": dropped,
            "wait_s": wait_s,
        }
        write_event(self._run_dir, "restart", event)
        return None

    def _answering_hosts(self) -> tuple[Host, ...]:
        """Return the hosts that answer, in the hostfile's order; hosts that were dropped before may be back."""
        hosts = self._options.hosts
        began = time.monotonic()
        while True:
            usable = self._launcher.answering(hosts)
            enough = len(usable) >= self._options.min_hosts
            waited_s = time.monotonic() - began
            if len(usable) == len(hosts) or self._signals or waited_s > (_WAIT_SPARE_S if enough else _WAIT_NEEDED_S):
                return usable
            self._sleep(2.0)

    def _hosts_that_can_train(
        self, hosts: tuple[Host, ...], words: tuple[str, ...]
    ) -> tuple[tuple[Host, ...], tuple[str, ...], str]:
        """Return (as many hosts as can train the first attempt's batches, the words for it, ""); without such hosts
        ((), words, the reason)."""
        why, wanted = "", list(self._run.batches)
        same_batch = (*words, "--train.global_batch", str(wanted[0]), "--train.accumulation", "null")
        for count in range(len(hosts), self._options.min_hosts - 1, -1):
            for candidate in (words, same_batch):  # the second keeps the batch by more accumulation
                try:
                    batches = list(self._run.resolve(candidate, sum(host.slots for host in hosts[:count])))
                except ConfigError as error:
                    why = why or str(error)
                    continue
                if batches == wanted:
                    return hosts[:count], candidate, ""
                if candidate is same_batch:
                    why = why or f"the global batches of its stages would be {batches} instead of {wanted}"
        return (), words, why

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._signals and time.monotonic() < until:
            time.sleep(_POLL_S)

    def _newest_step(self) -> int:
        complete = (self._run_dir / "checkpoints").glob("step-*/manifest.json")
        steps = (path.parent.name.removeprefix("step-") for path in complete)
        return max((int(step) for step in steps if step.isdecimal()), default=0)
