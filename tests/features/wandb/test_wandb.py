"""W&B: what an offline run holds, and that no way of failing blocks, raises or leaks the key."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import wandb

from llmtrain import features
from llmtrain.base import log
from llmtrain.base.errors import ConfigError
from llmtrain.config.load import parse
from llmtrain.features.wandb import TrackingConfig, sink
from llmtrain.features.wandb import mode as modes
from llmtrain.features.wandb.mode import choose_mode
from llmtrain.features.wandb.sink import WandB
from llmtrain.tracking import tracker as trackers
from llmtrain.tracking.environment import new_run_id
from llmtrain.tracking.local import JsonLines, truncate_after
from llmtrain.tracking.tracker import Queued, Tracker
from tests.features.wandb.wandb_files import read_back
from tests.helpers.config_workplace import write

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
CANARY = "c0ffee" * 6 + "beef"  # 40 characters, as W&B wants them


def python(code: str, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "NETRC"))}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *argv],
        cwd=ROOT,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


TWO_LAUNCHES = """
    import os, sys, psutil
    from llmtrain import features
    from llmtrain.tracking.tracker import Tracker
    from llmtrain.tracking.environment import describe_environment, write_environment

    config = {"run": {"optim": {"lr": 3e-4}}, "deepspeed": {"zero_optimization": {"stage": 2}},
              "wandb_api_key": os.environ["WANDB_API_KEY"], "note": "key is " + os.environ["WANDB_API_KEY"]}
    for start, end, status in ((0, 6, "failed"), (4, 9, "finished")):
        tracker = Tracker(sys.argv[1], run_id="run12345", config=config, total_steps=9, enabled=True, start_step=start,
                          trackers=features.trackers({"tracking": {"wandb": "offline", "project": "proj"}}))
        environment = describe_environment(ranks=[], plugins={}, argv=["x", "--api_key", os.environ["WANDB_API_KEY"]])
        write_environment(sys.argv[1], environment)
        tracker.event("start", environment=environment, key=os.environ["WANDB_API_KEY"])
        for step in range(start + 1, end):
            if step == 3:
                tracker.event("samples", step=3, prompts=["def f(", "a"], texts=["x):", "b"])
            tracker.log({"step": step, "loss": 5.0 - step})
        me = psutil.Process()
        for process in (me, *me.children(recursive=True)):
            assert os.environ["WANDB_API_KEY"] not in " ".join(process.cmdline())
        tracker.close(status)
        assert not me.children(), me.children()
