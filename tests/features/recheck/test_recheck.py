"""The words with which a rank is named that computes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmtrain.features.recheck import part as recheck

UUID = "8f4a1c2e-5b7d-4a39-9a51-6c0e2d4b7f10"


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        ("1652222013456", 0, ", serial 1652222013456"),
        ("[N/A]", 0, f", serial {UUID}"),  # no board of a data center
        ("Failed to initialize NVML: Driver/library version mismatch", 18, f", serial {UUID}"),
        ("Unable", 15, f", serial {UUID}"),
    ],
)
def test_a_gpu_is_named_by_its_serial_number_else_by_its_uuid(
    answer: str, code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    asked = f'[ "$2" = GPU-{UUID} ] && [ "$3" = --query-gpu=serial ]'
    tool.write_text(f'#!/bin/sh\n{asked} && echo "{answer}"\nexit {code}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(recheck, "device_id", lambda device: UUID)
    assert recheck._serial(torch.device("cuda", 0)) == words


def test_without_the_tool_a_gpu_has_its_uuid_and_a_processor_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert recheck._serial(torch.device("cpu")) == ""
    monkeypatch.setattr(recheck, "device_id", lambda device: UUID)
    assert recheck._serial(torch.device("cuda", 0)) == f", serial {UUID}"


class Made(TorchDispatchMode):
    """The most bytes of a tensor that an operator makes or widens."""

    most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not function.is_view:
            widens = function is torch.ops.aten.sum.dim_IntList and made.dtype != args[0].dtype
            read = args[0].numel() * made.itemsize if widens else 0  # the copy is made below the operator
            self.most = max(self.most, made.numel() * made.itemsize, read)
        return made


@pytest.mark.parametrize("elements", [1, 169, 170, 171, 1000])
def test_an_embeddings_gradient_is_summed_in_pieces(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bucket by bucket as in one sum; the copies are as long as a piece, not as a gradient (12 bytes an element)."""
    monkeypatch.setattr(recheck, "_AT_ONCE", 170)
    part: Any = object.__new__(recheck.Recheck)
    part._bound = 1.0
    values = torch.randn(elements, generator=torch.Generator().manual_seed(elements)).bfloat16()
    with Made() as made:
        sums = part._hash_or_sums(values)
    whole = [values[bucket::17].double().sum() for bucket in range(17)]
    assert torch.allclose(sums, torch.stack(whole), rtol=1e-12, atol=1e-12) and made.most <= 170 * 8
    assert part._hash_or_sums(values.fill_(float("inf"))).eq(0).all()


def test_the_former_key_is_refused_with_the_one_of_today(tmp_path: Path) -> None:
    from llmtrain.base.errors import ConfigError
    from llmtrain.config.load import parse

    file = tmp_path / "run.yaml"
    file.write_text("deepspeed: ds.json\nfault:\n  recheck_every: 500\n")
    with pytest.raises(ConfigError, match=r"(?s)fault\.recheck_every = 500.*recheck\.every"):
        parse([str(file)])
