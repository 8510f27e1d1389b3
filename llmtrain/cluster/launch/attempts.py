"""The attempts of one `llmtrain launch`: start the job, watch it, find the hosts that are left, start it again."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from llmtrain.base import log, units, untrusted
from llmtrain.base.errors import ConfigError
from llmtrain.base.redact import redact
from llmtrain.cluster.doctor.quick import quick
from llmtrain.cluster.doctor.report import WITHOUT_TERMINAL, print_report
from llmtrain.cluster.hosts.environment import SECRETS_VARIABLE, deliver, remove
from llmtrain.cluster.hosts.here import is_here
from llmtrain.cluster.hosts.hostfile import Host
from llmtrain.cluster.hosts.ssh import on_hosts
from llmtrain.cluster.launch import reach, slurm
from llmtrain.cluster.launch.job import Job
from llmtrain.cluster.launch.keeper import AGENTS_LEAVE_S, Keeper
from llmtrain.cluster.launch.plan import (
    Options,
    Plan,
    Run,
    address_of_first,
    check_programs,
    command,
    environment,
    host_of_rank,
    make_plan,
    place_lines,
    slurm_environment,
    threads,
    write_files,
)
from llmtrain.cluster.launch.supervise import FAULT_CODE, INTERRUPTED_CODE, PREEMPTED_CODE, Attempt, Supervisor

_POLL_S = 0.2
_ANSWER_S = 10.0
_LEAVES_S = 60.0
"""From the last word of a job, a fault or its end, until it is ended by force; closing W&B may take 20 s."""
_MEETS_S = 120.0
"""Beyond fault.start_timeout_s: imports on a cold file system."""
_SRUN_LEAVES_S = 10.0
_WAIT_SPARE_S, _WAIT_NEEDED_S = 30.0, 600.0
"""After a fault, for hosts that do not answer: when --min-hosts allows to go on without them, and when not."""


class Launch:
    """All attempts of one `llmtrain launch`."""

    def __init__(self, options: Options, mark: str, run: Run) -> None:
        self._run = run
        self._options, self._mark = options, mark
        self._hosts = options.hosts
        self._slurm = options.launcher == "slurm"
        self._step = f"llmtrain-{mark}"
        self._wait_for_place_s = run.start_timeout_s + _MEETS_S
        self._run_dir = Path(run.folder)
        self._supervisor = Supervisor(options.max_restarts)
        self._unfit: set[str] = set()
        """Hosts that a fault has shown to be broken: none of them is started on again."""
        self._signals: list[int] = []
        """Signals that the user sent, in their order."""
        self._words = options.words
        self._live: log.LiveLine | None = None

    def run(self) -> int:
        """Until the job is complete, asked to leave, refused, or not to be restarted. Raises UserError."""
        # nohup, and a shell that starts it in the background, have some of them ignored: so they stay.
        heard = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._on_signal) for number in heard}
        try:
            while True:
                try:
                    attempt, code = self._attempt()
                except ConfigError as error:
                    if self._supervisor.restarts == 0:
                        raise
                    attempt, code = _not_started(self._newest(), str(error)), FAULT_CODE
                outcome = attempt.outcome(code)
                decision = self._supervisor.after(attempt, outcome)
                if outcome.kind == "fault" and not (attempt.ranks and attempt.fault):
                    _say(f"error: {outcome.text}")  # else the watch has printed it
                if not decision.restart:
                    told = (attempt.end or {}).get("status") in ("refused", "stopped")  # by rank 0
                    return self._close(decision.code, "" if told else decision.text)
                problem = self._prepare_restart(attempt, outcome.signature, decision.wait_s)
                if self._signals:
                    return self._close(_code_of(self._signals[0]), "asked to stop before the restart")
                if problem is not None:
                    return self._close(FAULT_CODE, f"not restarted: {problem}")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._signals.append(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    def _close(self, code: int, text: str) -> int:
        if text:
            _say(f"launch: {text}")
        if summary := self._supervisor.summary():
            _say(f"launch: {summary}")
            self._event("launch", code=code, restarts=self._supervisor.restarts, summary=summary)
        return code

    def _attempt(self) -> tuple[Attempt, int]:
        """Start the job and watch it to its end; nothing of it is left on any host that answers."""
        plan = make_plan(self._options, self._hosts, self._mark, self._words)
        return self._by_slurm(plan) if self._slurm else self._by_deepspeed(plan)

    def _by_slurm(self, plan: Plan) -> tuple[Attempt, int]:
        slurm.check_programs()
        here = is_here(plan.names[0])
        port = _facts_here()["port"] if here else random.randrange(20000, 30000)
        attempt = Attempt(began_s=time.monotonic(), resumes_at=self._newest())
        with tempfile.TemporaryDirectory(prefix="llmtrain-launch-") as made:
            env = slurm_environment(plan, Path(made), os.environ, address_of_first(plan.hosts), port)
            with Job(slurm.command(plan.hosts, plan.words, self._step), env) as job:
                return attempt, self._watch(plan, attempt, job)

    def _by_deepspeed(self, plan: Plan) -> tuple[Attempt, int]:
        check_programs(plan)
        cores, port = self._ask(plan)
        if not os.environ.get("OMP_NUM_THREADS"):
            count = str(threads(plan, cores))
            plan = make_plan(self._options, self._hosts, self._mark, self._words, OMP_NUM_THREADS=count)
        address = "127.0.0.1" if plan.alone else self._examine(plan, port) or address_of_first(plan.hosts)
        secret = None
        if plan.travel.private and not plan.alone:
            secret = deliver(plan.names, plan.travel.private)
            plan = replace(plan, travel=replace(plan.travel, open={**plan.travel.open, SECRETS_VARIABLE: secret}))
        attempt = Attempt(began_s=time.monotonic(), resumes_at=self._newest())
        with contextlib.ExitStack() as kept:
            try:
                folder = Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="llmtrain-launch-")))
                write_files(plan, folder)
                argv = command(plan, folder, address, port)
                with Job(argv, environment(plan, folder, os.environ)) as job:
                    keeper = kept.enter_context(Keeper(plan.names, self._mark, str(folder), secret, job.output))
                    code = self._watch(plan, attempt, job, keeper)
            finally:
                # A complete job's watch leaves at once; after a fault it may still be telling W&B.
                for line in reach.end_all(plan.names, self._mark, AGENTS_LEAVE_S):
                    _say(f"warning: {line}")
                if secret is not None:
                    remove(plan.names, secret)
        return attempt, code

    def _ask(self, plan: Plan) -> tuple[dict[str, int], int]:
        """The cores of each host, and a free port of the first one. Raises ConfigError naming hosts that fail."""
        if plan.alone:
            found = _facts_here()
            return {plan.names[0]: found["cores"]}, found["port"]
        answers = on_hosts(plan.names, (sys.executable, "-c", _FACTS), timeout_s=30.0)
        problems = []
        facts = {}
        for name, answer in answers.items():
            try:
                facts[name] = json.loads(answer.stdout)
            except ValueError:
                why = answer.stderr.strip().rpartition("\n")[2] or f"code {answer.code}"
                said = f"{answer.trouble.text}: {answer.trouble.remedy}" if answer.trouble else None
                problems.append(f"  {name}: {said or f'{sys.executable} does not run there ({why})'}")
        if problems:
            head = f"{len(problems)} of {len(plan.hosts)} hosts cannot be used"
            raise ConfigError("\n".join([head, *problems]))
        return {name: int(found["cores"]) for name, found in facts.items()}, int(facts[plan.names[0]]["port"])

    def _examine(self, plan: Plan, port: int) -> str | None:
        """doctor's quick part, before the first start; the first host's address as the others know it.

        Raises ConfigError when doctor would.
        """
        if self._supervisor.restarts:  # it was in order, and what has gone since then `_answering` finds
            return None
        report = quick(plan.hosts, self._run.needs, port=port)
        if report.findings:
            print_report(
                report, Console(stderr=True, width=None if sys.stderr.isatty() else WITHOUT_TERMINAL, highlight=False)
            )
        if not report.ok:
            raise ConfigError("nothing was started: fix what is marked FAIL, and check with `llmtrain doctor`")
        return report.address

    def _watch(self, plan: Plan, attempt: Attempt, job: Job, keeper: Keeper | None = None) -> int:
        """Hear the job until its end; returns the exit code of what started it."""
        heard = 0
        by_force = False
        while (code := job.code()) is None:
            for message in job.take(_POLL_S):
                self._hear(plan, attempt, message)
                if keeper is not None and message["kind"] == "place":
                    keeper.met(attempt.ranks)
            now = time.monotonic()
            while heard < len(self._signals):
                heard += 1
                by_force = self._answer_signal(plan, attempt, job, heard) or by_force
            if not attempt.ranks and now - attempt.began_s > self._wait_for_place_s:
                _say(f"error: the ranks have not met within {self._wait_for_place_s:.0f} s")
                by_force = True
            if by_force or (attempt.last_word_s is not None and now - attempt.last_word_s > _LEAVES_S):
                self._end_by_force(plan, job)
        for message in job.rest():
            self._hear(plan, attempt, message)
        if self._live is not None:
            self._live.show("", None)
        return code

    def _answer_signal(self, plan: Plan, attempt: Attempt, job: Job, count: int) -> bool:
        """The first signal asks for a save, a Ctrl-C after it for the end. Whether the job is to be ended by force.

        Slurm may send SIGTERM more than once: that hurries nobody.
        """
        attempt.asked = self._signals[0]
        if count > 1 and self._signals[count - 1] != signal.SIGINT:
            return False
        if count > 1 or not attempt.ranks or attempt.fault is not None:
            _say("launch: ending all processes")
            return True
        ranks = len(attempt.ranks)
        again = "; Ctrl-C again ends it at once" if attempt.asked == signal.SIGINT else ""
        _say(
            f"launch: {ranks} rank{' is' if ranks == 1 else 's are'} asked to save and leave{again}"
        )  # first: a host may take long to answer
        if self._slurm:
            # It may take a minute, and a second Ctrl-C is to be heard meanwhile.
            threading.Thread(target=self._ask_by_slurm, args=(job,), name="ask", daemon=True).start()
            return False
        reached = reach.signal_ranks(plan.names, self._mark, attempt.ranks, attempt.asked)
        if reached < ranks:
            _say(f"warning: {reached} of {ranks} ranks were reached; the others learn of it at the next step")
        return False

    def _ask_by_slurm(self, job: Job) -> None:
        problem = slurm.ask_to_leave(self._step)
        if problem is not None and job.code() is None:
            _say(f"warning: the ranks were not asked to save and leave: {problem}")

    def _end_by_force(self, plan: Plan, job: Job) -> None:
        if self._slurm:
            # Two of them within a second make srun end its tasks; SIGKILL would leave that to Slurm's own timeouts.
            job.signal(signal.SIGINT)
            time.sleep(0.2)
            job.signal(signal.SIGINT)
            until = time.monotonic() + _SRUN_LEAVES_S
            while job.code() is None and time.monotonic() < until:
                time.sleep(_POLL_S)
        else:
            reach.end_all(plan.names, self._mark)
        job.kill()

    def _hear(self, plan: Plan, attempt: Attempt, message: dict[str, Any]) -> None:
        attempt.hear(message, time.monotonic())
        if message["kind"] == "progress":
            self._live = self._live or log.LiveLine()
            self._live.show(str(message.get("text") or ""), message.get("share"))
        if message["kind"] == "place":
            self._supervisor.met(time.monotonic())
            _say("\n".join(place_lines(plan, attempt.ranks)))

    def _prepare_restart(self, attempt: Attempt, signature: str, wait_s: float) -> str | None:
        """Wait, find the hosts, choose those with which the run can go on; a sentence if there are none."""
        _say(f"launch: restart {self._supervisor.restarts} of {self._options.max_restarts} in {wait_s:.0f} s")
        self._sleep(wait_s)
        if attempt.fault and attempt.fault.get("unfit"):
            self._unfit |= {host_of_rank(self._hosts, rank) for rank in attempt.fault.get("ranks", ())} - {""}
        found = tuple(host for host in self._answering() if host.name not in self._unfit)
        if self._signals:
            return None
        if len(found) < self._options.min_hosts:
            absent = [host.name for host in self._options.hosts if host not in found and host.name not in self._unfit]
            reasons = {"no answer": absent, "unfit after a fault of their own": sorted(self._unfit)}
            because = "; ".join(f"{reason}: {', '.join(names)}" for reason, names in reasons.items() if names)
            return f"{units.counted(len(found), 'host')} left, and --min-hosts is {self._options.min_hosts} ({because})"
        step = max(attempt.newest, self._newest())
        if step and self._run.resume != "auto":
            self._words = (*self._options.words, "--resume", "auto", "--resume_weights_only", "false")
        chosen, why = self._solvable(found)
        if chosen is None:
            return f"the run cannot go on with {units.counted(len(found), 'host')}: {why}"
        dropped = [host.name for host in self._options.hosts if host not in chosen]
        self._hosts = chosen
        size = f"{units.counted(len(chosen), 'host')}, {units.counted(sum(host.slots for host in chosen), 'rank')}"
        without = f", without {', '.join(dropped)}" if dropped else ""
        _say(f"launch: restarting from step {step} on {size}{without}")
        self._event(
            "restart",
            restart=self._supervisor.restarts,
            step=step,
            after=signature,
            hosts=[host.name for host in chosen],
            dropped=dropped,
            wait_s=wait_s,
        )
        return None

    def _answering(self) -> tuple[Host, ...]:
        """The hosts that answer, in the hostfile's order; those that were dropped before may have come back."""
        hosts = self._options.hosts
        began = time.monotonic()
        while True:
            found = slurm.answering(hosts) if self._slurm else _answering_ssh(hosts)
            enough = len(found) >= self._options.min_hosts
            waited_s = time.monotonic() - began
            if len(found) == len(hosts) or self._signals or waited_s > (_WAIT_SPARE_S if enough else _WAIT_NEEDED_S):
                return found
            self._sleep(2.0)

    def _solvable(self, found: tuple[Host, ...]) -> tuple[tuple[Host, ...] | None, str]:
        """As many of the hosts as the configuration has an answer for; else why there is none."""
        why = ""
        for count in range(len(found), self._options.min_hosts - 1, -1):
            try:
                self._run.resolve(self._words, sum(host.slots for host in found[:count]))
            except ConfigError as error:
                why = why or str(error)
            else:
                return found[:count], ""
        return None, why

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._signals and time.monotonic() < until:
            time.sleep(_POLL_S)

    def _newest(self) -> int:
        """Step of the newest complete checkpoint that is seen from here; 0 if there is none."""
        complete = (self._run_dir / "checkpoints").glob("step-*/manifest.json")
        steps = (path.parent.name.removeprefix("step-") for path in complete)
        return max((int(step) for step in steps if step.isdecimal()), default=0)

    def _event(self, kind: str, **fields: Any) -> None:
        """One line in the run's events.jsonl, if its folder is here."""
        line = json.dumps({"time_unix_s": time.time(), "kind": kind, **redact(fields)})
        try:
            with open(self._run_dir / "events.jsonl", "a") as file:
                file.write(line + "\n")
        except OSError as error:
            _say(f"warning: events.jsonl of {self._run_dir} cannot be written here ({error.strerror})")


