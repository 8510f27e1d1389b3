"""Fixtures of other folders: a lab of three hosts, and hosts with faults."""

from tests.cluster.conftest import lab3, running_lab, warm
from tests.unit.base.test_rank_interfaces import of_two_hosts
from tests.unit.cluster.test_hosts_envfile import hosts
from tests.unit.engine.test_op_builds import build

__all__ = ["build", "hosts", "lab3", "of_two_hosts", "running_lab", "warm"]
