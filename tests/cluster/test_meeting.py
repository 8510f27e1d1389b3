"""Ranks on hosts of their own meet without a word about network interfaces, or say who is missing."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from tests.helpers.launching import REPO, environment, free_port
from tests.helpers.warm import WarmCommands

RANK = """
import json, os, socket
from llmtrain.engine.deepspeed.build import join_process_group
from llmtrain.base.errors import UserError
try:
    ranks = join_process_group(60.0, start_timeout_s=float(os.environ["LIMIT_S"]))
    import torch, torch.distributed as dist
    total = torch.tensor([float(ranks.rank + 1)])
    dist.all_reduce(total)
    seats = [(seat.rank, seat.host) for seat in ranks.seats]
    from types import SimpleNamespace
    from examples.host_load import HostLoad
    load = HostLoad()
    load.open(SimpleNamespace(setup=SimpleNamespace(ranks=ranks)))
    dist.all_reduce(torch.zeros(1 << 20))  # 4 MiB over the network
    loads = load.figures(None)
    ranks.meet()
    print(json.dumps({"sum": float(total), "seats": seats, "gloo": os.environ["GLOO_SOCKET_IFNAME"], "load": loads}))
except UserError as error:
    print(json.dumps({"error": str(error)}))
"""


def start(lab: Any, world: int, ranks: range, limit_s: float, warm: WarmCommands) -> list[subprocess.Popen[str]]:
    """One rank on each of the first hosts; rank 0's host is node-1."""
    port, started = free_port(), []
    for rank in ranks:
        variables = {"RANK": rank, "LOCAL_RANK": 0, "LOCAL_SIZE": 1, "WORLD_SIZE": world, "LIMIT_S": limit_s}
        env = environment(
            MASTER_ADDR=lab.hosts[0].address, MASTER_PORT=str(port), **{k: str(v) for k, v in variables.items()}
        )
        env.pop("GLOO_SOCKET_IFNAME", None)
        started.append(
            lab.hosts[rank].popen(
                [warm.hosts / "python", "-c", RANK], env=env, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
    return started


def answers(started: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    found = []
    for process in started:
        output, _ = process.communicate(timeout=240)
        line = next((line for line in output.splitlines() if line.startswith("{")), None)
        assert line is not None, output
        found.append(json.loads(line))
    return found


def test_two_hosts_meet_over_their_network_without_being_told_which(lab3, warm):
    for answer in answers(start(lab3, 2, range(2), 200.0, warm)):
        load = answer.pop("load")
        assert answer == {"sum": 3.0, "seats": [[0, "node-1"], [1, "node-2"]], "gloo": "eth0"}
        names = ("cpu_percent", "memory_gib", "network_mib_per_s")
        assert load.keys() == {f"node-{number}/{name}" for number in (1, 2) for name in names}
        assert all(load[f"node-{number}/network_mib_per_s"] > 0 for number in (1, 2))


def test_a_host_that_is_cut_off_is_missed_by_the_others_and_says_so_itself(lab3, warm):
    lab3.hosts[1].cut()
    first, second = answers(start(lab3, 2, range(2), 5.0, warm))
    assert "rank 1 of 2" in first["error"], first
    assert "rank 1 on node-2" in second["error"] and lab3.hosts[0].address in second["error"]
