"""tools/bench: every preset builds; every command on a page runs, smaller, or is said not to have been run."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from llmtrain.config.run import ModelConfig
from llmtrain.models.spec import ModelSpec
from tests.helpers.launching import REPO, environment
from tools.lab.lab import why_not

BENCH = REPO / "tools/bench"
SMALLER = {
    "checkpoint.py": ["--preset", "tiny", "--rounds", "1"],
    "facts.py": [],
    "train_speed.py": ["--rounds", "1", "--steps", "1", "--sequence", "32", "--micro-batch", "1"],
    "long_context.py": ["--tokens", "64", "--limit-gib", "4"],
    "start.py": ["--rounds", "1"],
    "posttraining.py --only prepare": ["--mb", "0.5", "--vocabularies", "1024", "--rounds", "1"],
    **{
        f"posttraining.py --only {table}": ["--rounds", "1", "--steps", "1", "--hidden", "64", "--layers", "1"]
        for table in ("lora", "dpo", "sft")
    },
    **{
        f"posttraining.py --only {table}": [
            "--rounds",
            "1",
            "--steps",
            "1",
            "--hidden",
            "64",
            "--layers",
            "1",
            "--sequence",
            "256",
            "--at-once",
            "4",
        ]
        for table in ("packing", "packing-dpo")
    },
    "pipeline.py": ["--stages", "2", "--micro", "2", "--forward-ms", "5", "--steps", "1"],
    "balance.py": ["--ms", "1", "2", "--stages", "1", "--micro-batch", "2", "--steps", "4"],
    "estimate.py": ["--tokens", "512"],
    "experts.py": ["--experts", "4", "--zero", "1", "--rounds", "1", "--steps", "1"],
    "watch.py": ["--hidden", "32", "--layers", "1", "--blocks", "6"],
    "watch.py --hosts": ["--hosts", "16"],
    "sites.py": ["--hidden", "64", "--start-steps", "4", "--steps", "30", "--ddp-steps", "3", "--seeds", "0"],
    "plan.py": ["--only", "0"],
    "plan_time.py": ["--steps", "3", "--rate-mbit", "400"],
    "prepare_hosts.py": ["--mb", "1", "--vocabulary", "1024", "--rounds", "1"],
    "spikes_replays.py": ["--forms", "zero1"],
    "sites_many.py": ["--sites", "3", "--rounds", "1", "--parameters", "1000", "--every-s", "1"],
}


COMMAND = re.compile(r"(python tools/bench/)?(\w+\.py)((?: +--[a-z-]+(?: [\w.][\w.,:=-]*)*)*)")


def load(name: str) -> ModuleType:
    """The benchmark as a module; it puts its own folder on the path."""
    if name in sys.modules and getattr(sys.modules[name], "__file__", "") == str(BENCH / f"{name}.py"):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def models() -> dict[str, tuple[dict[str, Any], int]]:
    """Of every benchmark and preset: the model, and the tokens of a sequence."""
    found = {f"checkpoint {name}": (model, length) for name, (model, length, *_) in load("checkpoint").PRESETS.items()}
    found |= {f"train_speed {name}": (one.model, one.sequence) for name, one in load("train_speed").PRESETS.items()}
    found |= {f"long_context {name}": (model, 0) for name, model in load("long_context").PRESETS.items()}
    pipeline, watch = load("pipeline"), load("watch")
    found["pipeline"] = (pipeline.MODEL, pipeline.LENGTH)
    asked = watch.arguments([])
    shape = {"hidden": asked.hidden, "wide": 2 * asked.hidden, "layers": asked.layers}
    recipe = yaml.safe_load(watch.RECIPE.format(repo=REPO, data="data", run="run", steps=1, **shape))
    found["watch"] = (recipe["model"]["config"], recipe["data"]["sequence_length"])
    return found


def test_every_preset_builds_and_has_the_size_of_its_name() -> None:
    """On the meta device, as the benchmarks' first lines build it."""
    for name, (model, length) in models().items():
        parameters = ModelSpec.of(ModelConfig(config=model)).facts.parameters
        billions = re.search(r"([\d.]+)b$", name)
        if billions is not None:
            assert 0.9 <= parameters / 1e9 / float(billions[1]) < 1.3, (name, parameters)
        assert length <= model.get("max_position_embeddings", length), name


def commands() -> dict[str, str]:
    """Each command of a benchmark on our pages -> the line that it stands in. Inline code may go over a line's end."""
    found = {}
    for page in [REPO / "README.md", *(REPO / "docs").rglob("*.md")]:
        text = re.sub(r"`[^`\n]+\n[^`\n]+`", lambda code: code[0].replace("\n", " "), page.read_text())
        for line in text.splitlines():
            for python, name, words in COMMAND.findall(line):
                if (BENCH / name).is_file() and (python or words):
                    found[name + words] = line
    return found


COMMANDS = commands()
RUN = [command for command, line in COMMANDS.items() if "# not run" not in line]


def test_every_command_on_the_pages_is_one() -> None:
    assert len(COMMANDS) >= 13 and {command.split()[0] for command in COMMANDS} == {
        name.split()[0] for name in SMALLER
    }, COMMANDS
    for command in COMMANDS:
        name, *words = command.split()
        load(Path(name).stem).arguments(words)
    assert {command.split()[0] for command in RUN} == {name.split()[0] for name in SMALLER}, "all have been run"


def smaller() -> list[str]:
    """The commands that are run, with sizes for a test; equal ones once."""
    found = []
    for command in RUN:
        kind = max((kind for kind in SMALLER if set(kind.split()) <= set(command.split())), key=len)
        found.append(" ".join([command, *SMALLER[kind]]))
    return sorted(set(found))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", smaller())
def test_every_command_on_the_pages_runs(command: str) -> None:
    name, *words = command.split()
    if name in ("sites.py", "plan_time.py", "prepare_hosts.py") and (reason := why_not()):
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, str(BENCH / name), *words], cwd=REPO, env=environment(), capture_output=True, text=True
    )
    # checkpoint.py ends with 1 where a target is missed: a tiny model's are.
    assert done.returncode in ((0, 1) if name == "checkpoint.py" else (0,)), done.stdout + done.stderr
    assert "Traceback" not in done.stderr and re.search(r"\d", done.stdout), done.stdout + done.stderr


def test_a_site_that_failed_is_named_rather_than_one_that_still_runs() -> None:
    """Their order does not matter, and the one that runs is ended."""
    runs, fails = (
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        for code in ("input()", "raise SystemExit(3)")
    )
    ranks = [
        SimpleNamespace(name=name, process=process, steps=list, said=lambda name=name: f"{name}'s output")
        for name, process in (("north", runs), ("south", fails))
    ]
    with pytest.raises(SystemExit, match=r"^south ended with 3:\nsouth's output$"):
        load("sites").wait(ranks)
    assert runs.wait(10) == -signal.SIGKILL
