"""A run with a user's own code: its figures, its trackers, its exceptions, and a resume with it and without.

More than 20 CPU s: each fault of a plugin needs a launch of its own.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from llmtrain.cli import main
from tests.helpers.forked import finish, train
from tests.helpers.launching import REPO, deepspeed, environment, launch, rows, write_recipe
from tests.helpers.launching import finish as finish_process
from tests.helpers.preference import preferences
from tests.helpers.warm import WarmCommands
from tests.runs.test_chat import write_model
from tests.runs.test_kills import llmtrain

PAGE = (REPO / "docs/extend.md").read_text()
BLOCKS = [block.replace("\\\n", "") for block in re.findall(r"```bash\n(.*?)```", PAGE, re.S)]
COMMAND = next(shlex.split(block) for block in BLOCKS if "sqrt_schedule" in block)
WORDS = [str(REPO / word) if word.startswith("examples/") else word for word in COMMAND[COMMAND.index("--plugin") :]]
HEAD = """
import time
from dataclasses import dataclass
from typing import ClassVar
import torch
from llmtrain import Metric, Optimizer, Part, Request, Sink, bounded

@dataclass(kw_only=True)
class Likely(Metric, entry="likely"):
    in_training: ClassVar = True

    def values(self, nll, labels):
        return nll < 20
"""
FAILS = """
from dataclasses import dataclass
import time
from llmtrain import Part, Sink

@dataclass(kw_only=True)
class Count(Part, entry="count"):
    fails_at: int | None = None

    def open(self, launch):
        self.rank, self.seen = launch.setup.ranks.rank, 0

    def request(self):
        return None  # asks for nothing

    def after_step(self, done):
        self.seen += 1
        if done.position.step == self.fails_at and self.rank == 1:
            raise RuntimeError("as asked")

    def to_json(self):
        return self.seen

    def restore(self, kept, folder):
        self.seen = kept

@dataclass(kw_only=True)
class Dead(Sink, entry="dead"):
    after: int = 1

    def log(self, row, *, more):
        raise OSError("nobody answers")

@dataclass(kw_only=True)
class Slow(Sink, entry="slow"):
    seconds: float = 30.0

    def log(self, row, *, more):
        time.sleep(self.seconds)
"""


@pytest.mark.timeout(300)
def test_the_page_of_plugins_and_its_examples_run(small_data: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(@dataclass.*?)```", PAGE, re.S)
    (page := tmp_path / "page.py").write_text("\n".join([HEAD, *blocks]))
    words = [
        *WORDS,
        "--plugin",
        str(page),
        "--optim.name",
        "momentum",
        "--metrics.rare",
        "--metrics.likely",
        "--trackers.csv",
    ]
    output = train(
        write_recipe(tmp_path, small_data),
        *words,
        "--parts.layer_norms.every",
        "2",
        "--parts.sample_table.every",
        "2",
        "--train.max_steps",
        "4",
        "--train.log_every",
        "2",
        "--optim.clip_norm",
        "0",
    )
    for line in ("parts: layer_norms, sample_table, hosts", "metrics: rare, likely", "trackers: notify, csv"):
        assert f"\n{line}\n" in output, output
    assert "untested optimizer" not in output  # it was tried
    found = [row for row in rows(tmp_path / "run") if "loss" in row]
    assert (tmp_path / "run/loss.csv").read_text() == "".join(f"{row['step']},{row['loss']}\n" for row in found)
    assert [row["lr"] for row in found][-1] != found[0]["lr"] and "without a documented meaning" not in output
    for row in found:
        layers = [row[f"layer_norms/layer_{layer}"] for layer in (0, 1)]
        assert 0 < row["loss"] < row["focal/next_token_loss"]
        assert 0 < sum(norm**2 for norm in layers) ** 0.5 < row["grad_norm"]
        assert [row[key] > 0 for key in row if re.fullmatch(r"hosts/.+/memory_gib", key)] == [True]
    table = (tmp_path / "run/samples.md").read_text()
    assert re.findall(r"^\| (\d+) \| '.+' \|$", table, flags=re.M) == ["2", "4"]
    notes = (tmp_path / "run/notes.txt").read_text()
    assert ": start 0" in notes and ": stop 4" in notes
    assert json.loads((tmp_path / "run/environment.json").read_text())["plugins"].keys() == {
        "sqrt_schedule",
        "layer_norms",
        "notify",
        "sample_table",
        "focal_loss",
        "host_load",
        "page",
    }
    code = main(["checkpoint", "to-hf", str(tmp_path / "run"), str(tmp_path / "hf"), "--check", "none"])
    assert code == 0  # what reads a run needs no plugin
    found = [row for row in rows(tmp_path / "run") if "loss" in row or "eval/loss" in row]
    assert all(row[key] > 0.5 for row, key in zip(found, ["likely", "likely", "eval/likely"], strict=True))
    assert [row for row in found if "eval/rare" in row] == found[-1:] and 0 < found[-1]["eval/rare"] <= 1


@pytest.mark.timeout(300)
def test_the_first_file_of_the_page_trains(small_data: str, tmp_path: Path) -> None:
    command = next(shlex.split(block) for block in BLOCKS if "--plugin mine.py" in block)
    words = [{"mine.py": str(tmp_path / "mine.py"), "data/mine": small_data}.get(word, word) for word in command]
    (tmp_path / "mine.py").write_text(*re.findall(r"```python\n(# mine.py\n.*?)```", PAGE, re.S))
    train(write_recipe(tmp_path, small_data), *words[words.index("--plugin") :], "--train.max_steps", "2")
    first, second, last = rows(tmp_path / "run")
    assert 0 < second["fastest/step_s"] <= first["fastest/step_s"] and last["eval/mine/loss"] == last["eval/loss"]
    assert first["loss"] == pytest.approx(math.log(512) ** 1.2, rel=0.02)  # 512 words, alike before training


@pytest.mark.timeout(300)
def test_an_exception_in_a_part_saves_and_names_it(small_data: str, tmp_path: Path) -> None:
    (mine := tmp_path / "mine.py").write_text(FAILS)
    recipe = write_recipe(tmp_path, small_data)
    words = ["--plugin", str(mine), "--train.log_every", "1", "--checkpoint.keep", "3"]
    code, output = finish(
        recipe,
        *words,
        "--parts.count.fails_at",
        "3",
        "--train.max_steps",
        "9",
        "--trackers.dead.after",
        "1",
        "--trackers.slow.seconds",
        "9",
    )
    assert code == 3 and "--plugin-changed ok" in output
    line = FAILS.splitlines().index('            raise RuntimeError("as asked")') + 1
    assert f"rank 1: parts.count: after_step at step 3: {mine} line {line}: RuntimeError: as asked." in output
    assert re.search("trackers.dead .*OSError: nobody answers", output)
    assert (tmp_path / "run/checkpoints/step-00000004").is_dir()
    told = [json.loads(each) for each in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    (reason,) = [each["reason"] for each in told if each["kind"] == "stop"]
    assert reason.startswith("rank 1: parts.count: after_step at step 3: ")
    mine.write_text(f"{FAILS}\n# changed\n")
    words += ["--parts.count.fails_at", "100", "--train.max_steps", "6"]
    code, output = finish(recipe, *words)
    assert code == 2 and re.search("plugin mine .*--plugin-changed ok", output)
    train(recipe, *words, "--plugin-changed", "ok")
    kept = json.loads((tmp_path / "run/checkpoints/step-00000006/trainer.json").read_text())
    assert kept["parts.count"] == 6


STAYS = """
from dataclasses import dataclass
import os, subprocess, threading, time
from llmtrain import Part