"""


def test_two_launches_are_one_offline_run_that_can_be_read_back_and_holds_no_key(tmp_path):
    run_dir = tmp_path / "my-run"
    done = python(TWO_LAUNCHES, str(run_dir), WANDB_API_KEY=CANARY)
    assert done.returncode == 0, done.stderr
    first, second = (read_back(folder) for folder in sorted((run_dir / "wandb").glob("offline-run-*")))
    for session in (first, second):
        assert session["id"] == "run12345"
        assert session["project"] == "proj"
        assert session["config"]["run"] == {"optim": {"lr": 3e-4}}
        assert session["config"]["deepspeed"] == {"zero_optimization": {"stage": 2}}
        assert session["config"]["wandb_api_key"] == "[redacted]"
        assert session["metrics"]["*"] == "step"
    assert [(row["step"], row["loss"]) for row in first["rows"]] == [(s, 5.0 - s) for s in range(1, 6)]
    [table] = (run_dir / "wandb").glob("offline-run-*/files/media/table/*.json")
    assert json.loads(table.read_text())["data"] == [["def f(", "x):"], ["a", "b"]]
    # Step 5 is in the first file: repeated, `wandb sync` would give it another `_step`, and all after it.
    assert [(row["_step"], row["loss"]) for row in second["rows"]] == [(s, 5.0 - s) for s in range(6, 9)]
    assert (first["exit"], second["exit"]) == (1, 0)
    # The reason is said, and the way to upload.
    assert re.search("W&B: offline.* wandb sync", done.stdout)
    assert CANARY not in done.stdout + done.stderr
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if CANARY.encode() in path.read_bytes()]


def test_a_kill_leaves_no_process(tmp_path):
    code = """
        import os, sys, time, psutil
        from pathlib import Path
        from llmtrain import features
        from llmtrain.tracking.tracker import Tracker
        from tests.features.wandb.wandb_files import read_back
        tracker = Tracker(sys.argv[1], run_id="r1", config={}, total_steps=9, enabled=True,
                          trackers=features.trackers({"tracking": {"wandb": "auto"}}))
        tracker.log({"step": 1, "loss": 1.0})
        deadline = time.monotonic() + 40
        while not [path for path in Path(sys.argv[1]).rglob("*.wandb") if read_back(path.parent)["rows"]]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        print(*[c.pid for c in psutil.Process().children(recursive=True)], flush=True)
        os.kill(os.getpid(), 9)
    """
    done = python(code, str(tmp_path / "run"), HOME=str(tmp_path))
    assert done.returncode == -9
    children = [int(word) for word in done.stdout.split() if word.isdigit()]
    assert children
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        if not (left := [pid for pid in children if _runs(pid)]):
            break
        time.sleep(0.2)
    assert not left


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_server_that_never_answers_costs_nothing_and_leaves_no_process(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = """
            import sys, time, psutil
            from pathlib import Path
            from llmtrain.tracking import tracker
            from llmtrain import features
            tracker._CLOSES_S = 0.5
            run = tracker.Tracker(Path(sys.argv[1]), run_id="r1", config={}, total_steps=1, enabled=True,
                                  trackers=features.trackers({"tracking": {"wandb": "auto"}}))
            while not psutil.Process().children():
                time.sleep(0.05)
            run.log({"step": 1, "loss": 1.0})
            began = time.monotonic()
            run.close()
            assert time.monotonic() - began < 5, time.monotonic() - began
            assert not psutil.Process().children()
        """
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        began = time.monotonic()
        done = python(code, str(tmp_path / "run"), WANDB_API_KEY=CANARY, WANDB_BASE_URL=url)
        assert done.returncode == 0, done.stderr
        assert "tracking.wandb" in done.stderr
        assert "Traceback" not in done.stderr
        assert CANARY not in done.stdout + done.stderr
        assert time.monotonic() - began < 15


def test_a_dead_wandb_core_is_said_once_and_leaves_no_traceback(tmp_path):
    code = """
        import sys, time, psutil
        from pathlib import Path
        from llmtrain import features
        from llmtrain.tracking.tracker import Tracker
        tracker = Tracker(sys.argv[1], run_id="r1", config={}, total_steps=50, enabled=True,
                          trackers=features.trackers({"tracking": {"wandb": "offline"}}))
        while not list(Path(sys.argv[1]).rglob("*.wandb")):
            time.sleep(0.05)
        for child in psutil.Process().children():
            child.kill()
        for step in range(50):
            tracker.log({"step": step, "loss": 1.0})
        tracker.close()
    """
    done = python(code, str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning: tracking.wandb is given up") == 1
    assert "Traceback" not in done.stderr


class FakeRun:
    url = "https://wandb.test/run"

    def __init__(self, log=None, finish=None, folder: Path = Path("offline-run-1"), starting_step: int = 0) -> None:
        self.rows: list[dict] = []
        self.summary: dict = {}
        self.dir, self.starting_step = str(folder / "files"), starting_step
        self._log = log
        self._finish = finish

    def define_metric(self, *names, **options) -> None:
        pass

    def log(self, row, *, step=None, commit=True) -> None:
        if self._log:
            self._log()
        if row:
            assert step in (row["step"], None)
            self.rows.append(row)

    def finish(self, exit_code=0) -> None:
        if self._finish:
            self._finish()


def fake_wandb(monkeypatch, *, run: FakeRun | None = None, init=None) -> types.ModuleType:
    module = types.ModuleType("wandb")

    class Settings:
        def __init__(self, **given) -> None:
            self.given = given

    def start(**options):
        module.options.append(options)
        if init:
            init(**options)
        return run or FakeRun()

    module.options = []
    module.Settings = Settings
    Settings.model_fields = {"console": None, "base_url": types.SimpleNamespace(default="https://wandb.test")}
    module.init = start
    module.teardown = lambda: None
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(log, "_warned_of", set())
    return module


def tracker_of(folder: Path, *, wandb: str = "offline", start_step: int = 0, late: bool = False, **tracking) -> Queued:
    made = WandB(tracking=TrackingConfig(wandb=wandb, **tracking))
    made.late = late
    tracker = Queued("tracking.wandb", made, lambda _: "")
    tracker.call("open", folder, "r", {}, start_step)
    return tracker


def end(tracker: Queued, timeout_s: float = 5.0) -> None:
    tracker.end(0)
    tracker.join(time.monotonic() + timeout_s)


def drive(tmp_path: Path, *, wandb: str = "offline", rows: int = 200, timeout_s: float = 5.0) -> tuple[float, float]:
    """Log rows and close; seconds per log call and seconds of close."""
    tracker = tracker_of(tmp_path, wandb=wandb)
    began = time.perf_counter()
    for step in range(rows):
        tracker.call("log", {"step": step, "loss": 1.0}, more=False)
    per_call_s = (time.perf_counter() - began) / rows
    began = time.perf_counter()
    end(tracker, timeout_s)
    return per_call_s, time.perf_counter() - began


def fail(*_, **__) -> None:
    raise RuntimeError(f"server said no to {os.environ.get('WANDB_API_KEY')}\nsecond line")


def hang(**_) -> None:
    threading.Event().wait(30)


@pytest.mark.parametrize(
    ("where", "how", "said"),
    [
        *((where, fail, "RuntimeError: server said no to [redacted]") for where in ("init", "log", "finish")),
        *((where, hang, "did not finish") for where in ("init", "log", "finish")),
    ],
)
def test_failing_and_hanging_wandb_is_said_once_and_never_waited_for(tmp_path, monkeypatch, capsys, where, how, said):
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    if where == "init":
        fake_wandb(monkeypatch, init=how)
    else:
        fake_wandb(monkeypatch, run=FakeRun(**{where: how}))
    per_call_s, close_s = drive(tmp_path, timeout_s=5.0 if how is fail else 0.3)
    assert per_call_s < 1e-3
    assert close_s < 3
    error = capsys.readouterr().err
    assert said in error and "tracking.wandb" in error
    assert error.count("warning:") == 1
    assert CANARY not in error


def test_a_full_queue_drops_rows_and_counts_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "_MOST_WAITING", 10)
    gate = threading.Event()
    run = FakeRun(log=lambda: gate.wait(10))
    fake_wandb(monkeypatch, run=run)
    tracker = tracker_of(tmp_path)
    for step in range(100):
        tracker.call("log", {"step": step}, more=False)
    gate.set()
    end(tracker)
    dropped = int(re.search(r"(\d+) calls were dropped", capsys.readouterr().err)[1])
    assert 89 <= dropped <= 91  # the first calls may already be in the thread's hands
    assert len(run.rows) == 100 - dropped
    assert [row["step"] for row in run.rows] == list(range(len(run.rows)))


def test_online_that_fails_falls_back_to_offline_under_the_same_id(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", CANARY)

    def refuse_online(**options) -> None:
        if options["mode"] == "online":
            raise ConnectionError("no route")

    run = FakeRun()
    module = fake_wandb(monkeypatch, run=run, init=refuse_online)
    drive(tmp_path, wandb="online", rows=3, timeout_s=5)
    assert [(o["mode"], o["id"], o["resume"]) for o in module.options] == [
        ("online", "r", "allow"),
        ("offline", "r", "allow"),
    ]
    assert len(run.rows) == 3
    assert re.search("offline.* ConnectionError: no route", capsys.readouterr().out)


@pytest.mark.parametrize(("given", "word"), [("disabled", ""), ("auto", "disabled")])
def test_disabled_does_not_even_import(tmp_path, monkeypatch, capsys, given, word):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv("WANDB_MODE", word)
    made = features.trackers({"tracking": TrackingConfig(wandb=given)})
    Tracker(tmp_path, run_id="r", config={}, total_steps=1, enabled=True, trackers=made).close()
    assert "given up" not in capsys.readouterr().err


def launch(
    run: Path, monkeypatch, name: str, steps: range, *, killed: bool = False, server_has: int | None = None
) -> list[int]:
    """Steps of the rows that W&B gets from a launch that trains `steps`. `server_has`: its last step; None: offline."""
    folder = run / "wandb" / name
    fake = FakeRun(folder=folder, starting_step=0 if server_has is None else server_has + 1)
    fake_wandb(monkeypatch, run=fake).Table = lambda columns, data: data
    monkeypatch.setattr(sink, "choose_mode", lambda asked: (asked, ""))
    folder.mkdir(parents=True)
    (folder / "run-r.wandb").write_bytes(b"rows of W&B")
    start = steps[0] - 1
    truncate_after(run / "metrics.jsonl", start or -1)
    tracker = tracker_of(run, wandb="offline" if server_has is None else "online", start_step=start)
    file = JsonLines(run / "metrics.jsonl")
    for step in steps:
        file.write({"step": step, "loss": float(step)})
        tracker.call("log", {"step": step, "loss": float(step)}, more=False)
    file.close()
    if killed:
        tracker._calls.put(None)
        tracker._thread.join()
    else:
        end(tracker)
    return [row["step"] for row in fake.rows]


def left_to_sync(run: Path) -> list[str]:
    """Names of the folders that `wandb sync` uploads."""
    files = sorted((run / "wandb").glob("offline-*/*.wandb"))
    return [file.parent.name for file in files if not file.with_suffix(".wandb.synced").exists()]


def test_the_rows_of_a_killed_offline_launch_are_sent_again_and_its_file_is_left_out(tmp_path, monkeypatch):
    """A kill tears W&B's file, where `wandb sync` stops."""
    go = partial(launch, tmp_path, monkeypatch)
    assert go("offline-run-1-r", range(1, 6)) == [1, 2, 3, 4, 5]
    assert go("offline-run-2-r", range(6, 9), killed=True) == [6, 7, 8]
    (tmp_path / "wandb/offline-run-2-r/run-r.wandb").write_bytes(b"")
    (empty := tmp_path / "wandb/offline-run-2b-r").mkdir()
    (empty / "run-r.wandb").write_bytes(b"\0" * 7)  # W&B's header
    assert go("offline-run-3-r", range(8, 10)) == [6, 7, 8, 9]
    assert left_to_sync(tmp_path) == ["offline-run-1-r", "offline-run-3-r"]
    # From an earlier checkpoint: W&B keeps the values of the steps that it has.
    assert go("offline-run-4-r", range(8, 12)) == [10, 11]
    # The server has none of these; a launch online sends them all, and leaves nothing to sync.
    assert go("run-5-r", range(12, 14), server_has=-1) == list(range(1, 14))
    assert left_to_sync(tmp_path) == []
    # Killed online, continued offline: what was handed over counts as sent.
    assert go("run-6-r", range(14, 17), server_has=13, killed=True) == [14, 15, 16]
    assert go("offline-run-7-r", range(15, 18)) == [17]
    assert left_to_sync(tmp_path) == ["offline-run-7-r"]


