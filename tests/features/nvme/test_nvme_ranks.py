"""The optimizer's state in swap files, and weights in files: the same bits as in memory, in a run and over
checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.training import LLAMA, Case, make_engine
from tests.ranks.test_resume import END, load_and_go_on, save_in_the_middle

WIDE = {**LLAMA, "vocab_size": 4096}
"""A sub-group of 1 MiB on each of two ranks, the least that is swapped."""
AHEAD = {"pipeline_read": True, "pipeline_write": True}


def swapping(case: Case, folder: Path, **settings: object) -> Case:
    offload = {"device": "nvme", "nvme_path": str(folder), **settings}
    return replace(case, extra={"zero_optimization": {"stage": 3, "offload_optimizer": offload}, **case.extra})


@pytest.mark.parametrize(
    ("form", "settings"),
    [
        ({"precision": "bf16", "accumulation": 3}, {}),
        ({"optimizer": "lion"}, AHEAD),
        ({"precision": "autocast"}, AHEAD),
    ],
    ids=["adamw", "lion", "autocast"],
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


LORA = {"adapter": {"r": 4, "targets": ["*.q_proj", "*.up_proj"]}}


@pytest.mark.parametrize(
    ("form", "swaps"),
    [
        ({"precision": "bf16", "accumulation": 3}, True),
        ({"optimizer": "lion"}, False),
        (LORA, False),
        ({"precision": "autocast"}, True),
    ],
    ids=["both", "weights", "frozen weights", "autocast"],
)
def test_weights_in_files_are_those_in_memory(pools, small_data, tmp_path, form, swaps):
    case = Case(data=small_data, stage=3, steps=END, model=WIDE, clip=0.0, **form)
    disk = tmp_path / "disk"
    disk.mkdir()
    place = {"device": "nvme", "nvme_path": str(disk)}
    zero = {"stage": 3, "offload_param": place, **({"offload_optimizer": place} if swaps else {})}
    on_disk = replace(case, extra={"zero_optimization": zero, **case.extra})
    want, in_memory = pools(2).run(save_in_the_middle, case, str(tmp_path / "memory"))[0]
    got, from_disk = pools(2).run(save_in_the_middle, on_disk, str(tmp_path / "saved"))[0]
    crossed = [
        pools(2).run(load_and_go_on, reading, path)[0] for reading, path in ((case, from_disk), (on_disk, in_memory))
    ]
    for trace in (got, *crossed):
        assert trace.losses == want.losses
        for name, value in want.parameters.items():
            assert torch.equal(trace.parameters[name], value), name
    assert min(pools(2).run(bytes_in_files, on_disk, str(disk))) > 0.99
    assert not list(disk.iterdir()), "a file has a name, and a killed run would leave it"


def bytes_in_files(case: Case, folder: str) -> float:
    """The part of the weights' shares, above those that stay on the device, whose memory is a file of the folder."""
    engine, _ = make_engine(case)
    files = [line.split("-", 1) for line in Path("/proc/self/maps").read_text().split("\n") if f" {folder}/" in line]
    spans = [(int(low, 16), int(rest.split(" ", 1)[0], 16)) for low, rest in files]
    shares = [parameter.ds_tensor for parameter in engine.module.parameters() if not parameter.ds_persist]
    inside = sum(share.nbytes for share in shares if any(low <= share.data_ptr() < high for low, high in spans))
    engine.close()
    return inside / sum(share.nbytes for share in shares)
