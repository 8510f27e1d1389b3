"""A run of which one rank goes wrong in silence: it stops, and says which tensor on which rank."""

from __future__ import annotations

import os
from typing import Any

from llmtrain.cluster import messages
from tests.helpers import forked
from tests.helpers.launching import rows, write_recipe

NAME = "model.layers.1.mlp.up_proj.weight"


def lose_a_bit(rank: int) -> None:
    """Rank 1's memory changes after its 7th step."""
    os.environ[messages.SUPERVISED] = "1"  # here: the server of forks keeps the environment that it began with
    from llmtrain.session import Session

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
    assert "after step 10:" in output and NAME in output and "Traceback" not in output
    assert "At step 5 they agreed" in output  # each checkpoint is preceded by a comparison
    assert output.count("error:") == 1
    ends = [told for line in output.splitlines() if (told := messages.parse(line)) and told["kind"] == "end"]
    assert [(told["status"], told["code"]) for told in ends] == [("failed", 3)]  # `llmtrain launch` starts it again
    faults = [event for event in rows(run, "events.jsonl") if event["kind"] == "fault"]
    assert [(each["what"], each["step"], each["names"], each["ranks"]) for each in faults] == [
        ("ranks differ", 10, [NAME], [0, 1])
    ]
    saved = [event["step"] for event in rows(run, "events.jsonl") if event["kind"] == "save"]
    assert saved == [5]  # none of ranks that differ
