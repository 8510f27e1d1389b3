"""What an agent sees of its ranks and of their processes, and what it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmtrain.base.files import lock_folder
from llmtrain.base.rank import processes
from llmtrain.base.rank.heartbeat import OTHERS, Heartbeat, named, read
from llmtrain.features.watch import agent, observe
from llmtrain.features.watch.agent import Server, answers, call, wait
from llmtrain.features.watch.facts import RankFacts


@pytest.fixture
def heart(tmp_path):
    heart = Heartbeat()
    heart.connect(tmp_path / "rank-00003.beat", rank=3, local_rank=1)
    return heart


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "300"], env={**os.environ, processes.MARK: "/marked"})
    yield process
    process.kill()
    process.wait()


def test_only_the_very_process_is_ended(sleeper):
    me = processes.identify(sleeper.pid)
    processes.Process(me.pid, me.started + 1).send(signal.SIGKILL)  # the id was given to another one
    assert me.alive()
    assert agent.end_host([processes.Process(me.pid, me.started + 1)], None, "/another") == []
    assert me.alive()


def test_an_orphan_is_found_by_its_mark(sleeper):
    assert agent.end_host([], None, "/marked") == []
    assert not processes.identify(sleeper.pid) or not processes.identify(sleeper.pid).alive()


def test_only_the_jobs_own_connections_are_hung_up(monkeypatch):
    """Of a launcher that does not say which job it is, none; and of two launches on one port, each its own."""

    def start(name, *words):
        return subprocess.Popen([name, "-c", "import time; time.sleep(300)", *words], executable=sys.executable)

    job = ("--world_info=e30=", "--master_addr=10.0.0.1", "--master_port=29500")
    launcher = start("python", "deepspeed.launcher.launch", *job)
    vague = start("python", "deepspeed.launcher.launch", "--world_info", "e30=", "--master_port=29500")
    ssh = [start("ssh", f'export LLMTRAIN_LAUNCH="{mark}";', *job) for mark in ("aaaa", "bbbb")]
    try:
        while not all(job[0] in processes.words(each.pid) for each in (launcher, *ssh)):
            time.sleep(0.01)
        monkeypatch.setenv("LLMTRAIN_LAUNCH", "aaaa")
        assert agent.job_of(vague.pid) is None and agent.job_of(launcher.pid) == job
        agent.end_ssh(job, 0.0)
        assert ssh[0].wait(10) == -signal.SIGTERM and ssh[1].poll() is None
    finally:
        for each in (launcher, vague, *ssh):
            each.kill()
            each.wait()


def test_folders_that_somebody_uses_are_not_swept(tmp_path):
    """Its launcher lives, its watch holds it, a rank of it lives: none of these alone is enough to remove it."""
    me, uid = processes.identify(os.getpid()), os.getuid()
    names = {"launcher": f"{me.pid}-{me.started}", "watch": "1-1", "rank": "1-2", "dead": "1-3", "young": "1-4"}
    folders = {what: tmp_path / f"llmtrain-watch-{uid}-{ids}-29500-byhand" for what, ids in names.items()}
    for what, each in folders.items():
        each.mkdir(mode=0o700)
        if what == "rank":
            Heartbeat().connect(each / "rank-00000.beat", rank=0, local_rank=0)
        if what != "young":
            os.utime(each, (time.time() - 3600, time.time() - 3600))
    held = lock_folder(folders["watch"])
    agent.sweep(tmp_path / f"llmtrain-watch-{uid}-own")
    os.close(held)
    assert [what for what, each in folders.items() if not each.exists()] == ["dead"]


def test_what_a_rank_has_started_ends_with_it(tmp_path):
    code = "import subprocess, time; p = subprocess.Popen(['sleep', '300']); print(p.pid, flush=True); time.sleep(300)"
    rank = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = processes.identify(int(rank.stdout.readline()))
    assert agent.end_host([processes.identify(rank.pid)], None, "/nothing") == []
    assert not child.alive() and rank.wait(10) == -signal.SIGKILL


def test_a_rank_is_told_running_stopped_and_dead(tmp_path):
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from llmtrain.base.rank.heartbeat import heart\n"
        "heart.connect(Path(sys.argv[1]) / 'rank-00000.beat', rank=0, local_rank=0)\n"
        "heart.phase('backward')\nprint('there', flush=True)\ntime.sleep(300)"
    )
    root = str(observe.__file__).split("/llmtrain/")[0]
    rank = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), root], stdout=subprocess.PIPE, text=True)
    ranks = observe.HostRanks(tmp_path, "node-1", 1)
    try:
        assert rank.stdout.readline() == "there\n"

        def state():
            (report,) = ranks.observe(time.monotonic())
            return report["state"], report["signal"], report["phase"]

        assert state() == ("running", "", "backward") and len(ranks.endings()) == 1
        rank.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while state()[0] != "stopped" and time.monotonic() < deadline:
            time.sleep(0.02)
        assert state()[0] == "stopped"
        rank.send_signal(signal.SIGKILL)
        while processes.stat(rank.pid).state != "Z":
            time.sleep(0.01)
        assert state() == ("dead", "SIGKILL", "backward") and ranks.gone() and not ranks.endings()
        rank.wait()
        assert state() == ("dead", "SIGKILL", "backward")  # also after its parent has asked
    finally:
        rank.kill()
        rank.wait()


def test_a_rank_that_leaves_between_two_looks_has_left(heart, tmp_path, monkeypatch):
    """Its page is read, then the agent has to wait for a processor, then the process is gone."""
    ranks = observe.HostRanks(tmp_path, "node-1", 1)
    monkeypatch.setattr(observe.processes, "stat", lambda pid: heart.left(2))
    (report,) = ranks.observe(time.monotonic())
    assert (report["state"], report["code"]) == ("left", 2)


ANSWERS = """
import signal, sys, threading, time
sys.path.insert(0, sys.argv[2])
from llmtrain.base.rank import watch
agent = 'llmtrain.features.watch.agent'
watch.begin(stall_timeout_s=60.0, start_timeout_s=60.0, run_dir=sys.argv[1], agent=agent)
threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
def steps():
    print(watch._watched.folder, flush=True)
    if sys.argv[3] == 'holds':
        sum(range(10**10))  # C code, which holds Python's lock
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)  # a signal ends this rank
    time.sleep(300)
