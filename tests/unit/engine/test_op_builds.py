"""torch's lock of an op build: left by the dead it goes, in the hands of another program's build it stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    assert str(lock) in capsys.readouterr().err
