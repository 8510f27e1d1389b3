"""Faults of a GPU, of CUDA and of NCCL: texts as they are recorded -> the cause, and whether a restart is of use."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmtrain.base.rank.device_faults import device_fault, is_echo, with_reason
from llmtrain.base.rank.folder import RECORD_WANTED
from llmtrain.base.rank.heartbeat import Heartbeat
from llmtrain.base.rank.stacks import Recorded, excerpt
from llmtrain.cluster import gpus
from llmtrain.features.watch import observe
from llmtrain.features.watch.causes import explain
from llmtrain.features.watch.facts import HostFacts, RankFacts, telling_line, timed_out
from tests.features.watch.test_watch_explain import CLOSED, job, waiting
from tests.helpers import gpu_texts as texts

TABLE = [
    ("duplicate_gpu", texts.DUPLICATE_GPU, False, False),
    ("gpu_memory", texts.ECC, True, True),
    ("nvlink", texts.NVLINK, True, True),
    ("gpu_lost", texts.LOST, True, True),
    ("gpu_lost", texts.NCCL_UNHANDLED.replace("999 'unknown error'", "'GPU is lost'"), True, True),
    ("gpu_in_use", texts.UNAVAILABLE, False, True),
    ("fabric_manager", texts.NOT_READY, True, True),
    ("no_kernel_image", texts.NO_IMAGE, False, False),
    ("driver_too_old", texts.OLD_DRIVER, False, False),
    ("no_peer_access", texts.NCCL_NO_PEER, False, False),
    ("shared_memory", texts.NCCL_SHM, False, False),
    ("device_assert", texts.ASSERT, False, False),
    ("out_of_memory", texts.OUT_OF_MEMORY, False, True),
    ("out_of_memory", texts.CUBLAS_ALLOC, False, True),
    ("out_of_memory", texts.NCCL_OUT_OF_MEMORY, False, True),
    ("illegal_address", texts.ILLEGAL, False, True),
    ("illegal_address", texts.LAUNCH_FAILURE, False, True),
    ("gpu_error", texts.CUBLAS_FAILED, False, True),
    ("gpu_error", texts.NCCL_UNHANDLED, False, True),
]
IDS = [f"{name}-{number}" for number, (name, *_) in enumerate(TABLE)]


@pytest.mark.parametrize(("name", "text", "unfit", "again"), TABLE, ids=IDS)
def test_an_exception_of_the_device_is_a_cause_of_its_own(name: str, text: str, unfit: bool, again: bool) -> None:
    """Also where NCCL hands it on, and others meet the end of their connection to it."""
    error = f"RuntimeError: {with_reason(text)}"
    assert not is_echo(error)
    found = explain(job(waiting(0, state="dead", error=CLOSED), waiting(1, state="dead", error=error, on_device=True)))
    assert (found.cause, found.ranks, found.unfit, found.again) == (name, [1], unfit, again), found.text
    assert error.rstrip(".") in found.text and "backward" in found.text


@pytest.mark.parametrize(("name", "text", "unfit", "again"), TABLE[1:2] + TABLE[15:17])
def test_what_nccls_watchdog_ends_is_explained_by_its_last_words(
    name: str, text: str, unfit: bool, again: bool
) -> None:
    """It aborts the rank from a thread without Python: gloo does so where ranks took different ways, NCCL never."""
    said = telling_line(texts.watchdog_ended(text))
    assert text.splitlines()[0] in said
    aborted = waiting(1, state="dead", signal="SIGABRT", native=True, inside=False, on_device=True, said=said)
    found = explain(job(waiting(0, on_device=True), aborted, trigger="dead_rank"))
    assert (found.cause, found.ranks, found.unfit, found.again) == (name, [1], unfit, again), found.text
    assert "[PG ID 0 PG GUID 0(default_pg) Rank 1]" in found.text


def test_a_collective_that_took_too_long_names_itself() -> None:
    said = telling_line(texts.WATCHDOG_TIMED_OUT)
    found = timed_out(said)
    assert found is not None and (found.number, found.name, found.limit_s) == (78, "allreduce", 600.0)
    ended = [waiting(n, state="dead", signal="SIGABRT", native=True, on_device=True, said=said) for n in (0, 1)]
    told = explain(job(*ended, trigger="dead_rank"))
    assert (told.cause, told.ranks, told.unfit) == ("communication", [0, 1], False), told.text
    assert "allreduce #78" in told.text and "600 s" in told.text
    of_another = explain(job(*ended, waiting(2, state="dead", signal="SIGKILL"), trigger="dead_rank"))
    assert (of_another.cause, of_another.ranks) == ("killed", [2]), of_another.text


def test_an_abort_without_words_is_no_mismatch_on_a_gpu() -> None:
    aborted = waiting(1, state="dead", signal="SIGABRT", native=True, inside=False, on_device=True)
    found = explain(job(waiting(0, on_device=True), aborted, trigger="dead_rank"))
    assert (found.cause, found.ranks) == ("crashed", [1]) and "NCCL's watchdog" in found.text


def test_an_error_of_the_connection_is_an_echo_and_one_of_the_code_is_none() -> None:
    of_connection = (CLOSED, f"DistBackendError: {with_reason(texts.NCCL_REMOTE)}")
    of_code = ("KeyError: 'peer'", "ValueError: no peer of rank 3 in the table")
    assert all(map(is_echo, of_connection)) and not any(map(is_echo, of_code))
    assert not any(map(device_fault, (*of_connection, *of_code)))


def test_warnings_end_nothing() -> None:
    assert telling_line("UserWarning: CUDA out of memory is near\nThe NVIDIA driver on your system is too old\n") == ""


@pytest.mark.parametrize(
    ("number", "unfit"), [(79, True), (48, True), (95, True), (74, True), (119, True), (31, False), (94, False)]
)
def test_the_kernel_tells_of_a_broken_gpu(number: int, unfit: bool) -> None:
    """Whatever the ranks say: the GPU that fell off the bus is met as a closed connection, or as a stall."""
    kernel = HostFacts(name="node-2", xids=(texts.xid(13), texts.xid(number)))
    stall = explain(job(waiting(0, on_device=True), waiting(1, on_device=True), hosts=(kernel,)))
    assert (stall.cause == "gpu_broken", stall.unfit) == (unfit, unfit), stall.text
    dead = waiting(1, state="dead", error=f"AcceleratorError: {with_reason(texts.LAUNCH_FAILURE)}", on_device=True)
    died = explain(job(waiting(0, on_device=True), dead, trigger="dead_rank", hosts=(kernel,)))
    assert (died.host, died.ranks, died.unfit) == ("node-2", [1], unfit), died.text
    assert f"Xid {number} of GPU 0000:18:00: " in died.text


def test_an_error_of_the_code_beside_a_broken_gpu_is_still_the_cause() -> None:
    kernel = HostFacts(name="node-2", xids=(texts.xid(79),))
    bug = waiting(0, state="dead", error="ValueError: token 600 of 512", on_device=True)
    found = explain(job(bug, waiting(1, on_device=True), trigger="dead_rank", hosts=(kernel,)))
    assert (found.cause, found.ranks, found.unfit) == ("exception", [0], False)


def test_what_nvidia_smi_counts_is_told_beside_it() -> None:
    kernel = HostFacts(name="node-2", gpu_health="GPU 0000:18:00.0: 2 uncorrectable ECC errors")
    dead = waiting(1, state="dead", error=f"AcceleratorError: {with_reason(texts.ECC)}", on_device=True)
    found = explain(job(waiting(0), dead, trigger="dead_rank", hosts=(kernel,)))
    assert "(nvidia-smi: GPU 0000:18:00.0: 2 uncorrectable ECC errors)" in found.text


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, ""),
        ({"DRAM_Uncorrectable": "2"}, "2 uncorrectable ECC errors since the driver was loaded"),
        ({"SRAM_Uncorrectable_Parity": "1"}, "1 uncorrectable ECC error since the driver was loaded"),
        ({"Remapping_Failure": "Yes"}, "rows of its memory could not be replaced"),
        ({"Pending_Page": "Yes"}, "a broken part of its memory is replaced at the next reset only"),
    ],
)
def test_the_report_of_nvidia_smi_is_read(changed: dict[str, str], words: str) -> None:
    """Errors of earlier boots (aggregate) and corrected ones are in it, and are no fault."""
    read = gpus.read_report(texts.report(**changed))
    assert {bus: gpus.memory_fault(gpu) for bus, gpu in read.items()} == {
        "00000000:18:00.0": "",
        "00000000:2A:00.0": words,
    }


def test_the_flight_recorder_is_read() -> None:
    assert excerpt(texts.trace(begun=121, done=119)) == [
        Recorded(group="0", ranks=(0, 1, 2), begun=121, pending=120, name="all_reduce")
    ]
    assert excerpt(texts.trace(begun=119, done=119)) == [Recorded(group="0", ranks=(0, 1, 2), begun=119)]
    assert excerpt({"version": "2.10", "pg_config": {}}) == []


def on_nccl(rank: int, begun: int, done: int, **other: Any) -> RankFacts:
    """A rank whose host has handed its collectives over: its heartbeat shows it in none."""
    about = {"inside": False, "cpu_busy": True, "on_device": True, "recorded": tuple(excerpt(texts.trace(begun, done)))}
    return waiting(rank, **{**about, **other})


def test_the_rank_that_never_began_a_collective_is_named_with_it() -> None:
    late = on_nccl(1, begun=119, done=119, phase="forward")
    found = explain(job(on_nccl(0, begun=121, done=119), late, on_nccl(2, begun=120, done=119)))
    assert (found.cause, found.host, found.ranks) == ("behind", "node-2", [1]), found.text
    of_it, of_others = re.split(r"ranks 0, 2\b", found.text, maxsplit=1)
    assert "all_reduce #120" in of_it and "group 0" in of_it and "forward at llmtrain/engine/step.py:97" in found.text
    assert re.search(r"ranks 0, 2\b.* all_reduce .*#120, in backward", of_others), of_others


WITHOUT_RECORDER = [on_nccl(rank, begun=0, done=0, recorded=()) for rank in range(3)]
CONNECTS = {"phase": "connect", "inside": False, "cpu_busy": True, "on_device": True, "step": 0}
STALLS = [
    ("slow_data", [1], [on_nccl(0, 120, 119), on_nccl(1, 119, 119, phase="data"), on_nccl(2, 120, 119)], "in data"),
    (
        "communication",
        [],
        [on_nccl(rank, 120, 119) for rank in range(3)],
        "All ranks wait in the same collective (all_reduce of group 0 #120)",
    ),
    ("communication", [], WITHOUT_RECORDER, "wait for their devices for 31 s"),
    (
        "device_waits",
        [0],
        [replace(WITHOUT_RECORDER[0], given=41, done=40)],
        "it waits there for its device; it has done 40 of 41 micro-batches, or computes in an endless loop",
    ),
    ("not_connected", [0, 1], [waiting(rank, **CONNECTS) for rank in (0, 1)], "NCCL has no timeout of its own"),
]


@pytest.mark.parametrize(("cause", "odd", "ranks", "words"), STALLS)
def test_a_stall_on_devices_has_its_cause(cause: str, odd: list[int], ranks: list[RankFacts], words: str) -> None:
    found = explain(job(*ranks))
    assert (found.cause, found.ranks) == (cause, odd) and words in found.text, found.text


def test_stages_that_wait_for_their_devices_need_no_equal_counts() -> None:
    assert "the same collectives" not in explain(job(*WITHOUT_RECORDER, alike=False)).text


@pytest.fixture
def fake_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with nvidia-smi and a kernel log that everyone may read."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\ncat $FAKE/report\n")
    (tmp_path / "report").write_text(texts.report(DRAM_Uncorrectable="2"))
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(tmp_path))
    now_us = int(time.monotonic() * 1e6)
    rows = [
        f"4,{n},{now_us - age * 10**6},-;{text}"
        for n, (age, text) in enumerate([(7200, texts.xid(48)), (3, texts.xid(79)), (2, "e1000: link is up")])
    ]
    (tmp_path / "kmsg").write_text("")
    log = iter([*(row.encode() for row in rows), b""])
    monkeypatch.setattr(gpus, "_KERNEL_LOG", str(tmp_path / "kmsg"))
    read = os.read
    handle = str(tmp_path / "kmsg")

    def one_record(number: int, size: int) -> bytes:
        return next(log) if os.readlink(f"/proc/self/fd/{number}") == handle else read(number, size)

    monkeypatch.setattr(gpus.os, "read", one_record)
    return tmp_path


class Ranks:
    """Two ranks on devices, as observe.HostRanks shows them."""

    def on_device(self) -> bool:
        return True

    def capture(self, *, record: bool = False) -> list[dict[str, Any]]:
        return [{"record": record}]


def test_gpus_and_kernel_are_asked_when_the_job_ends(fake_driver: Path) -> None:
    found = observe.captured(Ranks(), 300.0, ends=True)  # type: ignore[arg-type]
    assert found["stacks"] == [{"record": True}]
    assert found["xids"] == [texts.xid(79)], "the one of two hours ago belongs to something else"
    assert found["gpu_health"] == "GPU 00000000:2A:00.0: 2 uncorrectable ECC errors since the driver was loaded"
    host = observe.with_answer(HostFacts(name="node-2"), found)
    assert (host.xids, host.gpu_health) == ((texts.xid(79),), found["gpu_health"])


def test_a_pause_asks_for_stacks_alone(fake_driver: Path) -> None:
    found = observe.captured(Ranks(), 300.0, ends=False)  # type: ignore[arg-type]
    assert found["stacks"] == [{"record": False}] and found.keys() == {"stacks", "shm_free"}


@pytest.mark.timeout(120)
def test_an_nvidia_smi_that_hangs_is_left_behind(fake_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fake_driver / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 300\n")
    monkeypatch.setattr(observe, "_WITHIN_S", 0.3)
    assert observe.captured(Ranks(), 300.0, ends=True)["gpu_health"] == ""  # type: ignore[arg-type]


KEEPS = """
import os, subprocess, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from llmtrain.base.rank import stderr, watched
stderr.keep_end(Path(sys.argv[1]), watched.start)
os.write(2, b"x" * 100_000 + b"\\n")
subprocess.run(["sh", "-c", "echo of a child >&2"])
sys.stdin.readline()
if sys.argv[3] == "mend":
    stderr.mend()
    print("warning: it goes on", file=sys.stderr, flush=True)
