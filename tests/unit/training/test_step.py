"""The parts of a step that need no engine."""

from __future__ import annotations

import traceback

import torch

from llmtrain.training.step import seed_step


def test_a_steps_numbers_are_those_of_manual_seed_without_its_stack_traces(monkeypatch):
    torch.manual_seed((3 * 1_000_003 + 7) * 65_537 + 1)
    expected = torch.rand(5)
    if not torch.accelerator.is_available():
        monkeypatch.setattr(traceback, "format_stack", lambda: 1 / 0)
    seed_step(3, 7, 1)
    assert torch.equal(torch.rand(5), expected)
