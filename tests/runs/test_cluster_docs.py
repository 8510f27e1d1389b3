"""docs/cluster.md: its commands run, its table of exit codes is the program's, its examples are read."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from llmtrain.cluster.hosts.hostfile import read_hostfile, select
from llmtrain.cluster.hosts.variables import PREFIXES, read_env_file, travelling
from llmtrain.cluster.launch import attempts
from llmtrain.cluster.launch.placement import Placement, place_lines
from llmtrain.commands.launch import MAX_RESTARTS
from tests.helpers.warm import WarmCommands
from tests.runs.test_docs import ROOT, Workplace

PAGE = ROOT / "docs/cluster.md"
TEXT = PAGE.read_text()
COMMANDS = [block.strip() for block in re.findall(r"^```bash\n(.*?)^```", TEXT, flags=re.M | re.S)]
ELSEWHERE = {
    "llmtrain doctor --hostfile hosts --config launch/recipes/llama_1b.yaml": "tests/cluster runs doctor in a lab",
    "deepspeed --hostfile hosts launch/train.py --config launch/recipes/llama_1b.yaml": "needs a cluster of GPUs",
    "sbatch launch/slurm.sbatch launch/recipes/llama_1b.yaml": "tests/cluster/test_slurm_launch.py runs the script",
}


@pytest.fixture(scope="module")
def place(small_data: str, tmp_path_factory: pytest.TempPathFactory, warm: WarmCommands) -> Workplace:
    place = Workplace(tmp_path_factory.mktemp("cluster-docs"), small_data)
    (place.path / "hosts").write_text("localhost slots=2\n")
    place.env = warm.environment(WANDB_MODE="disabled", HF_HUB_OFFLINE="1")
    return place


def run(place: Workplace, command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-ec", command], cwd=place.path, env=place.env, capture_output=True, text=True, timeout=400
    )


def test_commands_run(place: Workplace) -> None:
    mine = [command for command in COMMANDS if command not in ELSEWHERE]
    assert set(ELSEWHERE) <= set(COMMANDS) and len(mine) == 5, "a command of the page is not run"
    launched = 0
    for command in mine:
        if launched and "--dry-run" not in command:  # starting a run takes its time: once, with all the page's flags
            continue
        if "--dry-run" not in command:
            command = next(c for c in mine if "--env-file" in c).replace("--train.max_steps 20", "--train.max_steps 4")
            command = command.replace("--env-file", "--preempt-file /tmp/no-such-notice --env-file")
            command += f" --checkpoint.dir {place.path / 'disk'}"
            launched += 1
        done = run(place, command)
        assert done.returncode == 0, (command, done.stdout[-3000:], done.stderr[-3000:])
        if "--dry-run" in command:
            assert "1 host, 2 ranks" in done.stdout and "ranks 0 to 1" in done.stdout
        else:
            assert re.search(r"^rank 1 -> localhost.* -> .*, local rank 1$", done.stderr, flags=re.M)
            assert not re.search(r"llmtrain:[0-9a-f]*: ", done.stdout)
    assert launched == 1
    assert list((place.path / "disk").glob("step-00000004/manifest.json"))


def test_a_mistake_is_told_before_anything_starts(place: Workplace) -> None:
    (place.path / "wrong").write_text("a slots=0\nb\na slots=1\n-oProxyCommand=x slots=2\n")
    done = run(place, "llmtrain launch --hostfile wrong -- launch/recipes/quickstart.yaml || exit $?")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert [f"line {n}:" in done.stderr for n in (1, 2, 3, 4)] == [True] * 4
    odd = "llmtrain launch --hostfile hosts -- launch/recipes/quickstart.yaml --train.global_batch 7 || exit $?"
    done = run(place, odd)
    assert done.returncode == 2 and "train.global_batch" in done.stderr and "world size 2" in done.stderr


def test_what_the_page_says_of_the_program() -> None:
    told = TEXT[TEXT.index("Those of launch") : TEXT.index("## Slurm")]
    codes = [int(code) for code in re.findall(r"(?:: |;\s)(\d+),\s", told)]
    assert codes == [0, attempts.FAULT_CODE, 2, 3, attempts.PREEMPTED_CODE, attempts.INTERRUPTED_CODE]
    assert f"| `--max-restarts N` | {MAX_RESTARTS} |" in TEXT
    assert all(name.startswith(PREFIXES) for name in re.findall(r"`([A-Z]+_?)\*`", TEXT))
    assert f"({attempts.BACKOFF_S:.0f} s, doubled" in TEXT and f"at most {attempts.MAX_BACKOFF_S / 60:.0f} min" in TEXT
    shown = re.search(r"^(rank 0 -> .*)$", TEXT, flags=re.M)
    rank = {"rank": 0, "host": "node-01", "local_rank": 0, "device": "NVIDIA H100 80GB HBM3"}
    hosts = read_hostfile(ROOT / "launch/hostfile.example")
    plan = Placement(hosts=hosts, words=(), travel=travelling({}))
    assert shown is not None and place_lines(plan, [rank]) == [shown[1]]


def test_the_examples_of_the_page(tmp_path: Path) -> None:
    hosts = read_hostfile(ROOT / "launch/hostfile.example")
    example = re.search(r"^```text\n(node-01 .*?)^```", TEXT, flags=re.M | re.S)
    (tmp_path / "hosts").write_text(example[1] if example else "")
    assert [(h.name, h.slots) for h in read_hostfile(tmp_path / "hosts")] == [(h.name, h.slots) for h in hosts]
    assert [h.slots for h in select(hosts, "node-01@node-02:0,1", None)] == [8, 2]
    assert set(read_env_file(ROOT / "launch/env.example")) == {"WANDB_MODE", "HF_HUB_OFFLINE", "OMP_NUM_THREADS"}
