"""Decides from its messages how a job has ended, and if it is restarted. Pure logic: processes, files, time are passed
in."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any, Literal

from llmtrain.base import units

FAULT_CODE = 1
"""Exit code of a launch that ended by a fault without a restart."""
PREEMPTED_CODE = 75
"""The job was asked to leave from outside: it has saved, and the same command resumes it (EX_TEMPFAIL of
sysexits.h)."""
INTERRUPTED_CODE = 130
"""Ctrl-C."""

BACKOFF_S, MAX_BACKOFF_S = 5.0, 300.0
_KILLED = {255: "its ssh connection broke", 137: "it was killed", 143: "it was terminated"}

Kind = Literal["complete", "stopped", "preempted", "refused", "fault"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of one attempt."""

    kind: Kind
    code: int
    """Exit code of the launch if this was the last attempt."""
    step: int = 0
    """Optimizer steps done, as far as is known."""
    signature: str = ""
    """Identifies a fault: equal if the same thing has happened at the same step."""
    text: str = ""


@dataclass
class Attempt:
    """One start of the job, as far as its messages report it."""

    began_s: float
    """Start of the attempt; moved on while something had to be fetched first."""
    resumes_at: int = 0
    """Step of the newest checkpoint that was there at its start."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """Ranks of the message `place`; empty until they have met."""
    met_s: float | None = None
    checkpoint: int | None = None
    """Step of the newest checkpoint that this attempt has completed."""
    saved_s: float | None = None
    fault: dict[str, Any] | None = None
    end: dict[str, Any] | None = None
    last_word_s: float | None = None
    """Time of the fault or end message."""
    asked: int | None = None
    """The signal with which the user asked for the end."""

    def hear(self, message: dict[str, Any], now: float) -> None:
        """Take a message of the job."""
        kind = message["kind"]
        if kind == "wait":
            self.began_s = now
        elif kind == "place":
            self.ranks, self.met_s = list(message.get("ranks") or []), now
        elif kind == "checkpoint":
            self.checkpoint, self.saved_s = int(message["step"]), now
        elif kind == "fault":
            # Where the root was lost, several hosts report the same fault, and its echoes: the first one counts.
            self.fault = self.fault or message
            self.last_word_s = self.last_word_s or now
        elif kind == "end":
            self.end = self.end or message
            self.last_word_s = self.last_word_s or now

    @property
    def newest(self) -> int:
        """Step from which another attempt would resume."""
        return self.resumes_at if self.checkpoint is None else self.checkpoint

    def good_until_s(self) -> float:
        """Time up to which no work is lost."""
        return max(self.saved_s or 0.0, self.met_s or 0.0, self.began_s)

    def outcome(self, code: int) -> Outcome:
        """The outcome. `code`: exit code of DeepSpeed's launcher or srun; negative: the signal that ended it."""
        end = self.end or {}
        status, step = end.get("status"), self.newest
        if status == "complete":
            return Outcome(kind="complete", code=0, step=step)
        if status == "refused":
            return Outcome(kind="refused", code=int(end.get("code") or 2), step=step, text=str(end.get("reason") or ""))
        if self.asked is not None:
            saved = "saved" if status == "stopped" else "ended before it could save"
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
        # The job saves although only its launcher died: nobody asked it to leave, unless the launcher got SIGHUP or
        # SIGTERM.
        left = "launcher process" not in reason and code not in (137, 255) and code >= 0
        if status == "stopped" and (left or code in (-signal.SIGHUP, -signal.SIGTERM)):
            return Outcome(kind="preempted", code=PREEMPTED_CODE, step=step, text=reason)
        return self._unexplained(code, reason)

    def _unexplained(self, code: int, reason: str) -> Outcome:
        """The outcome of a job that ended without a reason from itself or its watch."""
        where = "after the ranks had met" if self.ranks else "before the ranks had met"
        why = reason or _KILLED.get(128 - code if code < 0 else code, "no cause was reported")
        return Outcome(
            kind="fault",
            code=FAULT_CODE,
            step=self.newest,
            signature=f"step {self.newest + 1}: code {code} {where}",
            text=f"the job ended with code {code} {where}: {why}",
        )


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The decision after the end of an attempt."""

    restart: bool
    wait_s: float = 0.0
    """Before the restart."""
    code: int = 0
    """Exit code of the launch, if there is no restart."""
    text: str = ""


class Supervisor:
    """All attempts of one launch."""

    def __init__(self, max_restarts: int) -> None:
        self._max = max_restarts
        self.restarts = 0
        self.steps_redone = 0
        self.lost_s = 0.0
        self._faults_at_rest = 0  # in a row, without a new checkpoint between them: the backoff grows with them
        self._newest = -1
        self._before = ""
        self._good_until_s: float | None = None

    def met(self, now: float) -> None:
        """The ranks of a restarted attempt have met: the time lost by the fault before it is now known."""
        if self._good_until_s is not None:
            self.lost_s += now - self._good_until_s
            self._good_until_s = None

    def after(self, attempt: Attempt, outcome: Outcome) -> Decision:
        """Decide what follows an attempt."""
        if outcome.kind != "fault":
            return Decision(restart=False, code=outcome.code, text=outcome.text)
        if attempt.fault is not None and attempt.fault.get("again") is False:
            return self._give_up(f"not restarted: a restart would meet the same fault ({outcome.signature})")
        again = outcome.signature == self._before
        self._before = outcome.signature
        if again:
            rule = "the same step failed twice with the same error, and a third time would not differ"
            return self._give_up(f"not restarted: {rule} ({outcome.signature})")
        if self.restarts >= self._max:
            rule = f"--max-restarts is {self._max}" + (f", and {self.restarts} are used up" if self.restarts else "")
            return self._give_up(f"not restarted: {rule}; the same command continues from step {attempt.newest}")
        self.restarts += 1
        self.steps_redone += max(0, outcome.step - attempt.newest)
        if self._good_until_s is None:  # else the attempt had not even met
            self._good_until_s = attempt.good_until_s()
        self._faults_at_rest = 0 if attempt.newest > self._newest else self._faults_at_rest + 1
        self._newest = max(self._newest, attempt.newest)
        wait_s = min(BACKOFF_S * 2**self._faults_at_rest, MAX_BACKOFF_S)
        return Decision(restart=True, wait_s=wait_s, text=outcome.text)

    def _give_up(self, text: str) -> Decision:
        return Decision(restart=False, code=FAULT_CODE, text=text)

    def summary(self) -> str:
        """One line for the end; empty when there was no restart."""
        if not self.restarts:
            return ""
        restarts, steps = units.counted(self.restarts, "restart"), units.counted(self.steps_redone, "step")
        return f"{restarts}, {steps} done again, {self.lost_s:.0f} s lost"
