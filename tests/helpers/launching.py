"""Runs as a user starts them: the real `deepspeed` launcher, small models, and what is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import yaml
from packaging.requirements import Requirement

if TYPE_CHECKING:
    from tests.helpers.forked import Launch
    from tests.helpers.warm import WarmCommands

REPO = Path(__file__).resolve().parents[2]

RECIPE = """
deepspeed: {repo}/ds_configs/zero1_fp32.json
model:
  config:
    model_type: llama
    vocab_size: 512
    hidden_size: 32
    intermediate_size: 64
    num_hidden_layers: 2
    num_attention_heads: 2
    num_key_value_heads: 2
    tie_word_embeddings: true
    attention_dropout: 0.1
data:
  path: {data}
  sequence_length: 32
train:
  run_dir: {run}
  global_batch: 8
  micro_batch: 2
  max_steps: 240
  log_every: 1
  eval_sequences: 8
  export: false
checkpoint:
  every_steps: 5
  keep: 2
"""


def write_recipe(folder: Path, data: str, run: str = "run") -> Path:
    """A recipe whose run folder is folder/run."""
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(repo=REPO, data=data, run=folder / run))
    return path


TINY = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def write_run(folder: Path, data: str, deepspeed: dict[str, Any], train: dict[str, Any], /, **sections: Any) -> Path:
    """A recipe at a constant learning rate whose run folder is folder/run, and its JSON. `sections`: in place of these,
    or more."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ds.json").write_text(json.dumps(deepspeed))
    tree = {
        "deepspeed": str(folder / "ds.json"),
        "model": {"config": TINY},
        "data": {"path": data, "sequence_length": 32},
        "optim": {"lr": 3e-3},
        "schedule": {"name": "constant"},
        "train": {"run_dir": str(folder / "run"), "log_every": 1, "eval": False, "export": False, **train},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree | sections, sort_keys=False))
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def installed_by_make(folder: Path) -> Path:
    """Make a virtual environment with what `make train` installs in a fresh clone and nothing else.

    Its packages are links to this interpreter's. Returns its interpreter, whose folder has the commands.
    """
    rule = (REPO / "Makefile").read_text().partition("$(VENV)/.run: ")[2].partition("\n\n")[0]
    [extras] = re.findall(r"-e '?\.(?:\[([\w,-]+)\])?", rule)
    wanted, found = ["torch", "setuptools", f"llmtrain[{extras}]"], set[str]()
    venv.create(folder, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    while wanted:
        asked = Requirement(wanted.pop())
        for extra in asked.extras or {""}:
            if (key := f"{asked.name}[{extra}]") in found:
                continue
            found.add(key)
            try:
                package = distribution(asked.name)
            except PackageNotFoundError:  # another platform's, or pip could not install it either
                continue
            for each in map(Requirement, package.requires or []):
                if each.marker is None or each.marker.evaluate({"extra": extra}):
                    wanted.append(str(each).partition(";")[0])
            for file in package.files or []:
                path = Path(str(package.locate_file(file)))
                if file.parts[0] != ".." and asked.name != "llmtrain":
                    top = Path(str(package.locate_file(file.parts[0])))
                    if not (site / top.name).is_symlink():
                        (site / top.name).symlink_to(top)
                elif file.parts[-2:-1] == ("bin",) and not (command := folder / "bin" / file.name).exists():
                    command.write_bytes(path.read_bytes().replace(f"#!{sys.prefix}/".encode(), f"#!{folder}/".encode()))
                    command.chmod(0o755)
    (site / "llmtrain.pth").write_text(f"{REPO}\n")
    return folder / "bin/python"


def environment(**extra: str) -> dict[str, str]:
    """The user's environment with this interpreter's tools first; one thread a rank."""
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    env.update(PATH=f"{Path(sys.executable).parent}:{env['PATH']}", OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", **extra)
    return env


def launch(
    recipe: Path, *overrides: str, slots: int = 2, env: dict[str, str] | None = None, warm: WarmCommands | None = None
) -> subprocess.Popen[str]:
    """Start `deepspeed --hostfile ... launch/train.py --config RECIPE ...`; output goes to the pipe."""
    words = (str(REPO / "launch/train.py"), "--config", str(recipe), *overrides)
    return deepspeed(recipe.parent, *words, slots=slots, env=env, warm=warm)


def deepspeed(
    folder: Path, *words: str, slots: int = 2, env: dict[str, str] | None = None, warm: WarmCommands | None = None
) -> subprocess.Popen[str]:
    """Start `deepspeed --hostfile ... SCRIPT ...` in a folder; output goes to the pipe.

    `warm`: what forks launcher and ranks; without it their interpreters start.
    """
    hosts = folder / f"hosts{slots}"
    hosts.write_text(f"localhost slots={slots}\n")
    command = [
        "deepspeed",
        *("--hostfile", str(hosts), "--no_ssh_check", "--master_addr", "127.0.0.1"),
        *("--master_port", str(free_port())),
        *words,
    ]
    env = env or environment()
    if warm is not None:
        env = {**env, "PATH": f"{warm.python.parent}:{env['PATH']}"}
    return (warm.popen if warm else subprocess.Popen)(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 180) -> tuple[int, str]:
    """(exit code, output)."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        kill_tree(process)
        raise
    return process.returncode, output


def train(recipe: Path, *overrides: str, slots: int = 2) -> str:
    """A run that must end well; its output."""
    code, output = finish(launch(recipe, *overrides, slots=slots))
    assert code == 0, output
    return output


def tree(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The launcher and all that it started."""
    try:
        root = psutil.Process(process.pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The training processes, rank 0 first."""
    found = []
    for child in tree(process):
        try:
            command = child.cmdline()
            if any(word.endswith("launch/train.py") for word in command) and "--local_rank=" in " ".join(command):
                found.append((next(w for w in command if w.startswith("--local_rank=")), child))
        except psutil.Error:
            continue
    return [child for _, child in sorted(found, key=lambda pair: pair[0])]


def kill_tree(process: subprocess.Popen[str]) -> None:
    """SIGKILL for the launcher and everything below it, at once."""
    for each in tree(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGKILL)
    process.wait(timeout=30)


def rows(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The complete lines of a jsonl file; none if it is not there."""
    path = run / name
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def resumed(run: Path) -> list[int]:
    """Steps at which launches have resumed the run."""
    return [event["step"] for event in rows(run, "events.jsonl") if event["kind"] == "resume"]


def losses(run: Path) -> dict[int, float]:
    """Training loss by step."""
    return {row["step"]: row["loss"] for row in rows(run) if "loss" in row}


def wait_for_step(process: subprocess.Popen[str] | Launch, run: Path, step: int, timeout_s: float = 240) -> None:
    """Until the run has logged a step."""
    deadline = time.monotonic() + timeout_s
    while max(losses(run), default=-1) < step:
        if isinstance(process, subprocess.Popen):
            assert process.poll() is None, finish(process)[1]
        else:
            assert process.alive(), process.output()
        assert time.monotonic() < deadline, f"no step {step} within {timeout_s} s"
        time.sleep(0.05)


def gone(processes: list[psutil.Process], timeout_s: float) -> bool:
    """Whether all of them end within the time."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def tiny_folder(folder: Path, seed: int) -> Path:
    """A Hugging Face folder of the model TINY."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(**{key: value for key, value in TINY.items() if key != "model_type"})
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
