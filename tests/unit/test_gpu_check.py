"""tools/gpu_check.sh and its table: parts, what a cut-off part leaves, on a machine that only seems to have a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from llmtrain.config.run import ModelConfig
from llmtrain.models.parallel.layers import set_up_layers
from tests.helpers.prepared import write_prepared
from tests.runs.test_bench import load

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
# A python3 with a GPU: it notes what it is asked to run; tests fail, 8b does not fit, host takes too long.
case "$*" in
  -c*) exit 0;;
  *gpu_table.py*) exec REAL "$@";;
  *facts.py*) echo "a GPU | python 3";;
esac
echo "$*" >> LOG
env | grep -E "^(TMPDIR|GLOO_SOCKET_IFNAME|NCCL_SOCKET_IFNAME|PYTHON.*)=" >> LOG.env
case "$*" in
  *"-m pytest"*) echo "[gw0] [ 50%] PASSED tests/gpu/a.py::b"; exit 1;;
  *"--preset 8b"*) exit 3;;
  *"--preset 1.2b --only llmtrain trainer"*)
    setsid sleep 300 & echo $! > LOG.left
    [ "${ESCAPED:-}" ] && env -i PATH="$PATH" setsid sleep 300 & echo $! > LOG.escaped;;
  *"--preset 0.5b --sequence 128"*) mkdir -p "$TMPDIR/left"; exec sleep ${HOST_S:-60};;
esac
exit 0
"""


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """A clone without .venv, and a python3 that has CUDA and all packages."""
    text = PYTHON.replace("REAL", sys.executable).replace("LOG", str(tmp_path / "log"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").write_text(text)
    (tmp_path / "bin/python3").chmod(0o755)
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone/tools").symlink_to(ROOT / "tools")
    script = tmp_path / "clone/check.sh"
    script.write_text(
        (ROOT / "tools/gpu_check.sh").read_text().replace('cd "$(dirname "$0")/.."', f"cd {tmp_path}/clone")
    )
    return {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}


def check(tmp_path: Path, env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    argv = ["bash", str(tmp_path / "clone/check.sh"), *words]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


def kept(tmp_path: Path) -> set[str]:
    with tarfile.open(tmp_path / "kept/figures.tar") as tar:
        return {name.removeprefix("./") for name in tar.getnames()}


def test_the_parts_that_are_asked_for_run_and_a_failed_one_is_named(tmp_path: Path, machine: dict[str, str]) -> None:
    done = check(tmp_path, machine, str(tmp_path / "out"), "tests", "8b", "parity")
    asked = (tmp_path / "log").read_text().splitlines()
    assert done.returncode == 1 and "FAILED: tests;" in done.stdout, done.stdout + done.stderr
    assert "gpu-check: 8b: skipped" in done.stdout
    assert asked[0] == "tools/bench/facts.py" and "tests/gpu" in asked[1] and "--preset 8b --only llmtrain" in asked[2]
    assert len(asked) == 5 and all("parity launch/recipes/quickstart.yaml" in line for line in asked[3:])
    assert json.loads((tmp_path / "out/parity.json").read_text())["passed"] == ["zero2", "zero3"]
    assert "tests/gpu: 1 passed, 0 failed, 0 skipped, cut off" in done.stdout
    assert (
        "not measured: facts, 0.5b, 1.2b, 8b, 1.2b-fp8, 8b-fp8, host, saves, context-1b, context-8b, lora-8b, sft-1b, "
        "lora-1b, packing, packing-dpo, moe" in done.stdout
    )
    found = (tmp_path / "log.env").read_text()
    assert "GLOO_SOCKET_IFNAME=lo" in found and "NCCL_SOCKET_IFNAME=lo" in found
    assert "PYTHONDONTWRITEBYTECODE" not in found and f"PYTHONPATH={tmp_path}/clone:" in found


def test_parts_are_held_to_the_deadline_and_begin_only_with_their_least_time(
    tmp_path: Path, machine: dict[str, str]
) -> None:
    """`facts`, asked for last, comes first, in the process that looks for the GPU; `host` would take for ever."""
    script = tmp_path / "clone/check.sh"
    shorter = {":-30": ":-3", "$(left) - 6": "$(left) - 1", "most > 5": "most > 1"}  # a test's seconds
    for before, after in shorter.items():
        assert before in script.read_text()
        script.write_text(script.read_text().replace(before, after))
    words = ["--seconds", "5", "--keep", str(tmp_path / "kept"), str(tmp_path / "out"), "host", "1.2b", "facts"]
    done = check(tmp_path, {**machine, "TMPDIR": str(tmp_path)}, *words)
    asked = (tmp_path / "log").read_text().splitlines()
    assert asked[0].startswith("tools/bench/facts.py --json") and "--sequence 128" in asked[1] and len(asked) == 2
    assert done.returncode == 1 and "gpu-check: host: cut off" in done.stdout, done.stdout + done.stderr
    assert re.search(r"1\.2b: \d s are left, of the 80 that it takes at least: not begun", done.stdout)
    assert "FAILED: host;" in done.stdout and "gpu-check: not begun: 1.2b;" in done.stdout
    assert "gpu-check.log" in kept(tmp_path)
    held = re.search(r"^TMPDIR=(.*)$", (tmp_path / "log.env").read_text(), re.MULTILINE)
    assert held is not None and not Path(held[1]).exists()  # what a part that was cut off had left there is gone


@pytest.mark.parametrize("escaped", ["", "1"])
def test_what_a_part_leaves_running_does_not_hold_the_callers_output(
    tmp_path: Path, machine: dict[str, str], escaped: str
) -> None:
    """`... 2>&1 | tee log` waited for it, on a machine that is lent by the second."""
    began_s = time.monotonic()
    done = check(tmp_path, {**machine, "ESCAPED": escaped}, str(tmp_path / "out"), "1.2b")
    assert time.monotonic() - began_s < 60 and "gpu-check: passed" in done.stdout, done.stdout
    left, other = (int((tmp_path / f"log.{name}").read_text()) for name in ("left", "escaped"))
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE
    if escaped:  # nobody knows it any more
        os.kill(other, signal.SIGKILL)
    assert (tmp_path / "out/gpu-check.log").read_text() == done.stdout


def test_no_folder_for_the_figures_ends_the_call_and_a_part_that_did_not_begin_is_no_pass(
    tmp_path: Path, machine: dict[str, str]
) -> None:
    (tmp_path / "file").write_text("")
    for words in ([str(tmp_path / "file")], ["--keep", str(tmp_path / "file"), str(tmp_path / "out")]):
        done = check(tmp_path, machine, *words, "1.2b")
        assert done.returncode == 2 and f"gpu-check: {tmp_path}/file cannot be made" in done.stderr, done.stderr
        assert not (tmp_path / "log").exists()
    done = check(tmp_path, machine, "--seconds", "30", str(tmp_path / "out"), "1.2b", "moe")
    assert done.returncode == 1 and "gpu-check: not begun: 1.2b moe;" in done.stdout and "passed" not in done.stdout


def test_tests_on_a_gpu_need_no_hypothesis() -> None:
    """Their conftest ended on a rented machine without it."""
    code = "import sys; sys.modules['hypothesis'] = None; import tests.conftest"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_layers_that_are_compiled_are_called_so() -> None:
    """The table said of every run that they were not."""
    contestants, model = load("contestants"), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    settings = ModelConfig(config={}, compile_layers=True)
    assert not contestants.is_compiled(model)
    set_up_layers(model, list(model), settings, SimpleNamespace(recomputes=False, zero_stage=1))  # type: ignore[arg-type]
    assert contestants.is_compiled(model)


def test_a_save_that_is_measured_is_kept_at_once(tmp_path: Path) -> None:
    """Of two ranks, with one timed round of the first saver and none of the second."""
    assert load("checkpoint")  # it lets its neighbours be imported
    savers = load("savers")

    def save(blocked_s: float) -> Any:
        return savers.Save(blocked_s=blocked_s, lost_s=1.0, seconds=2.0, bytes=24)

    everywhere = [({"llmtrain": [save(0.1)]}, [0.5, 0.7]), ({"llmtrain": [save(0.3)]}, [0.6, 0.6])]
    found = savers.figures(everywhere)
    assert found["saves"] == {"llmtrain": {"blocked_s": 0.3, "lost_s": 1.0, "seconds": 2.0, "bytes": 24}}
    assert found["step_s"] == pytest.approx(0.65)


def test_a_ceiling_warms_up_for_as_long_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three seconds of products had become 7.6, out of 545."""
    facts, now_s = load("facts"), [0.0]

    def product() -> None:
        now_s[0] += 1.4e-3

    monkeypatch.setattr(facts.time, "perf_counter", lambda: now_s[0])
    assert facts.Ceilings("cpu", 64)._seconds(product, least_s=3.0) == pytest.approx(1.4e-3)
    assert now_s[0] < 4.0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_what_is_kept_opens_after_a_kill(tmp_path: Path, machine: dict[str, str], how: signal.Signals) -> None:
    script = tmp_path / "clone/check.sh"
    script.write_text(script.read_text().replace("sleep 5;", "sleep 0.2;"))
    words = ["--keep", str(tmp_path / "kept"), str(tmp_path / "out"), "facts", "host"]
    with open(tmp_path / "said", "w") as said:
        process = subprocess.Popen(["bash", str(script), *words], env=machine, stdout=said, stderr=said)
    wait_for(lambda: (tmp_path / "log").is_file() and "--sequence 128" in (tmp_path / "log").read_text())
    (tmp_path / "out/1.2b.json").write_text("{}")
    (tmp_path / "out/cache/kernel").write_text("")
    if how == signal.SIGKILL:
        wait_for(lambda: (tmp_path / "kept/figures.tar").is_file() and "1.2b.json" in kept(tmp_path))
    stuck = the_sleep(process.pid)
    process.send_signal(how)
    process.wait(timeout=60)
    assert "1.2b.json" in kept(tmp_path) and not any("kernel" in name for name in kept(tmp_path))
    if how == signal.SIGTERM:
        stuck.wait(timeout=60)
    else:
        stuck.kill()


def the_sleep(pid: int) -> psutil.Process:
    """The process that stands for a part that does not end, once it has begun."""
    found: list[psutil.Process] = []

    def begun() -> bool:
        for each in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if each.name() == "sleep" and "60" in each.cmdline():
                    found.append(each)
        return bool(found)

    wait_for(begun)
    return found[0]


def wait_for(what: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + 60
    while not what():
        assert time.monotonic() < limit_s
        time.sleep(0.05)


def test_the_first_command_of_the_page_takes_its_parts_in_order(tmp_path: Path, machine: dict[str, str]) -> None:
    """As it is typed, in a folder without git; a person has 15 minutes, and each part its place in them."""
    page = (ROOT / "docs/developers/benchmarks.md").read_text()
    commands = re.findall(r"^    (unset PYTHONDONTWRITEBYTECODE; tools/gpu_check.sh .*)$", page, re.MULTILINE)
    assert len(commands) == 2
    (tmp_path / "clone/tools").unlink()
    (tmp_path / "clone/tools").mkdir()
    for each in (ROOT / "tools").iterdir():
        if each.name != "gpu_check.sh":
            (tmp_path / "clone/tools" / each.name).symlink_to(each)
    (tmp_path / "clone/check.sh").rename(tmp_path / "clone/tools/gpu_check.sh")
    (tmp_path / "clone/tools/gpu_check.sh").chmod(0o755)
    (tmp_path / "kept").mkdir()
    for command in commands:
        (tmp_path / "log").unlink(missing_ok=True)
        env = {**machine, "OUT": str(tmp_path / "kept")}
        done = subprocess.run(["bash", "-c", command], env=env, cwd=tmp_path / "clone", capture_output=True, text=True)
        parts = command.split("runs/gpu ")[1].split(" >")[0].split()
        asked = [line for line in (tmp_path / "log").read_text().splitlines() if "gpu_table" not in line]
        first = {
            "1.2b": "--preset 1.2b --only llmtrain trainer plain",
            "tests": "-m pytest",
            "lora-8b": "--only lora --preset 8b",
            "saves": "checkpoint.py --preset 0.5b --only saves",
            "1.2b-fp8": "--only llmtrain tensorwise",
            "moe": "experts.py --preset gpu",
            "parity": "llmtrain parity",
        }
        wanted = [first[part] for part in parts if part != "facts"]
        assert "facts.py" in asked[0] and [any(each in line for line in asked) for each in wanted] == [True] * len(
            wanted
        )
        places = [next(at for at, line in enumerate(asked) if each in line) for each in wanted]
        assert places == sorted(places), asked
        assert {"log.txt", "figures.tar"} <= {path.name for path in (tmp_path / "kept").iterdir()}, done.stderr


@pytest.mark.parametrize(
    ("gib", "part", "contestants", "together"),
    [
        (139, "0.5b", 3, True),
        (139, "1.2b", 3, True),
        (139, "8b", 1, True),
        (139, "sft", 3, True),
        (78, "0.5b", 3, False),
        (78, "1.2b", 3, False),
        (78, "8b", 0, True),
        (78, "sft", 3, False),
    ],
)
def test_each_part_fits_an_h100_and_an_h200(gib, part, contestants, together, capsys) -> None:
    """Three contestants at a time took 82 GiB of an H100's 78: the part died, and ours was not measured either.

    The counts are held to tensors without memory by tests/unit/models/test_fake_steps.py.
    """
    speed, tuning = load("train_speed"), load("posttraining")
    names = speed.NAMES if part in ("0.5b", "1.2b") else (speed.OURS,)
    if part == "sft":
        options = tuning.arguments(["--only", "sft", "--preset", "1.2b"])
        options.batch, needs, alike = tuning.what_fits(options, ("llmtrain full", "trainer full", "trl sft"), gib)
        assert options.batch == (4 if together else 2) and alike is together
        assert all(need.alone <= gib for need in needs)
        return
    preset = speed.PRESETS[part]
    task = speed.Task(
        folder="",
        model=preset.model,
        sequence=preset.sequence,
        micro_batch=preset.micro_batch,
        accumulation=1,
        bf16=True,
        eager=False,
        contestants=names,
        threads=1,
        steps_per_round=1,
        rounds=1,
    )
    left, at_a_time = speed.arrange(preset, part, task, float(gib))
    assert (len(left), at_a_time) == (contestants, together)
    said = capsys.readouterr().out
    assert all(word in said for word in ("8b: ", "128 GiB", "78", "skipped")) is (contestants == 0)
    assert ("each alone" in said) is not together


def test_a_peer_that_dies_leaves_our_figures_and_one_after_another_is_a_race_too(capsys) -> None:
    speed = load("train_speed")
    task = SimpleNamespace(contestants=("llmtrain", "plain", "trainer"), rounds=3, threads=1)
    for together in (True, False):
        seen: list[dict[str, int]] = []
        found = speed.race(
            task, lambda r, seen=seen: seen.append({k: len(v) for k, v in r.items()}), _contestant, together=together
        )
        assert {name: len(rounds) for name, rounds in found.items()} == {"llmtrain": 2, "trainer": 2}
        assert seen[0] == ({"llmtrain": 1, "trainer": 1} if together else {"llmtrain": 1})
        assert "plain: " in (said := capsys.readouterr().out) and "left out" in said


def _contestant(name: str, pipe: Any, task: Any) -> None:
    """One that answers each word; plain dies in its second round."""
    pipe.send(None)
    for turn in range(task.rounds):
        pipe.recv()
        if name == "plain" and turn:
            os._exit(1)
        pipe.send(turn)
    pipe.recv()
    pipe.send("end")


def test_an_unknown_part_is_refused_with_those_that_there_are(tmp_path: Path, machine: dict[str, str]) -> None:
    done = check(tmp_path, machine, str(tmp_path / "out"), "2b")
    assert done.returncode == 2 and "2b" in done.stderr and "facts 1.2b" in done.stderr
    done = check(tmp_path, machine, "--second", "5", str(tmp_path / "out"), "1.2b")
    assert done.returncode == 2 and all(word in done.stderr for word in ("--second ", "--seconds", "--keep"))
    assert not (tmp_path / "log").exists()


def test_the_table_shows_what_is_there(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from gpu_table import table  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    ours = {"tokens_per_s": 112345.6, "ms_per_step": 291.7, "peak_gib": 61.2}
    kernel = {
        "mfu_causal": 0.4321,
        "mfu_noncausal": 0.475,
        "attention": "_scaled_dot_product_cudnn_attention",
        "compiled": True,
    }
    speed = {
        "machine": {"torch": "2.13.0", "device": "NVIDIA H200"},
        "task": {"steps_per_round": 10},
        "clock_mhz": 1755.0,
        "power_w": 650.4,
        "contestants": {"llmtrain": {**ours, **kernel}, "trainer": {**ours, "tokens_per_s": 70000.0}},
        "speed_of_ours_over": {"trainer": 1.61},
        "losses": [1.0] * 22,
    }
    (tmp_path / "0.5b.json").write_text(json.dumps(speed))
    save = {"blocked_s": 0.02, "lost_s": 0.031, "bytes": 24.0}
    (tmp_path / "saves.json").write_text(json.dumps({"saves": {"llmtrain": save}, "parameters": 2}))
    row = {**ours, "ours_over_it": 0.5, "loss_difference": 2e-3}
    (tmp_path / "lora-1b.json").write_text(json.dumps({"contestants": {"llmtrain lora": row, "trl lora": row}}))
    packed = {**ours, "counted_per_s": 30123.0, "ours_over_it": 0.25, "loss_difference": 2e-3, "held_out": 1.5}
    (tmp_path / "packing.json").write_text(json.dumps({"contestants": {"llmtrain full": packed, "trl sft": packed}}))
    (tmp_path / "context-8b.json").write_text(json.dumps({"llmtrain": {"tokens": 196608}}))
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite tests="30" failures="1" errors="0" skipped="2" time="201.4"/></testsuites>'
    )
    moe = {"zero": 1, "experts": 128, "contestants": {"llmtrain": {**ours, **kernel}}, "speed_of_ours_over": {}}
    (tmp_path / "moe.json").write_text(json.dumps({"tables": [moe]}))
    (tmp_path / "facts.json").write_text(json.dumps({"programs": ["g++"], "bf16_tflops": 798.25}))
    shown = table(tmp_path)
    assert shown.startswith("torch 2.13.0, device NVIDIA H200\ntests/gpu: 27 passed, 1 failed, 2 skipped, 201 s\n")
    assert "\nbf16_tflops 798.2\n" in shown
    of_ours = "| 0.5b (2 rounds) | llmtrain | 112,346 | 43.2%, 47.5% | 291.7 | 61.2 |  | 110,000 | "
    assert f"{of_ours}scaled_dot_product_cudnn_attention, compiled |" in shown
    assert "| 0.5b (2 rounds) | trainer | 70,000 |  | 291.7 | 61.2 | 1.61 | 1.5 |  |" in shown
    assert "| 1755 MHz, 650 W |" in shown
    assert "| llmtrain | 0.020 | 0.031 | 12.000 |" in shown and "196,608 tokens: did not fit" in shown
    assert "| lora-1b | trl lora | 112,346 |  | 291.7 | 61.2 | 2.00 | 2.0e-03 |  |  |" in shown
    assert "| packing | trl sft | 30,123 | 61.2 | 4.00 | 2.0e-03 | 1.50000 |" in shown
    assert "| 1 | 128 | llmtrain | 112,346 | 43.2%, 47.5% | 291.7 | 61.2 |  |  |" in shown
    assert shown.endswith(
        "not measured: 1.2b, 8b, 1.2b-fp8, 8b-fp8, host, parity, context-1b, lora-8b, sft-1b, packing-dpo"
    )
    (tmp_path / "0.5b.json").write_text(json.dumps({**speed, "machine": {"device": "NVIDIA H100 80GB HBM3"}}))
    assert "| 92,000 to 105,000 |" in table(tmp_path)


def test_every_part_asks_for_what_its_benchmark_has(tmp_path: Path, machine: dict[str, str]) -> None:
    """tests/runs/test_gpu_check_parts.py runs them all, for minutes."""
    done = check(tmp_path, {**machine, "HOST_S": "0"}, str(tmp_path / "out"))
    asked = [line.split("|")[0] for line in (tmp_path / "log").read_text().splitlines() if "tools/bench" in line]
    for line in asked:
        tool, *words = shlex.split(line.replace("dcp thread", "'dcp thread'"))
        load(Path(tool).stem).arguments(words)
    every = re.search(r"^all=\(([^)]*)\)", (ROOT / "tools/gpu_check.sh").read_text(), re.MULTILINE)
    assert every is not None
    parts = every[1].split()
    assert re.findall(r"gpu-check: (\S+): ended", done.stdout) == parts and len(asked) == len(parts) - 2
    files = {re.search(r"--json \S+/([\w.-]+)\.json", line)[1] for line in asked}  # type: ignore[index]
    assert files == set(parts) - {"tests", "parity"}


def test_a_figure_names_its_commit_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without git ended every benchmark before its first step; a tree without .git has .wheels/COMMIT."""
    machine = load("machine")
    clone = tmp_path / "clone"
    (clone / "llmtrain").mkdir(parents=True)
    (clone / "llmtrain/a.py").write_text("")
    (clone / ".wheels").mkdir()
    monkeypatch.setattr(machine, "ROOT", clone)
    monkeypatch.setattr(machine, "_KEPT", clone / ".wheels/COMMIT")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.about()["commit"] == ""
    (clone / ".wheels/COMMIT").write_text(f"abc1234 {machine._sources()}\n")
    assert machine.about()["commit"] == "abc1234"
    (clone / ".git").mkdir()  # there, but no program that reads it
    (clone / "llmtrain/a.py").write_text("changed = True\n")
    assert machine.about()["commit"] == "abc1234 and changes"


def test_the_part_parity_compares_runs_that_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Muon refuses the sums in fp32 of the shipped files: the part ended at its first one."""
    from llmtrain.cli import main

    text = (ROOT / "tools/gpu_check.sh").read_text()
    loop = re.search(r"for name in ([\w ]+); do\n.*parity (\S+) --deepspeed \S+ \\\n *(--\S.*?) --ranks", text)
    assert loop is not None
    monkeypatch.chdir(ROOT)
    data = write_prepared(tmp_path / "data", [[[1, 2, 3] * 2000]], [[[1, 2, 3] * 2000]], vocab_size=512)
    for name in loop[1].split():
        words = [loop[2], "--deepspeed", f"ds_configs/{name}.json", *loop[3].split(), "--data.path", str(data)]
        assert main(["config", "check", *words]) == 0, capsys.readouterr()
