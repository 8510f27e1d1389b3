"""`llmtrain parity` as a user starts it: outcomes, messages, exit codes, and what is left behind.

More than 20 CPU s: each command of parity starts its ranks.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from llmtrain.base.errors import UserError
from llmtrain.commands.parity import main
from tests.helpers.launching import REPO, environment, finish, gone
from tests.helpers.launching import tree as processes
from tests.helpers.leftovers import unused_shared_memory
from tests.helpers.warm import WarmCommands

MODEL = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
DS_CONFIGS = sorted((REPO / "ds_configs").glob("*.json"))


def recipe(folder: Path, ds: str = "zero2.json", **sections: dict[str, object]) -> Path:
    """A run of a size that nobody trains here, with data and a tokenizer that are nowhere."""
    run = {
        "deepspeed": str(REPO / "ds_configs" / ds),
        "model": {"config": MODEL},
        "data": {"path": "not/there", "sequence_length": 4096},
        "schedule": {"warmup_steps": 2000},
        "train": {"global_batch": 256, "micro_batch": 4, "max_steps": 100_000},
        **sections,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def start(
    folder: Path, *words: str, fault: str | None = None, warm: WarmCommands | None = None, cwd: Path = REPO
) -> subprocess.Popen[str]:
    (folder / "tmp").mkdir(exist_ok=True)
    env = environment(TMPDIR=str(folder / "tmp"), PYTHONPATH=str(REPO))
    command = [str(warm.python) if warm else sys.executable, "-m", "llmtrain", "parity"]
    if fault is not None:
        env["FAULT"] = fault
        code = "import sys; from llmtrain.commands.parity import main; "
        code += "sys.exit(main(sys.argv[1:], worker='tests.helpers.faulty_worker'))"
        command = [command[0], "-c", code]
    return (warm.popen if warm else subprocess.Popen)(
        [*command, *words],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def left_in(folder: Path) -> list[str]:
    return [path.name for path in (folder / "tmp").glob("llmtrain-scratch-*")]


def test_a_fault_in_the_ranks_is_exit_code_1_and_a_message(tmp_path: Path, warm: WarmCommands) -> None:
    path = recipe(tmp_path, "zero1_fp32.json")
    # Fewer steps than the recipe's warm-up, which is shortened with the run.
    code, output = finish(start(tmp_path, str(path), "--steps", "2", fault="skipped_layer", warm=warm))
    assert code == 1, output
    assert output.splitlines()[-1] == "FAIL" and "FAIL  fp32" in output
    assert re.search(r"first parts at step 1:\n +loss: [\d.]+, expected [\d.]+; differs by .*, tolerated", output), (
        output
    )
    assert "likely: the forward pass of step 1" in output
    assert not left_in(tmp_path)


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    command = start(tmp_path, str(recipe(tmp_path)), "--ranks", "2")
    try:
        deadline = time.monotonic() + 120
        while len(ranks := worker_ranks(command)) < 2:
            assert command.poll() is None and time.monotonic() < deadline, finish(command)
            time.sleep(0.1)
        command.send_signal(signal.SIGINT)
        code, output = finish(command, 60)
    finally:
        for process in processes(command):
            process.kill()
    assert code == 130 and "interrupted" in output, output
    assert gone(ranks, 10) and not left_in(tmp_path)


def worker_ranks(command: subprocess.Popen[str]) -> list[psutil.Process]:
    found = []
    for process in processes(command):
        try:
            if "llmtrain.parity.trainer" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "0"], "--steps = 0"),
        (["--device", "cuda"], "0"),
        (["--optim.rate", "1"], "optim.rate"),
        (["--deepspeed", "nowhere.json"], "nowhere.json"),
        (["--model.config.hidden_size", "wide"], "wide"),
    ],
)
def test_mistakes(tmp_path: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(UserError, match=said):
        main([str(recipe(tmp_path)), *words])


def test_ranks_that_do_not_fit_the_degrees(tmp_path: Path) -> None:
    ds = tmp_path / "ds.json"
    ds.write_text('{"pipeline": {"stages": 2}, "zero_optimization": {"stage": 1}}')
    with pytest.raises(UserError, match=r"world size 3 \(--ranks\)") as refused:
        main([str(recipe(tmp_path)), "--deepspeed", str(ds), "--ranks", "3", "--device", "cpu"])
    assert str(ds) in str(refused.value), "the user's file is named, not the one that is made of it"


@pytest.mark.slow
@pytest.mark.parametrize("path", DS_CONFIGS, ids=lambda path: path.stem)
def test_every_config_that_is_shipped(tmp_path: Path, path: Path) -> None:
    name = "moe.yaml" if path.stem == "experts" else "llama_1b.yaml"
    code, output = finish(start(tmp_path, str(REPO / "launch/recipes" / name), "--deepspeed", str(path)), 1200)
    assert code == 0, output


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((REPO / "launch/recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe(tmp_path: Path, path: Path) -> None:
    words = [str(path)]
    if "pretrained" in yaml.safe_load(path.read_text())["model"]:
        model = tmp_path / "config.json"
        model.write_text(json.dumps(MODEL))
        words += ["--model.pretrained", str(tmp_path)]
    code, output = finish(start(tmp_path, *words), 900)
    assert code == 0, output


PAGE = (REPO / "docs/parity.md").read_text() if (REPO / "docs/parity.md").exists() else ""


def blocks(language: str) -> list[str]:
    return [block.strip() for block in re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.M | re.S)]


def form(line: str) -> str:
    """A line of output without its figures and without the step and the parameter that were the worst."""
    line = re.sub(r"\(step [^)]*\)", "", line)
    return " ".join(re.sub(r"\d[\d.,]*(e[+-]\d+)?", "#", line).split())


@pytest.mark.parametrize(
    "command",
    [
        block if index == 0 else pytest.param(block, marks=pytest.mark.slow)
        for index, block in enumerate(blocks("bash"))
    ],
)
def test_the_commands_on_the_page(tmp_path: Path, command: str, warm: WarmCommands, small_data: str) -> None:
    """As in a clone after `make train`: its data is there."""
    program, name, *words = command.split()
    assert (program, name) == ("llmtrain", "parity")
    for shipped in ("ds_configs", "launch"):
        (tmp_path / shipped).symlink_to(REPO / shipped)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/stdlib").symlink_to(small_data)
    (tmp_path / ".venv-oldest").symlink_to(sys.prefix)
    before = unused_shared_memory()
    code, output = finish(start(tmp_path, *words, warm=warm, cwd=tmp_path), 400)
    assert code == 0, output
    assert not left_in(tmp_path) and unused_shared_memory() <= before
    shown = [block for block in blocks("text") if block.startswith(words[0])]
    if shown and len(words) == 1:
        assert [form(line) for line in shown[0].splitlines()] == [form(line) for line in output.splitlines()]
