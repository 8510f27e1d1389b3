"""Where two experts have equal scores, rounding decides: that is no fault of the ranks, and no excuse for one."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from llmtrain.base.errors import ConfigError
from llmtrain.config.run import Run, RunConfig
from llmtrain.config.topology import Mix
from llmtrain.parity import plain, worlds
from llmtrain.parity.compare import COUNT, Difference, Trace, Verdict
from tests.helpers.families import FAMILIES
from tests.helpers.parity import resolved
from tests.helpers.training import Case

RUN = resolved(Case(model=FAMILIES["mixtral"], steps=3))
CPU = torch.device("cpu")
COPY = plain._copy
USER = Run(config=RunConfig(deepspeed="ds.json"), mix=Mix())


@pytest.fixture(params=[1, 2], ids=lambda step: f"step {step}")
def even_from(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """At this step the routers' first two experts have the same scores for every token."""
    copies: dict[int, int] = {}

    def copy(masters: dict[str, torch.Tensor], model: Any, nudge: int) -> None:
        copies[id(masters)] = step = copies.get(id(masters), 0) + 1
        if step == request.param:
            for name in masters:
                if name.endswith("mlp.gate.weight"):
                    masters[name][1:] = masters[name][:1]
        COPY(masters, model, nudge)

    monkeypatch.setattr(plain, "_copy", copy)
    yield request.param
    trained.cache_clear()


@functools.cache
def trained(nudge: int) -> Trace:
    order = replace(plain.orders(RUN.config.model, RUN.batch)[0], nudge=nudge)
    return plain.train_plainly(RUN, 3, order, CPU)


def more(until: int) -> list[Trace]:
    every = plain.nudged(plain.orders(RUN.config.model, RUN.batch), COUNT)
    return [plain.train_plainly(RUN, until, order, CPU) for order in every]


def told(got: Trace, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    want = [trained(0), trained(0), trained(0)]  # they agree: all chose alike
    code = worlds._tell(USER, RUN, got, want, more, sharp=True)
    return code, capsys.readouterr().out


def test_a_choice_that_is_nearly_even_is_no_failure(even_from: int, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = told(trained(99), capsys)
    assert f"from step {even_from} on rounding decides" in text, text
    if even_from == 1:
        assert code == worlds.NO_ANSWER and "--train.seed 1" in text
    else:
        assert code == worlds.SAME and "PASS" in text and "FAIL" not in text


def test_it_excuses_no_fault(even_from: int, capsys: pytest.CaptureFixture[str]) -> None:
    faulty = replace(trained(99), losses=[loss + 1 for loss in trained(99).losses])
    code, text = told(faulty, capsys)
    assert code == worlds.PARTS and "FAIL" in text and "rounding decides" not in text, text


def test_rounding_alone_decides_nothing_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    trained.cache_clear()
    code, text = told(trained(99), capsys)
    assert code == worlds.SAME and "rounding" not in text, text


def test_fp8_is_compared_sharply_at_step_1_and_as_half_precisions_later() -> None:
    assert worlds.comparisons(["fp32", "bf16"], 20, fp8=False) == [("fp32", True, 20), ("bf16", False, 20)]
    assert worlds.comparisons(["fp32", "bf16"], 20, fp8=True) == [("fp32", True, 1), ("bf16", False, 20)]
    assert worlds.comparisons(["fp32"], 20, fp8=True) == [("fp32", True, 1), ("fp32", False, 20)]
    assert worlds.comparisons(["bf16"], 20, fp8=True) == [("bf16", False, 20)]  # on a GPU


def test_a_wide_comparison_in_fp8_is_no_answer_and_says_what_has_one(capsys: pytest.CaptureFixture[str]) -> None:
    right = trained(0)
    other = replace(right, losses=[loss + 0.06 for loss in right.losses])
    user = replace(USER, config=replace(USER.config, model=replace(USER.config.model, fp8="rowwise")))
    code = worlds._tell(user, RUN, right, [right, other], more, sharp=True)
    said = capsys.readouterr().out
    assert code == worlds.NO_ANSWER and "0.24 " in said and "--model.fp8 null" in said, said
    assert "fp8 rowwise, step 1" in said


def test_one_scale_of_other_tokens_than_the_references_is_refused() -> None:
    model, data = replace(USER.config.model, fp8="tensorwise"), replace(USER.config.data, isolate_documents=True)
    user = replace(USER, config=replace(USER.config, model=model, data=data))
    with pytest.raises(ConfigError, match=r"data\.isolate_documents"):
        worlds.compare_worlds("run.yaml", worlds.Asked(run=user, steps=1, cpu=True, worker="none"), [2])


def test_a_blunt_comparison_says_so() -> None:
    moved = Verdict(worst={"movement": Difference(kind="movement", step=5, got=0.2, tolerated=0.44)})
    assert "44%" in worlds.bluntness("bf16", moved, sharp=False)[0] and not worlds.bluntness("fp32", moved, sharp=True)


def test_a_comparison_that_would_tolerate_nearly_all_is_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """Right trainings that part by 0.06 nats: four times that would pass, and so would a fault."""
    right = trained(0)
    other = replace(right, losses=[loss + 0.06 for loss in right.losses])
    got = replace(right, losses=[loss + 0.1 for loss in right.losses])
    code = worlds._tell(USER, RUN, got, [right, other, right], more, sharp=True)
    said = capsys.readouterr().out
    assert code == worlds.NO_ANSWER and "  PASS" not in said, said
    assert "0.24 " in said and "loss at step 1" in said and "0.001 " in said


def test_few_parameters_without_a_gradient_do_not_make_a_comparison_blunt(capsys: pytest.CaptureFixture[str]) -> None:
    right = trained(0)
    name = next(name for name, value in right.parameters[0].items() if value.dim() == 1)
    moved = [dict(step) for step in right.parameters]
    moved[-1][name] = moved[-1][name] + 1e-3
    code = worlds._tell(USER, RUN, right, [right, replace(right, parameters=moved), right], more, sharp=True)
    assert code == worlds.SAME, capsys.readouterr().out