@dataclass(kw_only=True)
class Stays(Part, entry="stays"):
    rank: int = 0

    def open(self, launch):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        self.child = subprocess.Popen(["sleep", "600.4711"])
        print("noise of a plugin", flush=True)

    def close(self, error):
        while int(os.environ["RANK"]) == self.rank:
            pass
"""


@pytest.mark.timeout(300)
def test_a_part_that_does_not_return_is_named_and_nothing_stays(
    small_data: str, tmp_path: Path, warm: WarmCommands
) -> None:
    """Its thread, its child and the run's processes are gone, and the newest checkpoint is intact. It computes, in the
    phase of the export. One that sleeps or ends its process: tests/unit/training/test_plugin_parts.py."""
    (mine := tmp_path / "mine.py").write_text(STAYS)
    words = ["--plugin", str(mine), "--parts.stays.rank", "0", "--train.max_steps", "9", "--fault.stall_timeout_s", "4"]
    words += ["--checkpoint.mode", "sync"]
    process = launch(write_recipe(tmp_path, small_data), *words, warm=warm)
    code, output = finish_process(process)
    told = f"rank 0 on {os.uname().nodename} is in parts.stays: close at "
    assert code != 0 and told in output and "mine.py" in output, output
    ours = (str(tmp_path), "600.4711")
    deadline = time.monotonic() + 60
    while any(
        word in " ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"]) for word in ours
    ):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert main(["checkpoint", "verify", str(tmp_path / "run/checkpoints/step-00000005")]) == 0


SCRIPT = """
import os, sys, threading
import torch
import llmtrain

class Seen(llmtrain.Part):
    def open(self, launch):
        self.steps = []

    def after_step(self, done):
        self.steps.append(done.position.step)

losses, before, random = [], dict(os.environ), torch.get_rng_state()
for number in range(2):
    seen = Seen()
    given = {"train.max_steps": 3 + number, "train.log_every": 1, "train.run_dir": f"run{number}"}
    given["deepspeed"] = "ds.json"
    given["optim.betas"] = [0.9, 0.98]
    result = llmtrain.train("recipe.yaml", given, parts=[seen])
    assert seen.steps == list(range(1, 4 + number)) and result.checkpoint.name == f"step-0000000{3 + number}"
    assert dict(os.environ) == before and not torch.distributed.is_initialized()
    assert torch.equal(torch.get_rng_state(), random) and threading.active_count() == 1, threading.enumerate()
    losses.append(result.history[0]["loss"])
    assert [row["step"] for row in result.history if "lr" in row] == seen.steps
