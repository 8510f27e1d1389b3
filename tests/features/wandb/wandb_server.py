"""A stand-in for the W&B server: the few routes that a run and `wandb sync` use, and the history that they send."""

from __future__ import annotations

import gzip
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Server(http.server.ThreadingHTTPServer):
    """Keeps the history lines that it was sent, by offset: a line that is sent to a taken offset replaces the other."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.history: dict[int, dict[str, Any]] = {}
        self.overwritten = 0
        self.runs: set[str] = set()

    def rows(self) -> list[dict[str, Any]]:
        """The run's history, in order."""
        return [self.history[offset] for offset in sorted(self.history)]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server

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
            for offset, line in enumerate(sent["content"], sent["offset"]) if sent else ():
                self.server.overwritten += offset in self.server.history
                self.server.history[offset] = json.loads(line)
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
            last = self.server.rows()[-1] if count else {}
            tail = json.dumps([json.dumps({"_step": last.get("_step"), "_runtime": 1})])
            resumed = bucket | {
                "summaryMetrics": json.dumps({"_step": last.get("_step")}),
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


@contextmanager
def serving() -> Iterator[tuple[Server, dict[str, str]]]:
    """(a running server, the variables that send W&B there)."""
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield (
                server,
                {
                    "WANDB_API_KEY": "a" * 40,
                    "WANDB_BASE_URL": server.url,
                    "WANDB_ERROR_REPORTING": "false",
                },
            )
        finally:
            server.shutdown()
