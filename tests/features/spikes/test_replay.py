from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.base.errors import ConfigError
from llmtrain.features.spikes import replay
from llmtrain.features.spikes.page import lines_for, page_of, worst_rows
from llmtrain.features.spikes.replay import modules_of, reason_of


def looked(values: dict[int, tuple[float, float]]) -> dict[int, dict[str, Any]]:
    return {step: {"largest": {"model.embed": [1.0, 1.0], "model.layer": list(pair)}} for step, pair in values.items()}


def test_a_module_out_of_the_range_of_the_other_steps_is_named() -> None:
    found = modules_of(looked({1: (1.0, 0.1), 2: (1.5, 0.1), 3: (1.2, 0.5)}))
    assert [(each["step"], each["module"], each["what"]) for each in found] == [
        (3, "model.layer", "gradient of the output")
    ]
    assert found[0]["factor"] == 5


def test_the_first_that_is_not_finite_comes_first() -> None:
    found = modules_of(looked({1: (1.0, 0.1), 2: (9.0, 0.1), 3: (math.nan, math.inf)}))
    assert (found[0]["step"], found[0]["what"]) == (3, "output")
    assert [each["step"] for each in found[1:]] == [2]


def test_an_answer_without_equal_steps_says_where_they_part() -> None:
    step = {"loss": 2.5, "norm": 0.5, "lr": 1e-3, "skipped": False, "record": 2.5}
    steps = [{**step, "step": 4, "equal": True, "apart": 0.0}, {**step, "step": 5, "equal": False, "apart": 1e-3}]
    row = {"step": 5, "sequence": 40, "loss": 9.0, "norm": 3.0, "share": 0.9, "documents": ['a:1, 9 tokens: "<b>&"']}
    answer: dict[str, Any] = {
        "run": "runs/mine",
        "first": 4,
        "last": 5,
        "exact": True,
        "why": "",
        "bound": 0.0,
        "equal": False,
        "steps": steps,
        "checkpoints": [],
        "modules": [],
        "rows": [row],
    }
    lines = list(lines_for(answer))
    assert re.search(r"not equal .*\bstep 5, .*\b1\.0e-03$", lines[0]), lines[0]
    assert "step 5 sequence 40: loss 9.0000, norm 3, share 90.0%" in lines  # a row of the table
    assert not any("damaged" in line for line in lines)
    later = [*steps, {**step, "step": 6, "equal": True, "apart": 0.0}]
    hint = list(lines_for({**answer, "steps": later}))[1]
    assert re.search(r"\bstep 6\b.*damaged.*\bsteps 5\b", hint), hint
    assert list(lines_for({**answer, "steps": later, "exact": False}))[1] == lines[1]
    # The one with the largest loss is shown, whatever its norm is.
    answer["rows"] = worst_rows([{**row, "sequence": n, "loss": 3 + n % 12, "norm": 3 - n / 50} for n in range(14)], 12)
    assert [each["sequence"] for each in answer["rows"]] == list(range(12))
    shown = [line.partition(":")[0] for line in lines_for(answer) if " sequence " in line]
    assert shown == [f"step 5 sequence {n}" for n in (*range(10), 11)]
    answer["rows"] = worst_rows(answer["rows"], 3)
    assert [each["sequence"] for each in answer["rows"]] == [0, 1, 2, 11]
    assert worst_rows([row, {**row, "sequence": 41, "loss": "NaN"}], 1)[-1]["sequence"] == 41
    page = page_of(answer)
    assert "&lt;b&gt;&amp;" in page and "<b>" not in page


@pytest.mark.parametrize(
    ("zero", "exact"),
    [
        ({"stage": 2}, True),
        ({"stage": 2, "offload_optimizer": {"device": "none"}}, True),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, False),
        ({"stage": 2, "cpu_offload": True}, False),
        ({"stage": 2, "cpu_offload": False}, True),
    ],
    ids=str,
)
def test_equal_bits_are_expected_unless_the_optimizer_is_on_the_host(
    tmp_path: Path, zero: dict[str, Any], exact: bool
) -> None:
    asked: Any = SimpleNamespace(run=tmp_path / "run", replayed=tmp_path / "replayed", devices=["cpu"])
    for folder in (asked.run, asked.replayed):
        folder.mkdir()
        (folder / "deepspeed.json").write_text(json.dumps({"zero_optimization": zero}))
    found, why = replay._exact(asked)
    assert found == exact and ("CPU optimizer" in why) == (not exact)


def test_two_replays_do_not_share_a_folder(tmp_path: Path) -> None:
    asked: Any = SimpleNamespace(out=tmp_path / "out", replayed=tmp_path / "out/run")
    held = replay.prepare(asked)
    (asked.out / "replay.log").touch()
    with pytest.raises(ConfigError, match="--out"):
        replay.prepare(asked)
    assert (asked.out / "replay.log").exists()
    os.close(held)
    os.close(replay.prepare(asked))
    assert not (asked.out / "replay.log").exists()


REFUSED = """\
 node-2     ok    ok    FAIL
red    config: node-2: /tmp/run/config.yaml cannot be read (No such file or directory)
       fix: copy it: scp /tmp/run/config.yaml node-2:/tmp/run/config.yaml
2 hosts, 2.2s: 1 to fix, 0 to know
error: nothing was started: fix what is marked FAIL, and check with `llmtrain doctor`
"""
OF_A_HOST = """\
node-1: network between the 2 hosts: eth0
node-1: error: data.path: data/x has changed
node-1:     since the run
pdsh@node-1: node-2: ssh exited with exit code 2
"""


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            REFUSED,
            "config: node-2: /tmp/run/config.yaml cannot be read (No such file or directory)\n"
            "       fix: copy it: scp /tmp/run/config.yaml node-2:/tmp/run/config.yaml",
        ),
        (OF_A_HOST, "data.path: data/x has changed\n    since the run"),
        ("error: one\nerror: two\nlast line\n", "two"),
        (
            "error: hosts: 1 problem\n  cannot be read: give another\nlast line\n",
            "hosts: 1 problem\n  cannot be read: give another",
        ),
        ("Killed\n", "Killed"),
        ("", "no output"),
    ],
)
def test_the_reason_is_the_launch_s_own(said: str, reason: str) -> None:
    assert reason_of(said) == reason
