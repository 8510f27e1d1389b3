"""Network interfaces: what doctor says that gloo and NCCL will take is what a rank sets, or refuses, on that host."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from llmtrain.base.errors import ConfigError
from llmtrain.base.rank import interfaces
from llmtrain.base.rank.interfaces import GLOO, NCCL
from llmtrain.features.doctor import differences
from tests.features.doctor.test_doctor_checks import NAMES, healthy

pytestmark = pytest.mark.usefixtures("of_two_hosts")
LO = {"lo": "127.0.0.1"}


def facts_of(here: list[str], **environment: str) -> dict[str, Any]:
    held = {name: {"addresses": [f"10.0.{n}.2"], "up": True, "speed": None} for n, name in enumerate(here)}
    return {"environment": environment, "interfaces": held}


@pytest.mark.parametrize(
    ("here", "takes"),
    [
        (["lo", "docker0", "eth0"], "eth0"),
        (["lo", "eth0", "ib0"], "ib0"),
        (["lo", "docker0"], "docker0"),
    ],
)
def test_nccl_alone_takes_interfaces_in_its_order(here: list[str], takes: str) -> None:
    assert differences.nccl_choice(facts_of(here)) == takes


@pytest.mark.parametrize(
    ("variable", "value", "here", "takes"),
    [
        (GLOO, "eth0", ["lo", "eth0"], "eth0"),
        (GLOO, "ib0,eth0", ["lo", "eth0", "ib0"], "ib0"),
        (GLOO, "eth0,ib0", ["lo", "eth0"], None),
        (GLOO, "eth", ["lo", "eth0"], None),
        (GLOO, "=eth0", ["lo", "eth0"], None),
        (NCCL, "eth", ["lo", "eth1", "eth0"], "eth1"),
        (NCCL, "=eth0", ["lo", "eth01", "eth0"], "eth0"),
        (NCCL, "=eth0,ib0", ["lo", "eth01", "ib0"], "ib0"),
        (NCCL, "=eth", ["lo", "eth0"], None),
        (NCCL, "eth0:5000", ["lo", "eth0"], "eth0"),
        (NCCL, "ib,bond", ["lo", "eth0", "bond0"], "bond0"),
        (NCCL, "ib", ["lo", "eth0"], None),
        (NCCL, "^docker,lo", ["lo", "docker0", "bond0"], "bond0"),
        (NCCL, "^=eth0", ["eth0", "eth01"], "eth01"),
        (NCCL, "^lo,eth", ["lo", "eth0"], None),
    ],
)
def test_a_variable_means_the_same_to_doctor_and_to_a_rank(
    variable: str, value: str, here: list[str], takes: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = facts_of(here, **{variable: value})
    choice = differences.gloo_choice if variable == GLOO else differences.nccl_choice
    assert choice(facts) == takes

    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(interfaces, "_addresses", lambda: differences.addresses_by_interface(facts))
    monkeypatch.setattr(interfaces, "_own_address", lambda _: "10.0.1.2")
    if takes is None:
        with pytest.raises(ConfigError, match=re.escape(f"{variable} is {value!r}")):
            interfaces.choose_interfaces("nccl")
    else:
        interfaces.choose_interfaces("nccl")
        assert os.environ[variable] == value


@pytest.mark.parametrize(
    ("held", "network", "own_name"),
    [
        ({"eth0": "10.0.0.{n}"}, "10.0.0.{n}", "10.0.0.{n}"),
        ({"docker0": "172.17.0.1", "eth0": "10.0.0.{n}"}, "10.0.0.{n}", "10.0.0.{n}"),
        ({"eth0": "10.0.0.{n}"}, "10.0.0.{n}", "127.0.1.1"),  # as Debian's /etc/hosts has it
        ({"eth0": "10.0.0.{n}", "ib0": "10.1.0.{n}"}, "10.1.0.{n}", "10.1.0.{n}"),
        ({"ib0": "10.1.0.{n}", "eth0": "10.0.0.{n}"}, "10.0.0.{n}", "127.0.1.1"),
    ],
)
@pytest.mark.parametrize("by_name", [False, True])
def test_doctor_names_the_interface_that_the_ranks_take(
    held: dict[str, str], network: str, own_name: str, by_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`held`: addresses by interface of host n; `network`: the address by which the other hosts know it; `own_name`: by
    which it knows itself. `by_name`: MASTER_ADDR is the first host's name, which it resolves for itself."""
    survey = healthy()
    for n, facts in enumerate(survey.facts.values(), start=1):
        own = {**LO, **{name: address.format(n=n) for name, address in held.items()}}
        facts["interfaces"] = {name: {"addresses": [a], "up": True, "speed": None} for name, a in own.items()}
        known = {name: network.format(n=m) for m, name in enumerate(NAMES, start=1)}
        known[NAMES[n - 1]] = own_name.format(n=n)
        facts["names"].update(addresses=known, own=known[NAMES[n - 1]])
    right = differences.right_interfaces(survey)

    taken = {}
    for n, (host, facts) in enumerate(survey.facts.items(), start=1):
        own = [each for about in facts["interfaces"].values() for each in about["addresses"]]

        def own_address(target: str, own: list[str] = own, facts: Any = facts, n: int = n) -> str:
            """The kernel's answer: the address in the target's network, else that of the way out of here."""
            address = facts["names"]["addresses"].get(target, target)
            near = [a for a in own if a.rpartition(".")[0] == address.rpartition(".")[0]]
            outward = network.format(n=n)
            return address if address.startswith("127.") else near[0] if near else outward

        monkeypatch.setattr(interfaces, "_own_address", own_address)
        master = NAMES[0] if by_name else network.format(n=1)
        taken[host] = interfaces.interface_towards(master, differences.addresses_by_interface(facts))
    assert taken == right and set(right) == set(NAMES)
