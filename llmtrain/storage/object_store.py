"""Files in object stores, by URL: s3://, gs://, az://, hf:// and all that fsspec has a driver for.

Drivers find their credentials in environment and files. Requests are repeated after faults of the network, but not
after a refusal by the store.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from llmtrain.base.redact import holds_secret, redact_text
from llmtrain.base.threads import in_thread

Result = TypeVar("Result")

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
"""Protocol -> the extra of llmtrain that installs its driver."""
_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Pauses before each further try."""
_SILENCE_S, _SLOWEST = 300.0, 1e6
"""Seconds without progress after which a call counts as failed; least speed (bytes/s) expected of a driver that reports
none."""
_FINAL = (PermissionError, IsADirectoryError, NotADirectoryError, ValueError, ImportError)
"""Errors that another try would only repeat."""
_VERSIONS = ("ETag", "etag", "generation", "blob_id", "content_md5", "LastModified", "last_modified", "mtime")
"""Keys under which drivers give a file's version, the most reliable first."""
_MODIFIED = ("LastModified", "last_modified", "mtime", "created")


def problem_of(url: str, *, writes: bool = False) -> tuple[str, str] | None:
    """Return (rule, remedy) for an unusable URL, or None. Uses no network."""
    import fsspec

    protocol, sign, rest = url.partition("://")
    if not sign or not rest or protocol not in fsspec.available_protocols():
        return "is no URL of a store", "write PROTOCOL://BUCKET/FOLDER, such as s3://bucket/runs/name"
    if "@" in rest.partition("/")[0] or holds_secret(url):
        return "has a user or a password in it", "leave them to the store's own settings (such as AWS_PROFILE)"
    if writes and protocol == "hf" and not rest.startswith("buckets/"):
        rule = "is a repository, where each file becomes a commit and deleted files stay in the history"
        return rule, "name a bucket: hf://buckets/ORG/NAME/FOLDER, or another store"
    try:
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError):
        return f"needs a driver for {protocol}", f"pip install 'llmtrain[{_EXTRAS.get(protocol, protocol)}]'"
    return None


class StoreError(OSError):
    """A store could not be used. The text is the driver's reason; the caller adds key, URL and remedy."""

    final = False
    """True if the store refuses, so that another try would fail, too."""


@dataclass(frozen=True)
class Stored:
    bytes: int
    version: str
    """Version of the file, which changes with its content; empty: the store gives none."""
    modified_s: float | None = None
    """Time of the upload, in seconds since 1970; None: unknown."""