assert losses[0] == losses[1]
try:
    llmtrain.train("recipe.yaml", {"train.max_stepz": 3})
except llmtrain.UserError as error:
    assert "did you mean --train.max_steps?" in str(error)
if os.environ.get("RANK", "0") == "0":
    model, tokenizer = llmtrain.load("run1")
    assert model.config.vocab_size == len(tokenizer)
print("all well")
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2])
def test_trainings_follow_each_other_in_a_script(
    small_data: str, tmp_path: Path, warm: WarmCommands, ranks: int
) -> None:
    """A notebook's process, and `deepspeed --hostfile hosts mine.py`, whose ranks share matrices."""
    write_recipe(tmp_path, small_data)
    (tmp_path / "ds.json").write_text(json.dumps({"tensor_parallel": {"autotp_size": ranks}}))
    (tmp_path / "mine.py").write_text(SCRIPT)
    env = environment(PYTHONPATH=str(REPO))
    if ranks == 1:
        command = [sys.executable, "mine.py"]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False)
        code, output = done.returncode, done.stdout + done.stderr
    else:
        code, output = finish_process(deepspeed(tmp_path, "mine.py", slots=ranks, env=env, warm=warm))
    assert code == 0 and output.count("all well") == ranks, output


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mistake", [False, True])
def test_parity_of_a_users_objective_finds_a_mean_over_the_micro_batch(
    tmp_path: Path, warm: WarmCommands, mistake: bool
) -> None:
    command = next(shlex.split(block) for block in BLOCKS if block.startswith("llmtrain parity"))
    words = [str(REPO / word) if (REPO / word).is_file() else word for word in command[1:]]
    if mistake:
        at = words.index("--plugin") + 1
        text = Path(words[at]).read_text()
        words[at] = str(tmp_path / "focal_loss.py")
        Path(words[at]).write_text(text.replace("* nll, nll", "* nll / nll.detach().mean(), nll"))
    code, output = run_from_the_clone(warm, *words)
    assert (code, output.splitlines()[-1]) == ((1, "FAIL") if mistake else (0, "PASS")), output
    assert ("terms of objective.name focal depends on the tokens that share a micro-batch" in output) == mistake


def run_from_the_clone(warm: WarmCommands, *words: str) -> tuple[int, str]:
    command = [str(warm.python), "-m", "llmtrain", *words]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    return finish_process(warm.popen(command, cwd=REPO, env=environment(PYTHONPATH=str(REPO)), **streams))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", [1, 3])
def test_parity_of_an_optimizer_with_two_rates(warm: WarmCommands, stage: int) -> None:
    words = ("--plugin", "examples/two_rates.py", "--optim.name", "two_rates", "--steps", "3")
    json_words = ("--deepspeed", f"ds_configs/zero{stage}.json")
    code, output = run_from_the_clone(warm, "parity", "launch/recipes/quickstart.yaml", *words, *json_words)
    assert (code, output.splitlines()[-1]) == (0, "PASS"), output


HINGE = """
from dataclasses import dataclass
from typing import Literal
import torch.nn.functional as F
from llmtrain import Pairs

@dataclass(frozen=True, kw_only=True)
class Hinge(Pairs, choice="hinge"):
    reference: Literal["column", "online"] = "column"

    def losses(self, answers):
        margins = answers.ratio[:, 0] - answers.ratio[:, 1]
        return F.relu(1 - margins), margins
"""


@pytest.mark.timeout(300)
def test_an_objective_of_a_plugin_has_its_reference_written(tmp_path: Path, warm: WarmCommands) -> None:
    """`llmtrain reference --plugin`, and the run that compares with it: at first the margins are 0."""
    write_model(tmp_path / "model")
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in preferences(150)))
    words = ("--format", "preference", "--source", "records.jsonl", "--tokenizer", "model", "--out", "data")
    llmtrain(tmp_path, "prepare", *words, warm=warm)
    tree = yaml.safe_load(write_recipe(tmp_path, str(tmp_path / "data")).read_text())
    tree |= {"model": {"pretrained": str(tmp_path / "model")}, "objective": {"name": "hinge"}}
    tree["data"] |= {"sequence_length": 160, "isolate_documents": True}
    (recipe := tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    (mine := tmp_path / "mine.py").write_text(HINGE)
    llmtrain(tmp_path, "reference", str(recipe), "--plugin", str(mine), warm=warm)
    train(recipe, "--plugin", str(mine), "--train.max_steps", "2")
    found = [row for row in rows(tmp_path / "run") if "loss" in row]
    assert (found[0]["loss"], found[0]["pairs/margin"]) == (pytest.approx(1, abs=1e-5), pytest.approx(0, abs=1e-5))
    assert found[1]["loss"] < 1
