"""Runs, checkpoints and prepared folders of version 0.1.0 (tests/data/saved-0.1.0): each command still reads them.

A run that is resumed from its own config.yaml writes that file and its remaining figures again: a field that is no
longer read, kept or written is a difference here. The file takes 20 CPU-seconds: each form is resumed.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import xxhash
import yaml

from llmtrain import cli
from llmtrain.checkpoint.format import step_folder
from tests.helpers import forked
from tests.helpers.launching import free_port, rows
from tests.helpers.saved_runs import NAMES, ONE_RANK, PLUGIN, SAVED, exported, prepare_rank, words_of
from tests.helpers.stored import BF16, FP32, differences, machine

EXPECTED = json.loads((SAVED / "expected.json").read_text())
NEEDS = {"lora": "peft", "plugin": "tensorboard", "sites": "torchft"}
RUNS = [pytest.param(name, marks=pytest.mark.needs(NEEDS[name])) if name in NEEDS else name for name in NAMES]
OF_A_MACHINE = re.compile(r"time|elapsed|per_s|share|stall|memory|seconds|_s$|bytes")
"""Keys of figures that no two launches have alike."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, which is the working folder. Paths of runs are relative, except the folder of frozen parameters."""
    shutil.copytree(SAVED, tmp_path / "saved")
    for path in (tmp_path / "saved/runs").glob("*/checkpoints/*/manifest.json"):
        raw = json.loads(path.read_text())["manifest"]
        if "frozen" in raw:
            raw["frozen"]["folder"] = str(tmp_path / "saved/base")
            digest = xxhash.xxh3_64_hexdigest(json.dumps(raw, separators=(",", ":")).encode())
            path.write_text(json.dumps({"manifest": raw, "xxh3": digest}, separators=(",", ":")))
    monkeypatch.chdir(tmp_path / "saved")
    return tmp_path / "saved"


def figures(run: Path) -> list[dict[str, Any]]:
    """Of the steps after the checkpoint; none of sites, which meet as soon as they find each other."""
    found = [row for row in rows(run) if row["step"] > 3 and run.name != "sites"]
    return [{key: value for key, value in row.items() if not OF_A_MACHINE.search(key)} for row in found]


def configurations(run: Path, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the run's folder and of a checkpoint."""
    trainer = json.loads((step_folder(run / "checkpoints", step) / "trainer.json").read_text())
    return yaml.safe_load((run / "config.yaml").read_text()), trainer["run"]


LATER = (("data", "pack", True),)
"""(section, field, its value in a run that was saved before there was the field)"""


@pytest.mark.parametrize("run", RUNS)
def test_a_saved_run_goes_on(run: str, here: Path) -> None:
    """From its config.yaml, without a word about what changed; with the figures that it had; after an export."""
    folder, saved, port = here / "runs" / run, SAVED / "runs" / run, free_port()
    launch = forked.Launch(
        folder / "config.yaml",
        *words_of(run, port),
        world_size=1 if run in ONE_RANK else 2,
        before=functools.partial(prepare_rank, here, run, port, exports=True),
        log_folder=here,
    )
    assert not any(launch.wait(240)), launch.output()
    said = launch.output()
    assert f"resumed from runs/{run}/checkpoints/step-00000003 at step 3" in said and "rate jumps" not in said
    changed = re.findall(r"changed since: (?!versions\.)(.*)", said)
    assert [line.partition(":")[0] for line in changed] == (["run.sites.coordinator"] if run == "sites" else []), said
    for then, now in zip(configurations(saved, 3), configurations(folder, 5), strict=True):
        now["sites"]["coordinator"] = then["sites"]["coordinator"]
        for section, name, default in LATER:
            assert now[section].pop(name) == default
        assert now == then
    assert json.loads((folder / "deepspeed.json").read_text()) == json.loads((saved / "deepspeed.json").read_text())
    got, want = figures(folder), figures(saved)
    if machine() == EXPECTED["machine"]:
        assert got == want
    assert [row.keys() for row in got] == [row.keys() for row in want]
    rounding = BF16 if "bf16" in json.loads((saved / "deepspeed.json").read_text()) else FP32
    for now, then in zip(got, want, strict=True):
        assert differences(now, then, rounding) == {}
    assert exported(here / "export") == EXPECTED["exports"][run]
    if run == "mixture":
        assert exported(here / "export-ema") == EXPECTED["exports"]["mixture --weights ema"]


def test_a_stored_figure_may_round_as_what_it_is_made_of() -> None:
    """A margin is a difference of log-probabilities; a loss is compared as itself."""
    want = {
        "step": 4,
        "loss": 0.6875,
        "pairs/margin": 0.0148,
        "pairs/chosen_log_prob": -75.7,
        "pairs/rejected_log_prob": -66.9,
        "eval/perplexity": 255.0,
    }
    assert differences(want | {"pairs/margin": 0.01485, "eval/perplexity": 255.01}, want, FP32) == {}
    moved = {"pairs/margin": 0.0158, "loss": 0.6876, "eval/perplexity": 255.1, "step": 5}
    assert differences(want | moved, want, FP32).keys() == moved.keys()
    assert differences({"step": 4}, want, BF16).keys() == want.keys() - {"step"}


@pytest.mark.parametrize("run", RUNS)
def test_a_saved_run_is_checked_and_listed(run: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*(PLUGIN if run == "plugin" else ()), "--world-size", "1" if run in ONE_RANK else "2")
    assert cli.main(["config", "check", f"runs/{run}/config.yaml", *words]) == 0, capsys.readouterr().err
    assert cli.main(["checkpoint", "ls", f"runs/{run}"]) == 0
    assert "step-00000003" in capsys.readouterr().out


@pytest.mark.parametrize("words", EXPECTED["where"])
def test_a_prepared_folder_tells_what_a_saved_run_has_read(
    words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["data", "where", *words.split()]) == 0
    assert capsys.readouterr().out.splitlines() == EXPECTED["where"][words]


def test_the_rate_of_a_saved_stage_is_compared(here: Path) -> None:
    """Step 4 was to be the second of a cosine's three; the second stage is now constant, and has other ranks."""
    tree = yaml.safe_load(Path("runs/stages/config.yaml").read_text())
    tree["data"]["stages"][0]["schedule"] = {"name": "constant"}
    Path("runs/stages/config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    enter = functools.partial(prepare_rank, here, "stages", 0, exports=False)
    folder = here / "runs/stages"
    code, said = forked.finish(folder / "config.yaml", "--deepspeed", "zero1.json", world_size=1, before=enter)
    assert code == 0 and "the learning rate jumps" in said and "0.005 at step 4," in said, said
