"""metrics.jsonl, events.jsonl: whole lines, valid JSON, one row a step; console; trackers; redaction; imports."""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from llmtrain.base import log, units
from llmtrain.base.redact import REDACTED, is_secret, redact, redact_argv, redact_text
from llmtrain.tracking.environment import VERIFIED, describe_environment, new_run_id, unverified, write_environment
from llmtrain.tracking.local import JsonLines, read_rows, truncate_after
from llmtrain.tracking.sink import Sink
from llmtrain.tracking.tracker import Console, Queued, Tracker

ROOT = Path(__file__).parents[3]


def tracker(run_dir: Path, *, start_step: int = 0, enabled: bool = True) -> Tracker:
    return Tracker(run_dir, run_id="r", config={}, total_steps=10, enabled=enabled, start_step=start_step)


def strict_json(line: str) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_rows_are_strict_json_and_numbers_come_back(tmp_path):
    run = tracker(tmp_path)
    run.log({"step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": 1e-4})
    run.event("skip", step=1, samples=[3, 4], worst=-math.inf)
    run.close()
    row = strict_json((tmp_path / "metrics.jsonl").read_text())
    assert (row["loss"], row["grad_norm"], row["lr"]) == ("NaN", "Infinity", 1e-4)
    assert math.isnan(float(row["loss"])) and float(row["grad_norm"]) == math.inf
    assert row["elapsed_s"] >= 0 and abs(row["time_unix_s"] - time.time()) < 60
    event = strict_json((tmp_path / "events.jsonl").read_text())
    assert (event["kind"], event["samples"], event["worst"]) == ("skip", [3, 4], "-Infinity")


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 3', "\x00\x00\x00", '{"step": 3, "loss": 1.0}'])
def test_a_torn_last_line_is_repaired(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n' + torn)
    lines = JsonLines(path)
    lines.write({"step": 4})
    lines.close()
    steps = [strict_json(line)["step"] for line in path.read_text().splitlines()]
    assert steps == ([1, 2, 3, 4] if torn.endswith("}") else [1, 2, 4])


def test_resume_drops_what_will_be_repeated_and_says_so(tmp_path):
    run = tracker(tmp_path)
    for step in range(1, 8):
        run.log({"step": step, "loss": 1.0})
    run.log({"step": 5, "eval/loss": 2.0})
    run.close()
    run = tracker(tmp_path, start_step=5)
    run.log({"step": 6, "loss": 0.5})
    run.close()
    rows, bad = read_rows(tmp_path / "metrics.jsonl")
    assert bad == 0
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 5, 6]
    assert rows[-1]["loss"] == 0.5
    events, _ = read_rows(tmp_path / "events.jsonl")
    assert [(e["kind"], e["step"], e["dropped_rows"]) for e in events] == [("rewind", 5, 2)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["events.jsonl", "metrics.jsonl"]


def test_truncation_keeps_foreign_lines_and_missing_files(tmp_path):
    assert truncate_after(tmp_path / "none.jsonl", 3) == 0
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\nnot json\n{"step": 9}\n{"note": "no step"}\n')
    assert truncate_after(path, 3) == 1
    assert path.read_text() == '{"step": 1}\nnot json\n{"note": "no step"}\n'


def test_a_run_that_starts_again_from_nothing_drops_its_step_0_as_well(tmp_path):
    for _ in range(2):
        run = tracker(tmp_path)
        run.log({"step": 0, "eval/loss": 9.0})
        run.close()
    assert len(read_rows(tmp_path / "metrics.jsonl")[0]) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said_once_and_training_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(log, "_warned_of", set())
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    run = tracker(tmp_path)
    for step in range(5):
        run.log({"step": step, "loss": 1.0})
    run.event("save", step=5)
    run.close()
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert read_rows(tmp_path / "events.jsonl")[0][0]["kind"] == "save"


def test_a_half_written_line_is_taken_back(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(log, "_warned_of", set())
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    lines.write({"step": 1})
    whole_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: whole_write(fd, data[:5]))
    lines.write({"step": 2})
    monkeypatch.setattr(os, "write", whole_write)
    lines.write({"step": 3})
    lines.close()
    assert [strict_json(line)["step"] for line in path.read_text().splitlines()] == [1, 3]
    assert str(path) in capsys.readouterr().err


def test_other_ranks_write_nothing(tmp_path, capsys):
    run = tracker(tmp_path / "run", enabled=False)
    run.log({"step": 1, "loss": 1.0})
    run.event("start")
    run.close()
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


ROW = {"loss": 3.25, "lr": 3e-4, "grad_norm": 0.5, "tokens_per_s": 12345.0, "max_memory_gib": 1.5}


def test_plain_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    console = Console(total_steps=100, norm="update", stream=stream)
    console.log({"step": 10, **ROW})
    time.sleep(0.01)
    console.log({"step": 20, **ROW})
    console.log({"step": 20, "eval/loss": 3.0, "eval/perplexity": 20.09})
    console.close()
    first, second, evaluation = stream.getvalue().splitlines()
    assert first == (
        "step  10/100  loss 3.2500 nats/token  12.3k tokens/s  learning rate 3.0e-04  update norm 0.50  memory 1.5 GiB"
    )
    assert second.split("  ")[4].endswith("s left")
    assert evaluation == "step  20/100  validation loss 3.0000 nats/token  perplexity 20.09"
    assert "\x1b" not in stream.getvalue()


def test_the_time_left_is_that_of_recent_steps(monkeypatch):
    """Each step took a minute at first, a second later: an hour stood on the screen."""
    now = iter([60.0 * step if step < 10 else 540.0 + step for step in range(1, 16)])
    monkeypatch.setattr("llmtrain.tracking.tracker.time.monotonic", lambda: next(now))
    stream = io.StringIO()
    console = Console(total_steps=75, stream=stream)
    for step in range(1, 16):
        console.log({"step": step, **ROW})
    lines = stream.getvalue().splitlines()
    assert f"  {units.duration(3960.0)} left  " in lines[8] and f"  {units.duration(60.0)} left  " in lines[-1]


def test_the_live_line_is_off_the_screen_before_what_is_said_last(monkeypatch):
    screen = Tty()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    console = Console(total_steps=4)
    console.log({"step": 1, **ROW})
    print("saved", "checkpoint")
    console.log({"step": 2, **ROW})
    console.close()
    print("last")
    assert sys.stdout is screen
    text = screen.getvalue()
    # What stays on the terminal: an erase sequence empties the line that it stands in.
    shown = [re.sub(r"\x1b\[[?\d;]*[a-zA-Z]|\r", "", line.split("\x1b[2K")[-1]).strip() for line in text.split("\n")]
    assert text.count("step 1/4") == 2 and "━" in text  # drawn again below the message
    kept = [line for line in shown if line]
    assert kept[0] == "saved checkpoint" and kept[-1] == "last"
    assert kept[-2].endswith("memory 1.5 GiB") and kept[-2].startswith("step 2/4  loss 3.2500")


def test_the_live_line_of_a_long_run_fits_beside_its_bar_into_120_columns():
    shown = []
    console = Console(total_steps=350_000, norm="update", show=lambda *given: shown.append(given), stream=io.StringIO())
    figures = {"tokens_per_s": 123_456.0, "lr": 4.3e-3, "grad_norm": 67.19, "max_memory_gib": 70.5}
    for step in (99_990, 100_000):
        row = {"step": step, "loss": 4.164, **figures, "mfu_causal": 0.401, "comm_share": 0.19}
        console.log(row)
    text = shown[-1][0]
    assert text.endswith("MFU 40.1%  comm 19%") and "loss 4.1640" in text and " left" in text
    assert len(text) <= 120 - 9, text  # a bar of 8 and a blank
    assert "communication 19%" in console._line  # what stays on the screen at the end says all in full


def test_another_process_shows_the_progress():
    shown = []
    stream = io.StringIO()
    console = Console(total_steps=4, show=lambda *given: shown.append(given), stream=stream)
    console.log({"step": 2, **ROW})
    console.log({"step": 2, "eval/loss": 3.0})
    console.close()
    line = shown[0][0]
    assert line.startswith("step 2/4  loss") and shown == [(line, 0.5), ("", None)]
    evaluation, last = stream.getvalue().splitlines()
    assert evaluation == "step 2/4  validation loss 3.0000 nats/token"
    assert last.startswith("step 2/4  loss 3.2500 nats/token") and last.endswith("memory 1.5 GiB")  # all in full


@pytest.mark.parametrize("key", ["WANDB_API_KEY", "apiKey", "hf_token", "db.password", "AWS_SECRET_ACCESS_KEY"])
def test_secret_names(key):
    assert is_secret(key)
    assert redact({key: "s3cr3t"}) == {key: REDACTED}


@pytest.mark.parametrize("key", ["max_tokens", "pad_token", "eos_token", "loss_chunk_tokens", "tokenizer", "key"])
def test_names_of_this_field_are_no_secrets(key):
    assert not is_secret(key)


def test_redaction_reaches_every_depth(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "canary-in-env")
    dirty = {
        "remote": "https://me:pw@host/repo.git",
        "deep": [{"auth": {"password": "x"}}, "says canary-in-env here"],
        "credentials": ["a", "b"],
        "lr": 1e-4,
        "bytes_per_token": 2,
    }
    clean = redact(dirty)
    assert clean["remote"] == f"https://{REDACTED}@host/repo.git"
    assert clean["deep"] == [{"auth": {"password": REDACTED}}, f"says {REDACTED} here"]
    assert clean["credentials"] == [REDACTED, REDACTED]
    assert (clean["lr"], clean["bytes_per_token"]) == (1e-4, 2)
    assert "hf_" not in redact_text("token hf_" + "a" * 34)
    assert redact_text("https://b/a?X-Amz-Credential=c&X-Amz-Signature=canary&versionId=3") == (
        f"https://b/a?X-Amz-Credential={REDACTED}&X-Amz-Signature={REDACTED}&versionId=3"
    )
    assert redact_text("'az://b/c?sr=b&sig=canary%3D'") == f"'az://b/c?sr=b&sig={REDACTED}'"
    assert redact_argv(["--api_key", "x", "--hf-token=y", "--lr", "1", "--password", "--flag"]) == [
        *("--api_key", REDACTED, f"--hf-token={REDACTED}", "--lr", "1", "--password", "--flag")
    ]


def test_environment_json_says_what_ran_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary-wandb-key")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    ranks = [{"rank": 0, "host": "a", "device": "cpu"}, {"rank": 1, "host": "b", "device": "cpu"}]
    environment = describe_environment(ranks=ranks, plugins={}, argv=["train.py", "--api_key", "canary-argv"])
    write_environment(tmp_path, environment)
    text = (tmp_path / "environment.json").read_text()
    found = strict_json(text)
    assert found["ranks"] == ranks
    assert found["versions"]["python"].startswith("3.")
    assert found["versions"]["torch"]
    assert found["variables"]["NCCL_DEBUG"] == "INFO"
    assert {"commit", "dirty"} == found["git"].keys()
    assert "canary" not in text


def test_training_goes_on_when_nobody_reads_its_lines_or_their_disk_is_full(monkeypatch):
    """`llmtrain train ... | head`, and `> log` on a full disk."""
    for stream in (open("/dev/full", "w"), None):  # noqa: SIM115
        if stream is None:
            reader, writer = os.pipe()
            os.close(reader)
            stream = os.fdopen(writer, "w")
        monkeypatch.setattr(sys, "stdout", stream)
        console = Console(total_steps=3)
        for step in (1, 2, 3):
            console.log({"step": step, "loss": 2.0})
        console.close()


def test_versions_that_no_test_has_run_with_are_told_in_one_line() -> None:
    known = {"torch": "2.13.0+cpu", "deepspeed": "0.19.8", "transformers": "5.17.0", "numpy": "9.0"}
    assert unverified(known) is None
    assert unverified({**known, "torch": None}) is None
    told = unverified({**known, "torch": "2.16.0", "deepspeed": "0.20.1+abc"})
    assert told is not None and told.startswith("not tested with torch 2.16.0 (tested: 2.11 to 2.15), deepspeed 0.20.1")


def test_the_verified_versions_are_those_of_the_two_constraints_files() -> None:
    """And torch's newest is the newest that pyproject.toml admits: `make test-newest` ran with it."""
    lowest, highest = (
        dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / name).read_text(), re.M))
        for name in ("constraints-oldest.txt", "constraints.txt")
    )
    for package, (low, high) in VERIFIED.items():
        assert lowest[package].startswith(f"{low}.")
        assert package == "torch" or highest[package].startswith(f"{high}.")
    (ceiling,) = re.findall(r'"torch>=[\d.]+,<2\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert VERIFIED["torch"][1] == f"2.{int(ceiling) - 1}"
    floors = dict(re.findall(r'^  "([\w-]+)>=([\d.]+)', (ROOT / "pyproject.toml").read_text(), re.M))
    for package, floor in floors.items():
        assert lowest[package] == floor or lowest[package].startswith(f"{floor}."), (package, floor)


class Stubborn(Sink):
    """Raises in each row, or does not come back from it."""

    def __init__(self, *, raises: bool) -> None:
        self.raises, self.abandoned, self.free = raises, 0, threading.Event()

    def log(self, row: dict[str, Any], *, more: bool) -> None:
        if self.raises:
            raise OSError("nobody answers")
        self.free.wait(60)

    def abandon(self) -> None:
        self.abandoned += 1
        self.free.set()
        raise OSError("nor does it end")


@pytest.mark.parametrize("raises", [True, False])
def test_a_tracker_that_raises_or_hangs_ends_what_would_hold_up_the_process(
    raises: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Queued("trackers.mine", sink := Stubborn(raises=raises), lambda _: "")
    tracker.call("log", {"step": 1}, more=False)
    tracker.end(0)
    tracker.join(time.monotonic() + (30 if raises else 0.2))
    assert sink.abandoned == 1
    error = capsys.readouterr().err
    assert error.count("warning:") == 2 and ("OSError: nobody answers" if raises else "did not finish") in error
    assert "trackers.mine" in error


def test_a_tracker_that_ends_well_is_not_abandoned() -> None:
    tracker = Queued("trackers.mine", sink := Stubborn(raises=True), lambda _: "")
    tracker.end(0)
    tracker.join(time.monotonic() + 30)
    assert not sink.abandoned


def test_run_ids_differ_are_those_of_the_launch_and_leave_seeded_generators_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLMTRAIN_LAUNCH", "mark")
    assert new_run_id() == "mark", "a restart before the first checkpoint continues the same run"
    monkeypatch.delenv("LLMTRAIN_LAUNCH")
    random.seed(0)
    ids = {new_run_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(re.fullmatch("[a-z0-9]{8}", run_id) for run_id in ids)
    after = random.random()
    random.seed(0)
    assert random.random() == after
