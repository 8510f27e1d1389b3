"""DeepSpeed's 1F1B schedule on a GPU, where a send holds the stage until its peer receives: does that widen the bubble?

A simulation of the schedule's own instructions. gloo's sends return at once, NCCL's hold the stream that computes.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from deepspeed.runtime.pipe.schedule import TrainSchedule

Work = Callable[[int, int], float]
"""Seconds of a pass, from the stage and the pass's number in its plan."""
_PEER = {"SendActivation": 1, "RecvActivation": -1, "SendGrad": -1, "RecvGrad": 1}


def step_s(stages: int, micro_batches: int, work: Work, *, sends_wait: bool) -> float:
    """How long a step takes whose messages take no time."""
    plans = [
        [type(each).__name__ for now in TrainSchedule(micro_batches, stages, stage) for each in now]
        for stage in range(stages)
    ]
    at, clock = [0] * stages, [0.0] * stages
    sent: dict[tuple[int, int], list[float]] = {}

    def advance(stage: int) -> bool:
        """One instruction of a stage, if it need not wait for another stage's."""
        name = plans[stage][at[stage]]
        peer = stage + _PEER.get(name, 0)
        if name.startswith("Send") and sends_wait:
            meets = plans[peer][at[peer]] == name.replace("Send", "Recv")
            if not meets:
                return False
            clock[stage] = clock[peer] = max(clock[stage], clock[peer])
            at[peer] += 1
        elif name.startswith("Send"):
            sent.setdefault((stage, peer), []).append(clock[stage])
        elif name.startswith("Recv"):
            if not sent.get((peer, stage)):
                return False
            clock[stage] = max(clock[stage], sent[peer, stage].pop(0))
        elif name in ("ForwardPass", "BackwardPass"):
            clock[stage] += work(stage, at[stage]) * (2 if name == "BackwardPass" else 1)
        at[stage] += 1
        return True

    while True in [at[s] < len(plans[s]) and advance(s) for s in range(stages)]:
        pass
    assert at == [len(plan) for plan in plans], f"deadlock at {at}"
    return max(clock)


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("micro_batches", [4, 16, 32])
def test_equal_stages_keep_to_the_formula_though_sends_wait(stages: int, micro_batches: int) -> None:
    ideal = 3.0 * (micro_batches + stages - 1)
    for sends_wait in (True, False):
        assert step_s(stages, micro_batches, lambda *_: 1.0, sends_wait=sends_wait) == ideal


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_with_uneven_passes_waiting_sends_cost_nothing(stages: int) -> None:
    """A stage sends where its peer has just received from it: passes that vary by 10 % delay both ways alike."""
    for seed in range(20):
        shares = [[random.Random(f"{seed} {s} {i}").uniform(0.9, 1.1) for i in range(400)] for s in range(stages)]

        def work(stage: int, index: int, shares: list[list[float]] = shares) -> float:
            return shares[stage][index]

        waiting, free = (step_s(stages, 16, work, sends_wait=wait) for wait in (True, False))
        assert waiting == pytest.approx(free, rel=1e-9)
