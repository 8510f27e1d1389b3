"""A machine that computes wrong gives other gradients than its replicas: it is named, a healthy one never is."""

from __future__ import annotations

import random
import re
from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers.families import FAMILIES
from tests.helpers.processors import on_device
from tests.helpers.training import LLAMA, Case, view_of
from tests.helpers.wrong_machine import GUILTY, LOGITS, Machine, Wrong, compute_wrong, found

DROPOUT = {**LLAMA, "attention_dropout": 0.1}


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 40), marks=pytest.mark.slow)], ids=["6", "34"])
def test_the_rank_that_computes_wrong_is_named_within_three_checks(pools: Any, small_data: str, seeds: range) -> None:
    """Each module, sign, exponent and mantissa, forwards and backwards; every second fault in one of ten calls."""
    for answers in pools(3).run(found, Case(data=small_data, stage=1, model=DROPOUT), list(seeds), False, 24):
        for check, text, passing in answers:
            assert check, text
            assert re.findall(r"rank (\d+) on ", text) == [str(GUILTY)], text
            assert passing  # launch starts again, without the host


@pytest.mark.parametrize("place", ["hf.lm_head", LOGITS])
def test_a_head_that_computes_wrong_is_named(pools: Any, small_data: str, place: str) -> None:
    """Of the head's output, which is the loss, a wrong value leaves each gradient as it is."""
    for answers in pools(3).run(found, Case(data=small_data, stage=1), list(range(6)), False, 24, [place]):
        for check, text, _ in answers:
            assert check and f"rank {GUILTY} on " in text, text


FORMS = [
    ({"stage": 0, "precision": "bf16"}, 3),
    ({"stage": 2, "precision": "bf16", "accumulation": 2}, 3),
    ({"stage": 1, "precision": "bf16", "optimizer": "muon"}, 3),
    ({"stage": 1, "model": FAMILIES["mixtral"]}, 3),
    ({"stage": 1, "precision": "fp16", "extra": {"fp16": {"enabled": True}}}, 3),
    ({"stage": 2, "recompute": {"layers": "all"}, "model": DROPOUT}, 3),
]


def untouched(case: Case, checks: int) -> tuple[list[tuple[int, str, bool]], dict[str, bool], list[str]]:
    """(answers of checks of healthy ranks, what a check has left as it was, events)."""
    machine = Machine(case)
    engine = machine.setup.engine
    machine.launch.session.step(next(machine.loader))  # there are moments now, and counts of the routers
    part = machine.part()
    answers = [machine.check(part, step) for step in range(checks - 1)]

    def state() -> dict[str, Any]:
        routing = engine.module.routing
        counts = [] if routing is None else [routing._tokens_LE, routing._aux_sum, torch.tensor(routing._passes)]
        return {
            "masters and moments": [view_of(piece) for piece in engine.state()],
            "parameters": [copy.values for copy in engine.copies()],
            "gradients": [p.grad for p in engine.module.parameters() if p.grad is not None],
            "buffers": list(engine.module.buffers()),
            "routers": counts,
            "random numbers": [torch.get_rng_state()],
            "loss scale": [torch.tensor(each) for each in engine.counters().loss_scale.values()],
        }

    before = {name: [each.clone() for each in tensors] for name, tensors in state().items()}
    answers.append(machine.check(part, checks))
    same = {
        name: len(tensors) == len(before[name]) and all(map(torch.equal, tensors, before[name]))
        for name, tensors in state().items()
    }
    machine.close()
    return answers, same, machine.events


@pytest.mark.parametrize(("form", "world"), FORMS, ids=str)
def test_in_each_form_a_check_changes_nothing_and_finds_the_rank(
    pools: Any, small_data: str, form: dict[str, Any], world: int
) -> None:
    case = Case(data=small_data, **form)
    for answers, same, events in pools(world).run(on_device, True, untouched, case, 3):
        assert [code for code, _, _ in answers] == [0] * 3 and events == []
        assert all(same.values()), same
    for (check, text, _), *_ in pools(world).run(on_device, True, found, case, [2]):
        assert check == 1 and f"rank {GUILTY} on " in text, text


