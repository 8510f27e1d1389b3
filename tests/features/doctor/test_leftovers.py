"""What doctor finds left over on a host: locks of dead builds, shared memory of ended runs, DeepSpeed's own file."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

from llmtrain import cli
from llmtrain.base.rank.op_builds import BUILD_LOCK
from llmtrain.features.doctor import probe


def test_doctor_calls_a_build_dead_when_it_is(build):
    lock, builder = build
    assert probe.look_ops({})["locks"] == {}
    builder.kill()
    builder.wait()
    assert list(probe.look_ops({})["locks"]) == [str(lock)]
    held = os.open(lock.parents[1] / BUILD_LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)  # as a run does that builds; in another container its processes are not seen
    assert probe.look_ops({})["locks"] == {}
    os.close(held)


def test_what_goes_while_doctor_looks_is_not_left_over(build, monkeypatch):
    lock, builder = build
    builder.kill()
    builder.wait()
    monkeypatch.setattr(probe, "users_of", lambda path: os.unlink(path))  # a build that ends now
    assert probe.look_ops({})["locks"] == {} and not lock.exists()
    monkeypatch.setattr(probe.glob, "glob", lambda *args: ["/dev/shm/deepspeed_allreduce_buffer_that_is_gone"])
    assert probe.look_shm({})["left"] == {}


def test_doctor_lists_memory_of_ended_runs_only(tmp_path: Path):
    used, left = (Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getpid()}_{name}") for name in ("used", "left"))
    code = "import mmap, sys, time; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 4096); print(1, flush=True)"
    code += "; time.sleep(300)"
    try:
        for path in (used, left):
            path.write_bytes(bytes(4096))
        user = subprocess.Popen([sys.executable, "-c", code, str(used)], stdout=subprocess.PIPE)
        assert user.stdout is not None and user.stdout.readline()
        found = probe.look_shm({})["left"]
        user.kill()
        user.wait()
        assert found.get(str(left)) == 4096 and str(used) not in found
    finally:
        used.unlink()
        left.unlink()


def test_doctor_tells_of_deepspeeds_own_file(hosts, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(hosts / "home-a"))
    (hosts / "list").write_text("a slots=1\n")

    def cells() -> list[str]:
        cli.main(["doctor", "--hostfile", str(hosts / "list"), "--quick", "--json"])
        found = json.loads(capsys.readouterr().out)["findings"]
        return [f"{f['level']} {f['host']}: {f['what']} -> {f['fix']}" for f in found if ".deepspeed_env" in f["what"]]

    assert cells() == []
    (hosts / "home-a/.deepspeed_env").write_text("A=1\n\n")
    told = "line 2: a blank line ends DeepSpeed's launcher with a ValueError -> remove it"
    assert cells() == [f"red a: {hosts}/home-a/.deepspeed_env {told}"]