steps()
"""


@pytest.mark.parametrize("how", ["waits", "holds"])
def test_a_rank_that_is_asked_for_its_stack_shows_its_main_thread(tmp_path, how):
    """By no signal where that can be: after SIGSTOP and SIGCONT any thread may be the one that handles it, while the
    main thread runs on, and walking its frames ended the rank by SIGSEGV (one in 300 to 600 times), with the run."""
    root = str(observe.__file__).split("/llmtrain/")[0]
    env = {**os.environ, "LOCAL_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}  # local rank 0 would start an agent
    command = [sys.executable, "-c", ANSWERS, str(tmp_path), root, how]
    rank = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    place = Path(rank.stdout.readline().strip())
    try:
        time.sleep(0.2)
        ranks = observe.HostRanks(place, "node-1", 1)
        ranks.observe(time.monotonic())
        rank.send_signal(signal.SIGSTOP)
        ranks.capture()
        rank.send_signal(signal.SIGCONT)
        frames = [tuple(frame[1:]) for frame in ranks.capture()[0]["stack"]]
        assert [function for _, function in frames] == ["steps", "<module>"] and rank.poll() is None, frames
        rank.send_signal(signal.SIGSEGV)
        rank.wait()
        (report,) = ranks.capture()  # who has asked for its exit status has it; what it wrote before is no crash
        assert (report["state"], report["signal"]) == ("dead", "SIGSEGV")
    finally:
        rank.kill()
        rank.wait()
        shutil.rmtree(place)


SPINS = """
import sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from llmtrain.base.rank.heartbeat import heart
heart.connect(Path(sys.argv[1]) / 'rank-00000.beat', rank=0, local_rank=0)
heart.on_device()
heart.phase('evaluate')
print('there', flush=True)
until = time.monotonic() + 60
while time.monotonic() < until:
    pass
