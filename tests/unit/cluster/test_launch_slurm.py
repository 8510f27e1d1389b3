"""Slurm's lists of nodes and tasks, and what a task becomes."""

from __future__ import annotations

import pytest

from llmtrain.base.errors import ConfigError
from llmtrain.cluster.launch.slurm import become_rank, expand, hostfile, hosts_of, tasks_per_node


@pytest.mark.parametrize(
    "text, names",
    [
        ("node1", ["node1"]),
        ("node[001-003,007],gpu-a", ["node001", "node002", "node003", "node007", "gpu-a"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("a[1]x,b", ["a1x", "b"]),
        ("a[1-2].cluster.example", ["a1.cluster.example", "a2.cluster.example"]),
    ],
)
def test_a_nodelist_is_expanded(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "a,", "a,,b", "n[", "n[1", "n]1", "n[]", "n[1-]", "n[3-1]", "n[a-b]", "n[1,]", "n[[1]]", "a,a"),
        *("n[1-2]x]", "$(touch x)", "-oProxyCommand=x", "n[1-2];rm", "a b", "n[0-99999999999]", "n[1-100001]"),
        "[1-999][1-999][1-999]",
        "n[" + "9" * 5000 + "]",
    ],
)
def test_what_slurm_would_not_write_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST"):
        expand(text)


@pytest.mark.parametrize(
    "text, nodes, counts",
    [("8", 1, [8]), ("8(x4),4", 5, [8, 8, 8, 8, 4]), ("1(x3)", 3, [1, 1, 1]), ("2,1(x2),2", 4, [2, 1, 1, 2])],
)
def test_tasks_are_counted(text: str, nodes: int, counts: list[int]) -> None:
    assert tasks_per_node(text, nodes) == counts


@pytest.mark.parametrize("text", ["", "8(x3)", "0", "8(x)", "x8", "8(x4", "8 (x4)", "8(x4);"])
def test_a_count_of_other_nodes_or_of_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_TASKS_PER_NODE"):
        tasks_per_node(text, 4)


def test_hosts_of_an_allocation() -> None:
    hosts = hosts_of({"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_TASKS_PER_NODE": "2,1"})
    assert [(host.name, host.slots, host.devices) for host in hosts] == [("node1", 2, (0, 1)), ("node2", 1, (0,))]
    assert hostfile(hosts) == "node1\nnode1\nnode2\n"
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST"):
        hosts_of({})


def test_a_task_becomes_a_rank() -> None:
    task = {
        "SLURM_PROCID": "2",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
    }
    become_rank(task)
    assert {name: task[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_SIZE", "WORLD_SIZE", "CROSS_RANK")} == {
        "RANK": "2",
        "LOCAL_RANK": "0",
        "LOCAL_SIZE": "1",
        "WORLD_SIZE": "3",
        "CROSS_RANK": "1",
    }
    with pytest.raises(ConfigError, match="SLURM_STEP_NUM_NODES"):
        become_rank({})
