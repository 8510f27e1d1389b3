"""Asynchronous saves of state on a GPU: a stream of its own copies it to page-locked memory while training goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmtrain.checkpoint.reader import CheckpointReader
from tests.helpers.training import LLAMA, Case
from tests.ranks.test_save import save_both_ways


@pytest.mark.parametrize("offload", ["", "optimizer"])
@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16")])
def test_the_copy_is_the_state_at_the_boundary(pools, small_data, tmp_path, stage, precision, offload):
    if stage == 0 and offload:
        pytest.skip("DeepSpeed offloads under ZeRO only")
    model = dict(LLAMA)
    if (stage, offload) == (1, ""):  # 600 MiB of state: page-locked memory has several registrations
        model["vocab_size"] = 400_000
    case = Case(data=small_data, stage=stage, precision=precision, steps=4, offload=offload, model=model)
    (sync, behind), asynchronous, want = pools(1).run(save_both_ways, case, str(tmp_path))[0]
    assert asynchronous
    for name in ("rank-00000.safetensors", "manifest.json"):
        assert (Path(sync) / name).read_bytes() == (Path(behind) / name).read_bytes(), name
    reader = CheckpointReader(Path(behind))
    for name, value in want.items():
        assert torch.equal(reader.read(name, 0, value.numel()), value.float().reshape(-1).cpu()), name