_FACTS = (
    "import json, os, random, socket\n"
    "s = socket.socket()\n"
    # Below the ports that the kernel gives to outgoing connections: nobody takes it between now and the start.
    "for port in random.sample(range(20000, 30000), 100):\n"
    "    try: s.bind(('', port)); break\n"
    "    except OSError: pass\n"
    "print(json.dumps({'port': s.getsockname()[1], 'cores': len(os.sched_getaffinity(0))}))"
)


def _answering_ssh(hosts: tuple[Host, ...]) -> tuple[Host, ...]:
    others = [host.name for host in hosts if not is_here(host.name)]
    answers = on_hosts(others, ("true",), timeout_s=_ANSWER_S) if others else {}
    return tuple(host for host in hosts if host.name not in answers or answers[host.name].code == 0)


def _facts_here() -> dict[str, int]:
    done = subprocess.run((sys.executable, "-c", _FACTS), capture_output=True, text=True, check=True)
    return {str(name): int(value) for name, value in json.loads(done.stdout).items()}


def _not_started(step: int, why: str) -> Attempt:
    """A restart for which the hosts were not ready after all."""
    attempt = Attempt(began_s=time.monotonic(), resumes_at=step)
    attempt.fault = {"step": step, "signature": f"not started: {why}", "text": why}
    return attempt


def _code_of(number: int) -> int:
    return INTERRUPTED_CODE if number == signal.SIGINT else PREEMPTED_CODE


def _say(text: str) -> None:
    print(untrusted.shown(text, lines=True), file=sys.stderr, flush=True)
