"""The watch of a running job: what it says of a fault, what it ends, and what it must not take for a fault.

The ranks are forked, which takes 2 s instead of 10; one test goes through DeepSpeed's launcher. Several hosts:
tests/features/watch/test_watch_hosts.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmtrain.base.rank import messages
from tests.features.watch import stalls
from tests.helpers.forked import Launch
from tests.helpers.gpu_texts import ILLEGAL, watchdog_ended
from tests.helpers.launching import (
    REPO,
    deepspeed,
    environment,
    finish,
    gone,
    launch,
    losses,
    ranks_of,
    rows,
    tree,
    wait_for_step,
    write_recipe,
)
from tests.helpers.warm import WarmCommands

ENDED_S = 20.0  # twice the promise: machines that test are busy


def agents_of(run: Path) -> list[psutil.Process]:
    """The watches of the jobs in a run folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "llmtrain.features.watch.agent" in words and str(run) in words[-1]:
                found.append(process)
    return found


def explained(small_data: str, folder: Path, fault: Any, *overrides: str) -> dict[str, Any]:
    """A run with a seeded fault: its event. Everything of it is gone afterwards."""
    recipe, run = write_recipe(folder, small_data), folder / "run"
    steps = ("--train.max_steps", "100000", "--schedule.name", "constant")
    job = Launch(recipe, *steps, "--fault.stall_timeout_s", "4", *overrides, before=fault)
    assert None not in job.wait(120), job.output()[-3000:]
    assert gone(agents_of(run), ENDED_S)
    event = rows(run, "events.jsonl")[-1]
    assert event["kind"] == "fault", job.output()[-3000:]
    assert job.output().count("error: fault after step") == 1 and f"error: {event['text']}" in job.output()
    assert len(event["all_ranks"]) == 2
    return event


def test_a_script_without_the_rest_of_llmtrain_is_watched(tmp_path, warm):
    """That of docs/watch.md; in its third step a rank sleeps."""
    (text,) = re.findall(r"^```python\n(.*?)^```", (REPO / "docs/watch.md").read_text(), flags=re.M | re.S)
    text = text.replace("stall_timeout_s=300", "stall_timeout_s=4")
    tells = "open(f'loaded-{engine.global_rank}', 'w').write(' '.join(sys.modules))"
    text = text.replace("    for step", f"    import sys, time\n    {tells}\n    for step")
    # DeepSpeed would compile its shared-memory collectives, for a minute.
    text = text.replace(
        "    import torch\n", "    import torch\n    deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False\n"
    )
    sleeps = "time.sleep(600 if step == 3 and engine.global_rank == 1 else 0)"
    text = text.replace("engine.backward(", f"{sleeps}\n            engine.backward(")
    (tmp_path / "own.py").write_text(text)
    (tmp_path / "runs/mine").mkdir(parents=True)
    code, output = finish(deepspeed(tmp_path, "own.py", warm=warm), 120)
    (event,) = rows(tmp_path / "runs/mine", "events.jsonl")[-1:]
    zero, one = event["all_ranks"]
    assert code != 0 and f"error: {event['text']}" in output and event["step"] == 2, output
    assert f"in forward at {tmp_path.name}/own.py:" in event["text"], event["text"]
    assert (event["kind"], event["ranks"], one["inside"], zero["inside"]) == ("fault", [1], False, True), event
    assert one["collectives"] == zero["collectives"] - 1 > 2
    loaded = {name.split(".")[1] for name in re.findall(r"llmtrain\.[\w.]+", (tmp_path / "loaded-0").read_text())}
    assert loaded <= {"base", "features"}
    assert gone(agents_of(tmp_path / "runs/mine"), ENDED_S)