def test_scores_after_a_killed_offline_launch_come_with_its_rows(tmp_path, monkeypatch):
    """`wandb sync` would stop at the file of the killed launch, and upload no scores."""
    launch(tmp_path, monkeypatch, "offline-run-1-r", range(1, 6), killed=True)
    fake_wandb(monkeypatch, run=(run := FakeRun(folder=tmp_path / "wandb/offline-run-2-r")))
    tracker = tracker_of(tmp_path, late=True)
    tracker.call("log", {"step": 3, "tasks/a": 0.5}, more=False)
    end(tracker)
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4, 5, 3] and left_to_sync(tmp_path) == []
    assert launch(tmp_path, monkeypatch, "offline-run-3-r", range(4, 8)) == [6, 7]


def test_one_save_covers_all_rows_of_earlier_launches(tmp_path, monkeypatch):
    saves, rows = [], range(1, 41)
    launch(tmp_path, monkeypatch, "offline-run-1-r", rows, killed=True)
    monkeypatch.setattr(WandB, "_save_sent", lambda sink: saves.append(sink._sent.step))
    assert launch(tmp_path, monkeypatch, "offline-run-2-r", range(41, 42)) == [*rows, 41]
    assert saves == [40, 40, 41, 41]  # before `wandb.init`, before the rows, after the new row, at the end


