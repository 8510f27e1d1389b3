"""What loading costs a rank: it reads its own slices and no more, and needs little memory beside its state."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import pytest
import torch

from llmtrain.checkpoint.load import load_checkpoint
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.storage.tensorfile import numel
from tests.helpers.training import LLAMA, Case, counted, make_engine, resolved_run, save_checkpoint, view_of

# 17 M parameters, the largest tensor a quarter of them: headers and manifest are small beside the values, and a rank
# that read whole files would be seen.
LARGE = {**LLAMA, "vocab_size": 16384, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
FORMS = [
    (2, {"stage": 3}),
    (4, {"stage": 2}),
    (4, {"stage": 1, "tensor": 2}),
    (2, {"stage": 1, "pipeline": 2}),
]


def save_large(case: Case, folder: str) -> str:
    engine, ranks = make_engine(case)
    with torch.no_grad():
        for index, fragment in enumerate(engine.state()):
            view_of(fragment).add_(torch.arange(fragment.region.numel) % 97 + index)
    engine.refresh()
    state = {"step": 1, "tokens": 0, **counted(engine)}
    path = save_checkpoint(engine, Path(folder), 1, state, resolved_run(case, ranks.world_size), ranks)
    engine.close()
    return str(path)


def measured_load(case: Case, path: str) -> dict[str, int]:
    """Bytes: needed, read, the largest tensor, the peak of resident memory above what the engine takes."""
    engine, ranks = make_engine(case)
    live = engine.state()
    trainer = TrainerState.read(Path(path))
    # Once before it counts: zeros that were never written take no memory yet, nor does code that never ran.
    load_checkpoint(engine, CheckpointReader(Path(path)), trainer, ranks)
    with torch.no_grad():
        for fragment in live:
            view_of(fragment).fill_(0.5)
    engine.refresh()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that is free but kept would hide what loading takes
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    resident, read = _status("VmRSS"), _read_bytes()
    load_checkpoint(engine, CheckpointReader(Path(path)), trainer, ranks)
    costs = {
        "needed": 4 * sum(fragment.region.numel for fragment in live),
        "read": _read_bytes() - read,
        "largest": 4 * max(numel(shape) for shape in engine.shapes().values()),
        "extra": _status("VmHWM") - resident,
    }
    engine.close()
    return costs


def _status(key: str) -> int:
    """Bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


def _read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.fixture(scope="module")
def large(pools, small_data, tmp_path_factory):
    """A checkpoint of 201 MB, saved under ZeRO 1 on 2 ranks."""
    folder = tmp_path_factory.mktemp("large")
    return pools(2).run(save_large, Case(data=small_data, stage=1, model=LARGE), str(folder))[0]


@pytest.fixture(scope="module")
def large_in_columns(pools, small_data, tmp_path_factory):
    """The same, saved by two tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("columns")
    return pools(2).run(save_large, Case(data=small_data, stage=1, tensor=2, model=LARGE), str(folder))[0]


def check_costs(everywhere, tensor):
    for costs in everywhere:
        # Rows of less than 1 KiB, which the attention's output projection has here, are read with what lies between.
        assert costs["needed"] <= costs["read"] <= (1.1 if tensor else 1.05) * costs["needed"]
        assert costs["extra"] <= 2 * costs["largest"]


@pytest.mark.parametrize(("world_size", "form"), FORMS, ids=str)
def test_a_rank_reads_its_pieces_and_needs_little_memory(pools, small_data, large, world_size, form):
    case = Case(data=small_data, model=LARGE, **form)
    check_costs(pools(world_size).run(measured_load, case, large), "tensor" in form)


@pytest.mark.parametrize(("world_size", "form"), [(2, {"stage": 3}), (2, {"stage": 1, "tensor": 2})], ids=str)
def test_pieces_of_matrices_cost_no_more(pools, small_data, large_in_columns, world_size, form):
    case = Case(data=small_data, model=LARGE, **form)
    check_costs(pools(world_size).run(measured_load, case, large_in_columns), "tensor" in form)
