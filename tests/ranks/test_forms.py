"""Precisions, pretrained weights and skipped steps, on real ranks.

Tolerances of bf16, here and where this file is named: it keeps 8 bits, 2^-9 of a loss near 6 is 1.2e-2, averaged over a
hundred tokens 1e-3.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.processors import fp16, on_device
from tests.helpers.training import (
    LLAMA,
    Case,
    batches,
    make_engine,
    poisoned,
    run_case,
    train_steps,
    view_of,
)


def by_definition(group: dict[str, Any], before: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(parameter, moments) after a step: AdamW (arXiv 1711.05101) or Lion (2302.06675), their moments rounded last."""
    (one, two), lr, grad = group["betas"], group["lr"], before["grad"]
    first, value = before["exp_avg"].float(), before["value"] * (1 - lr * group["weight_decay"])
    if "exp_avg_sq" not in before:
        return value - lr * torch.sign(first.lerp(grad, 1 - one)), {"exp_avg": two * first + (1 - two) * grad}
    first = one * first + (1 - one) * grad
    second = two * before["exp_avg_sq"].float() + (1 - two) * grad**2
    count = float(before["step"]) + 1
    update = (first / (1 - one**count)) / ((second / (1 - two**count)).sqrt() + group["eps"])
    return value - lr * update, {"exp_avg": first, "exp_avg_sq": second}


