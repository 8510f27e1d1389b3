"""The supervisor's decisions, from messages, exit codes and a clock that are given."""

from __future__ import annotations

from typing import Any

import pytest

from llmtrain.cluster.launch.attempts import Attempt, Outcome, Supervisor

FAULT = {"kind": "fault", "step": 12, "cause": "killed", "signature": "step 13: killed", "text": "rank 1 was killed"}


def ended(*messages: dict[str, Any], code: int, asked: int | None = None, resumes_at: int = 0) -> Outcome:
    attempt = Attempt(began_s=0.0, resumes_at=resumes_at, asked=asked)
    for now, message in enumerate(messages):
        attempt.hear(message, float(now))
    return attempt.outcome(code)


def end(status: str, code: int = 0, reason: str | None = None) -> dict[str, Any]:
    return {"kind": "end", "status": status, "code": code, "reason": reason}


@pytest.mark.parametrize(
    "messages, code, asked, kind, exit_code",
    [
        ([end("complete")], 0, None, "complete", 0),
        ([end("complete")], 0, 2, "complete", 0),  # it was done before the request arrived
        ([end("stopped", reason="SIGTERM")], 0, None, "preempted", 75),
        ([end("stopped", reason="SIGTERM")], 1, None, "preempted", 75),  # the host's launcher was signalled too
        ([end("stopped", reason="preempt file /run/spot")], 0, None, "preempted", 75),
        ([end("stopped", reason="SIGTERM")], 0, 15, "preempted", 75),
        ([end("ended", reason="parts.mine asked to stop")], 0, None, "stopped", 0),
        ([end("ended", reason="parts.mine asked to stop")], 0, 15, "preempted", 75),  # launch had, too
        ([end("stopped", reason="SIGTERM")], 0, 2, "stopped", 130),
        ([end("stopped", reason="launcher process 7 is gone")], -9, None, "fault", 75),  # restarted; saved, if not
        ([end("stopped", reason="launcher process 7 is gone")], -15, None, "preempted", 75),  # SIGTERM to it
        ([end("stopped", reason="launcher process 7 is gone")], -1, None, "preempted", 75),  # SIGHUP
        ([end("stopped", reason="another rank was asked to stop")], 137, None, "fault", 75),
        ([end("refused", 2, "train.global_batch")], 2, None, "refused", 2),
        ([end("refused", 3, "non-finite")], 3, None, "refused", 3),
        ([end("failed", 2, "ranks 4 to 7 had not connected")], 2, None, "fault", 1),
        ([FAULT], 137, None, "fault", 1),
        ([FAULT], -9, None, "fault", 1),  # the launcher was killed
        ([], 0, None, "fault", 1),
        ([], 137, 2, "stopped", 130),
    ],
)
def test_how_an_attempt_ended(
    messages: list[dict[str, Any]], code: int, asked: int | None, kind: str, exit_code: int
) -> None:
    outcome = ended(*messages, code=code, asked=asked)
    assert (outcome.kind, outcome.code) == (kind, exit_code)


def test_the_first_fault_counts() -> None:
    echo = {**FAULT, "step": 12, "signature": "step 13: cut_off", "text": "cut off"}
    assert ended(FAULT, echo, code=1).text == "rank 1 was killed"


def attempt(now: float, checkpoint: int | None = None, resumes_at: int = 0) -> Attempt:
    one = Attempt(began_s=now, resumes_at=resumes_at)
    one.hear({"kind": "place", "ranks": [{"rank": 0}]}, now + 5)
    if checkpoint is not None:
        one.hear({"kind": "checkpoint", "step": checkpoint}, now + 10)
    return one


def fault_at(step: int, cause: str = "killed") -> Outcome:
    return Outcome(kind="fault", code=1, step=step, signature=f"step {step + 1}: {cause}", text="")


