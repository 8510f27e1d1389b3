"""Python's search for garbage stops a rank: in a run all ranks search after the same steps, and after no other."""

from __future__ import annotations

import gc
import os
import re

from tests.helpers import forked
from tests.helpers.launching import write_recipe


def tell(rank: int) -> None:
    """Each search of this rank, with the step that it comes after, goes to the output. Python would look often."""
    from llmtrain.training.guards import SkippedSteps

    step = [0]
    plain = SkippedSteps.after_step

    def after_step(self, done):
        plain(self, done)
        step[0] = done.position.step

    SkippedSteps.after_step = after_step  # type: ignore[method-assign]
    gc.set_threshold(50)
    gc.callbacks.append(
        lambda phase, info: phase == "start" and os.write(1, f"rank {rank} step {step[0]} searches\n".encode())
    )


def test_all_ranks_look_for_garbage_together_every_20_steps(small_data, tmp_path):
    recipe = write_recipe(tmp_path, small_data)
    words = ("--schedule.name", "constant", "--train.max_steps", "41", "--train.log_every", "7")
    code, output = forked.finish(recipe, *words, before=tell)
    assert code == 0, output
    searches = [(int(rank), int(step)) for rank, step in re.findall(r"rank (\d) step (\d+) searches", output)]
    within = sorted(each for each in searches if 0 < each[1] < 41)  # what comes after the last step is the run's end
    assert within == [(rank, step) for rank in (0, 1) for step in (19, 39)]  # in steps 20 and 40, before their parts