def against_the_definition(case: Case) -> tuple[float, float, int]:
    """Of all steps: (largest difference of a parameter, share of moments that are not the nearest bf16, elements)."""
    from llmtrain.engine.deepspeed import optimizers
    from llmtrain.engine.deepspeed.state import base_optimizer

    engine, ranks = make_engine(case)
    optimizer = base_optimizer(engine.deepspeed)
    theirs, chunk, found = optimizer.step, optimizers._CHUNK, []

    def step() -> None:
        stepped = [(group, p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        before = [
            {name: value.detach().clone() for name, value in {"value": p, "grad": p.grad, **optimizer.state[p]}.items()}
            for _, p in stepped
        ]
        theirs()
        for (group, p), each in zip(stepped, before, strict=True):
            value, expected = by_definition(group, each)
            kept = {kind: optimizer.state[p][kind] for kind in expected}
            assert p.dtype == torch.float32 and {m.dtype for m in kept.values()} == {torch.bfloat16}
            other = sum(int((kept[kind] != expected[kind].bfloat16()).sum()) for kind in kept)
            found.append((float((p.detach() - value).abs().max()), other, len(kept) * p.numel()))

    optimizer.step = step
    optimizers._CHUNK = 5_000  # so that a tensor has several pieces
    train_steps(case, engine, ranks, 0, case.steps)
    optimizers._CHUNK = chunk
    engine.close()
    differences, others, elements = zip(*found, strict=True)
    return max(differences), sum(others) / sum(elements), sum(elements)


@pytest.mark.parametrize(
    "form",
    [{"stage": 2, "optimizer": "lion"}, {"stage": 3}],
    ids=lambda form: "-".join(str(v) for v in form.values()),
)
def test_bf16_moments_are_rounded_after_each_step_and_masters_never(pools, small_data, form):
    """An update from rounded moments would differ by 2^-9 of 3e-4, 6e-7; products and sums in fp32 by one rounding of
    a parameter of 1, 1.2e-7. That takes few moments to the other neighbour in bf16."""
    case = Case(data=small_data, precision="bf16", extra={"bf16": {"bf16_optimizer_states": True}}, **form)
    for difference, other, elements in pools(2).run(against_the_definition, case):
        assert elements > 1_000_000 / 2 and difference < 2.5e-7 and other < 1e-3, (difference, other, elements)


@fp16(True)
def at_the_floor(case: Case) -> tuple[int, str]:
    """Train in fp16 with every loss NaN until the run is told to stop: (steps skipped before, message)."""
    from llmtrain.base.errors import TrainingStopped
    from tests.helpers.training import one_step

    engine, ranks = make_engine(case)
    hook = engine.module.hf.get_output_embeddings().register_forward_hook(lambda module, args, out: out * float("nan"))
    source = batches(case, (ranks.rank, ranks.world_size), case.accumulation)
    skipped = 0
    try:
        for batch in source:
            skipped += one_step(engine, batch, 100)[1].skipped
    except TrainingStopped as error:
        return skipped, str(error)
    finally:
        hook.remove()
        source.close()  # type: ignore[attr-defined]
        engine.close()
    return skipped, ""


@pytest.mark.parametrize("stage", [1, 3])
def test_fp16_without_a_smaller_loss_scale_stops_with_a_message(pools, small_data, stage):
    scale = {"enabled": True, "initial_scale_power": 3, "hysteresis": 1, "min_loss_scale": 1}
    case = Case(data=small_data, stage=stage, precision="fp16", extra={"fp16": scale})
    for skipped, message in pools(2).run(at_the_floor, case):
        assert skipped == 3 and "loss scale" in message and "bf16" in message  # 8, 4, 2, then 1


def test_a_bf16_run_orthogonalises_in_fp16_where_the_device_has_it(pools, small_data):
    """Which costs nothing beside bf16's own rounding (the tolerances of the test of bf16 above)."""
    case = Case(data=small_data, optimizer="muon", precision="bf16", stage=2, steps=4)
    without, there = (pools(2).run(on_device, device, run_case, case)[0] for device in (False, True))
    assert without.losses != there.losses
    assert max(abs(a - b) for a, b in zip(there.losses, without.losses, strict=True)) < 1.5e-3
    # An fp32 engine of the same process has set the iteration to fp32: this one has set it back.
    exact = pools(2).run(on_device, True, run_case, replace(case, precision="fp32"))[0]
    assert max(abs(a - b) for a, b in zip(there.losses, exact.losses, strict=True)) < 1.5e-3
    assert pools(2).run(on_device, True, run_case, case)[0].losses == there.losses


def load_pretrained(case: Case, folder: str, break_name: str | None) -> str:
    """Write a folder's weights into a live engine and prove them; "" or the error."""
    from llmtrain.base.errors import ModelError
    from llmtrain.config.run import ModelConfig
    from llmtrain.engine.weights import fill_parameters, prove_weights
    from llmtrain.models.spec import ModelSpec
    from llmtrain.optim.optimizers import PARAM

    engine, ranks = make_engine(case)
    try:
        source = ModelSpec.of(ModelConfig(pretrained=folder)).initial_weights(0, torch.device("cpu"))
        fill_parameters(engine, source)
        engine.refresh()
        if break_name:
            for fragment in engine.state():
                if fragment.name == break_name and fragment.kind == PARAM:
                    with torch.no_grad():
                        view_of(fragment)[:1] += 1e-6
        prove_weights(engine, source, ranks)
    except ModelError as error:
        return str(error)
    finally:
        engine.close()
    return ""


@pytest.mark.parametrize(
    ("world_size", "stage", "precision"),
    [
        (1, 0, "fp32"),
        (2, 3, "bf16"),
    ],
)
def test_pretrained_weights_are_proved(pools, small_data, tmp_path, world_size, stage, precision):
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(LLAMA)
    torch.manual_seed(5)
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    hf.save_pretrained(tmp_path, max_shard_size="200KB")
    case = Case(data=small_data, stage=stage, precision=precision)
    pool = pools(world_size)
    assert pool.run(load_pretrained, case, str(tmp_path), None) == [""] * world_size
    (error, *_) = pool.run(load_pretrained, case, str(tmp_path), "model.layers.2.mlp.down_proj.weight")
    assert "1 of 39 parameters" in error and "layers.2.mlp.down_proj" in error

    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    moved = index["weight_map"].pop("model.norm.weight")
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / moved)
    tensors["model.other.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / moved)
    index["weight_map"]["model.other.weight"] = moved
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (error, *_) = pool.run(load_pretrained, case, str(tmp_path), None)
    assert re.search(r"\b1 of .*\b39 parameters", error) and "model.norm.weight" in error


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        (0, "fp32"),
        (1, "bf16"),
        (2, "fp32"),
        (3, "bf16"),
    ],
)
def test_a_nan_on_one_rank_skips_the_step_on_all(pools, small_data, stage, precision):
    case = Case(data=small_data, stage=stage, accumulation=3, precision=precision)
    for skipped, finite, unchanged in pools(2).run(poisoned, case, 2, 1):
        assert skipped == [False, False, True, False] and finite and unchanged


