"""README.md and the pages beside it: their commands run, their outputs and errors are real, their links resolve.

More than 20 CPU s: the pages' commands train and convert for real.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from llmtrain.base.errors import UserError
from llmtrain.checkpoint.format import complete_checkpoints
from tests.helpers.launching import environment, finish, free_port, installed_by_make, kill_tree, rows, wait_for_step
from tests.helpers.warm import WarmCommands

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", *(f"docs/{name}.md" for name in (
    "README", "quickstart", "plan", "recipes", "training", "stages", "checkpoints", "conversions", "tracking",
    "developers/proofs", "developers/architecture", "developers/deepspeed", "developers/style"))]  # fmt: skip
PAGES = [page for page in PAGES if (ROOT / page).exists()]  # a feature's is deleted with it
TEXT = {page: (ROOT / page).read_text() for page in PAGES}

NOT_RUN = {
    "make train": "installs a virtual environment and trains for minutes; its launch line is run here, smaller",
    "make test": "it is what runs this file",
    "make install\nmake check": "`make test` installs the same, and its tests are more",
}
IN_SIGNAL_TEST = re.compile(r"^kill -|--train.max_steps 1000000")
NEWCOMER = "llmtrain prepare --source 'my_text"  # the lines of "Your own text", which test_newcomer.py runs


def blocks(page: str, language: str) -> list[str]:
    return [block.strip() for block in re.findall(rf"^```{language}\n(.*?)^```", TEXT[page], flags=re.M | re.S)]


def unique_commands() -> list[str]:
    found = dict.fromkeys(block for page in PAGES for block in blocks(page, "bash"))
    wanted = [b for b in found if b not in NOT_RUN and not IN_SIGNAL_TEST.search(b) and not b.startswith(NEWCOMER)]
    return [block for block in wanted if not any(block in other and block != other for other in wanted)]


LAUNCH = next(block for block in blocks("docs/quickstart.md", "bash") if "llmtrain launch" in block)
COMMANDS = [block for block in unique_commands() if block not in LAUNCH]
AT_ONCE = [block for block in COMMANDS if any(block in TEXT[page] for page in ("README.md", "docs/quickstart.md"))]


# Outputs on the pages: the command, its page, and a word in the block that shows what it prints.
SHOWN = [
    ("llmtrain init work", "docs/quickstart.md", "files in work"),
    ("checkpoint verify", "docs/checkpoints.md", "intact"),
    ("checkpoint diff", "docs/checkpoints.md", "different:"),
    ("checkpoint prune", "docs/checkpoints.md", "would delete"),
    ("checkpoint to-hf", "docs/conversions.md", "round trip"),
    ("checkpoint average", "docs/conversions.md", "the mean of"),
    ("checkpoint ls runs/more", "docs/stages.md", "FROM"),
]


SMALLER = {
    "curl -sSO https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt": (
        "cat my_text/part/*.txt > input.txt"
    ),
    "launch/recipes/shakespeare.yaml": "launch/recipes/shakespeare.yaml --train.max_steps 6 --schedule.warmup_steps 1",
    "step-300": "step-3",
    "step-350": "step-6",
    "runs/llama_1b": "runs/quickstart",
    "max_steps 400": "max_steps 8",
    "from_step: 300, mix": "from_step: 3, mix",
}
"""The quickstart's checkpoints and lengths, a run with AdamW, and what is downloaded."""


