"""`llmtrain sites plan`: its formulas against what the exchange does, its words, its recommendation, its refusals.

And the line that `doctor --sites` measures for it beside `sites measure`.
"""

from __future__ import annotations

import json
import math
import re
import socket
import threading
import time
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest

from llmtrain.base.errors import ConfigError, UserError
from llmtrain.cluster.doctor import site_links as lines
from llmtrain.commands import doctor
from llmtrain.commands import sites as command
from llmtrain.commands.sites import main
from llmtrain.optim.message_formats import FORMATS
from llmtrain.optim.outer_methods import Async, DiLoCo, LocalSgd, SitesConfig, Streaming
from llmtrain.sites import forecast as plan
from llmtrain.sites.forecast import Job, Line, measured
from tests.helpers.launching import free_port

LINE = Line(rate=12.5e6, rtt_s=0.05)


JOB = Job(fragments=(4_000_000, 3_000_000, 3_000_000, 1_000_000), sites=2, ranks=1, step_s=0.8, steps=60)


METHODS = plan.ways(DiLoCo())


def test_a_transfer_is_the_lines_time_and_that_of_a_window_that_doubles() -> None:
    """By hand: a line of 1 MB/s and 100 ms holds 100 kB; windows of 14,480, 28,960 and 57,920 bytes come before."""
    line = Line(rate=1e6, rtt_s=0.1)
    size = 500_000 * plan.HEADERS
    assert line.transfer_s(500_000) == pytest.approx(3 * 0.1 + (size - 14_480 * 7) / 1e6)
    assert line.transfer_s(10_000) == pytest.approx(10_000 * plan.HEADERS / 1e6)  # one window
    assert line.fetch_s(0) == 0 and line.fetch_s(10_000, 3) == pytest.approx(6 * 0.1 + line.transfer_s(10_000))
    assert replace(line, rtt_s=0.0).transfer_s(500_000) == pytest.approx(size / 1e6)


def test_one_connection_fills_no_line_that_holds_more_than_its_window() -> None:
    """10 Gbit/s and 100 ms hold 125 MB; with 4 MiB on their way, 42 MB/s come."""
    line = Line(rate=1.25e9, rtt_s=0.1)
    assert 1e9 * plan.HEADERS / line.transfer_s(10**9) == pytest.approx(plan.WINDOW / 0.1, rel=0.05)


def settings_of(way: str, **given: Any) -> SitesConfig:
    """A method, with those of the fields that it has."""
    return SitesConfig.of(way, **{key: value for key, value in given.items() if key in SitesConfig.CHOICES[way].own()})


