"""`llmtrain launch` from start to end, with a script in the place of DeepSpeed's launcher: no torch, one host."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmtrain.base.files import lock_folder, scratch_folder
from llmtrain.cluster.hosts.hostfile import Host
from llmtrain.cluster.launch import attempts, job, launchers
from llmtrain.cluster.launch.attempts import Attempt, Attempts
from llmtrain.cluster.launch.job import Job
from llmtrain.cluster.launch.placement import LaunchedRun, Options
from llmtrain.commands.launch import batches
from llmtrain.commands.launch import main as launch
from llmtrain.config.load import load
from tests.unit.cluster.test_launch_placement import recipe as recipe  # the fixture

pytestmark = pytest.mark.long

JOB = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

MARK = "llmtrain:" + os.environ["LLMTRAIN_LAUNCH"] + ": "

def tell(kind, **fields):
    print(MARK + json.dumps({"kind": kind, **fields}), flush=True)

def place():
    tell("place", ranks=[{"rank": 0, "host": "here", "local_rank": 0, "device": "cpu", "pid": os.getpid()}])

def fault(step, cause="killed"):
    tell("fault", step=step, signature=f"step {step + 1}: {cause}", text="told", cause=cause)
    sys.exit(1)

os.environ["RANK"] = "0"
if "again" not in sys.argv:  # RANK has to stand in what the kernel shows of the process
    os.execv(sys.executable, [sys.executable, __file__, "again", *sys.argv[1:]])
starts = Path("starts")
count = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (count + 1))
print("a line for the user", flush=True)
"""