def test_a_killed_rank_is_explained_and_nothing_is_left(small_data, tmp_path, warm):
    """Through DeepSpeed's launcher."""
    recipe, run = write_recipe(tmp_path, small_data), tmp_path / "run"
    process = launch(recipe, "--train.max_steps", "100000", env=environment(LLMTRAIN_SUPERVISED="1"), warm=warm)
    wait_for_step(process, run, 6, timeout_s=180)
    while not [e for e in rows(run, "events.jsonl") if e["kind"] == "save"]:
        wait_for_step(process, run, max(losses(run)) + 1)
    watch = agents_of(run)
    everyone = tree(process)
    assert len(watch) == 2 and not {p.pid for p in watch} & {p.pid for p in everyone}  # the agent, and its keeper
    ranks_of(process)[1].send_signal(signal.SIGKILL)
    code, output = finish(process, 60)
    assert gone([*everyone, *watch], ENDED_S)
    assert "Traceback" not in output and "error: " in output, output[-3000:]  # rank 0 fails after rank 1
    # -9 as DeepSpeed says it; 1 if its launcher had to be asked to go
    assert code in (247, 1), output[-3000:]
    event = rows(run, "events.jsonl")[-1]
    assert (event["kind"], event["cause"], event["ranks"]) == ("fault", "killed", [1])
    assert event["host"] == os.uname().nodename and "SIGKILL" in event["text"]
    said = [m for line in output.splitlines() if (m := messages.parse(line)) is not None]
    assert [m["kind"] for m in said if m["kind"] != "checkpoint"] == ["place", "fault"]
    assert [r["rank"] for r in said[0]["ranks"]] == [0, 1]
    saved = [e["step"] for e in rows(run, "events.jsonl") if e["kind"] == "save"]
    assert saved and [m["step"] for m in said if m["kind"] == "checkpoint"] == saved
    assert said[-1]["signature"] == event["signature"] == f"step {event['step'] + 1}: killed: SIGKILL"


def test_a_stopped_rank_is_named_and_where_the_others_wait(small_data, tmp_path):
    recipe, run = write_recipe(tmp_path, small_data), tmp_path / "run"
    job = Launch(
        recipe, "--train.max_steps", "100000", "--fault.stall_timeout_s", "4", before=stalls.watched, world_size=2
    )
    deadline = time.monotonic() + 120
    while len(rows(run)) < 6 and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(job.ranks[1].pid, signal.SIGSTOP)
    assert None not in job.wait(60) and gone(agents_of(run), ENDED_S)
    event = rows(run, "events.jsonl")[-1]
    assert (event["kind"], event["cause"], event["ranks"]) == ("fault", "stopped", [1])
    assert f"`kill -CONT {job.ranks[1].pid}`" in event["text"]
    rank_0 = event["all_ranks"][0]
    assert rank_0["inside"] and rank_0["collective"] and any("run.py" in frame[0] for frame in rank_0["stack"])
    assert re.search(r"rank 0 .*llmtrain/", event["text"])


def test_a_checkpoint_writer_that_stands_still_is_a_stall_and_named(small_data, tmp_path):
    """The ranks ask each other a hundred times a second if the save has ended; the job is asked to stop meanwhile."""
    recipe, run = write_recipe(tmp_path, small_data), tmp_path / "run"
    often = ("--checkpoint.every_steps", "4", "--schedule.name", "constant", "--train.max_steps", "100000")
    job = Launch(recipe, *often, "--fault.stall_timeout_s", "8", before=stalls.watched)
    deadline = time.monotonic() + 120
    while len(rows(run)) < 6 and time.monotonic() < deadline:
        time.sleep(0.1)
    writer = job.writer(1)
    assert writer is not None
    writer.suspend()
    while "pause" not in [e["kind"] for e in rows(run, "events.jsonl")] and time.monotonic() < deadline:
        time.sleep(0.1)
    for rank in job.ranks:
        os.kill(rank.pid, signal.SIGTERM)
    assert None not in job.wait(60) and gone([*agents_of(run), writer], ENDED_S), job.output()[-3000:]
    told, event = (e for e in rows(run, "events.jsonl") if e["kind"] in ("pause", "fault"))
    assert (told["cause"], event["cause"], event["ranks"]) == ("child_stopped", "child_stopped", [1]), event["text"]
    process = f"process {writer.pid} (llmtrain.checkpoint.writer)"
    assert process in event["text"] and "save at llmtrain/checkpoint/save.py" in event["text"], event["text"]
    assert f"`kill -CONT {writer.pid}`" in told["text"]