"""


def test_a_rank_that_spins_computes_but_does_not_work(tmp_path, monkeypatch):
    """So does one that waits for its device: cudaStreamSynchronize polls."""
    monkeypatch.setattr(observe, "_SAMPLE_S", 0.3)
    root = str(observe.__file__).split("/llmtrain/")[0]
    rank = subprocess.Popen([sys.executable, "-c", SPINS, str(tmp_path), root], stdout=subprocess.PIPE, text=True)
    try:
        assert rank.stdout.readline() == "there\n"
        ranks = observe.HostRanks(tmp_path, "node-1", 1)
        seen: list[tuple[bool, bool]] = []
        deadline = time.monotonic() + 10
        while not (seen and not seen[-1][1]) and time.monotonic() < deadline:
            time.sleep(0.1)
            (report,) = ranks.observe(time.monotonic())
            seen.append((report["cpu_busy"], report["active"]))
        assert seen[-1] == (True, False), seen
        assert report["on_device"] and report["phase"] == "evaluate"
    finally:
        rank.kill()
        rank.wait()


@pytest.mark.parametrize("device", [True, False])
@pytest.mark.parametrize(
    ("phase", "computing", "working"),
    [
        ("start", True, True),
        ("export", True, True),
        ("compile", True, True),
        ("model", "without a device", True),
        ("resume", "without a device", True),
        ("save", "without a device", True),
        ("end", "without a device", True),
        ("evaluate", False, "in the first step"),
        ("data", False, "in the first step"),
        ("forward", False, "in the first step"),
        ("backward", False, "in the first step"),
        ("step", False, "in the first step"),
        ("compare", False, "in the first step"),
    ],
)
def test_what_a_silent_rank_may_be_busy_with(heart, tmp_path, phase, computing, working, device):
    """`computing`: its own processor is busy, as in a wait for a device. `working`: files move, memory fills, or a
    process below it computes: imports, a build of an op, a checkpoint's writer."""
    if device:
        heart.on_device()
    heart.phase(phase)
    ranks = observe.HostRanks(tmp_path, "node-1", 2)
    ranks.observe(time.monotonic())
    (seen,) = ranks._seen.values()

    def is_active(*, computes: bool = False, works: bool = False) -> bool:
        seen.computes, seen.works, seen.beat = computes, works, read(tmp_path / "rank-00003.beat")
        facts = RankFacts(rank=3, host="node-1", phase=phase, cpu_busy=computes or works, on_device=device)
        return ranks._is_active(seen, facts)

    assert not is_active()
    assert is_active(computes=True) == (computing is True or (computing == "without a device" and not device))
    assert is_active(works=True)
    heart.end_step(1)
    assert is_active(works=True) == (working is True)


def test_the_first_connections_have_a_limit(heart, tmp_path):
    """NCCL's have none of their own; the rendezvous before has, and tells who is missing."""
    heart.phase("connect")
    ranks = observe.HostRanks(tmp_path, "node-1", 2, connects_s=30.0)
    now = time.monotonic()
    assert ranks.observe(now + 29)[0]["active"] and not ranks.observe(now + 31)[0]["active"]
    heart.phase("rendezvous")
    assert ranks.observe(now + 3000)[0]["active"]


def test_memory_that_fills_is_work(heart, tmp_path, monkeypatch):
    """A model is built, or memory is locked for checkpoints, without a beat and without a byte that moves."""
    ranks = observe.HostRanks(tmp_path, "node-1", 1)
    seen, found = observe._Seen(0, 0, 0, read(tmp_path / "rank-00003.beat")), processes.stat(os.getpid())
    used = iter([observe._Use(root=1, own_s=1.0, below_s=0.0, moved=0, resident=n << 20) for n in (100, 110, 200, 90)])
    monkeypatch.setattr(observe, "_used", lambda *_: next(used))
    works = []
    for now in (10.0, 12.0, 14.0, 16.0):
        ranks._sample_use(seen, found, 9.0, now)
        works.append(seen.works)
    assert works == [False, False, True, False] and not seen.computes


_WRITES = """
import os, sys, time
with open(sys.argv[1], "wb", buffering=0) as file:
    while True:
        file.write(bytes(100_000))
        time.sleep(0.25)
"""