def test_a_file_of_steps_that_cannot_be_written_costs_no_row(tmp_path, monkeypatch, capsys):
    (tmp_path / "wandb/sent.json.tmp").mkdir(parents=True)
    assert launch(tmp_path, monkeypatch, "offline-run-1-r", range(1, 6)) == [1, 2, 3, 4, 5]
    error = capsys.readouterr().err
    assert error.count("warning:") == 1 and "sent.json" in error


def test_what_a_user_has_synced_of_a_killed_launch_is_not_sent_again(tmp_path, monkeypatch):
    launch(tmp_path, monkeypatch, "offline-run-1-r", range(1, 6), killed=True)
    (tmp_path / "wandb/offline-run-1-r/run-r.wandb.syncstate").touch()
    assert launch(tmp_path, monkeypatch, "offline-run-2-r", range(3, 8), killed=True) == [6, 7]
    for file in (tmp_path / "wandb/offline-run-2-r").iterdir():  # wandb clean
        file.unlink()
    assert launch(tmp_path, monkeypatch, "offline-run-3-r", range(6, 9)) == [8]


def test_the_file_of_another_run_counts_for_nothing_and_a_lost_one_for_all_earlier_steps(tmp_path, monkeypatch):
    launch(tmp_path, monkeypatch, "offline-run-1-r", range(1, 6))
    file = tmp_path / "wandb" / "sent.json"
    file.write_text(file.read_text().replace('"r"', '"other"'))
    assert launch(tmp_path, monkeypatch, "offline-run-2-r", range(1, 4)) == [1, 2, 3]
    file.unlink()
    assert launch(tmp_path, monkeypatch, "offline-run-3-r", range(4, 6)) == [4, 5]


