"""Checksums are the same in pieces of any size, on a CPU and by a GPU's way: today's checkpoints are verified later."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmtrain.engine import weights
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.optim.optimizers import PARAM
from llmtrain.storage import checksum as sums
from llmtrain.storage.region import Region

VALUES = (torch.arange(9_000_000) % 9973).float() * 0.37
KNOWN = {
    "fp32": 1162964719823112217,
    "bf16 from 12345 on": 6213873478849003520,
    "a GPU's, from 777 on": 5192671999667962835,
}
"""As they were on 26 November 2026: no change of speed may change them."""


def test_the_values_stay_what_they_are() -> None:
    sums._row_on.cache_clear()
    found = {
        "fp32": sums.checksum(VALUES),
        "bf16 from 12345 on": sums.checksum(VALUES.bfloat16(), 12345),
        "a GPU's, from 777 on": sums._on_device(VALUES[:3_000_000], 777),
    }
    assert found == KNOWN and sums.checksum(VALUES[:3_000_000], 777) == found["a GPU's, from 777 on"]
    assert sums._row_on(torch.device("cpu")) is sums._row_on(torch.device("cpu"))  # it stays there


@pytest.mark.parametrize("first", [0, 65_537])
def test_what_the_forward_pass_reads_is_hashed_alike_in_small_and_large_pieces(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    region = Region(first, VALUES.numel())
    piece: Any = SimpleNamespace(
        own=slice(0, VALUES.numel()), own_region=region, open=lambda: contextlib.nullcontext(VALUES)
    )
    small = weights._rounded_sum(piece, torch.bfloat16)
    monkeypatch.setattr(weights, "_CHUNK", weights._DEVICE_CHUNK)  # as on a GPU
    assert VALUES.numel() > weights._CHUNK
    assert (
        weights._rounded_sum(piece, torch.bfloat16) % 2**64 == small % 2**64 == sums.checksum(VALUES.bfloat16(), first)
    )


def test_a_frozen_parameter_is_hashed_once_and_in_large_pieces_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice and on one core, the frozen weights of 8B took 19 s of a start by count."""
    values, calls = VALUES.bfloat16(), list[int]()

    def counted(part: torch.Tensor, start: int = 0) -> int:
        calls.append(part.numel())
        return sums.checksum(part, start)

    source: Any = SimpleNamespace(read=lambda *_: values, shape=lambda _: values.shape, origin="a folder")
    state = [SimpleNamespace(kind=PARAM, name="frozen", dtype=torch.bfloat16)]
    monkeypatch.setattr(weights, "checksum", counted)
    monkeypatch.setattr(weights, "check_names", lambda *_: None)
    monkeypatch.setattr(weights, "differing_tensors", lambda *_, **__: [])
    monkeypatch.setattr(torch.Tensor, "to", lambda self, to: self)  # there is no GPU, and the type is the same
    ranks = Ranks()
    found = []
    for device in ("cpu", "cuda"):
        engine: Any = SimpleNamespace(
            shapes=lambda: {"frozen": values.shape}, state=lambda: state, device=SimpleNamespace(type=device)
        )
        calls.clear()
        found.append(weights.prove_weights(engine, source, ranks))
        assert sum(calls) == values.numel() and max(calls) >= min(values.numel(), weights._DEVICE_CHUNK), device
    assert found[0] == found[1] == {"frozen": sums.checksum(values)}
