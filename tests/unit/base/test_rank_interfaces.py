"""Network interfaces: which a rank sets for NCCL, by the one towards rank 0."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmtrain.base.rank import interfaces
from llmtrain.base.rank.interfaces import GLOO, NCCL

pytestmark = pytest.mark.usefixtures("of_two_hosts")


@pytest.fixture
def of_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is a rank, and there are ranks on other hosts."""
    for name in (GLOO, NCCL):
        monkeypatch.setenv(name, "")  # so that what a test sets does not stay
        monkeypatch.delenv(name)
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_SIZE", "1"), ("MASTER_ADDR", "10.0.0.1")):
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("cards", "infiniband", "takes"),
    [
        ({"eth0": "25000"}, False, "=eth0"),
        ({"eth0": "25000", "eth1": "25000", "eth2": "1000"}, False, "=eth0,eth1"),
        ({"eth0": "25000", "eth1": "25000"}, True, "=eth0"),  # the data does not go over sockets
        ({"eth0": "-1", "eth1": "-1"}, False, "=eth0"),  # a virtual machine's: one may lead nowhere
        ({"eth0": "25000", "br0": "25000 bridge"}, False, "=eth0"),
        ({"eth0": "25000", "eth1": "25000 down"}, False, "=eth0"),
    ],
)
def test_nccl_gets_the_cards_that_are_like_the_one_towards_rank_0(
    cards: dict[str, str], infiniband: bool, takes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, about in cards.items():
        speed, _, kind = about.partition(" ")
        (tmp_path / "net" / name / ("bridge" if kind == "bridge" else "device")).mkdir(parents=True)
        (tmp_path / "net" / name / "speed").write_text(f"{speed}\n")
        (tmp_path / "net" / name / "operstate").write_text("down\n" if kind == "down" else "up\n")
    if infiniband:
        (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(interfaces, "_NET", tmp_path / "net")
    monkeypatch.setattr(interfaces, "_INFINIBAND", tmp_path / "infiniband")
    monkeypatch.setattr(interfaces, "_addresses", lambda: {name: [f"10.0.{n}.2"] for n, name in enumerate(cards)})
    monkeypatch.setattr(interfaces, "_own_address", lambda _: "10.0.0.2")
    assert interfaces.choose_interfaces("nccl") == "eth0"
    assert os.environ[NCCL] == takes
