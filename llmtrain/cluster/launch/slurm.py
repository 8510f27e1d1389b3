"""Slurm: takes the hosts from its variables, and srun in place of ssh. As a program: the task that srun starts for each
rank.

Hosts are not asked before a start: either Slurm has started this program on all of them, or it has failed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from llmtrain import features
from llmtrain.base.errors import ConfigError, number_in
from llmtrain.cluster.hosts.hostfile import Host, name_problem
from llmtrain.cluster.launch.job import TRAIN

MAX_HOSTS = 100_000
_ANSWERS_S = 30.0
_TRIES, _PAUSE_S = 3, 2.0

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_TASKS = re.compile(r"([1-9]\d{0,3})(?:\(x([1-9]\d{0,5})\))?")
_PIECE = re.compile(r"([^\[\],]*)(?:\[([^\[\]]*)\])?")


def expand(nodelist: str) -> list[str]:
    """Return the names in Slurm's list, such as `node[001-004,007],gpu-a` or `rack[1-2]n[01-16]`. Raises
    ConfigError."""
    names: list[str] = []
    at = 0
    while at <= len(nodelist):
        word = [""]
        while True:  # the pieces of one word, each some text and perhaps a bracket
            piece = _PIECE.match(nodelist, at)
            assert piece is not None  # the pattern matches the empty string, too
            at = piece.end()
            ends = _numbers(piece[2], nodelist) if piece[2] is not None else [""]
            if len(word) * len(ends) + len(names) > MAX_HOSTS:
                raise _wrong(nodelist, f"names more than {MAX_HOSTS} hosts")
            word = [head + piece[1] + end for head in word for end in ends]
            if piece[2] is None:
                break
        if at < len(nodelist) and nodelist[at] != ",":
            raise _wrong(nodelist, f"has a misplaced {nodelist[at]!a}")
        for name in word:
            if (problem := name_problem(name)) is not None:
                raise _wrong(nodelist, problem)
        names += word
        at += 1
    if len(set(names)) != len(names):
        raise _wrong(nodelist, "names a host twice")
    return names


def _numbers(text: str, nodelist: str) -> list[str]:
    """Return the numbers in `001-003,7`: 001 002 003 7."""
    numbers: list[str] = []
    for part in text.split(","):
        matched = _RANGE.fullmatch(part)
        if matched is None or len(part) > 20:
            raise _wrong(nodelist, f"has {part!a} between brackets, instead of numbers and ranges")
        first, last = int(matched[1]), int(matched[2] or matched[1])
        if not 0 <= last - first < MAX_HOSTS:
            raise _wrong(nodelist, f"has the range {part!a}")
        numbers += [f"{number:0{len(matched[1])}}" for number in range(first, last + 1)]
    return numbers


def _wrong(nodelist: str, why: str) -> ConfigError:
    shown = nodelist if len(nodelist) <= 200 else f"{nodelist[:200]}..."
    return ConfigError(f"SLURM_JOB_NODELIST={shown!a} {why}: Slurm sets this variable; do not set it by hand")


def tasks_per_node(text: str, nodes: int) -> list[int]:
    """Return the counts in `8(x4),4`: 8 8 8 8 4. Raises ConfigError if their number is not `nodes`."""
    counts: list[int] = []
    for part in text.split(","):
        matched = _TASKS.fullmatch(part)
        if matched is None:
            raise ConfigError(f"SLURM_TASKS_PER_NODE={text!a} has {part!a} instead of COUNT or COUNT(xNODES)")
        counts += [int(matched[1])] * int(matched[2] or 1)
    if len(counts) != nodes:
        rule = f"has counts for {len(counts)} nodes, but SLURM_JOB_NODELIST names {nodes}"
        raise ConfigError(f"SLURM_TASKS_PER_NODE={text!a} {rule}: give sbatch --nodes and --ntasks-per-node")
    return counts


def hosts_of(environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the hosts of this allocation, one slot for each task. Raises ConfigError."""
    missing = [name for name in ("SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE") if not environ.get(name)]
    if missing:
        raise ConfigError(
            f"--launcher slurm: {missing[0]} is not set: start launch within an allocation (salloc, or sbatch: "
            "`llmtrain init DIR` writes a script), with --ntasks-per-node"
        )
    names = expand(environ["SLURM_JOB_NODELIST"])
    counts = tasks_per_node(environ["SLURM_TASKS_PER_NODE"], len(names))
    return tuple(
        Host(name=name, slots=count, devices=tuple(range(count)), line=number)
        for number, (name, count) in enumerate(zip(names, counts, strict=True), start=1)
    )


