"""A stand-in for the Hugging Face Hub: the routes that fetching and publishing use, for repositories of the test's.

Files that git would keep in LFS are answered as the Hub does: a redirect with X-Linked-Etag, then the content.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOKEN = "hf_" + "a" * 34
LARGE = (".safetensors", ".parquet", ".bin")


@dataclass
class Repo:
    """What the Hub has of a repository."""

    commits: dict[str, dict[str, bytes]]
    """Commit -> files."""
    branches: dict[str, str]
    private: bool = False
    gated: bool = False


@dataclass
class Hub:
    """Its repositories, what it was asked, and what goes wrong."""

    url: str = ""
    cdn: str = ""
    """Where large files are, on another host by its name, which is no business of the token's."""
    repos: dict[str, Repo] = field(default_factory=dict)
    """By "models/ORG/NAME" or "datasets/ORG/NAME"."""
    asked: list[str] = field(default_factory=list)
    """Method and path of every request."""
    tokens: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)
    """Names of files of which one bit is wrong when they are sent."""
    down: bool = False
    leaked: bool = False
    """The token was sent to where large files are."""
    uploaded: dict[str, bytes] = field(default_factory=dict)

    def add(self, name: str, folder: Path | dict[str, bytes], branch: str = "main", **kind: Any) -> str:
        """Commit the files of a folder; returns the commit."""
        files = folder if isinstance(folder, dict) else {p.name: p.read_bytes() for p in folder.iterdir()}
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        repo = self.repos.setdefault(name, Repo({}, {}, **kind))
        repo.commits[commit], repo.branches[branch] = files, commit
        return commit

    def count(self, part: str) -> int:
        """How many requests had this in their method and path."""
        return sum(part in each for each in self.asked)


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _etag(name: str, data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if name.endswith(LARGE) else git_oid(data)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Any
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _any(self) -> Any:
        hub: Hub = self.server.hub
        path, _, query = self.path.partition("?")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.asked.append(f"{self.command} {path}")
        self.token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        hub.tokens.add(self.token)
        if hub.down:
            return self._send(500, {})
        if self.token not in ("", TOKEN, "hf_" + "b" * 34):
            return self._send(401, {}, {"X-Error-Message": "Invalid credentials in Authorization header"})
        if path == "/api/whoami-v2":
            return self._send(200, {"name": "me"}) if self.token else self._send(401, {})
        if self.command in ("POST", "PUT"):
            return self._write(hub, path, body)
        if m := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            return self._info(hub, f"{m[1]}/{m[2]}", m[3] or "main", "blobs" in query)
        if m := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/tree/(.+)", path):
            return self._tree(hub, f"{m[1]}/{m[2]}", m[3])
        if m := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(hub, f"{'datasets' if m[1] else 'models'}/{m[2]}", m[3], m[4])
        if m := re.fullmatch(r"/cdn/(.+)", path):
            hub.leaked |= bool(self.token)
            return self._file(hub, m[1])
        return self._send(404, {})

    do_GET = do_HEAD = do_POST = do_PUT = _any

    def _seen(self, hub: Hub, key: str) -> Repo | None:
        repo = hub.repos.get(key)
        if repo is not None and not (repo.private and self.token != TOKEN):
            return repo
        self._send(404 if self.token else 401, {}, {"X-Error-Code": "RepoNotFound"})
        return None

    def _commit(self, repo: Repo, revision: str) -> str | None:
        commit = repo.branches.get(revision, revision)
        if commit in repo.commits:
            return commit
        self._send(404, {}, {"X-Error-Code": "RevisionNotFound"})
        return None

    def _info(self, hub: Hub, key: str, revision: str, blobs: bool) -> None:
        if (repo := self._seen(hub, key)) is None or (commit := self._commit(repo, revision)) is None:
            return
        siblings = []
        for name, data in repo.commits[commit].items():
            entry: dict[str, Any] = {"rfilename": name}
            if blobs:
                entry |= {"size": len(data), "blobId": git_oid(data)}
                if name.endswith(LARGE):
                    entry["lfs"] = {"sha256": _etag(name, data), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        self._send(200, {"id": key.partition("/")[2], "sha": commit, "siblings": siblings, "private": repo.private})

    def _tree(self, hub: Hub, key: str, revision: str) -> None:
        if (repo := self._seen(hub, key)) is None or (commit := self._commit(repo, revision)) is None:
            return
        entries: list[dict[str, Any]] = []
        for name, data in repo.commits[commit].items():
            entries.append({"type": "file", "path": name, "size": len(data), "oid": git_oid(data)})
            if name.endswith(LARGE):
                entries[-1]["lfs"] = {"oid": _etag(name, data), "size": len(data), "pointerSize": 130}
        self._send(200, entries)

    def _resolve(self, hub: Hub, key: str, revision: str, name: str) -> Any:
        if (repo := self._seen(hub, key)) is None or (commit := self._commit(repo, revision)) is None:
            return None
        if repo.gated and self.token != TOKEN:
            return self._send(403 if self.token else 401, {}, {"X-Error-Code": "GatedRepo"})
        if name not in repo.commits[commit]:
            return self._send(404, {}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        data = repo.commits[commit][name]
        etag, about = f'"{_etag(name, data)}"', {"X-Repo-Commit": commit}
        if name.endswith(LARGE):
            about |= {
                "X-Linked-Etag": etag,
                "X-Linked-Size": str(len(data)),
                "Location": f"{hub.cdn}/cdn/{key}/{commit}/{name}",
            }
            return self._send(302, {}, about)
        return self._bytes(self._sent(hub, name, data), {**about, "ETag": etag})

    def _file(self, hub: Hub, path: str) -> None:
        kind, org, name, commit, file = path.split("/", 4)
        self._bytes(self._sent(hub, file, hub.repos[f"{kind}/{org}/{name}"].commits[commit][file]), {})

    def _sent(self, hub: Hub, name: str, data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1]) if name in hub.damaged else data

    def _write(self, hub: Hub, path: str, body: bytes) -> Any:
        if path.startswith("/upload/"):  # signed
            assert hashlib.sha256(body).hexdigest() == path.rpartition("/")[2]
            hub.uploaded[path.rpartition("/")[2]] = body
            hub.leaked |= bool(self.token)
            return self._send(200, {})
        if not self.token:
            return self._send(401, {})
        if self.token != TOKEN:
            return self._send(403, {}, {"X-Error-Message": "no rights"})
        if path == "/api/repos/create":
            asked = json.loads(body)
            key = f"models/{asked['organization']}/{asked['name']}"
            if key in hub.repos:
                return self._send(409, {"url": f"{hub.url}/{key}"})
            hub.repos[key] = Repo({}, {}, private=bool(asked.get("private") or asked.get("visibility") == "private"))
            return self._send(200, {"url": f"{hub.url}/{asked['organization']}/{asked['name']}"})
        if "/preupload/" in path:
            files = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                    "oid": None,
                }
                for f in json.loads(body)["files"]
            ]
            return self._send(200, {"files": files})
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{hub.url}/upload/{each['oid']}", "header": {}}}}
                for each in json.loads(body)["objects"]
            ]
            return self._send(200, {"transfer": "basic", "objects": objects})
        if m := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            files = {}
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = hub.uploaded[value["oid"]]
            commit = hub.add(f"models/{m[1]}", files)
            return self._send(200, {"commitUrl": f"{hub.url}/{m[1]}/commit/{commit}", "commitOid": commit})
        return self._send(404, {})

    def _send(self, status: int, tree: Any, headers: dict[str, str] | None = None) -> None:
        self._bytes(json.dumps(tree).encode(), headers or {}, status)

    def _bytes(self, data: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def serving() -> Iterator[Hub]:
    """The server, until the block is left."""
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    port = server.server_address[1]
    server.hub = Hub(url=f"http://127.0.0.1:{port}", cdn=f"http://localhost:{port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