def test_a_stop_that_ends_is_explained_and_the_run_goes_on(small_data, tmp_path):
    recipe, run = write_recipe(tmp_path, small_data), tmp_path / "run"
    job = Launch(
        recipe, "--train.max_steps", "100000", "--fault.stall_timeout_s", "30", before=stalls.watched, world_size=2
    )

    def wait_for(kind: str) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        while not (found := [e for e in rows(run, "events.jsonl") if e["kind"] == kind]):
            if time.monotonic() > deadline or not job.alive():
                gone(agents_of(run), ENDED_S)  # they say why
                raise AssertionError(job.output()[-3000:])
            time.sleep(0.1)
        return found[0]

    wait_for("save")
    os.kill(job.ranks[1].pid, signal.SIGSTOP)
    told = wait_for("pause")
    os.kill(job.ranks[1].pid, signal.SIGCONT)
    assert wait_for("pause_over")["lasted_s"] >= 6
    before = len(rows(run))
    while len(rows(run)) < before + 5:
        time.sleep(0.1)
    for rank in job.ranks:
        os.kill(rank.pid, signal.SIGTERM)
    assert job.wait(60) == [0, 0] and gone(agents_of(run), ENDED_S)
    assert (told["cause"], told["ranks"], len(told["all_ranks"])) == ("stopped", [1], 2)
    assert re.search(r"\b[678] s\b", told["text"]) and told["all_ranks"][0]["stack"]
    assert re.search(f"warning: {re.escape(told['text'])} .*30 s", job.output())
    kinds = [e["kind"] for e in rows(run, "events.jsonl")]
    assert (kinds.count("pause"), kinds.count("pause_over"), kinds.count("fault")) == (1, 1, 0)


def test_an_exception_is_told_with_its_line_and_its_phase(small_data, tmp_path):
    event = explained(small_data, tmp_path, stalls.raises)
    assert (event["cause"], event["ranks"], event["step"]) == ("exception", [1], 5)
    assert "ValueError: token 600 of a vocabulary of 512 at watch/stalls.py:" in event["text"]
    assert event["signature"] == "step 6: exception: ValueError: token 600 of a vocabulary of 512"


def test_a_stage_that_fails_in_its_first_forward_pass_ends_the_run(small_data, tmp_path):
    """It had waited for the other stage, to agree on the message, which waited for its activations."""
    stages = tmp_path / "stages.json"
    stages.write_text(json.dumps({"zero_optimization": {"stage": 1}, "pipeline": {"stages": 2}}))
    overrides = ("--deepspeed", str(stages), "--model.config.tie_word_embeddings", "false")
    event = explained(small_data, tmp_path, stalls.fails_in_transformers, *overrides)
    assert (event["cause"], event["ranks"], event["step"]) == ("exception", [0], 0), event["text"]
    assert "TypeError: 'NoneType' object is not callable at" in event["text"]


