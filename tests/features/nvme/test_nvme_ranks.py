"""The optimizer's state in swap files: the same bits as in memory, in a run and over checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.training import LLAMA, Case
from tests.ranks.test_resume import END, load_and_go_on, save_in_the_middle

WIDE = {**LLAMA, "vocab_size": 4096}
"""A sub-group of 1 MiB on each of two ranks, the least that is swapped."""
AHEAD = {"pipeline_read": True, "pipeline_write": True}


def swapping(case: Case, folder: Path, **settings: object) -> Case:
    offload = {"device": "nvme", "nvme_path": str(folder), **settings}
    return replace(case, extra={"zero_optimization": {"stage": 3, "offload_optimizer": offload}, **case.extra})


@pytest.mark.parametrize(
    ("form", "settings"),
    [({"precision": "bf16", "accumulation": 3}, {}), ({"optimizer": "lion"}, AHEAD)],
    ids=["adamw", "lion"],
)
def test_a_run_in_swap_files_is_one_in_memory(pools, small_data, tmp_path, form, settings):
    """Without clipping: DeepSpeed adds an offloaded gradient's norm up in another order."""
    case = Case(data=small_data, stage=3, steps=END, model=WIDE, clip=0.0, **form)
    swapped = swapping(case, tmp_path, **settings)
    want, in_memory = pools(2).run(save_in_the_middle, case, str(tmp_path / "memory"))[0]
    got, on_disk = pools(2).run(save_in_the_middle, swapped, str(tmp_path / "disk"))[0]
    crossed = [
        pools(2).run(load_and_go_on, reading, path)[0] for reading, path in ((case, on_disk), (swapped, in_memory))
    ]
    for trace in (got, *crossed):
        assert trace.losses == want.losses
        assert trace.norms == pytest.approx(want.norms, rel=1e-6)
        for name, value in want.parameters.items():
            assert torch.equal(trace.parameters[name], value), name