@pytest.mark.parametrize(("way", "compress"), zip(METHODS, cycle(plan.COMPRESS), strict=False))
def test_bytes_are_those_of_the_rounds_that_a_run_has(way: str, compress: str) -> None:
    """Counted round by round, as Site.after_update does them; the last step's is of all fragments."""
    parts = JOB.fragments if way == "streaming" else (sum(JOB.fragments),)
    form = FORMATS.get(compress)
    size = [4 * part if form is None else -(-part // 256) * form.record for part in parts]
    sent = turn = 0
    for step in range(1, 61):
        if step == 60:
            sent += sum(size)
        elif step % (20 // len(parts)) == 0:
            sent, turn = sent + size[turn % len(parts)], turn + 1
    found = plan.with_sites(JOB, LINE, settings_of(way, sync_every=20), compress)
    # The formula takes the mean of the fragments for rounds that do not go round: at most 3 of their sizes are off.
    assert found.bytes_per_step * 60 == pytest.approx(sent * plan.HEADERS, rel=0.12 if way == "streaming" else 1e-9)


def test_plain_data_parallelism_sends_what_a_ring_does() -> None:
    for sites in (2, 4, 64):
        sent = plan.data_parallel(replace(JOB, sites=sites), LINE).bytes_per_step
        assert sent == pytest.approx(2 * (sites - 1) / sites * 2 * JOB.parameters * plan.HEADERS)


def test_sites_that_ask_all_others_at_once_share_lines() -> None:
    """Four sites, a message of a second: each line carries three in each direction."""
    line = Line(rate=1e6 * plan.HEADERS, rtt_s=0.0)
    job = replace(JOB, sites=4, fragments=(250_000,), steps=None)
    assert plan.with_sites(job, line, DiLoCo(sync_every=10), "none").fetch_s == pytest.approx(3.0)


def test_streaming_waits_only_for_what_takes_longer_than_its_overlap() -> None:
    slow = Line(rate=1e6, rtt_s=0.05)  # 16 MB of the largest fragment: 16 s, of which 4 s are trained meanwhile
    job = replace(JOB, fragments=(4_000_000,) * 4, steps=None)
    fetch_s = 2 * 0.05 + slow.transfer_s(16_000_000) + plan.MEETINGS * 0.05
    with_none, all_of_it = (
        plan.with_sites(job, slow, Streaming(overlap_steps=steps, sync_every=40), "none").wait_s * 10
        for steps in (5, 30)
    )
    assert with_none - all_of_it == pytest.approx(fetch_s - 4.0)
    assert all_of_it < 0.5  # this site's own work


def test_async_waits_for_the_others_at_its_meetings_alone() -> None:
    line, job = Line(rate=1e6, rtt_s=0.05), replace(JOB, steps=None)
    diloco = plan.with_sites(job, line, LocalSgd(sync_every=40), "none")
    alone = plan.with_sites(job, line, Async(sync_every=40, overlap_steps=60, meet_every=4), "none")
    assert alone.bytes_per_step == diloco.bytes_per_step
    own_s = 40 * diloco.wait_s - diloco.fetch_s - plan.MEETINGS * 0.05
    assert 40 * alone.wait_s == pytest.approx((diloco.fetch_s + plan.MEETINGS * 0.05) / 4 + own_s)


def test_wall_time_is_the_steps_the_waiting_and_the_last_round() -> None:
    found = plan.with_sites(JOB, LINE, DiLoCo(sync_every=30), "none")  # rounds after steps 30 and 60
    assert found.run_s == pytest.approx(60 * 0.8 + 2 * found.round_s)
    assert found.wait_s == pytest.approx(found.round_s / 60)


@pytest.mark.parametrize("way", METHODS)
def test_the_smallest_sync_every_reaches_the_goal_and_the_next_smaller_does_not(way: str) -> None:
    job, line = replace(JOB, steps=None), Line(rate=2e5, rtt_s=0.1)
    method, unit = settings_of(way), 4 if way == "streaming" else 1
    steps = plan.smallest(job, line, method, "int8")
    assert steps is not None and steps % unit == 0
    assert plan.with_sites(job, line, method.synchronising(steps), "int8").computing >= plan.GOAL
    assert plan.with_sites(job, line, method.synchronising(steps - unit), "int8").computing < plan.GOAL


def test_streaming_leaves_each_fragment_more_steps_than_it_travels() -> None:
    """As a row of Streaming.rules wants it: overlap_steps 5 is at most sync_every / fragments - 1."""
    assert plan.smallest(JOB, Line(rate=1e9, rtt_s=1e-4), Streaming(), "int4") == 24


def test_the_recommendation_is_the_gentlest_that_synchronises_often_enough() -> None:
    fast = plan.recommended(JOB, Line(rate=1.25e9, rtt_s=1e-3), METHODS)
    assert fast is not None and (fast.way, fast.compress) == ("diloco", "none") and fast.sync_every < 24
    seen = []
    for rate in (12.5e6, 3e5, 1.5e5, 1e4):
        best = plan.recommended(JOB, Line(rate=rate, rtt_s=0.05), METHODS)
        assert best is not None and best.computing >= plan.GOAL
        seen.append(plan.COMPRESS.index(best.compress))
        for gentler in plan.COMPRESS[: seen[-1]]:
            least = [plan.smallest(JOB, Line(rate=rate, rtt_s=0.05), METHODS[way], gentler)
                     for way in ("diloco", "streaming")]  # fmt: skip
            assert min(each or math.inf for each in least) > plan.LONGEST
    assert seen == sorted(seen) and seen[0] == 0 and seen[-1] == 3
    assert plan.recommended(JOB, Line(rate=1.0, rtt_s=0.05), METHODS) is None


def test_a_fetch_that_does_not_fit_in_half_of_the_timeout_raises_it() -> None:
    """Site._travel gives fetching half of the time that is left."""
    line = Line(rate=5e4, rtt_s=0.05)
    made = plan.advise(JOB, line, DiLoCo(), 0.95)
    assert made.best is not None and made.best.fetch_s > 30 / 1.5
    words = plan.words(made, 60.0)
    assert float(words[words.index("--sites.timeout_s") + 1]) / 2 >= 1.5 * made.best.fetch_s
    assert "--sites.timeout_s" not in plan.words(made, 1e6)


def test_a_line_that_carries_every_steps_gradients_needs_no_sites() -> None:
    made = plan.advise(JOB, Line(rate=1.25e10, rtt_s=1e-4), DiLoCo(), 0.95)
    assert made.plain.computing >= 0.95 and "no sites" in command.said(made, 60.0)[0]
    assert "--sites.method" in command.said(plan.advise(JOB, LINE, DiLoCo(), 0.95), 60.0)[0]
    assert "too slow" in command.said(plan.advise(JOB, Line(rate=1.0, rtt_s=1.0), DiLoCo(), 0.95), 60.0)[0]


def test_a_rate_and_a_round_trip_have_their_units() -> None:
    rates, trips = ("100mbit", "1Gbit/s", "512 kbitps"), ("50ms", "0.2s", "300 us")
    assert [command.rate_of(text) for text in rates] == pytest.approx([12.5e6, 1.25e8, 64e3])
    assert [command.seconds_of("--rtt", text) for text in trips] == pytest.approx([0.05, 0.2, 3e-4])
    for text in ("100", "100MB", "512 kbps", "0mbit", "-1mbit", "9" * 400 + "gbit", ""):
        with pytest.raises(ConfigError, match=r"(?s)--rate.*rule:.*mbit.*remedy:.*write --rate 100mbit"):
            command.rate_of(text)
    for text in ("50", "50min", "-1ms", "9" * 400 + "s"):
        with pytest.raises(ConfigError, match=r"(?s)--rtt.*remedy:.*--rtt 50ms"):
            command.seconds_of("--rtt", text)


def test_a_steps_time_is_that_of_the_runs_log_points(tmp_path) -> None:
    rows = [
        {"step": step, "tokens": 512 * step, "tokens_per_s": rate} for step, rate in ((10, 50), (20, 640), (30, 640))
    ]
    rows += [
        {"step": 30, "eval/loss": 3.0},
        {"step": 0, "tokens": 0, "tokens_per_s": 1},
        {"step": 1, "tokens": 1, "tokens_per_s": "NaN"},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plan.step_seconds(str(tmp_path)) == pytest.approx(0.8)
    with pytest.raises(ConfigError, match=r"(?s)--step-s.*remedy:.*--run DIR"):
        plan.step_seconds(str(tmp_path / "none"))


def test_a_measured_file_gives_its_slowest_line(tmp_path) -> None:
    file = tmp_path / "lines.json"
    one = {"up": 9e7, "down": 8e7, "both_up": 9e7, "both_down": 4e7, "trip_s": 0.02}
    file.write_text(json.dumps({"lines": [one, {**one, "both_down": 8e7, "trip_s": 0.06}]}))
    line = plan.measured(str(file))
    assert (line.rate, line.rtt_s) == (5e6, 0.06)
    for text in ("{", "[]", '{"lines": []}', '{"lines": [{"up": 1}]}', json.dumps({"lines": [{**one, "up": 0}]})):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"(?s)--measured.*doctor --sites"):
            plan.measured(str(file))


PLAN = "plan none.yaml --rate 1gbit"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plan none.yaml --rtt 50ms", "--rate = "),
        (PLAN, "--rtt = "),
        (f"{PLAN} --rtt 1ms --sites 1", "--sites = "),
        (f"{PLAN} --rtt 1ms --world-size 0", "--world-size = "),
        (f"{PLAN} --rtt 1ms --computing 95", "--computing = "),
        (f"{PLAN} --rtt 1ms --step-s -1", "--step-s = "),
        (f"{PLAN} --measured x", "--measured = "),
        ("measure --listen 0.0.0.0:29511", "0.0.0.0 is no private address"),
        ("measure --listen 29511", "must be HOST:PORT"),
        ("measure --listen 127.0.0.1:99999", "must be HOST:PORT"),
        ("measure --listen 127.0.0.1:29511 --for-s nan", "--for-s"),
        ("measure --listen 127.0.0.1:29511 --for-s 1e9", "--for-s"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_read_or_listens(words: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        main(words.split())


def test_other_commands_take_no_further_words() -> None:
    with pytest.raises(SystemExit):
        main(["status", "--nonsense"])


def test_a_run_is_planned_by_its_own_model_and_keys(small_data, tmp_path, capsys) -> None:
    """Through the command and the resolver: parameters counted by hand, fragments and steps as the YAML has them."""
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 0}}))
    model = {"model_type": "llama", "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64,
             "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
             "tie_word_embeddings": True}  # fmt: skip
    recipe = {"deepspeed": str(tmp_path / "ds.json"), "model": {"config": model},
              "data": {"path": small_data, "sequence_length": 32}, "schedule": {"name": "constant"},
              "train": {"run_dir": str(tmp_path / "run"), "global_batch": 4, "max_steps": 40}}  # fmt: skip
    (tmp_path / "run.yaml").write_text(json.dumps(recipe))
    common = ["plan", str(tmp_path / "run.yaml"), "--rate", "1mbit", "--rtt", "50ms", "--step-s", "0.1"]
    fragments = ["--sites.method", "streaming", "--sites.fragments", "2", "--sites.overlap_steps", "3"]
    assert main([*common, "--json", "--sites", "3", *fragments, "--sites.sync_every", "20"]) == 0
    found = json.loads(capsys.readouterr().out)
    layer = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
    assert found["job"]["parameters"] == 512 * 32 + 2 * layer + 32 and len(found["job"]["fragments"]) == 2
    diloco = next(row for row in found["sites"] if (row["way"], row["compress"]) == ("diloco", "none"))
    assert diloco["sync_every"] == 20 and found["job"]["steps"] == 40
    assert diloco["bytes_per_step"] == pytest.approx(2 * 2 * 4 * found["job"]["parameters"] * plan.HEADERS / 40)
    assert found["recommended"]["words"][0] == "--sites.method"
    assert main([*common, "--model.freeze", '["model.layers.*"]']) == 0
    shown = capsys.readouterr().out
    assert "16.4k parameters that train" in shown  # embeddings and the last norm
    # The words are keys that the configuration takes.
    assert main([*common, *re.findall(r"recommended: (.*)", shown)[0].split()]) == 0


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of half a second."""
    monkeypatch.setattr(lines, "_WINDOW_S", 0.5)


def test_doctor_measures_a_line_for_the_plan(short, tmp_path, capsys) -> None:
    """Through both commands. A loopback has more than 100 Mbit/s and less than 50 ms."""
    at, out = f"127.0.0.1:{free_port()}", tmp_path / "line.json"
    ended: list[int] = []
    answering = threading.Thread(
        target=lambda: ended.append(main(["measure", "--listen", at, "--for-s", "8"])), daemon=True
    )
    answering.start()
    time.sleep(0.2)
    assert doctor.main(["--sites", at, at, "--out", str(out)]) == 0
    assert "round trip" in capsys.readouterr().out
    found = json.loads(out.read_text())["lines"]
    assert [each["site"] for each in found] == [at, at]
    line = measured(str(out))
    assert line.rate > 12.5e6 and 0 < line.rtt_s < 0.05
    assert line.rate == min(each[key] for each in found for key in ("up", "down", "both_up", "both_down")) / 8
    answering.join(10)
    assert ended == [0], "it ends by itself"
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", int(at.rpartition(":")[2])), 1):
        pass


def test_a_site_that_does_not_answer_is_named_with_the_command_to_start(tmp_path) -> None:
    at, out = f"127.0.0.1:{free_port()}", tmp_path / "line.json"
    with pytest.raises(UserError, match=f"--sites {at}: .*llmtrain sites measure --listen {at}"):
        doctor.main(["--sites", at, "--out", str(out)])
    assert not out.exists()


def test_something_else_that_listens_there_is_no_measurement() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        at = f"127.0.0.1:{other.getsockname()[1]}"
        threading.Thread(target=lambda: other.accept()[0].sendall(b"SSH-2.0-OpenSSH\r\n"), daemon=True).start()
        with pytest.raises(UserError, match=f"--sites {at}: no measurement"):
            doctor.main(["--sites", at])


def test_doctor_wants_a_hostfile_or_sites() -> None:
    with pytest.raises(SystemExit):
        doctor.main([])
    with pytest.raises(UserError, match=r"--sites 10\.0\.0\.1: must be HOST:PORT"):
        doctor.main(["--sites", "10.0.0.1"])
