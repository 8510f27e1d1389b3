"""The first process groups: who could not connect the ranks, why, and what is left at the end of a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from llmtrain.engine.ranks import rendezvous
from llmtrain.engine.ranks.ranks import AgreedError, Seat
from llmtrain.engine.ranks.rendezvous import Meeting, RendezvousError
from tests.helpers import gpu_texts as texts

GLOO_SAYS = (
    "Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:144] no error: connect "
    "timeout"
)


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Meeting:
    for name, value in (("RANK", "1"), ("MASTER_ADDR", "10.0.0.1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=ib0")
    seats = [Seat(rank=n, host=f"node-{n + 1}", local_rank=0, device="H200", pid=n) for n in (0, 1)]
    return Meeting(store=None, seats=tuple(seats))  # type: ignore[arg-type]


def said(meeting: Meeting, monkeypatch: pytest.MonkeyPatch, text: str, fails: str = "nccl") -> RendezvousError:
    """What a rank says when `fails` cannot connect it, with this text."""

    def refuse(*_: Any, **__: Any) -> None:
        raise dist.DistBackendError(text)

    monkeypatch.setattr(dist, "init_process_group", refuse if fails == "nccl" else lambda *_, **__: None)
    monkeypatch.setattr(dist, "new_group", refuse)
    with pytest.raises(RendezvousError) as ended:
        rendezvous.connect_all(meeting, "nccl", torch.device("cpu"), 5.0)
    return ended.value


def test_nccls_own_reason_is_said_and_not_the_networks(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    error = said(meeting, monkeypatch, texts.DUPLICATE_GPU)
    assert all(word in str(error) for word in ("rank 1 on node-2", "10.0.0.1", "NCCL"))
    assert "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 18000" in str(error)
    assert "SOCKET_IFNAME" not in str(error)
    assert not error.passing, "a restart would meet it again"
    assert said(meeting, monkeypatch, texts.NCCL_OUT_OF_MEMORY).passing


@pytest.mark.parametrize(
    ("fails", "text", "who", "interface"),
    [
        ("nccl", texts.NCCL_REMOTE, "NCCL cannot", "=ib0 (NCCL_SOCKET_IFNAME)"),
        ("gloo", GLOO_SAYS, "gloo cannot", "eth0 (GLOO_SOCKET_IFNAME)"),
    ],
)
def test_the_network_is_blamed_with_the_interface_of_the_one_that_failed(
    fails: str, text: str, who: str, interface: str, meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = said(meeting, monkeypatch, text, fails)
    assert who in str(error) and f"over interface {interface}." in str(error) and error.passing
    assert text.splitlines()[-1] in str(error), "NCCL's last error stands below its first line"


@pytest.mark.parametrize(
    ("backend", "error", "leaves"),
    [
        ("nccl", None, True),
        ("nccl", AgreedError("all stop", 3), True),
        ("nccl", RuntimeError("cuDNN error"), False),
        ("nccl", KeyboardInterrupt(), False),
        ("gloo", RuntimeError("out of memory"), True),
    ],
)
def test_a_rank_that_fails_alone_does_not_wait_for_nccls_peers(
    backend: str, error: BaseException | None, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[str] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: left.append("destroyed"))
    rendezvous.leave_all(error)
    assert bool(left) == leaves