def command(hosts: Sequence[Host], words: Sequence[str], step: str) -> list[str]:
    """Return the srun command that starts a process for each rank, with unchanged words and environment. `step`: the
    name of the job step, for `ask_to_leave`. Rank 0 is on the first host of SLURM_HOSTFILE, whatever Slurm's order."""
    # srun waits until the step before has given back its cores and GPUs. A step that has lost a host never does so
    # (Slurm 22.05, sbatch --no-kill), and the step on the hosts that are left would wait for ever.
    fewer = len(hosts) < number_in("SLURM_JOB_NUM_NODES", 0)
    return [
        *("srun", f"--job-name={step}", f"--nodes={len(hosts)}", f"--ntasks={sum(host.slots for host in hosts)}"),
        *("--distribution=arbitrary", "--export=ALL", *(("--overlap",) if fewer else ())),
        # With an agent, it ends the job, and says why.
        *(f"--kill-on-bad-exit={0 if features.agent() else 1}", "--wait=0"),
        *(sys.executable, "-u", "-m", "llmtrain.cluster.launch.slurm", *words),
    ]


def ask_to_leave(step: str) -> str | None:
    """Send SIGTERM to the ranks of this job step; srun would send SIGKILL (Slurm's srun_job.c, _srun_signal_mgr).
    Returns the reason of a failure, or None."""
    problem = ""
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE_S)
        try:
            jobs = f"--jobs={os.environ['SLURM_JOB_ID']}"
            steps = _slurm("squeue", "--noheader", "--steps", jobs, "--format=%i %j").splitlines()
            steps_of_run = [line.removesuffix(f" {step}") for line in steps if line.endswith(f" {step}")]
            if _slurm("squeue", "--noheader", jobs, "--format=%t").strip() == "CG":
                return None  # cancelled, or out of time: Slurm has sent a signal, and sends no other
            if steps_of_run:
                _slurm("scancel", "--signal=TERM", *steps_of_run)
                return None
            problem = "Slurm does not know their step"
        except (KeyError, OSError, subprocess.SubprocessError) as error:
            problem = str(getattr(error, "stderr", None) or error).strip()
    return problem


def _slurm(*words: str) -> str:
    silent = subprocess.DEVNULL
    return subprocess.run(words, stdin=silent, capture_output=True, text=True, timeout=_ANSWERS_S, check=True).stdout


def hostfile(hosts: Sequence[Host]) -> str:
    """Return the contents of SLURM_HOSTFILE: a line for each rank."""
    return "".join(f"{host.name}\n" * host.slots for host in hosts)


def check_programs() -> None:
    """Raise ConfigError if there is no srun."""
    if shutil.which("srun") is None:
        raise ConfigError("--launcher slurm: no program `srun` on PATH: start it within a Slurm allocation")


def answering(hosts: Sequence[Host]) -> tuple[Host, ...]:
    def answers(host: Host) -> bool:
        words = ("srun", "--nodes=1", "--ntasks=1", f"--nodelist={host.name}", "--overlap", "true")
        environ = {name: value for name, value in os.environ.items() if name != "SLURM_HOSTFILE"}
        try:
            done = subprocess.run(words, env=environ, timeout=_ANSWERS_S, stdin=subprocess.DEVNULL, capture_output=True)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    with ThreadPoolExecutor(16, "srun") as pool:
        return tuple(host for host, answer in zip(hosts, pool.map(answers, hosts), strict=True) if answer)


def become_rank(environ: MutableMapping[str, str]) -> None:
    """Set a rank's variables, as DeepSpeed's launcher does, from Slurm's variables of a task. Raises ConfigError."""
    try:
        nodes = int(environ["SLURM_STEP_NUM_NODES"])
        local = tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"], nodes)
        environ["RANK"] = str(int(environ["SLURM_PROCID"]))
        environ["LOCAL_RANK"] = str(int(environ["SLURM_LOCALID"]))
        environ["LOCAL_SIZE"] = str(local[int(environ["SLURM_NODEID"])])
        environ["WORLD_SIZE"] = str(int(environ["SLURM_STEP_NUM_TASKS"]))
        environ["CROSS_RANK"], environ["CROSS_SIZE"] = environ["SLURM_NODEID"], str(nodes)
    except KeyError as error:
        raise ConfigError(
            f"{error.args[0]} is not set: this program is started by srun, from `llmtrain launch --launcher slurm`"
        ) from None
    except (IndexError, ValueError) as error:
        raise ConfigError(f"Slurm's variables of this task are not valid ({error}): start it by srun") from None


def main(words: list[str]) -> int:
    """Replace this process by the rank, so that Slurm's signals reach it."""
    become_rank(os.environ)
    os.execv(sys.executable, [sys.executable, "-u", "-m", *TRAIN, *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
