"""`llmtrain prepare --on ray`: a real cluster of three nodes on this machine, one of which goes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmtrain.commands.prepare import main


@pytest.mark.slow
@pytest.mark.needs("ray")
@pytest.mark.parametrize("seed", range(3))
def test_a_node_that_goes_costs_no_byte(tmp_path: Path, seed: int) -> None:
    """At any moment."""
    from ray.cluster_utils import Cluster

    with open(tmp_path / "a.jsonl", "w") as stream:
        for index in range(6000):
            stream.write(json.dumps({"text": f"document {index}: " + "some words to learn from " * 40}) + "\n")
    words = ["--source", str(tmp_path / "a.jsonl"), "--vocab-size", "300", "--shard-bytes", "100000"]
    assert main([*words, "--out", str(tmp_path / "alone")]) == 0
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        third = cluster.add_node(num_cpus=1)
        command = [sys.executable, "-m", "llmtrain", "prepare", *words, "--out", str(tmp_path / "set"), "--on", "ray"]
        environment = {**os.environ, "RAY_ADDRESS": cluster.address}
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        at = random.Random(seed).randrange(1, 40)
        while len(list((tmp_path / "set/unfinished").glob("unit-*.json"))) < at:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.01)
        cluster.remove_node(third)
        said = process.communicate(timeout=300)[0]
    finally:
        cluster.shutdown()
    assert process.returncode == 0 and "under way will be done again" in said, said
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).rglob("*") if path.is_file()}
             for name in ("alone", "set")]  # fmt: skip
    assert files[0] == files[1]
