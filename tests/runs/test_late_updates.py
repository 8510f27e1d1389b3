"""A run whose host does not wait for an update, as with AdamW in bf16 under ZeRO 1 and 2 on a GPU.

AdamW's kernel takes the clip and the verdict on the gradient on a CPU, too: here the run believes that it is on a GPU.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from llmtrain.features import features
from tests.helpers import forked
from tests.helpers.launching import rows, write_run

LATE = Path("late.txt")
"""In the current folder: rank 0's updates as they were given to the device (+) and read by the host (-), in order."""
BAD = (3, 4, 9)
"""Steps without a finite gradient on one of the ranks."""


def with_bad_gradients(rank: int) -> None:
    from llmtrain.engine.deepspeed.engine import ZeroEngine

    plain, done = ZeroEngine.micro_step, [0]

    def micro_step(self: Any, micro: Any, weight: Any, objective: Any) -> Any:
        done[0] += 1
        bad = rank == 1 and done[0] in BAD
        return plain(self, micro, (lambda: weight() * math.nan) if bad else weight, objective)

    ZeroEngine.micro_step = micro_step  # type: ignore[method-assign]


def late(rank: int) -> None:
    from llmtrain.engine.deepspeed import engine, zero_step

    with_bad_gradients(rank)
    zero_step._on_gpu = lambda _: True
    plain, given = engine._read_later, [0]

    def noted(text: str) -> None:
        if rank == 0:
            with LATE.open("a") as file:
                file.write(text)

    def read_later(number: Any) -> Any:
        given[0] += 1
        step, read = given[0], plain(number)
        noted(f"+{step} ")
        return lambda: (noted(f"-{step} "), read())[1]

    engine._read_later = read_later


def run(folder: Path, data: str, before: Any, *words: str) -> tuple[int, str, Path]:
    train = {"global_batch": 8, "micro_batch": 4, "max_steps": 12, "log_every": 5}
    sections = {"checkpoint": {"every_steps": 4, "keep": 9}, "optim": {"lr": 3e-3, "clip_norm": 0.1}}
    recipe = write_run(folder, data, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}, train, **sections)
    code, output = forked.finish(recipe, *words, world_size=2, before=before)
    return code, output, folder / "run"


def test_a_run_goes_on_before_its_updates_are_done(
    small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output, whole = run(tmp_path / "waits", small_data, with_bad_gradients)
    assert code == 0, output
    code, output, without = run(tmp_path / "late", small_data, late)
    assert code == 0, output
    for kind in ("skip", "save", "stop"):
        ours, theirs = (
            [(event["step"], event.get("what"), event.get("samples")) for event in rows(folder, "events.jsonl")
             if event["kind"] == kind]
            for folder in (without, whole)
        )  # fmt: skip
        assert ours == theirs and ours, kind
    assert [event["step"] for event in rows(without, "events.jsonl") if event["kind"] == "skip"] == list(BAD)
    assert all(f"step {step} skipped: non-finite gradient" in output for step in BAD)
    counted = {row["step"]: row["skipped_steps"] for row in rows(without) if "loss" in row}
    assert (
        counted == {row["step"]: row["skipped_steps"] for row in rows(whole) if "loss" in row} == {5: 2, 10: 3, 12: 3}
    )
    for one, other in zip(rows(without), rows(whole), strict=True):
        # A gradient divided by the excess, and not multiplied by its inverse, differs by a rounding of fp32: 6e-8. Ten
        # updates of AdamW make less of it than the rounding of a bf16 forward pass, 2^-9 of a loss.
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-3)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-2)
    states = [
        [(state.step, state.skipped_steps, state.optimizer_step) for state in map(state_of, (4, 8, 12))]
        for state_of in (lambda step: trainer_of(without, step), lambda step: trainer_of(whole, step))
    ]
    assert states[0] == states[1] == [(4, 2, 2), (8, 2, 6), (12, 3, 9)]
    if "spikes" in features():
        from llmtrain.features.spikes.steps import STEPS, read_steps

        flags = [
            [(row.step, row.skipped, row.norm == math.inf) for row in read_steps(r / STEPS)] for r in (without, whole)
        ]
        assert flags[0] == flags[1] and [row[0] for row in flags[0] if row[1] and row[2]] == list(BAD)
    # The host reads a step's update after it gave the next one, but for logs (5, 10), saves (4, 8) and the end.
    assert order_of(tmp_path / LATE) == [1, 1, 1, 0, 0, 1, 1, 0, 1, 0, 1, 0]


def trainer_of(run: Path, step: int) -> Any:
    from llmtrain.checkpoint.trainer_state import TrainerState

    return TrainerState.read(run / "checkpoints" / f"step-{step:08d}")


def order_of(noted: Path) -> list[int]:
    """For each update how many others were given before it was read."""
    words = noted.read_text().split()
    return [
        sum(other[0] == "+" for other in words[words.index(f"+{step}") + 1 : words.index(f"-{step}")])
        for step in range(1, 13)
    ]


def test_too_many_skipped_steps_end_it_one_step_later(
    small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output, folder = run(tmp_path, small_data, late, "--fault.max_skipped", "2")
    assert code == 3 and "error: 2 steps " in output and "non-finite" in output, output
    assert [event["step"] for event in rows(folder, "events.jsonl") if event["kind"] == "skip"] == [3, 4]
