"""A run's own code for a GPU, where there is none: two steps, evaluation, saves, and what looks at gradients.

    python -m tests.features.plan.cuda_walk FOLDER FORMS.json

A process of its own: it changes what torch believes of this machine (tests/helpers/hopper.py), and has DeepSpeed's
accelerator for CUDA. Tensors have no memory and say that they are on "cuda"; streams, events and page locks are
those of tests/helpers/fake_cuda.py. Each form is walked in a process that is forked from this one; FOLDER/walked.json
gets what it has seen.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

MEMORY = 139 * 2**30


@contextlib.contextmanager
def on_cuda() -> Iterator[dict[str, int]]:
    """Yield how often the host has waited for the device, has read from it in steps, and has asked for page locks."""
    import torch
    from deepspeed.runtime.zero import partition_parameters
    from torch._subclasses import fake_tensor

    from llmtrain.checkpoint import snapshot
    from llmtrain.features.plan.ledger import Ledger
    from llmtrain.features.plan.torch_private import READ
    from llmtrain.models import compiler, loss
    from llmtrain.models.transformers_private import is_without_memory
    from tests.helpers import fake_cuda

    seen = {"waits": 0, "reads": 0, "pinned": 0}
    plain_to, plain_tensor, plain_dispatch = torch.Tensor.to, torch.tensor, Ledger.__torch_dispatch__
    plain_numbers = fake_tensor.should_allow_numbers_as_tensors

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        target = kwargs.get("device", args[0] if args else None)
        there = isinstance(target, (str, torch.device)) and torch.device(target).type == "cuda"
        if there and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
            return tensor  # a small copy of the model that computes with values
        if there and not is_without_memory(tensor):
            dtypes = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.dtype))
            return torch.empty(tensor.shape, dtype=next(dtypes, tensor.dtype), device=fake_cuda.DEVICE)
        return plain_to(tensor, *args, **kwargs)

    def made(values: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return plain_tensor(values, *args, **kwargs).to("cpu" if device is None else device)

    def pin(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        seen["pinned"] += 1
        return tensor

    def synchronize(*_: Any) -> None:
        seen["waits"] += 1

    def count_read(ledger: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Of a step, not of a save, an evaluation or a look between steps."""
        named = kwargs or {}
        if function is READ:
            of, to, waits = args[0], torch.device("cpu"), True
        elif function is torch.ops.aten.copy_.default:
            of, to, waits = args[1], args[0].device, True not in (named.get("non_blocking"), *args[2:])
        elif function is torch.ops.aten._to_copy.default:
            of, to, waits = args[0], named.get("device") or args[0].device, not named.get("non_blocking")
        else:
            return plain_dispatch(ledger, function, types, args, kwargs)
        of_step = ledger.phase in ("forward", "backward", "step")
        seen["reads"] += of_step and waits and of.device.type == "cuda" and torch.device(to).type == "cpu"
        return plain_dispatch(ledger, function, types, args, kwargs)

    properties = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, total_memory=MEMORY, uuid="fake", multi_processor_count=132
    )
    answers = {
        "synchronize": synchronize,
        "empty_cache": lambda *_: None,
        "reset_peak_memory_stats": lambda *_: None,
        "mem_get_info": lambda *_: (MEMORY - 2**29, MEMORY),
        "get_device_name": lambda *_: properties.name,
        "get_device_properties": lambda *_: properties,
        "memory_stats": lambda *_: defaultdict(int),
        "is_current_stream_capturing": lambda: False,
        "manual_seed": lambda _: None,
        "manual_seed_all": lambda _: None,
        "is_initialized": lambda: True,
        "initial_seed": lambda: 0,
        **{f"{most}memory_{kind}": lambda *_: 0 for most in ("", "max_") for kind in ("allocated", "reserved")},
    }
    tensors = {"to": to, "pin_memory": pin, "is_pinned": lambda *_: False, "record_stream": lambda *_: None}
    compiler._answers["cuda"] = None
    loss.TRIED.update({("cuda", torch.bfloat16): True, ("cuda", torch.float32): True})
    with (
        fake_cuda.page_locks() as locks,
        patch.multiple(torch.cuda, create=True, **answers),
        patch.multiple(torch.Tensor, **tensors),
        patch.object(Ledger, "__torch_dispatch__", count_read),
        patch.object(torch, "tensor", made),
        patch.object(partition_parameters, "_orig_torch_tensor", made),  # what ZeRO 3 puts back after a model is built
        patch.object(torch.cuda.nvtx, "range_push", lambda *_: None),
        patch.object(torch.cuda.nvtx, "range_pop", lambda *_: None),
        patch.object(loss, "_compiled", lambda function: function),
        patch.object(snapshot, "LOCKED_AT_ONCE", 1 << 16),
        # Of small tensors the mode keeps the values, and computes with them on their device.
        patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", -1),
        patch.object(
            fake_tensor,
            "should_allow_numbers_as_tensors",
            lambda f: f is not torch.ops.aten._to_copy.default and plain_numbers(f),
        ),
    ):
        yield seen
        seen["copies"] = locks.copies


