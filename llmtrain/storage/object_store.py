"""Files in object stores, by URL: s3://, gs://, az://, hf:// and all that fsspec has a driver for.

Drivers find their credentials in environment and files. Faults of the network are tried again; what the store refuses
is not.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from llmtrain.base.redact import redact_text

Result = TypeVar("Result")

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
"""Protocol -> the extra of llmtrain that brings its driver."""
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Before each further try."""
_FINAL = (PermissionError, IsADirectoryError, NotADirectoryError, ValueError, ImportError)
"""Another try would end the same way."""
_VERSIONS = ("ETag", "etag", "generation", "blob_id", "content_md5", "LastModified", "last_modified", "mtime")
"""Names under which drivers tell what a file's content was, the surest first."""


def is_url(text: str) -> bool:
    """True for the URL of a store, as opposed to a path of this host."""
    return _URL.match(text) is not None


def problem_of(url: str) -> tuple[str, str] | None:
    """(rule, remedy) for a URL that cannot be used; None: it can. Nothing is asked of the network."""
    import fsspec

    protocol, sign, rest = url.partition("://")
    if not sign or not rest or protocol not in fsspec.available_protocols():
        return "is no URL of a store", "write PROTOCOL://BUCKET/FOLDER, such as s3://bucket/runs/name"
    if "@" in rest.partition("/")[0]:
        return "has a user or a password in it", "leave them to the store's own settings (such as AWS_PROFILE)"
    try:
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError):
        return f"needs a driver for {protocol}", f"pip install 'llmtrain[{_EXTRAS.get(protocol, protocol)}]'"
    return None


class StoreError(OSError):
    """A store could not be used; the driver's reason, for a caller who names key, URL and remedy."""


@dataclass(frozen=True)
class Stored:
    """A file of a store."""

    bytes: int
    version: str
    """Changes with the content, as far as the store tells; empty: it does not."""


class Store:
    """A folder in an object store, or a single file with the name ''. Its methods may be called in several threads.

    They raise FileNotFoundError where the file is missing, and StoreError, without secrets, for all else.
    """

    def __init__(self, url: str, *, again: bool = True) -> None:
        """`again`: what a fault of the network has ended is tried again, five times in 8 seconds.

        Raises StoreError: no driver, or its settings are wrong.
        """
        import fsspec

        here = {"auto_mkdir": True} if url.startswith(("file://", "local://")) else {}
        self.url = url
        self._pauses_s = (*_PAUSES_S, None) if again else (None,)
        self._files, self._root = self._tried(lambda: fsspec.core.url_to_fs(url, **here))

    def files(self) -> dict[str, Stored]:
        """All files below the folder, by their names relative to it, in the order of names; none: an empty folder, or
        no folder."""
        found = self._tried(self._find)
        root = self._root.rstrip("/")
        return {path[len(root) + 1 :]: _stored(info) for path, info in sorted(found.items())}

    def _find(self) -> dict[str, Any]:
        self._files.invalidate_cache()
        try:
            found: dict[str, Any] = self._files.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        return found

    def matching(self, pattern: str) -> dict[str, Stored]:
        """The files whose names, relative to the folder, match a glob."""
        found = self._tried(lambda: self._files.glob(self._path(pattern), detail=True))
        root = self._root.rstrip("/")
        return {path[len(root) + 1 :]: _stored(info) for path, info in sorted(found.items()) if info["type"] == "file"}

    def stat(self, name: str = "") -> Stored:
        """Size and version of a file."""

        def once() -> Stored:
            self._files.invalidate_cache()
            return _stored(self._files.info(self._path(name)))

        return self._tried(once)

    def read(self, name: str = "", start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of a file, the whole of it without them."""

        def once() -> bytes:
            content: bytes = self._files.cat_file(self._path(name), start=start, end=stop)
            if stop is not None and len(content) != stop - start:
                raise OSError(f"{len(content)} bytes came for {stop - start}")
            return content

        return self._tried(once)

    def open(self, name: str = "", block_bytes: int = 8 << 20) -> Any:
        """A binary stream that can seek. Its reads raise what the driver raises."""
        return self._tried(lambda: self._files.open(self._path(name), "rb", block_size=block_bytes))

    def get(self, name: str, path: Path) -> None:
        """Download a file; `path` holds all of it or is not there."""
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")

        def once() -> None:
            self._files.get_file(self._path(name), str(partial))
            size, came = self._files.info(self._path(name))["size"], partial.stat().st_size
            if size is not None and came != size:
                raise OSError(f"{came} bytes came for {size}")

        try:
            self._tried(once)
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)

    def put(self, path: Path, name: str) -> None:
        """Upload a file, and ask how large it is there. Stores show it when it is whole."""

        def once() -> None:
            self._files.put_file(str(path), self._path(name))
            self._files.invalidate_cache()
            size, there = path.stat().st_size, self._files.info(self._path(name))["size"]
            if there is not None and there != size:
                raise OSError(f"{there} bytes are there of {size}")

        self._tried(once)

    def write(self, content: bytes, name: str) -> None:
        """Upload what is in memory."""
        self._tried(lambda: self._files.pipe_file(self._path(name), content))

    def remove(self, names: Sequence[str]) -> None:
        """Delete files; one that is not there is no fault."""
        with contextlib.suppress(FileNotFoundError):
            if names:
                self._tried(lambda: self._files.rm([self._path(name) for name in names]))

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else str(self._root)

    def _tried(self, once: Callable[[], Result]) -> Result:
        for pause_s in self._pauses_s:
            try:
                return once()
            except FileNotFoundError:
                raise
            except Exception as error:  # each driver has its own
                if pause_s is None or isinstance(error, _FINAL) or "Credentials" in type(error).__name__:
                    raise StoreError(short(error)) from None
                time.sleep(pause_s)
        raise AssertionError


def _stored(info: dict[str, Any]) -> Stored:
    version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
    return Stored(int(info["size"] or 0), version.strip('"'))


def short(error: BaseException) -> str:
    """An error of a driver on one line, without secrets."""
    if isinstance(error, StoreError):
        return str(error)
    text = redact_text(re.sub(r"\s+", " ", str(error)))
    return f"{type(error).__name__}: {text}"[:300]