class Store:
    """A folder in an object store, or a single file with the name ''. Several threads may call its methods.

    They raise FileNotFoundError for a missing file, and StoreError, without secrets, for anything else.
    """

    def __init__(self, url: str, *, again: bool = True) -> None:
        """`again`: repeat requests after network faults, five tries in 8 seconds.

        Raises StoreError: when there is no driver, or its settings are wrong.
        """
        import fsspec

        options = {"auto_mkdir": True} if url.startswith(("file://", "local://")) else {}
        self.url = url
        self._pauses_s = (*_PAUSES_S, None) if again else (None,)
        self._files, self._root = self._try_call(lambda: fsspec.core.url_to_fs(url, **options))

    def files(self) -> dict[str, Stored]:
        """Return all files below the folder, by relative name in order; {} if the folder is empty or missing."""
        entries = self._try_call(self._find_files)
        root = self._root.rstrip("/")
        return {path[len(root) + 1 :]: _stored(info) for path, info in sorted(entries.items())}

    def _find_files(self) -> dict[str, Any]:
        self._files.invalidate_cache()
        try:
            entries: dict[str, Any] = self._files.find(self._root, detail=True)
        except FileNotFoundError:
            entries = {}
        if not entries:
            self._need_bucket()
        # Web servers list no sizes: ask for each file.
        return {path: info if "size" in info else self._files.info(path) for path, info in entries.items()}

    def _need_bucket(self) -> None:
        """Raise StoreError if the bucket does not exist, so that a misspelt one does not look like an empty folder."""
        bucket = self._root.strip("/").partition("/")[0]
        if self.url.partition("://")[0] not in _EXTRAS:
            return
        try:
            self._files.info(bucket)
        except FileNotFoundError:
            raise StoreError(f"there is no bucket {bucket}") from None
        except Exception:  # a user may have access only to a folder in the bucket
            return

    def matching(self, pattern: str) -> dict[str, Stored]:
        paths = self._try_call(lambda: self._files.glob(self._path(pattern), detail=True))
        root = self._root.rstrip("/")
        return {path[len(root) + 1 :]: _stored(info) for path, info in sorted(paths.items()) if info["type"] == "file"}

    def stat(self, name: str = "") -> Stored:

        def once() -> Stored:
            self._files.invalidate_cache()
            info = self._files.info(self._path(name))
            if info["type"] != "file":
                raise FileNotFoundError(self._path(name))
            return _stored(info)

        return self._try_call(once)

    def read(self, name: str = "", start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop) of a file; by default all of them."""

        def once() -> bytes:
            # Stores refuse any range of an empty file.
            content: bytes = self._files.cat_file(self._path(name), start=start or None, end=stop)
            if stop is not None and len(content) != stop - start:
                raise OSError(f"{len(content)} bytes came instead of {stop - start}")
            return content

        return self._try_call(once)

    def get(self, name: str, path: Path) -> None:
        """Download a file. `path` then has all of it; after an error it does not exist."""
        size = self.stat(name).bytes
        tries = (path.with_name(f"{path.name}.{os.getpid()}.{count}.partial") for count in itertools.count())

        def once(alive: Any) -> None:
            partial = next(tries)  # an abandoned download may still write its file
            try:
                self._files.get_file(self._path(name), str(partial), callback=alive)
                if (came := partial.stat().st_size) != size:
                    raise OSError(f"{came} bytes came instead of {size}")
                partial.rename(path)
            finally:
                partial.unlink(missing_ok=True)

        self._transfer(once, size)

    def put(self, path: Path, name: str) -> None:
        """Upload a file, and check its size in the store. Stores show a file only when it is complete."""
        size = path.stat().st_size

        def once(alive: Any) -> None:
            self._files.put_file(str(path), self._path(name), callback=alive)
            self._files.invalidate_cache()
            stored = self._files.info(self._path(name))["size"]
            if stored is not None and stored != size:
                raise OSError(f"{stored} of {size} bytes are stored")

        self._send(lambda: self._transfer(once, size))

    def write(self, content: bytes, name: str) -> None:
        self._send(lambda: self._try_call(lambda: self._files.pipe_file(self._path(name), content)))

    def remove(self, names: Sequence[str]) -> None:
        """Delete files, and a folder that becomes empty. Missing files are no error."""
        with contextlib.suppress(FileNotFoundError):
            if names:
                self._try_call(lambda: self._files.rm([self._path(name) for name in names]))
        for folder in {name.rpartition("/")[0] for name in names} if "file" in self._files.protocol else ():
            with contextlib.suppress(OSError):  # not empty, or an object store, which has no folders
                self._files.rmdir(self._path(folder))

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else str(self._root)

    def _send(self, send: Callable[[], None]) -> None:
        try:
            send()
        except FileNotFoundError as error:  # the destination is missing, not a file
            raise StoreError(short(error)) from None

    def _transfer(self, once: Callable[[Any], None], size: int) -> None:
        """Try a transfer of `size` bytes. Each call of the driver's callback for `once` counts as progress."""
        from fsspec.callbacks import Callback

        limit = _Limit(_SILENCE_S + size / _SLOWEST)
        self._try_call(lambda: once(Callback(hooks={"alive": limit.alive})), limit)

    def _try_call(self, once: Callable[[], Result], limit: _Limit | None = None) -> Result:
        for pause_s in self._pauses_s:
            try:
                return (limit or _Limit(_SILENCE_S)).result(once)
            except FileNotFoundError:
                raise
            except Exception as error:  # each driver has its own
                if isinstance(error, StoreError):
                    raise
                final = isinstance(error, _FINAL) or "Credentials" in type(error).__name__
                if pause_s is None or final:
                    refused = StoreError(short(error))
                    refused.final = final
                    raise refused from None
                time.sleep(pause_s)
        raise AssertionError


class _Limit:
    """Time limit for a driver's call: some drivers never give up a connection that does not answer."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: limit of a call, or until its first progress if it reports any."""
        self._limit_s = self._until = limit_s

    def alive(self, *_: object, **__: object) -> None:
        self._until = time.monotonic() + _SILENCE_S

    def result(self, call: Callable[[], Result]) -> Result:
        """Return the result of a call in a separate thread. Raises TimeoutError, and then abandons the thread."""
        self._until = time.monotonic() + self._limit_s
        future = in_thread(call, "store")
        while (left_s := self._until - time.monotonic()) > 0:
            if wait([future], left_s).done:
                return future.result()
        raise TimeoutError("the store does not answer")


def _stored(info: dict[str, Any]) -> Stored:
    if info.get("size") is None:  # as with some web servers; it would look like an empty file
        raise StoreError(f"the store does not give the size of {info['name']}")
    version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
    modified = next((info[key] for key in _MODIFIED if info.get(key)), None)
    if isinstance(modified, datetime):
        modified = modified.timestamp()
    return Stored(int(info["size"]), version.strip('"'), modified if isinstance(modified, int | float) else None)


def short(error: BaseException) -> str:
    """Return a driver's error as one line without secrets."""
    if isinstance(error, StoreError):
        return str(error)
    text = redact_text(re.sub(r"\s+", " ", str(error)))
    return f"{type(error).__name__}: {text}"[:300]