@pytest.fixture
def run(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """run(script, ...) -> exit code of a launch whose job is `script`."""
    monkeypatch.setattr(attempts, "BACKOFF_S", 0.0)
    monkeypatch.setattr(launchers, "AGENTS_LEAVE_S", 0.0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    (tmp_path / "runs/run").mkdir(parents=True)
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    # What started the tests in the background may have had it ignored, and launch leaves that as it is.
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)

    def go(script: str, *options: str) -> int:
        path = tmp_path / "job.py"
        path.write_text(JOB + script)
        monkeypatch.setattr(launchers, "command", lambda *_: [sys.executable, str(path)])
        return launch(["--hostfile", "hosts", *options, "--", str(recipe)])

    yield go
    signal.signal(signal.SIGINT, before)


def starts() -> int:
    return len(Path("starts").read_text())


def events(kind: str) -> list[dict[str, Any]]:
    lines = Path("runs/run/events.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def test_a_complete_run(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("place(); tell('end', status='complete', code=0)") == 0
    out, err = capfd.readouterr()
    assert "a line for the user" in out and "llmtrain:" not in out
    assert "rank 0 -> localhost (here) -> cpu, local rank 0" in err and starts() == 1


FORGED = """
end = {"kind": "end", "status": "refused", "code": 2, "reason": "forged"}
for mark in ("llmtrain:: ", "llmtrain:0123456789abcdef: "):  # as a text that the model has generated may hold it
    print("sample:", mark + json.dumps(end), flush=True)
for body in ("[" * 5000, '{"kind":"checkpoint"}', '{"kind":"end","status":7,"code":2}', '{"kind":["end"]}', "5",
             '{"kind":"place","ranks":[{"rank":0}]}', '{"kind":"fault","ranks":["x"]}', '{"kind":"progress","text":3}'):
    print(MARK + body, flush=True)
os.write(1, MARK.encode() + b"\\xff\\n")
tell("end", status="complete", code=0)
"""


def test_no_line_of_the_output_passes_for_a_message(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Nor ends it launch."""
    assert run("place()\n" + FORGED, "--verbose") == 0
    out, err = capfd.readouterr()
    assert starts() == 1 and "Traceback" not in err and "forged" in out


def test_a_fault_is_followed_by_a_restart(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    script = "place()\nif count < 1: tell('checkpoint', step=10); fault(13)\ntell('end', status='complete', code=0)"
    assert run(script) == 0
    assert starts() == 2
    (restart,) = events("restart")
    assert (restart["step"], restart["after"], restart["hosts"]) == (10, "step 14: killed", ["localhost"])
    assert "launch: 1 restart, 3 steps done again" in capfd.readouterr().err


def test_a_launch_leaves_nothing(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With warnings as errors, as a plugin may have them."""
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run("place(); tell('end', status='complete', code=0)") == 0
        gc.collect()
    assert not found, found
    assert not list(tmp_path.glob("llmtrain-*"))


def test_a_scratch_folder_of_a_killed_command_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, age_s in (("scratch-dead", 0), ("scratch-lives", 0), ("unlocked-old", 90), ("unlocked-young", 0)):
        (folder := tmp_path / f"llmtrain-{name}").mkdir()
        os.utime(folder, (time.time() - age_s,) * 2)
    lock = lock_folder(tmp_path / "llmtrain-scratch-lives")
    with scratch_folder("next"):
        pass
    os.close(lock)
    assert {path.name.rpartition("-")[2] for path in tmp_path.glob("llmtrain-*")} == {"lives", "young"}


def test_max_restarts(run: Any) -> None:
    assert run("place(); fault(count)", "--max-restarts", "2") == 1
    assert starts() == 3


def test_a_difference_between_ranks_is_followed_by_a_restart_until_it_comes_again(
    run: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    differ = "tell('end', status='failed', code=3, reason='after step 10: rank 1 on node-2 differs'); sys.exit(3)"
    assert (
        run(f"place()\nif count < 1: tell('checkpoint', step=8); {differ}\ntell('end', status='complete', code=0)") == 0
    )
    assert starts() == 2 and "rank 1 on node-2 differs" in capfd.readouterr().err
    Path("starts").unlink()
    assert run(f"place(); {differ}") == 1
    assert starts() == 2


def test_ranks_that_outlive_their_launcher_have_time_to_save(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were killed 12 s after it, whatever they had to write, and the kill was called someone else's."""
    monkeypatch.setattr(job, "_REST_S", 0.2)
    rank = "ranks=[{'rank': 0, 'host': socket.gethostname(), 'local_rank': 0, 'device': 'cpu', 'pid': os.getpid()}]"
    saves = "time.sleep(1.5); Path('saved').touch(); tell('end', status='stopped', code=0, reason='launcher process 7')"
    assert run(f"import socket\nif os.fork(): os._exit(0)\ntell('place', {rank}); {saves}", "--max-restarts", "0") == 75
    assert Path("saved").exists()


def test_nothing_that_the_job_started_is_left(run: Any) -> None:
    orphan = "p = subprocess.Popen(['sleep', '600'], start_new_session=True); Path('pid').write_text(str(p.pid))\n"
    assert run(orphan + "place(); tell('end', status='complete', code=0)") == 0
    try:
        state = psutil.Process(int(Path("pid").read_text())).status()
    except psutil.NoSuchProcess:
        state = "gone"
    assert state in ("gone", psutil.STATUS_ZOMBIE)  # a container's first process may not collect the dead


def test_only_the_watch_folders_of_this_launch_go_with_it(run: Any) -> None:
    """Also when its watch was killed. Another launch has the same launcher's id in no container but its own."""
    folder = "Path(f'/dev/shm/llmtrain-watch-{os.getuid()}-1-2-3-{mark}')"
    script = f"for mark in ('another{os.getpid()}', os.environ['LLMTRAIN_LAUNCH']):\n"
    script += f"    {folder}.mkdir()\n    with open('made', 'a') as file: print({folder}, file=file)\n"
    try:
        assert run(script + "place(); tell('end', status='complete', code=0)") == 0
        another, own = map(Path, Path("made").read_text().split())
        assert another.is_dir() and not own.exists()
    finally:
        for each in Path("made").read_text().split():
            shutil.rmtree(each, ignore_errors=True)


def test_the_id_of_a_job_that_has_ended_is_not_given_away_before_its_group_is_killed() -> None:
    with Job(["sh", "-c", "exit 7"], os.environ, "mark") as job:
        while (code := job.code()) is None:
            time.sleep(0.01)
        assert (code, job.code()) == (7, 7) and psutil.Process(job._process.pid).status() == psutil.STATUS_ZOMBIE
    assert job.code() == 7 and not psutil.pid_exists(job._process.pid)


def press_when_there_is(*files: str) -> None:
    """Ctrl-C when the job has written the first file, and again for each of the others."""

    def press() -> None:
        for file in files:
            while not Path(file).exists():
                time.sleep(0.05)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()


STOPS = """
def stop(*_):
    tell("end", status="stopped", code=0, reason="Ctrl-C")
    sys.exit(0)
signal.signal(signal.SIGINT, stop)
place()
Path("met").write_text("")
while True: time.sleep(0.1)
"""


def test_ctrl_c_lets_the_ranks_save(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    press_when_there_is("met")
    assert run(STOPS) == 130
    err = capfd.readouterr().err
    assert "1 rank " in err and "Ctrl-C" in err and "launch: asked to stop" not in err and starts() == 1


def test_a_second_ctrl_c_ends_it(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    press_when_there_is("met", "asked")
    assert run(STOPS.replace("signal.SIGINT, stop", "signal.SIGINT, lambda *_: Path('asked').touch()")) == 130
    assert "before it could save" in capfd.readouterr().err


def launch_of(recipe: Path, *words: str, hosts: str, slots: int = 1, least: int = 1) -> Attempts:
    """A launch on hosts of one letter, as its command makes it."""
    made = tuple(Host(name=name, slots=slots, devices=tuple(range(slots)), line=1) for name in hosts)
    given = ("--config", str(recipe), *words)
    options = Options(
        hosts=made, words=given, launcher="pdsh", max_restarts=9, min_hosts=least, env_file=None, dry_run=False
    )
    first = batches(given, slots * len(made))
    run = LaunchedRun(
        folder=str(recipe.parent),
        resume="auto",
        again="the same command",
        start_timeout_s=1.0,
        examine=None,
        batches=first,
        resolve=batches,
    )
    return Attempts(options, "mark", run)


@pytest.mark.parametrize("accumulation", ["null", "2"])
def test_a_restart_on_fewer_hosts_trains_the_same_global_batch(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, accumulation: str
) -> None:
    """With the micro-batch alone, or with accumulation, the global batch was that of the ranks that were left."""
    words = ("--train.global_batch", "null", "--train.micro_batch", "2", "--train.accumulation", accumulation)
    made = launch_of(recipe, *words, hosts="abcd")
    first = load(list(made._options.words), 4).batch
    monkeypatch.setattr(attempts, "_WAIT_SPARE_S", 0.0)
    monkeypatch.setattr(made._launcher, "answering", lambda hosts: hosts[:3])
    attempt = Attempt(began_s=0.0, resumes_at=10)
    assert made._prepare_restart(attempt, "step 13: host_lost", 0.0) is None
    assert [host.name for host in made._hosts] == ["a", "b"]  # 3 ranks cannot train it
    second = load(list(made._words), 2).batch
    assert second.global_batch == first.global_batch and second.micro_batch == first.micro_batch
    assert second.accumulation == 2 * first.accumulation
    monkeypatch.setattr(made._launcher, "answering", lambda hosts: hosts)
    assert made._prepare_restart(attempt, "step 14: host_lost", 0.0) is None
    assert load(list(made._words), 4).batch == first and len(made._hosts) == 4


def test_a_restart_that_would_train_another_batch_is_refused(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The accumulation of a stage, or of the JSON, is no word of the command line."""
    stage = '[{"from_step": 2, "train": {"micro_batch": 2, "accumulation": 1}}]'
    made = launch_of(recipe, "--train.global_batch", "16", "--data.stages", stage, hosts="ab")
    monkeypatch.setattr(attempts, "_WAIT_SPARE_S", 0.0)
    monkeypatch.setattr(made._launcher, "answering", lambda hosts: hosts[:1])
    why = made._prepare_restart(Attempt(began_s=0.0, resumes_at=10), "step 13: host_lost", 0.0)
    assert why == (
        "the run cannot continue with 1 host: the global batches of its stages would be [16, 2] instead of [16, 4]"
    )


def unfit(rank: int) -> Attempt:
    """An attempt that ended by a fault of the GPUs of a rank's host."""
    told = {"kind": "fault", "step": 12, "signature": "step 13: gpu_broken", "ranks": [rank], "unfit": True}
    one = Attempt(began_s=0.0, resumes_at=10)
    one.hear(told, 1.0)
    return one


def test_a_host_with_a_broken_gpu_is_not_started_on_again(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The hostfile's name counts, whatever the host calls itself; it stays out at later restarts, too."""
    made = launch_of(recipe, "--train.global_batch", "24", hosts="abc", slots=2, least=2)
    monkeypatch.setattr(made._launcher, "answering", lambda hosts: hosts)
    assert made._prepare_restart(unfit(3), "step 13: gpu_broken", 0.0) is None
    assert [host.name for host in made._hosts] == ["a", "c"]
    assert "2 hosts, 4 ranks, without b" in capfd.readouterr().err
    why = made._prepare_restart(unfit(3), "step 13: gpu_broken", 0.0)  # rank 3 is on c now
    assert why == "1 host left, and --min-hosts is 2 (unfit after a fault of their own: b, c)"
