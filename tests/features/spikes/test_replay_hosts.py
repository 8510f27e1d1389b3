"""`llmtrain replay --launch HOSTS`: the steps of a run of two hosts, by the same two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.launched import MET_S, Launched, write_recipe
from tests.helpers.warm import WarmCommands
from tools.lab.lab import Lab


@pytest.mark.timeout(900)
def test_a_run_of_two_hosts_is_replayed_there(lab3: Lab, small_data: str, tmp_path: Path, warm: WarmCommands) -> None:
    recipe, hosts = write_recipe(tmp_path, small_data), tmp_path / "hosts"
    hosts.write_text("node-1 slots=1\nnode-2 slots=1\n")
    with Launched(lab3, recipe, "--exclude", "node-3", warm=warm, words=("--train.max_steps", "8")) as run:
        assert run.finish() == 0, run.text[-3000:]
    asked = ["llmtrain", "replay", run.run_dir, "--steps", "6:8", "--launch", hosts, "--rows", "1"]
    done = lab3.hosts[0].run(asked, env=warm.on_hosts(), cwd=tmp_path, timeout_s=MET_S)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads((tmp_path / "run-replay-6-8/answer.json").read_text())
    assert answer["from"].endswith("step-00000005") and answer["exact"] and answer["equal"]
    ranks = json.loads((Path(answer["folder"]) / "run/environment.json").read_text())["ranks"]
    assert [rank["host"] for rank in ranks] == ["node-1", "node-2"]
    run.assert_nothing_left()