class Workplace:
    """A folder that looks like a clone, with small data and a quickstart of a few steps."""

    def __init__(self, path: Path, data: str, warm: WarmCommands | None = None) -> None:
        """`warm`: how `run` starts `llmtrain`; `start` does it as a user."""
        self.path = path
        (path / "launch/recipes").mkdir(parents=True)
        for name in ("ds_configs", "tools", "launch/train.py", "launch/env.example"):
            (path / name).symlink_to(ROOT / name)
        for recipe in (ROOT / "launch/recipes").glob("*.yaml"):
            text = recipe.read_text().replace("sequence_length: 4096", "sequence_length: 128")  # small data, too
            (path / "launch/recipes" / recipe.name).write_text(text)
        (path / "launch/recipes/quickstart.yaml").write_text(small_quickstart())
        (path / ".venv/bin").mkdir(parents=True, exist_ok=True)
        python = warm.python if warm else installed_by_make(path / ".venv")
        (path / ".venv/bin/activate").write_text(f'PATH="{python.parent}:$PATH"\n')
        (path / "data").mkdir()
        (path / "data/stdlib").symlink_to(data)
        (path / "my_text/part").mkdir(parents=True)
        rng = random.Random(0)
        words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(900)]
        for index in range(60):
            (path / f"my_text/part/{index}.txt").write_text(" ".join(rng.choices(words, k=200)))
        quiet = {"WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
        self.env = environment(**quiet)
        self.env["PATH"] = f"{python.parent}:{self.env['PATH']}"
        self._quick = warm.environment(**quiet) if warm else self.env

    def start(self, command: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        command = command.replace("deepspeed --hostfile", f"deepspeed --master_port {free_port()} --hostfile")
        return subprocess.Popen(
            ["bash", "-ec", command],
            cwd=self.path,
            env=env or self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, command: str) -> str:
        for real, small in SMALLER.items():
            command = command.replace(real, small)
        code, output = finish(self.start(command, self._quick))
        assert code == ("checkpoint diff" in command), (command, output)  # diff: 1 where something differs
        return output


def small_quickstart() -> str:
    recipe = yaml.safe_load((ROOT / "launch/recipes/quickstart.yaml").read_text())
    recipe["model"]["config"].update(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    )
    recipe["data"]["sequence_length"] = 32
    recipe["optim"] = {"lr": 3e-3}
    recipe["schedule"] = {"warmup_steps": 1}
    recipe["train"].update(global_batch=8, micro_batch=2, max_steps=6, log_every=2, eval_every=3, eval_sequences=8)
    recipe["checkpoint"] = {"every_steps": 3}
    return yaml.safe_dump(recipe)


@pytest.fixture(scope="module")
def place(small_data: str, tmp_path_factory: pytest.TempPathFactory, warm: WarmCommands) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("clone"), small_data, warm)


@pytest.fixture(scope="module")
def launched(place: Workplace) -> str:
    """What docs/quickstart.md's launch line prints; it leaves runs/quickstart."""
    return place.run(LAUNCH)


def form(line: str) -> str:
    """A line of output without its figures."""
    line = line.replace("update norm", "gradient norm")  # the small quickstart has AdamW
    line = re.sub(r"\S+ left\b", "", line.partition("error: ")[2] or line)
    line = re.sub(r"\b(\d+h)?(\d+m)?\d+(\.\d+)?[sm]\b", "#", line)  # a duration
    return " ".join(re.sub(r"\d[\d.,]*(e[+-]\d+)?([kMGT]|\.?\d* [KMG]iB)?\b", "#", line).split())


def test_the_launch_prints_what_the_page_shows(launched: str) -> None:
    shown = next(block for block in blocks("docs/quickstart.md", "text") if "parameters" in block)
    before, _, after = shown.partition("sample: ")
    lines = [*before.splitlines(), *("run folder" + after.partition("\nrun folder")[2]).splitlines()]
    printed = {form(line) for line in launched.splitlines()}
    for line in lines:
        if line != "..." and not line.startswith("W&B"):  # W&B's words: test_tracking_wandb.py
            assert form(line) in printed, (line, launched)
    assert 'sample: "def read_file(path):' in launched


def first_line(command: str) -> str:
    return command.splitlines()[0][:60]


@pytest.mark.parametrize("command", AT_ONCE, ids=first_line)
def test_every_command_of_the_first_pages(launched: str, place: Workplace, command: str) -> None:
    does_what_the_page_shows(place, command)


@pytest.mark.parametrize("command", [block for block in COMMANDS if block not in AT_ONCE], ids=first_line)
def test_every_command_of_the_other_pages(launched: str, place: Workplace, command: str) -> None:
    does_what_the_page_shows(place, command)


def does_what_the_page_shows(place: Workplace, command: str) -> None:
    output = place.run(command)
    for word, page, sign in SHOWN:
        if word in command:
            shown = next(block for block in blocks(page, "text") if sign in block)
            # Which tensor differs most depends on the run.
            lines = {form(line) for line in shown.splitlines() if not line.startswith(("...", "tensor", "different"))}
            assert lines <= {form(line) for line in output.splitlines()}, (shown, output)


def test_signals_and_resume(launched: str, place: Workplace) -> None:
    """The lines of "Stop and go on": resume in one process, save on SIGUSR1, stop on SIGTERM with exit code 0."""
    commands = [block for block in blocks("docs/quickstart.md", "bash") if IN_SIGNAL_TEST.search(block)]
    train, save, stop = commands
    run = place.path / "runs/quickstart"
    first = rows(run)[-1]["step"]
    process = place.start(f"exec {train} --checkpoint.every_steps null")
    try:
        wait_for_step(process, run, first + 4)
        place.run(save)
        deadline = time.monotonic() + 30
        while complete_checkpoints(run / "checkpoints")[0].name <= f"step-{first:08d}":
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        saved = int(complete_checkpoints(run / "checkpoints")[0].name[5:])
        wait_for_step(process, run, saved + 2)
        place.run(stop)
        code, output = finish(process, 60)
    finally:
        if process.poll() is None:
            kill_tree(process)
    assert code == 0, output
    shown = next(block for block in blocks("docs/quickstart.md", "text") if block.startswith("stopped"))
    assert form(shown) in {form(line) for line in output.splitlines()}
    assert f"at step {first}" in output and f"changed since: run.train.max_steps: {first} -> 1000000" in output
    assert int(complete_checkpoints(run / "checkpoints")[0].name[5:]) > saved


@pytest.fixture
def shown_errors() -> Iterator[set[str]]:
    """All error lines of the pages; a test takes out what it has produced."""
    lines = {line for page in PAGES for block in blocks(page, "text") for line in block.splitlines()}
    errors = {line.removeprefix("error: ") for line in lines if line.startswith("error: ")}
    yield errors
    assert not errors, "no test produces these"


def test_every_error_on_the_pages_is_real(shown_errors: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator import get_accelerator

    from llmtrain.checkpoint.format import FrozenSource, differences
    from llmtrain.checkpoint.load import refuse_other_run
    from llmtrain.checkpoint.trainer_state import TrainerState
    from llmtrain.config.load import parse
    from llmtrain.config.resolve import resolve
    from llmtrain.engine.ranks.device import check_device

    monkeypatch.chdir(ROOT)
    shown_errors -= {e for e in shown_errors if "steps in a row were skipped" in e}  # test_faults.py, explosion
    shown_errors -= {e for e in shown_errors if e in TEXT["README.md"]}  # test_newcomer.py
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: False)
    monkeypatch.setattr(get_accelerator(), "device_name", lambda *_: "cpu")
    words = ["--config", "launch/recipes/quickstart.yaml", "--deepspeed", "ds_configs/fp16.json"]
    with pytest.raises(UserError) as refused:
        run = resolve(parse(words, check_paths=False).config, 1)
        check_device(run.mix, run.config.model.attention, None, run.config.deepspeed)
    shown_errors.remove(str(refused.value))

    error = next(e for e in shown_errors if "data_fingerprint" in e)
    there, here = re.findall(r"'(\w{32})'", error)
    saved, now = (
        TrainerState(
            step=40,
            optimizer="adamw",
            vocab_size=1,
            data_fingerprint=data,
            run={"data": {"sequence_length": length}},
        )
        for data, length in ((there, 256), (here, 512))
    )
    with pytest.raises(UserError) as refused:
        refuse_other_run(saved, now, Path(error.partition(": ")[0]))
    shown_errors.remove(str(refused.value))

    error = next(e for e in shown_errors if "other values" in e)
    source = FrozenSource(folder=Path("/models/llama"), checksums={}, parts={})
    shown_errors.remove(str(source.error(error.partition(". ")[0])))

    (line,) = differences({"run": {"optim": {"lr": 0.003}}}, {"run": {"optim": {"lr": 0.002}}})
    assert f"changed since: {line}" in TEXT["docs/quickstart.md"] and line in TEXT["docs/checkpoints.md"]


def test_every_page_with_commands_is_run_by_a_test() -> None:
    """Commands stand in blocks, and a test reads the blocks of the page; test_bench.py reads whole pages."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("tools/*/README.md")]
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
    for file in files:
        page, text = str(file.relative_to(ROOT)), file.read_text()
        outside = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        loose = re.findall(r"^    (?:python|llmtrain|deepspeed|make|torchrun) .*", outside, flags=re.M)
        loose = [line for line in loose if "tools/bench/" not in line and not re.search(r"\bNAME\b", line)]
        assert not loose, f"{page}: put these into a bash block, which is run: {loose}"
        if re.search(r"^```(bash|console)", text, flags=re.M):
            assert page in PAGES or page in tests, f"no test reads the commands of {page}"


def slugs(text: str) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "page",
    sorted(
        str(p.relative_to(ROOT))
        for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("ds_configs/*.md")]
    ),
)
def test_links_resolve(page: str) -> None:
    file = ROOT / page
    for target in re.findall(r"\]\(([^)\s]+)\)", file.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        other = (file.parent / path).resolve() if path else file
        assert other.exists(), target
        assert not anchor or anchor in slugs(other.read_text()), target


def test_files_and_functions_that_the_pages_name_exist() -> None:
    for page in PAGES:
        for path, function in re.findall(r"`((?:[\w.]+/)+[\w.]+\.(?:py|json|yaml|md))`(?: `(\w+)`)?", TEXT[page]):
            file = next((f for f in (ROOT / path, ROOT / "llmtrain" / path) if f.is_file()), None)
            if path.startswith("runs/"):
                continue
            assert file, f"{page}: {path}"
            if function:
                assert re.search(rf"^\s*(def|class) {function}\b", file.read_text(), flags=re.M), (path, function)


def test_the_readme_is_short_and_the_recipes_are_listed() -> None:
    readme = TEXT["README.md"]
    assert len(readme.splitlines()) <= 120
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", readme)
    assert (ROOT / picture).read_bytes().startswith(b"\x89PNG")
    assert (ROOT / picture).stat().st_size < 100_000
    for recipe in (ROOT / "launch/recipes").glob("*.yaml"):
        assert f"launch/recipes/{recipe.name}" in TEXT["docs/recipes.md"], "list the recipe"


def test_the_index_lists_every_page() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert page.name == "README.md" or f"({page.relative_to(ROOT / 'docs')})" in TEXT["docs/README.md"], page


def test_the_tests_that_proofs_names_exist() -> None:
    named = re.findall(r"\]\(\.\./\.\./(tests/[\w/]+\.py)\) `(test_\w+)`", TEXT["docs/developers/proofs.md"])
    assert len(named) >= 24
    assert [pair for pair in named if f"def {pair[1]}(" not in (ROOT / pair[0]).read_text()] == []


def test_the_architecture_page_shows_the_layers_of_the_import_test() -> None:
    from tests.unit.test_imports import LAYERS

    shown = TEXT["docs/developers/architecture.md"].partition("    base ")[2].partition("\n\n")[0]
    shown = ("base " + shown).replace("features/NAME", "feature")
    lines = [set(line.partition("#")[0].split()) for line in shown.splitlines()]
    assert [layer for layer in lines if layer] == [set(layer) for layer in LAYERS if layer != ("__main__",)]
    assert len(TEXT["docs/developers/architecture.md"].splitlines()) <= 100, "two screens"


def test_the_examples_are_what_deepspeed_reads(tmp_path: Path) -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    assert dict(fetch_hostfile(str(ROOT / "launch/hostfile.example"))) == {"node-01": 8, "node-02": 8}
    example = (ROOT / "launch/env.example").read_text()
    command = next(line.strip("# ") for line in example.splitlines() if "grep -E" in line)
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    subprocess.run(["bash", "-ec", command], cwd=tmp_path, check=True)
    lines = (tmp_path / ".deepspeed_env").read_text().splitlines()
    assert lines and all(re.fullmatch(r"[A-Z_]+=\S+", line) for line in lines)
    loaded = subprocess.run(
        ["bash", "-ec", "set -a; . launch/env.example; set +a; env -0"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    assert set(lines) <= set(loaded)
    assert "WANDB_API_KEY" not in json.dumps(lines)
