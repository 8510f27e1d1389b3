"""One W&B run per training run, against a stub of the W&B server: resumed online, or offline and synced later."""

from __future__ import annotations

import gzip
import http.server
import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


class Stub(http.server.ThreadingHTTPServer):
    """Answers the few requests of a run, and keeps the history lines that it was sent, by offset."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.history: dict[int, dict[str, Any]] = {}
        self.runs: set[str] = set()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Stub

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._reply({})

    def do_PUT(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            raw = gzip.decompress(raw)
        if "graphql" in self.path:
            body = json.loads(raw)
            self._reply({"data": self._graphql(body["query"], body.get("variables") or {})})
        elif "file_stream" in self.path:
            sent = (json.loads(raw).get("files") or {}).get("wandb-history.jsonl")
            for number, line in enumerate(sent["content"] if sent else ()):
                self.server.history[sent["offset"] + number] = json.loads(line)
            self._reply({"limits": {}})
        else:
            self._reply({})

    def _graphql(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        count = len(self.server.history)
        project = {"id": "p", "name": "proj", "entity": {"id": "e", "name": "ent"}}
        bucket = {
            "id": "b",
            "name": variables.get("name"),
            "displayName": "d",
            "config": "{}",
            "project": project,
            "historyLineCount": count,
        }
        if "RunResumeStatus" in query:
            tail = json.dumps([json.dumps({"_step": count - 1, "_runtime": 1})])
            resumed = bucket | {
                "summaryMetrics": json.dumps({"_step": count - 1}),
                "logLineCount": 0,
                "eventsLineCount": 0,
                "historyTail": tail,
                "eventsTail": "[]",
                "tags": [],
                "wandbConfig": json.dumps({"t": 1}),
            }
            return {"model": project | {"bucket": resumed if count else None}}
        if "upsertBucket" in query:
            self.server.runs.add(variables["name"])
            return {"upsertBucket": {"bucket": bucket, "inserted": count == 0}}
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": self.server.url + "/up"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        return {}

    def _reply(self, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


TWO_LAUNCHES = """
    import sys
    from llmtrain.config.run import TrackingConfig
    from llmtrain.tracking.tracker import Tracker
    tracking = TrackingConfig(wandb=sys.argv[2], project="proj", entity="ent")
    for start, end in ((0, 6), (4, 9)):
        tracker = Tracker(sys.argv[1], tracking=tracking, run_id="run12345", config={}, total_steps=9, enabled=True,
                          start_step=start)
        for step in range(start + 1, end):
            tracker.log({"step": step, "loss": 5.0 - step})
        tracker.close()
"""


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_resume_from_an_older_step_appends_to_the_same_run(tmp_path, mode):
    with Stub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("WANDB")},
            "WANDB_API_KEY": "a" * 40,
            "WANDB_BASE_URL": server.url,
            "WANDB_ERROR_REPORTING": "false",
            "TMPDIR": str(tmp_path),
        }
        options: dict[str, Any] = {
            "cwd": ROOT,
            "env": environment,
            "capture_output": True,
            "text": True,
            "timeout": 60,
        }
        code = textwrap.dedent(TWO_LAUNCHES)
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run"), mode], **options)
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr
        assert f"W&B: {mode}" in done.stdout
        if mode == "offline":
            assert server.history == {}
            folders = sorted(str(path) for path in (tmp_path / "run" / "wandb").glob("offline-run-*"))
            synced = subprocess.run([sys.executable, "-m", "wandb", "sync", "--yes", *folders], **options)
            assert synced.returncode == 0, synced.stderr
        server.shutdown()
    assert server.runs == {"run12345"}
    rows = [server.history[offset] for offset in sorted(server.history)]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 5, 6, 7, 8]
    assert [row["_step"] for row in rows] == list(range(9))
    assert [row["loss"] for row in rows] == [5.0 - row["step"] for row in rows]