@pytest.mark.slow
@pytest.mark.parametrize("form", [{"tensor": 2}, {"sequence": 2}], ids=str)
def test_ranks_are_compared_with_those_of_the_same_place(pools: Any, small_data: str, form: dict[str, Any]) -> None:
    """There are two replicas, each of two ranks: what one rank computes wrong reaches its neighbour, and none is in the
    majority."""
    case = Case(data=small_data, stage=1, **form)
    for answers, same, events in pools(4).run(untouched, case, 3):
        assert [code for code, _, _ in answers] == [0] * 3 and events == []
        assert all(same.values()), same
    for (check, text, passing), *_ in pools(4).run(found, case, [2]):
        assert check == 1 and not passing and f"rank {GUILTY} on " in text, text


def test_of_two_replicas_both_are_named_and_launch_does_not_start_again(pools: Any, small_data: str) -> None:
    for (check, text, passing), *_ in pools(2).run(found, Case(data=small_data, stage=1), [0]):
        assert check == 1 and not passing
        assert "rank 0 on " in text and "rank 1 on " in text, text


def failing(case: Case) -> bool:
    """A gradient whose computation raises leaves the counts of the routers in place."""
    machine = Machine(case)
    engine = machine.setup.engine
    routing, shut = engine.module.routing, RuntimeError("no memory")
    with pytest.raises(RuntimeError, match="no memory"), mock.patch.object(torch.autograd, "grad", side_effect=shut):
        machine.part()
    machine.close()
    return routing is not None and engine.module.routing is routing


def test_a_gradient_that_cannot_be_computed_leaves_the_routers_counting(pools: Any, small_data: str) -> None:
    assert pools(1).run(failing, Case(data=small_data, stage=1, model=FAMILIES["mixtral"])) == [True]


def passing(case: Case) -> tuple[list[int], list[str]]:
    """(exit codes of two checks, each with one wrong call; events)."""
    machine = Machine(case)
    codes, part = [], machine.part()
    once = Wrong(module="hf.model.layers.1.mlp.up_proj", bit=24, element=77, every=1 << 30)
    for step in (1, 2):
        repair = compute_wrong(machine.setup.engine.module, once) if machine.rank == GUILTY else lambda: None
        codes.append(machine.check(part, step)[0])
        repair()
    machine.close()
    return codes, machine.events


def test_after_a_fault_that_does_not_come_again_the_run_continues(pools: Any, small_data: str) -> None:
    for codes, events in pools(3).run(passing, Case(data=small_data, stage=1)):
        assert codes == [0, 0] and events == ["a loss or gradient differed once"] * 2


def noisy(case: Case, checks: int) -> tuple[list[int], tuple[int, str, bool]]:
    """Kernels that do not repeat their last bits: (codes of healthy checks, answer for a wrong machine)."""
    machine = Machine(case)
    model, generator = machine.setup.engine.module, random.Random(machine.rank)
    name = "hf.model.layers.1.mlp.up_proj"

    def shake(_module: Any, _given: Any, output: Any) -> Any:
        noise = torch.Generator().manual_seed(generator.getrandbits(60))
        return output * (1 + 1e-6 * torch.randn(output.shape, generator=noise))

    hook = model.get_submodule(name).register_forward_hook(shake)
    part = machine.part()
    codes = [machine.check(part, step)[0] for step in range(checks)]
    if machine.rank == GUILTY:
        compute_wrong(model, Wrong(module=name, bit=28, element=77))
    answer = machine.check(part, checks)
    hook.remove()
    machine.close()
    return codes, answer


def test_with_kernels_that_do_not_repeat_their_bits_a_bound_decides(pools: Any, small_data: str) -> None:
    for codes, (code, text, _) in pools(3).run(noisy, Case(data=small_data, stage=1), 20):
        assert codes == [0] * 20
        assert code == 3 and "rank 1 on " in text