def test_samples_of_a_killed_launch_are_sent_again(tmp_path, monkeypatch):
    launch(tmp_path, monkeypatch, "offline-run-1-r", range(1, 6), killed=True)
    (tmp_path / "events.jsonl").write_text('{"kind":"samples","step":2,"prompts":["a"],"texts":["b"]}\n')
    launch(tmp_path, monkeypatch, "offline-run-2-r", range(4, 6))
    (row,) = [row for row in sys.modules["wandb"].init().rows if "samples" in row]
    assert (row["step"], row["loss"], row["samples"]) == (2, 2.0, [["a", "b"]])


def test_an_alert_goes_to_the_run(tmp_path, monkeypatch):
    run, alerts = FakeRun(), []
    run.alert = lambda **given: alerts.append(given)
    fake_wandb(monkeypatch, run=run)
    tracker = tracker_of(tmp_path)
    tracker.call("alert", "Spike at step 812", "the loss jumps\nllmtrain replay RUN")
    end(tracker)
    assert alerts == [{"title": "Spike at step 812", "text": "the loss jumps\nllmtrain replay RUN"}]


@pytest.fixture
def no_credentials(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith(("WANDB", "NETRC")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_what_keeps_wandb_offline_keeps_a_run_offline(no_credentials, monkeypatch, capsys):
    monkeypatch.chdir(no_credentials)
    assert choose_mode("auto") == ("offline", "no API key (set WANDB_API_KEY or run `wandb login`)")
    assert choose_mode("online")[0] == "offline"
    assert choose_mode("disabled")[0] == "disabled"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
        (no_credentials / ".netrc").write_text("machine 127.0.0.1 login user password secret\n")
        (no_credentials / ".netrc").chmod(0o600)
        assert choose_mode("auto")[0] == "online"
        monkeypatch.setenv("WANDB_MODE", "offline")
        assert choose_mode("auto")[0] == "offline"
        assert choose_mode("online")[0] == "online"
        for word, mode in (("dryrun", "offline"), ("run", "online"), ("disabled", "disabled"), ("Offline", "offline")):
            monkeypatch.setenv("WANDB_MODE", word)
            assert choose_mode("auto")[0] == mode, word
        monkeypatch.setenv("WANDB_MODE", "dyrrun")
        assert choose_mode("auto")[0] == "offline" and "WANDB_MODE" in capsys.readouterr().err
        monkeypatch.delenv("WANDB_MODE")
        monkeypatch.setenv("WANDB_DISABLED", "true")
        assert choose_mode("auto")[0] == "disabled"
        monkeypatch.delenv("WANDB_DISABLED")
        saved = no_credentials / "wandb" / "settings"  # as `wandb offline` and `wandb disabled` write it
        saved.parent.mkdir()
        for mode in ("offline", "disabled"):
            saved.write_text(f"[default]\nmode = {mode}\n\n")
            assert choose_mode("auto")[0] == mode
        saved.unlink()
    assert choose_mode("auto") == ("offline", "127.0.0.1 cannot be reached")


def test_base_url_of_the_settings_file(no_credentials):
    folder = no_credentials / ".config" / "wandb"
    folder.mkdir(parents=True)
    (folder / "settings").write_text("[default]\nbase_url = https://wandb.mine\n")
    assert modes.base_url() == "https://wandb.mine"
    (folder / "settings").write_text("broken [")
    default = modes.base_url()
    assert default == wandb.Settings().base_url != "https://wandb.mine"
    for host in (urlsplit(default).hostname, "api.wandb.ai"):  # of `wandb login`, now and before
        (no_credentials / ".netrc").write_text(f"machine {host} login user password secret\n")
        assert modes.has_api_key(default) and not modes.has_api_key("https://wandb.mine")


def test_a_new_run_takes_the_id_of_the_environment(monkeypatch):
    monkeypatch.setenv("LLMTRAIN_LAUNCH", "mark")
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    assert new_run_id() == "mine"


@pytest.mark.parametrize(("word", "meant"), [("off", "disabled"), ("ofline", "offline")])
def test_a_wrong_mode_is_refused_with_the_right_one(tmp_path, monkeypatch, word, meant):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"tracking": {"wandb": word}})
    with pytest.raises(ConfigError, match=f'tracking.wandb = "{word}"(.|\n)*did you mean {meant}?'):
        parse(["--config", "run.yaml"])


def test_a_fault_is_in_the_summary_and_fails_the_run(tmp_path):
    """In a process of its own, as the one that the watch starts."""
    code = """
        import sys
        from dataclasses import asdict
        from pathlib import Path
        from llmtrain import features
        others = {key: asdict(section) for key, section in features.defaults().items()}
        (sink,) = features.trackers(others | {"tracking": {"wandb": "offline", "project": "proj"}}).values()
        sink.fault(Path(sys.argv[1]), "run12345", {"text": "rank 1 is dead", "cause": "killed", "step": 7})
    """
    done = python(code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    told = read_back(folder)
    summary = {"fault": "rank 1 is dead", "fault_cause": "killed", "fault_step": 7}
    assert (told["id"], told["project"], told["exit"]) == ("run12345", "proj", 1)
    assert summary.items() <= told["summary"].items()
