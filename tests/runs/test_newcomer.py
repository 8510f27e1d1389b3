"""The first ten minutes of somebody who has the README, the quickstart and one text file, word for word."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from llmtrain.checkpoint.format import complete_checkpoints
from llmtrain.cli import main
from tests.helpers.hf_folders import model_folder, new_model
from tests.helpers.launching import finish, kill_tree, rows, wait_for_step
from tests.helpers.pages import Page
from tests.helpers.play import write_play
from tests.helpers.warm import WarmCommands
from tests.runs.test_docs import ROOT, Workplace, blocks, form, small_quickstart


def section(title: str) -> list[str]:
    """The commands of a section of docs/quickstart.md."""
    text = (ROOT / "docs/quickstart.md").read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    found = [block for block in blocks("docs/quickstart.md", "bash") if block in text]
    return [line for block in found for line in block.splitlines()] + re.findall(r"`(llmtrain generate [^`]*)`", text)


@pytest.fixture
def place(small_data: str, tmp_path: Path, warm: WarmCommands) -> Workplace:
    made = Workplace(tmp_path / "clone", small_data, warm)
    recipe = small_quickstart().replace("max_steps: 6", "max_steps: 240").replace("log_every: 2", "log_every: 5")
    recipe = recipe.replace("eval_every: 3", "eval_every: 120").replace("every_steps: 3", "every_steps: 100")
    (made.path / "launch/recipes/quickstart.yaml").write_text(recipe)
    return made


def test_the_newcomers_path(place: Workplace) -> None:
    prepare, check, train, generate = section("Your own text")
    source = place.path / shlex.split(prepare)[shlex.split(prepare).index("--source") + 1].replace("**/*", "play")
    source.parent.mkdir(exist_ok=True)
    write_play(source)
    for other in place.path.glob("my_text/part"):
        other.rename(place.path / "not_used")  # one file is all that there is

    assert re.search(r"validation 1 document, [\d.]+k tokens \([45]\.\d%\)", place.run(prepare))
    assert "ok" in place.run(check)
    run = place.path / "runs/mine"

    process = place.start(f"exec {train}")
    try:
        wait_for_step(process, run, 20)
        process.send_signal(signal.SIGINT)
        code, output = finish(process, 60)
    finally:
        if process.poll() is None:
            kill_tree(process)
    stop = rows(run, "events.jsonl")[-1]
    assert (code, stop["kind"], stop["complete"]) == (0, "stop", False), output
    stopped = int(complete_checkpoints(run / "checkpoints")[0].name[5:])
    assert 20 <= stopped < 240

    output = place.run(train)
    assert f"at step {stopped}" in output and rows(run)[-1]["step"] == 240, output
    assert "bigram" in output
    losses = [row["loss"] for row in rows(run) if "loss" in row]
    assert losses[-1] < losses[0]
    assert (run / "export" / "model.safetensors").is_file()
    words = AutoTokenizer.from_pretrained(run / "export")
    for name in ("config.json", "generation_config.json"):  # Llama's own defaults are words of this vocabulary
        told = json.loads((run / "export" / name).read_text())
        assert (told["bos_token_id"], told["eos_token_id"]) == (words.bos_token_id, words.eos_token_id), name

    prompt = shlex.split(generate)[-1]
    output = place.run(f"{generate} --max-tokens 20")
    assert f"\n{prompt}" in output and "step 240" in output, output
    assert main(["report", str(run)]) == 0
    assert "training, smoothed" in Page(run / "report/index.html").text  # of at least ten points


def test_the_readmes_first_screen(place: Workplace, small_data: str) -> None:
    """Its YAML with a tiny Qwen3 and short sequences; without hosts, the ranks are on this machine."""
    model = model_folder(place.path / "qwen", new_model("qwen3", vocab_size=512))
    for file in (Path(small_data) / "tokenizer").iterdir():
        shutil.copy(file, model)
    (recipe,) = blocks("README.md", "yaml")
    recipe = recipe.replace("Qwen/Qwen3-8B", "qwen").replace("sequence_length: 4096", "sequence_length: 32")
    (place.path / "mine.yaml").write_text(recipe)
    commands = next(block for block in blocks("README.md", "bash") if "--hostfile hosts" in block)
    printed = place.run(commands.replace("Qwen/Qwen3-8B", "qwen").replace("--hostfile hosts ", "--max-restarts 0 "))
    assert "bf16, ZeRO 3, 2 ranks" in printed, printed
    assert (place.path / "runs/mine/export/model.safetensors").is_file()

    refusal = next(block for block in blocks("README.md", "text") if "error:" in block)
    command, *lines = refusal.splitlines()
    code, printed = finish(place.start(command.removeprefix("$ ")))
    assert (code, printed.splitlines()) == (2, lines)


def test_the_readmes_loss_passes_parity(place: Workplace) -> None:
    (place.path / "mine.py").write_text(blocks("README.md", "python")[0])
    (shown,) = (block for block in blocks("README.md", "text") if "llmtrain parity" in block)
    command, *lines = shown.splitlines()
    printed = place.run(command.removeprefix("$ "))
    kinds = {kind(line) for line in printed.splitlines()}
    assert {kind(line) for line in lines if line != "..."} <= kinds, printed


def kind(line: str) -> str:
    """A line of parity's output without its figures, step and tensor, which depend on the model."""
    return form(line).partition(" (step")[0]