os.write(2, b"  what():  the last words\\n")
os.abort()
"""


def start(path: Path, what: str) -> subprocess.Popen[bytes]:
    root = str(Path(gpus.__file__).parents[2])
    words = [sys.executable, "-c", KEEPS, str(path), root, what]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE)


def test_the_end_of_what_an_aborted_rank_prints_is_kept_and_nothing_is_lost(tmp_path: Path) -> None:
    rank = start(tmp_path / "end", "")
    _, said = rank.communicate(b"\n", timeout=30)
    assert rank.returncode == -signal.SIGABRT
    assert said.startswith(b"x" * 100_000 + b"\nof a child\n  what():  the last words\n")
    kept = (tmp_path / "end").read_bytes()
    assert len(kept) <= 64 << 10 and b"of a child\n  what():  the last words\n" in kept


def test_a_rank_outlives_the_process_that_keeps_the_end(tmp_path: Path) -> None:
    rank = start(tmp_path / "end", "mend")
    deadline = time.monotonic() + 20
    keepers: list[int] = []
    while not keepers and time.monotonic() < deadline:
        found = subprocess.run(["pgrep", "-f", f"rank.stderr {tmp_path / 'end'}"], capture_output=True, text=True)
        keepers = [int(word) for word in found.stdout.split()] if (tmp_path / "end").exists() else []
    time.sleep(0.3)
    os.kill(keepers[0], signal.SIGKILL)
    time.sleep(0.3)
    _, said = rank.communicate(b"\n", timeout=30)
    assert b"warning: it goes on\n" in said and rank.returncode == -signal.SIGABRT


def test_a_rank_that_cannot_answer_does_not_hold_up_the_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heart = Heartbeat()
    heart.connect(tmp_path / "rank-00000.beat", rank=0, local_rank=0)
    heart.on_device()
    monkeypatch.setattr(observe, "_RECORD_S", 0.2)
    monkeypatch.setattr(observe, "STACK_SIGNAL", 0)
    monkeypatch.setattr(observe, "_STACK_S", 0.1)
    ranks = observe.HostRanks(tmp_path, "node-1", 1)
    ranks.observe(0.0)
    (found,) = ranks.capture(record=True)
    assert found["recorded"] == [] and (tmp_path / RECORD_WANTED).exists() and ranks.on_device()