def test_a_file_server_that_does_not_answer(small_data, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    event = explained(small_data, tmp_path, partial(stalls.file_server_is_silent, fifo=tmp_path / "fifo"))
    assert (event["cause"], event["ranks"]) == ("input_output", [1]), event["text"]
    assert "rank 0 " in event["text"] and "disk" in event["text"]


def test_work_that_takes_long_is_no_fault(small_data, tmp_path):
    """A stall time-out of 4 s, an end of the run on rank 0 alone that computes for 8 s."""
    recipe, run = write_recipe(tmp_path, small_data), tmp_path / "run"
    job = Launch(recipe, "--train.max_steps", "12", "--fault.stall_timeout_s", "4", before=stalls.busy_export)
    assert job.wait(120) == [0, 0], job.output()[-3000:]
    assert gone(agents_of(run), ENDED_S)
    kinds = [e["kind"] for e in rows(run, "events.jsonl")]
    assert kinds[kinds.index("stop") - 1] == "save" and "stop" in kinds[-2:]
    assert "fault" not in job.output() and "straggler" not in job.output()


def test_an_error_is_told_before_the_process_group_is_left(small_data, tmp_path):
    """With NCCL that waits for the others, who wait for this rank."""
    event = explained(small_data, tmp_path, stalls.fails_before_training)
    assert (event["cause"], event["ranks"], event["step"]) == ("gpu_error", [1], 0), event["text"]
    assert "CUDNN_STATUS_EXECUTION_FAILED at watch/stalls.py:" in event["text"] and "resume" in event["text"]


@pytest.mark.parametrize(
    ("fault", "steps", "cause", "words"),
    [
        (stalls.spins_in_evaluate, 3, "slow_host", "evaluate"),
        (stalls.never_begins_a_collective, 100000, "behind", "all_reduce #120"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_busy_processor_is_no_progress(small_data, tmp_path, fault, steps, cause, words):
    """A rank that waits for its device polls, and was let wait for ever where there is no pace yet."""
    event = explained(small_data, tmp_path, fault, "--train.max_steps", str(steps))
    assert (event["cause"], event["ranks"]) == (cause, [1]), event["text"]
    assert words in event["text"]


def test_what_nccls_watchdog_says_is_the_cause(small_data, tmp_path):
    """It stands on standard error alone, which the user still has in full."""
    event = explained(small_data, tmp_path, stalls.aborted_by_nccl)
    assert (event["cause"], event["ranks"], event["step"]) == ("illegal_address", [1], 5), event["text"]
    assert ILLEGAL.splitlines()[0] in event["text"] and " data" in event["text"]
    assert (event["unfit"], event["again"]) == (False, True)
    output = "".join(path.read_text() for path in tmp_path.glob("launch-*.log"))
    assert watchdog_ended(ILLEGAL) in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "cause", "ranks", "words"),
    [
        (stalls.crashes, "crashed", [1], "SIGSEGV"),
        (stalls.one_micro_batch_less, "uneven_batches", [1], "rank 1 on"),
        (stalls.loops_for_ever, "slow_host", [1], "forward"),
        (stalls.waits_for_a_lock, "one_waits", [1], "rank 1 on"),
        (stalls.rank_0_saves_alone, "rank_0_only_save", [0], "rank 0 on"),
        (stalls.another_collective, "collective_mismatch", [1], "broadcast #"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_seeded_faults_are_told_apart(small_data, tmp_path, fault, cause, ranks, words):
    event = explained(small_data, tmp_path, fault)
    assert (event["cause"], event["ranks"]) == (cause, ranks), event["text"]
    assert words in event["text"]


def with_dev_shm(size: str, small_data: str, folder: Path, warm: WarmCommands, *more: str) -> tuple[int, str]:
    """(exit code, output) of a launch whose /dev/shm has this size and a file of 20 kB."""
    recipe = write_recipe(folder, small_data)
    (folder / "hosts").write_text("localhost slots=2\n")
    full = f"mount -t tmpfs -o size={size} tmpfs /dev/shm && head -c 20000 /dev/zero > /dev/shm/full"
    run = shlex.join(["llmtrain", "launch", "--hostfile", "hosts", "--max-restarts", "0", str(recipe), *more])
    words = ["unshare", "-m", "bash", "-c", f"({full}) 2> /dev/null; df -T /dev/shm; exec {run} --train.max_steps 3"]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    job = subprocess.Popen(words, cwd=folder, env=warm.environment(), start_new_session=True, **streams)
    code, output = finish(job)
    if not re.search(r"tmpfs +tmpfs +\d{2,4} ", output):
        pytest.skip(f"needs the right to mount a tmpfs: {output[:200]}")
    return code, output


def test_a_full_dev_shm_is_named_before_the_start(small_data: str, tmp_path: Path, warm: WarmCommands) -> None:
    """The ranks were killed by SIGBUS at their first heartbeat, and nothing was said of a cause."""
    code, output = with_dev_shm("16k", small_data, tmp_path, warm)
    assert code == 0 and losses(tmp_path / "run").keys() == {1, 2, 3}, output
    assert output.count("(0 B free)") == 1 and "mount -o remount" in output, output


WRITES = """
from dataclasses import dataclass
import mmap
from llmtrain import Part

@dataclass(kw_only=True)
class Writes(Part, entry="writes"):
    def open(self, launch):
        self.rank = launch.setup.ranks.rank

    def after_step(self, done):
        if done.position.step == 2 and self.rank == 1:
            with open("/dev/shm/of_a_plugin", "w+b") as file:
                file.truncate(1 << 22)
                mmap.mmap(file.fileno(), 1 << 22)[:] = bytes(1 << 22)
"""


def test_a_dev_shm_that_fills_up_is_named(small_data: str, tmp_path: Path, warm: WarmCommands) -> None:
    """A rank was said to be killed by something outside the job: its stack found no room there."""
    (tmp_path / "plugin.py").write_text(WRITES)
    more = ("--plugin", str(tmp_path / "plugin.py"), "--parts.writes")
    code, output = with_dev_shm("1200k", small_data, tmp_path, warm, *more)
    assert code == 1, output
    assert re.search(r"rank 1 on .* was ended by SIGBUS in parts.writes: after_step at .*plugin.py:15 ", output), output
    assert re.search(r"/dev/shm of .* is full \(0 B free\).*mount -o remount,size=50%", output), output
