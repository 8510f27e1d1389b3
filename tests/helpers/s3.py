"""An S3 server on this machine, and a network before it that cuts connections."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SECRET = "a-secret-of-forty-letters"


class Network:
    """A way to a port of this machine, which cuts connections that have carried many bytes."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.cuts = 0
        """Connections that will be cut."""
        self.after_bytes = 1 << 62
        """Of either direction."""
        self.pause_s = 0.0
        """After each piece of at most 64 KiB."""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._to))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        carried = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                carried += len(data)
                time.sleep(self.pause_s)
                if carried > self.after_bytes and self.cuts > 0:
                    self.cuts -= 1
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


@contextlib.contextmanager
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Network]]:
    """A client of a server with an empty bucket named `bucket`, and the network by which drivers reach it."""
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    network = Network(port)
    values = {
        "AWS_ACCESS_KEY_ID": "an-id",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{network.port}",
        "AWS_MAX_ATTEMPTS": "1",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()  # of another server's address
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}")
    client.create_bucket(Bucket="bucket")
    try:
        yield client, network
    finally:
        for key in contents(client):
            client.delete_object(Bucket="bucket", Key=key)  # all servers of a process share one state
        network.close()
        server.stop()


def upload(client: Any, folder: Path, prefix: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            client.upload_file(str(path), "bucket", f"{prefix}/{path.relative_to(folder)}")


def contents(client: Any, prefix: str = "") -> dict[str, bytes]:
    """All files below a prefix, by their names behind it."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix=prefix)
    keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
    return {key[len(prefix) :]: client.get_object(Bucket="bucket", Key=key)["Body"].read() for key in keys}
