"""`--profile.steps`: the files of two ranks and the page, and the run's losses as they are without it."""

from __future__ import annotations

import csv
import gzip
import json
import re
from pathlib import Path

import pytest

from llmtrain.config.run import RunConfig
from llmtrain.features import shortened
from llmtrain.features.profile import ProfileConfig
from tests.helpers.forked import finish, train
from tests.helpers.launching import losses, write_recipe


@pytest.mark.timeout(300)
def test_a_profile_says_what_a_step_went_to(small_data: str, tmp_path: Path) -> None:
    found = []
    for name, words in (("plain", ()), ("profiled", ("--profile.steps", "3:4"))):
        (tmp_path / name).mkdir()
        recipe = write_recipe(tmp_path / name, small_data)
        output = train(recipe, "--train.max_steps", "6", "--train.log_every", "1", *words)
        found.append(losses(tmp_path / name / "run"))
    assert found[0] == found[1] and len(found[0]) == 6
    assert not (tmp_path / "plain/run/profile").exists()
    folder = tmp_path / "profiled/run/profile"
    assert str(folder) in output
    for rank in (0, 1):
        events = json.loads(gzip.decompress((folder / f"trace-rank{rank}.json.gz").read_bytes()))["traceEvents"]
        names = [event.get("name", "") for event in events]
        accumulation = names.count("llmtrain: backward") // 2
        assert names.count("llmtrain: update") == names.count("llmtrain: forward_backward") == 2 and accumulation >= 1
        assert any(name.startswith("gloo:") for name in names)
        with open(folder / f"memory-rank{rank}.csv") as file:
            table = list(csv.DictReader(file))
        assert len(table) > 100 and max(int(row["allocated_bytes"]) for row in table) > 1e5
    page = (folder / "profile.md").read_text()
    step, *phases, _ = map(float, re.findall(r"[\d.]+", re.findall(r"^\| 1 \| (.*) \|$", page, re.M)[0]))
    assert abs(sum(phases) - step) < 0.5 and phases[1] > 0 and phases[2] > 0 and phases[3] > 0
    assert "optimizer: exp_avg" in page and "| `aten::" in page


def test_steps_that_are_no_range_are_refused(small_data: str, tmp_path: Path) -> None:
    code, output = finish(write_recipe(tmp_path, small_data), "--profile.steps", "4:3", world_size=1)
    assert code == 2 and 'profile.steps = "4:3"' in output and "FIRST:LAST" in output


def test_a_proof_of_few_steps_has_no_profile() -> None:
    run = RunConfig(deepspeed="ds.json", profile=ProfileConfig(steps="1000:1001"))
    assert shortened(run, 20)["profile"] == ProfileConfig()