def test_a_fault_is_followed_by_a_restart_and_the_cost_is_counted() -> None:
    supervisor = Supervisor(max_restarts=2)
    decision = supervisor.after(attempt(0.0, checkpoint=10), fault_at(13))
    assert decision.restart and decision.wait_s == 5
    supervisor.met(40.0)  # the checkpoint was complete at 10 s
    assert supervisor.after(attempt(35.0, checkpoint=20, resumes_at=10), fault_at(21)).restart
    supervisor.met(80.0)  # at 45 s
    assert supervisor.summary() == "2 restarts, 4 steps done again, 65 s lost"
    last = supervisor.after(attempt(75.0, checkpoint=30), fault_at(31))
    assert not last.restart and last.code == 1 and "--max-restarts is 2" in last.text and "step 30" in last.text


def test_a_run_that_resumes_nothing_is_continued_by_another_command() -> None:
    """With `resume: none` the same command is refused, as its folder has checkpoints."""
    last = Supervisor(0, "the same command with --resume auto").after(attempt(0.0, checkpoint=10), fault_at(13))
    assert last.text.endswith("; the same command with --resume auto continues from step 10")


def test_the_same_step_with_the_same_error_is_not_tried_a_third_time() -> None:
    supervisor = Supervisor(max_restarts=9)
    assert supervisor.after(attempt(0.0, checkpoint=10), fault_at(13)).restart
    again = supervisor.after(attempt(50.0, resumes_at=10), fault_at(13))
    assert not again.restart and again.code == 1 and "step 14: killed" in again.text


@pytest.mark.parametrize("second", [fault_at(14), fault_at(13, "silent_host")])
def test_another_step_or_another_error_is_tried_again(second: Outcome) -> None:
    supervisor = Supervisor(max_restarts=9)
    assert supervisor.after(attempt(0.0, checkpoint=10), fault_at(13)).restart
    assert supervisor.after(attempt(50.0, resumes_at=10), second).restart


def test_the_backoff_grows_without_progress_only_and_has_a_limit() -> None:
    supervisor = Supervisor(max_restarts=99)
    waits = [supervisor.after(attempt(0.0, resumes_at=10), fault_at(11 + n)).wait_s for n in range(9)]
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    assert supervisor.after(attempt(0.0, checkpoint=20), fault_at(25)).wait_s == 5


def test_a_rank_that_was_killed_is_started_again_at_once_unless_that_has_not_helped() -> None:
    supervisor = Supervisor(max_restarts=99)
    waits = []
    for step, (cause, checkpoint) in enumerate([("killed", 10), ("killed", 20), ("killed", 20), ("gpu_broken", 30)]):
        one = attempt(0.0, resumes_at=checkpoint)
        one.hear({**FAULT, "cause": cause}, 20.0)
        waits.append(supervisor.after(one, fault_at(11 + step, cause)).wait_s)
    assert waits == [0, 0, 10, 5]


@pytest.mark.parametrize("kind, code", [("refused", 2), ("refused", 3), ("preempted", 75), ("complete", 0)])
def test_nothing_but_a_fault_is_restarted(kind: Any, code: int) -> None:
    decision = Supervisor(max_restarts=9).after(attempt(0.0), Outcome(kind=kind, code=code))
    assert not decision.restart and decision.code == code


def test_a_fault_that_another_start_would_meet_is_not_tried_again() -> None:
    """A build of torch without code for this GPU, two ranks on one GPU."""
    one = attempt(0.0, checkpoint=10)
    one.hear({**FAULT, "cause": "no_kernel_image", "again": False}, 20.0)
    decision = Supervisor(max_restarts=9).after(one, one.outcome(1))
    assert not decision.restart and decision.code == 1 and "same fault" in decision.text
    two = attempt(0.0, checkpoint=10)
    two.hear({**FAULT, "again": True, "unfit": True}, 20.0)
    assert Supervisor(max_restarts=9).after(two, two.outcome(1)).restart  # on which hosts is for launch to say
