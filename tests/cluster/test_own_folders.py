"""Three hosts that share no file system: each keeps its ranks' files; a restart goes on from them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from llmtrain.checkpoint.verify import verify
from tests.cluster.launched import EVERY, Launched, one_fault, write_recipe
from tests.helpers.launching import REPO
from tools.lab.lab import Lab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]  # a minute; tests/ranks/test_folders.py is quicker


def test_a_run_goes_on_from_what_each_host_has(lab3: Lab, small_data: str, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, small_data)
    text = recipe.read_text().replace(f"run_dir: {tmp_path / 'run'}", "run_dir: /tmp/run")
    assert "/tmp/run\n" in text
    recipe.write_text(text.replace("keep: 2", "keep: 2\n  dir: /tmp/checkpoints"))
    words = ("doctor", "--quick", "--json", "--hostfile", str(lab3.hostfile()), "--config", str(recipe))
    report = json.loads(lab3.hosts[0].run([sys.executable, "-m", "llmtrain", *words], cwd=REPO).stdout)
    assert not [each for each in report["findings"] if each["check"] == "shared"]
    assert any("each host keeps the files" in note for note in report["notes"]), report["notes"]

    with Launched(lab3, recipe, "--max-restarts", "1") as run:
        run.run_dir, run.checkpoints = lab3.hosts[0].tmp / "run", lab3.hosts[0].tmp / "checkpoints"
        run.wait_for(r"^rank 2 -> node-3")
        assert "\nrank 1 -> node-2 -> cpu, local rank 0\n" in run.text
        run.wait_for_step(run.newest_checkpoint() + EVERY + 2)
        one_fault(run, "rank", lab3.hosts[1], nth=1)
        resumed = run.rows("events.jsonl", "restart")[0]["step"]
        assert resumed >= EVERY
        assert f"resumed from /tmp/checkpoints/step-{resumed:08d} at step {resumed}" in run.text
        run.interrupt()
        assert run.finish() == 130
        assert "3 ranks" in run.text and re.search(r"\b1 restart", run.text)
        last = run.newest_checkpoint()
        assert last == run.step()
        run.assert_nothing_left()
    name = f"step-{last:08d}"
    for rank, host in enumerate(lab3.hosts):
        folder = host.tmp / "checkpoints" / name
        files = sorted(path.name for path in folder.iterdir())
        assert files == ["manifest.json", f"rank-{rank:05d}.safetensors", "trainer.json"], host.name
        assert verify(folder, whole=False) == []
    assert (lab3.hosts[0].tmp / "run/checkpoints").is_symlink() and not (lab3.hosts[1].tmp / "run").exists()

    with Launched(lab3, recipe, "--exclude", "node-3") as run:  # another number of ranks, and a host's files missing
        assert run.finish() == 2
        assert f"{name}: no host has rank-00002.safetensors, written on node-3" in run.text, run.text[-3000:]
