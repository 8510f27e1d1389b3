"""torch's lock of an op build: left by the dead it goes, in the hands of another program's build it stays."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtrain.base.rank.op_builds import BUILD_LOCK
from llmtrain.cluster.doctor import probe

HOLD = "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print('held', flush=True); time.sleep(300)"


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """The lock of a build of CPUAdam, an hour old, and the process that is at it."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    builder = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, text=True)
    assert builder.stdout is not None and builder.stdout.readline() == "held\n"
    os.utime(lock, (time.time() - 3600, time.time() - 3600))
    yield lock, builder
    builder.kill()
    builder.wait()


def test_the_build_of_another_program_keeps_its_lock(build, capsys):
    from llmtrain.engine.deepspeed.optimizers import op_build_lock

    lock, builder = build
    with op_build_lock():
        assert lock.exists()
    assert f"waiting for the build of process {builder.pid}" in capsys.readouterr().err
    builder.kill()
    builder.wait()
    with op_build_lock():
        assert not lock.exists()
    assert "a killed process left it behind" in capsys.readouterr().err


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
