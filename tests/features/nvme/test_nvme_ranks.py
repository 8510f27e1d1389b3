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
LORA = {"adapter": {"r": 4, "targets": ["*.q_proj", "*.up_proj"]}}
BF16 = {"precision": "bf16", "accumulation": 3}


@pytest.mark.parametrize(
    ("form", "optimizer", "weights"),
    [
        (BF16, {}, False),
        ({"optimizer": "lion"}, AHEAD, False),
        (BF16, {}, True),
        ({"precision": "autocast"}, AHEAD, True),
        ({"optimizer": "lion"}, None, True),
        (LORA, None, True),
    ],
    ids=["adamw", "lion", "both", "both with autocast", "weights", "frozen weights"],
)
def test_a_run_in_files_is_one_in_memory(pools, small_data, tmp_path, form, optimizer, weights):
    """Without clipping: DeepSpeed adds an offloaded gradient's norm up in another order."""
    case = Case(data=small_data, stage=3, steps=END, model=WIDE, clip=0.0, **form)
    disk = tmp_path / "disk"
    disk.mkdir()
    place = {"device": "nvme", "nvme_path": str(disk)}
    zero = {"stage": 3, **({} if optimizer is None else {"offload_optimizer": {**place, **optimizer}})}
    zero |= {"offload_param": place} if weights else {}
    in_files = replace(case, extra={"zero_optimization": zero, **case.extra})
    want, from_memory = pools(2).run(save_in_the_middle, case, str(tmp_path / "memory"))[0]
    got, from_files = pools(2).run(save_in_the_middle, in_files, str(tmp_path / "files"))[0]
    crossed = [
        pools(2).run(load_and_go_on, reading, path)[0]
        for reading, path in ((case, from_files), (in_files, from_memory))
    ]
    for trace in (got, *crossed):
        assert trace.losses == want.losses
        assert trace.norms == pytest.approx(want.norms, rel=1e-6)
        for name, value in want.parameters.items():
            assert torch.equal(trace.parameters[name], value), name
    assert not weights or min(pools(2).run(bytes_in_files, in_files, str(disk))) > 0.99
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
