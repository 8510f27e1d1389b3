"""A run that goes wrong in silence, on one rank or in what its optimizer keeps: it stops and names the tensor."""

from __future__ import annotations

import os
import re
from typing import Any

from llmtrain.base.rank import messages
from tests.helpers import forked
from tests.helpers.launching import rows, write_recipe

NAME = "model.layers.1.mlp.up_proj.weight"


def lose_a_bit(rank: int) -> None:
    """Rank 1's memory changes after its 7th step."""
    os.environ[messages.SUPERVISED] = "1"  # here: the server of forks keeps the environment that it began with
    from llmtrain.training.step import Session

    plain, steps = Session.step, [0]

    def step(self: Session, *args: Any, **kwargs: Any) -> Any:
        result = plain(self, *args, **kwargs)
        steps[0] += 1
        if rank == 1 and steps[0] == 7:
            (values,) = (copy.values for copy in self.engine.copies() if copy.name == NAME)
            values[5] *= -1
        return result

    Session.step = step  # type: ignore[method-assign]


def test_a_lost_bit_on_one_rank_stops_the_run_and_is_named(small_data, tmp_path):
    recipe, run = write_recipe(tmp_path, small_data), tmp_path / "run"
    zero0 = tmp_path / "zero0.json"  # each rank holds its own weights from step to step
    zero0.write_text('{"zero_optimization": {"stage": 0}}')
    launch = forked.Launch(recipe, "--deepspeed", str(zero0), "--fault.check_every", "10", before=lose_a_bit)
    codes = launch.wait(240)
    output = launch.output()
    assert codes == [3, 3], (codes, output)
    assert " step 10:" in output and NAME in output and "Traceback" not in output
    assert " step 5 " in output  # each checkpoint is preceded by a comparison
    assert output.count("error:") == 1
    ends = [told for line in output.splitlines() if (told := messages.parse(line)) and told["kind"] == "end"]
    assert [(told["status"], told["code"]) for told in ends] == [("failed", 3)]  # `llmtrain launch` starts it again
    faults = [event for event in rows(run, "events.jsonl") if event["kind"] == "fault"]
    assert [(each["what"], each["step"], each["names"], each["ranks"]) for each in faults] == [
        ("ranks differ", 10, [NAME], [0, 1])
    ]
    saved = [event["step"] for event in rows(run, "events.jsonl") if event["kind"] == "save"]
    assert saved == [5]  # none of ranks that differ


def compute_wrong_later(rank: int) -> None:
    """Rank 1 computes wrong from its 5th step on."""
    os.environ[messages.SUPERVISED] = "1"
    from llmtrain.training.step import Session
    from tests.helpers.wrong_machine import Wrong, compute_wrong

    plain, steps = Session.step, [0]

    def step(self: Session, *args: Any, **kwargs: Any) -> Any:
        steps[0] += 1
        if rank == 1 and steps[0] == 5:
            wrong = Wrong(module="hf.model.layers.1.mlp.up_proj", bit=20, element=77)
            compute_wrong(self.engine.module, wrong)
        return plain(self, *args, **kwargs)

    Session.step = step  # type: ignore[method-assign]


def test_a_rank_that_computes_wrong_ends_the_run_and_launch_leaves_its_host_out(small_data, tmp_path):
    """Until then, checks have changed no digit."""
    words = ("--train.global_batch", "12", "--train.max_steps", "9", "--checkpoint.every_steps", "3")
    for name, recheck, before in (("plain", "0", None), ("wrong", "3", compute_wrong_later)):
        (tmp_path / name).mkdir()
        recipe = write_recipe(tmp_path / name, small_data)
        launch = forked.Launch(recipe, *words, "--recheck.every", recheck, world_size=3, before=before)
        assert launch.wait(240) == [3 if before else 0] * 3, launch.output()
    losses = [
        [row["loss"] for row in rows(tmp_path / name / "run") if "loss" in row][:4] for name in ("plain", "wrong")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    told = [told for line in launch.output().splitlines() if (told := messages.parse(line))]
    (fault,), (end,) = ([each for each in told if each["kind"] == kind] for kind in ("fault", "end"))
    assert fault["ranks"] == [1] and fault["unfit"] and fault["step"] == 6 and end["status"] == "failed"
    assert "checkpoints after step 3" in fault["text"]
    events = rows(tmp_path / "wrong" / "run", "events.jsonl")
    assert [(each["what"], each["ranks"]) for each in events if each["kind"] == "fault"] == [("computes wrong", [1])]
    assert [each["step"] for each in events if each["kind"] == "save"] == [3]  # no state after the difference


def by_the_first_order(rank: int) -> None:
    """Masters are looked for where the parameters lay before DeepSpeed has laid them out round robin."""
    from llmtrain.engine.deepspeed.state import Zero12State

    plain = Zero12State._partition

    def partition(self: Zero12State, index: int) -> Any:
        self.optimizer.round_robin_bit16_groups[index] = self.optimizer.bit16_groups[index]
        sizes = [parameter.numel() for parameter in self.optimizer.bit16_groups[index]]
        self.optimizer.round_robin_bit16_offsets[index] = [sum(sizes[:i]) for i in range(len(sizes))]
        return plain(self, index)

    Zero12State._partition = partition  # type: ignore[method-assign]


def part_after_each_step(rank: int) -> None:
    """Change the masters after each step, so that the forward pass no longer reads copies of them."""
    from llmtrain.training.step import Session

    plain = Session.step

    def step(self: Session, *args: Any, **kwargs: Any) -> Any:
        result = plain(self, *args, **kwargs)
        for piece in self.engine.state():
            if piece.name == NAME and piece.kind == "param":
                with piece.open() as master:
                    master.data.mul_(1.01)
        return result

    Session.step = step  # type: ignore[method-assign]


def test_masters_under_other_names_end_the_run_at_its_start(small_data, tmp_path):
    recipe = write_recipe(tmp_path, small_data)
    laid_out = tmp_path / "round_robin.json"
    laid_out.write_text('{"zero_optimization": {"stage": 2, "round_robin_gradients": true}}')
    code, output = forked.finish(recipe, "--deepspeed", str(laid_out), before=by_the_first_order)
    assert code == 2 and "Traceback" not in output, (code, output)
    (error,) = [line for line in output.splitlines() if line.startswith("error:")]
    assert re.search(r" model\..*\branks 0", error)
    assert "zero_optimization.round_robin_gradients = true" in error
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*")) and not rows(tmp_path / "run")


def test_masters_that_part_from_what_is_trained_are_never_saved(small_data, tmp_path):
    """One rank, that compares with nobody: the first checkpoint of a launch is preceded by a look in any case."""
    recipe, run = write_recipe(tmp_path, small_data), tmp_path / "run"
    code, output = forked.finish(recipe, "--fault.check_every", "0", world_size=1, before=part_after_each_step)
    assert code == 3 and "Traceback" not in output, (code, output)
    assert f"after step 5: the optimizer keeps other values of {NAME} than the forward pass reads, on rank 0" in output
    faults = [event for event in rows(run, "events.jsonl") if event["kind"] == "fault"]
    assert [(each["what"], each["step"], each["names"]) for each in faults] == [("masters differ", 5, [NAME])]
    assert not list((run / "checkpoints").glob("step-*"))
