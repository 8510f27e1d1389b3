"""A machine that computes wrong: a module of one rank has one bit of its output, or of its gradient, the other way."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from llmtrain.models import loss
from tests.helpers import training
from tests.helpers.training import Case

GUILTY = 1
"""The rank that computes wrong."""
LOGITS = "logits"
"""In place of a module's name: what the head's matrix gives, before loss and gradient are made of it."""
SIGN, EXPONENT, MANTISSA = (31,), range(23, 31), range(19, 23)
"""Bits of fp32: of the mantissa the highest four."""


@dataclass(frozen=True, kw_only=True)
class Wrong:
    module: str
    bit: int
    element: int
    every: int = 1
    """Wrong in one of these calls."""
    first: int | None = 0
    """The first wrong call; None: at random."""
    backward: bool = False
    """Wrong in the gradient."""

    @classmethod
    def seeded(cls, seed: int, modules: list[str], at_random: bool = False) -> Wrong:
        """An odd seed: in one of ten calls, each tenth or `at_random`."""
        draw = random.Random(seed)
        every = (1, 10)[seed % 2]
        return cls(
            module=draw.choice(modules),
            bit=draw.choice(draw.choice([SIGN, EXPONENT, MANTISSA])),
            element=draw.randrange(1 << 30),
            every=every,
            backward=draw.random() < 0.5,
            first=None if at_random else draw.randrange(every),
        )


class _Flip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, wrong: Wrong) -> Tensor:
        return flipped(values, wrong)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def flipped(values: Tensor, wrong: Wrong) -> Tensor:
    found = values.detach().clone().contiguous()
    half = found.element_size() == 2  # bf16 has the upper 16 bits of fp32
    words = found.view(-1).view(torch.int16 if half else torch.int32)
    mask = torch.tensor([1 << wrong.bit >> 16 * half]).to(words.dtype)
    words[wrong.element % words.numel()] ^= mask[0]
    return found


def modules_of(model: nn.Module) -> list[str]:
    """The modules with parameters that a forward pass calls, without the head, which gives a loss."""
    return [
        name
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False)) and not name.endswith(("head", "lm_head"))
    ]


def compute_wrong(model: nn.Module, wrong: Wrong) -> Callable[[], None]:
    """Returns the repair."""
    calls = [0]
    if wrong.module == LOGITS:
        right = loss._in_place

        def in_place(logits_CV: Tensor, *others: Any) -> Any:
            calls[0] += 1
            is_wrong = (calls[0] - 1) % wrong.every == (wrong.first or 0)
            return right(flipped(logits_CV, wrong) if is_wrong else logits_CV, *others)

        patch = mock.patch.object(loss, "_in_place", in_place)
        patch.start()
        return patch.stop

    def hook(_module: nn.Module, _given: Any, output: Tensor) -> Tensor | None:
        calls[0] += 1
        call = calls[0] - 1
        lot = call if wrong.first is not None else random.Random(f"{wrong.element} {call}").randrange(wrong.every)
        if lot % wrong.every != (wrong.first or 0):
            return None
        if not wrong.backward:
            return _Flip.apply(output, wrong)  # type: ignore[no-any-return, no-untyped-call]
        if output.requires_grad:
            output.register_hook(lambda gradient: flipped(gradient, wrong))
        return None

    return model.get_submodule(wrong.module).register_forward_hook(hook).remove


class Machine:
    """A run with checks, and the model that one of its ranks computes wrong."""

    def __init__(self, case: Case, global_batch: int = training.GLOBAL_BATCH) -> None:
        from llmtrain.tracking.tracker import Tracker
        from llmtrain.training.replica_check import ReplicaCheck

        with mock.patch.object(training, "GLOBAL_BATCH", global_batch):
            self.setup = setup = training.make_setup(case, proves=False)
        self.rank = setup.ranks.rank
        tracker = Tracker(".", run_id="", config={}, total_steps=None, enabled=False)
        self.events: list[str] = []
        tracker.event = lambda kind, **fields: self.events.append(fields["what"])  # type: ignore[method-assign]
        self.loader = setup.loader(0, step=0)
        launch: Any = SimpleNamespace(setup=setup, tracker=tracker, loader=self.loader, session=setup.session(0))
        replicas = ReplicaCheck(launch)
        launch.part = lambda kind: replicas
        launch.session.seed()
        self.launch = launch

    def part(self) -> Any:
        from llmtrain.features.recheck.part import Recheck
        from llmtrain.training.step import Position

        part = Recheck(self.launch)
        part._every = 1
        part.begin(Position())
        return part

    def check(self, part: Any, step: int) -> tuple[int, str, bool]:
        """(exit code, message, True if another start may succeed) of a check after `step`."""
        from llmtrain.base.errors import UserError
        from llmtrain.training.step import Position

        done = SimpleNamespace(position=Position(step=step), steps=range(step, step + 1))
        try:
            part.after_step(done)
        except UserError as error:
            return error.exit_code, str(error), error.passing
        return 0, "", False

    def close(self) -> None:
        self.loader.close()
        self.setup.engine.close()


def found(
    case: Case,
    seeds: list[int],
    at_random: bool = False,
    global_batch: int = training.GLOBAL_BATCH,
    modules: list[str] | None = None,
) -> list[tuple[int, str, bool]]:
    """For each seeded fault the check, of three, that has ended the run, its message, and if a start may succeed.
    `modules`: names of those that may compute wrong, in place of all but the head."""
    machine = Machine(case, global_batch)
    modules, answers = modules or modules_of(machine.setup.engine.module), []
    for seed in seeds:
        part = machine.part()
        wrong = Wrong.seeded(seed, modules, at_random)
        repair = compute_wrong(machine.setup.engine.module, wrong) if machine.rank == GUILTY else lambda: None
        answer = (0, str(wrong), False)
        for check in (1, 2, 3):
            code, text, passing = machine.check(part, 10 * seed + check)
            if code:
                answer = (check, text, passing)
                break
        answers.append(answer)
        repair()
    machine.close()
    return answers