def test_a_poll_is_no_progress_and_the_bytes_of_the_process_that_is_awaited_are(heart, tmp_path, monkeypatch):
    """A slow writer, then one that is stopped; the ranks ask each other all the time if it has ended."""
    monkeypatch.setattr(observe, "_SAMPLE_S", 0.5)
    monkeypatch.setattr(observe, "_BUSY_BYTES", 64 << 10)
    file, child = tmp_path / "file", subprocess.Popen([sys.executable, "-c", _WRITES, str(tmp_path / "file")])
    ranks, ask, active = observe.HostRanks(tmp_path, "node-1", 2), named("all_reduce"), {}

    def look(what, seconds):
        active[what], until_s = [], time.monotonic() + seconds
        while time.monotonic() < until_s:
            heart.enter(ask)
            heart.leave()
            (report,) = ranks.observe(time.monotonic())
            if report["idle_s"] > 1.2:
                active[what].append(report["active"])
            time.sleep(0.02)
        return report

    try:
        while not file.exists():
            time.sleep(0.01)
        assert look("steps", 1.0)["beats"] > 50 and active["steps"] == []
        heart.awaits(child.pid)
        beats = look("writes", 3.0)["beats"]
        child.send_signal(signal.SIGSTOP)
        report = look("stopped", 3.0)
        process = observe._awaited(child.pid)
        heart.awaits(OTHERS)
        look("others", 1.0)
        heart.awaits(0)
        assert report["beats"] == beats and all(active["writes"]) and not any(active["others"])
        assert not any(active["stopped"][-50:]) and not report["inside"]
        assert report["awaits"] == child.pid and (process["state"], process["file"]) == ("T", str(file))
        assert ranks.observe(time.monotonic())[0]["beats"] == beats + 1
    finally:
        child.kill()
        child.wait()


def test_the_processor_time_of_a_poll_is_no_work_of_the_call_that_is_awaited(heart, tmp_path, monkeypatch):
    """A poll among 400 ranks takes a tenth of a second: a call that hung for ever counted as one that computes."""
    monkeypatch.setattr(observe, "_SAMPLE_S", 0.3)
    ranks, ask = observe.HostRanks(tmp_path, "node-1", 1), named("all_reduce")

    def look(inside: float, outside: float) -> list[bool]:
        """Compute for these seconds in each poll, and between two."""
        active, until_s = [], time.monotonic() + 2.5
        heart.awaits(os.getpid())
        while time.monotonic() < until_s:
            for seconds, place in ((inside, heart.enter), (outside, lambda _: heart.leave())):
                place(ask)
                end = time.process_time() + seconds
                while time.process_time() < end:
                    pass
                active.append(ranks.observe(time.monotonic())[0]["active"])
            time.sleep(0.05)
        heart.awaits(0)
        return active[len(active) // 2 :]

    assert not any(look(inside=0.1, outside=0.0))
    assert any(look(inside=0.0, outside=0.1))


def test_who_does_not_know_the_token_is_hung_up_on():
    server = Server()
    try:
        stranger = call("127.0.0.1", server.port, {"token": "x", "host": "node-2"}, 5)
        friend = call("127.0.0.1", server.port, {"token": server.token, "host": "node-2", "port": 7}, 5)
        deadline = time.monotonic() + 10
        while not (server.lines and stranger.closed) and time.monotonic() < deadline:
            server.accept(time.monotonic())
            wait([stranger], 0.05)
            stranger.receive()
        assert list(server.lines) == ["node-2"] and stranger.closed
        friend.send({"ranks": [], "text": "ä" * 100_000})
        received = []
        while not received and time.monotonic() < deadline:
            friend.flush()
            received = server.lines["node-2"].receive()
        assert received == [{"ranks": [], "text": "ä" * 100_000}]
        assert answers("127.0.0.1", server.port)
    finally:
        server.close()
    assert not answers("127.0.0.1", server.port)


def test_a_line_that_is_no_json_ends_the_connection():
    server = Server()
    try:
        line = call("127.0.0.1", server.port, {"token": server.token, "host": "node-2"}, 5)
        deadline = time.monotonic() + 10
        while not server.lines and time.monotonic() < deadline:
            server.accept(time.monotonic())
        line._out += b"{broken\n"
        line.flush()
        while not server.lines["node-2"].closed and time.monotonic() < deadline:
            assert server.lines["node-2"].receive() == []
        assert server.lines["node-2"].closed
    finally:
        server.close()