def timeouts_of_groups() -> list[float]:
    """Timeout of every process group of this rank, in seconds."""
    import torch.distributed as dist

    from llmtrain.engine.deepspeed.patches import apply_group_timeout

    dist.new_group(list(range(dist.get_world_size())))  # as DeepSpeed makes its groups: without a timeout
    apply_group_timeout(77.0)
    groups = dist.distributed_c10d._world.pg_map
    return [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups]


def test_every_group_gets_the_runs_timeout(pools, small_data):
    for found in pools(2).run(timeouts_of_groups):
        assert len(found) >= 3 and set(found) == {77.0}


def devices_asked_for(case: Case) -> list[int]:
    """By a start and two steps of a task that sees its own GPU only (`srun --gpus-per-task=1`), played by the CPU."""
    from deepspeed.accelerator import get_accelerator

    from llmtrain.engine.ranks.device import own_device

    asked: list[int] = []
    kind = "cuda"

    def name(number: Any = None) -> str:
        if number is not None:
            asked.append(int(number))
            assert int(number) == 0, f"CUDA error: invalid device ordinal {number}"
        return kind

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", str(int(os.environ["RANK"]) + 2))
        patch.setattr(get_accelerator(), "device_name", name)
        patch.setattr(get_accelerator(), "set_device", lambda number: name(getattr(number, "index", number)) and None)
        patch.setattr(get_accelerator(), "device_count", lambda: 1)
        patch.setattr(get_accelerator(), "current_device_name", lambda: "cpu")
        assert own_device() == torch.device("cpu")
        kind = "cpu"
        engine, ranks = make_engine(case)
        train_steps(case, engine, ranks, 0, 2)
        engine.close()
    return asked


@pytest.mark.parametrize("form", [{"stage": 1}, {"stage": 3}, {"stage": 1, "pipeline": 2}], ids=str)
def test_deepspeed_takes_the_only_gpu_that_a_task_sees(pools, small_data, form):
    """It called for number LOCAL_RANK of one: "invalid device ordinal", on every rank but the first of a host."""
    for asked in pools(2).run(devices_asked_for, Case(data=small_data, **form)):
        assert len(asked) >= 2, "the start-up asks DeepSpeed's accelerator by number"


def born_partitioned(case: Case) -> tuple[int, int]:
    """(elements that this rank holds after building under ZeRO 3, elements of the model)."""
    from llmtrain.models.parallel.mesh import mesh_of
    from llmtrain.models.run.build_for_rank import build_model
    from llmtrain.models.spec import ModelSpec
    from tests.helpers.training import joined, resolved_run

    ranks = joined()
    run = resolved_run(case, ranks.world_size)
    model = build_model(run, ModelSpec.of(run.config.model), ranks.device, mesh_of(run.mix.degrees))
    held = sum(p.numel() + p.ds_tensor.numel() for p in model.parameters())
    return held, sum(p.ds_numel for p in model.parameters())


def test_zero3_parameters_are_born_partitioned(pools, small_data):
    for held, whole in pools(4).run(born_partitioned, Case(data=small_data, stage=3)):
        assert held < 0.26 * whole