def walk(form: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The form's figures. `form`: the DeepSpeed JSON, fields of the run, ranks, and the rank that is walked."""
    import yaml

    from llmtrain.checkpoint.rundir import CheckpointFolder
    from llmtrain.checkpoint.save import Saver
    from llmtrain.config.load import parse
    from llmtrain.config.resolve import resolve
    from llmtrain.features import features
    from llmtrain.features.plan import rehearsal
    from llmtrain.features.plan.rehearsed_ranks import rehearsed_ranks
    from llmtrain.features.plan.torch_private import without_memory
    from tests.helpers import fake_cuda

    folder.mkdir()
    (folder / "ds.json").write_text(json.dumps({"bf16": {"enabled": True}, **form["json"]}))
    words = {
        "deepspeed": "ds.json",
        "data": {"path": "data", "sequence_length": 64},
        "optim": {"name": "adamw", "lr": 1e-3},
        "train": {"micro_batch": 1, "accumulation": 2, "max_steps": 4},
        "checkpoint": {"mode": "async"},
        **form["run"],
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(words))
    os.chdir(folder)
    run = resolve(parse(["run.yaml"], check_paths=False).config, form["ranks"])
    examined, held = rehearsal.prepared(run, on_gpu=True), list[Any]()

    def keep(setup: Any) -> None:
        setup.engine.closes, setup.engine.close = setup.engine.close, lambda: None
        held.append(setup)

    with rehearsed_ranks(form["rank"], form["ranks"], 1) as ranks, without_memory(), on_cuda() as seen:
        ranks = replace(ranks, device=fake_cuda.DEVICE)
        ledger, _, _ = rehearsal.walk(examined, ranks, keep, on_gpu=True)
        (setup,) = held
        steps_waits = seen["waits"]
        found: dict[str, Any] = {"peak": ledger.most, "waits": steps_waits, "pinned": seen["pinned"]}
        found["reads"] = seen["reads"]
        engine, objective = setup.engine, setup.objective
        devices, found["pieces"] = {piece.device.type for piece in engine.state()}, len(engine.state())
        with ledger, contextlib.closing(setup.loader()) as loader:
            batch = next(loader)
            weight = sum(map(objective.weight, batch.micro_batches))
            if "spikes" in features():
                from llmtrain.features.spikes.looks import GradientCopy, gradient_norm, largest_values

                copy = GradientCopy()
                with largest_values(engine.module.hf):
                    gradient_norm(engine, ranks, batch.micro_batches, weight, objective, copy_into=copy)
                gradient_norm(engine, ranks, [loader.row(1, 0)], weight, objective, times=copy)
                copy.clear()
            if form.get("recheck"):
                seats = [SimpleNamespace(device="NVIDIA H200")] * form["ranks"]
                setup.ranks = replace(ranks, seats=tuple(seats))
                launch: Any = SimpleNamespace(setup=setup, session=setup.session(), loader=loader)
                from llmtrain.features.recheck.part import Recheck

                part = Recheck(launch)
                micros = [loader.row(1, 0)]
                part._gradients(micros)
                part._bound = 1.0
                part._gradients(micros)
        mine = CheckpointFolder(
            path=folder, leaders=(ranks.rank,) * ranks.world_size, rank=ranks.rank, hosts=("a host",) * ranks.world_size
        )
        with Saver(engine, mine, run.config.checkpoint, run.mix, ranks) as saver:
            saver.prepare()
            assert saver._copy is not None and saver._copy.problem() is None, "no page-locked copy"
            with patch.object(saver._copy.writer(), "send", lambda job: None):
                saver._partial, saver._step = folder, 1
                saver._write_behind(folder / "rank.safetensors", saver._pieces())
                saver._snapshot._thread.join(20)
                saver.before_update()
                assert saver._snapshot.error is None and saver._answer is None, (saver._snapshot.error, saver._answer)
                found["waited_s"] = saver._snapshot.device_wait_s()
        engine.closes()
    return {**found, "copies": seen["copies"], "devices": sorted(devices)}


def _in_child(form: dict[str, Any], folder: Path, pipe: Any) -> None:
    warnings.simplefilter("ignore")
    try:
        pipe.send(walk(form, folder))
    except BaseException:
        pipe.send(traceback.format_exc())
    os._exit(0)


def main(folder: Path, forms: dict[str, dict[str, Any]]) -> None:
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # peft would have it look for CUDA's libraries
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"), DS_ACCELERATOR="cuda")
    from tests.helpers.hopper import pretend_device

    pretend_device()
    import torch
    from deepspeed.accelerator import get_accelerator

    assert get_accelerator().device_name() == "cuda"
    torch.set_num_threads(1)
    from llmtrain.features.plan import rehearsal

    assert rehearsal  # imported once
    found, fork = {}, multiprocessing.get_context("fork")
    for name, form in forms.items():
        ours, theirs = fork.Pipe(duplex=False)
        child = fork.Process(target=_in_child, args=(form, folder / name, theirs))
        child.start()
        theirs.close()
        try:
            found[name] = ours.recv()
        except EOFError:
            found[name] = f"its process ended with {child.exitcode}"
        child.join()
        (folder / "walked.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), json.loads(Path(sys.argv[2]).read_text()))
