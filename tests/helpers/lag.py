"""An object store with a round trip: `lag:///FOLDER` is a folder of this host whose requests take a while, or fail."""

from __future__ import annotations

import threading
import time
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Lag(LocalFileSystem):
    """The class's attributes are the network, for all that is opened."""

    protocol = "lag"
    delay_s = 0.0
    fault: Exception | None = None
    """What each request ends with."""
    asked: list[str] = []  # noqa: RUF012  (of all instances)
    """Requests for content, by the name of the file."""
    under_way = most = 0
    """Requests that wait at present, and the largest number of these."""
    lock = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        return super()._strip_protocol(str(path).removeprefix("lag://"))

    def _trip(self, name: str = "") -> None:
        if name:
            with Lag.lock:
                Lag.asked.append(name.rpartition("/")[2])
        with Lag.lock:
            Lag.under_way += 1
            Lag.most = max(Lag.most, Lag.under_way)
        time.sleep(Lag.delay_s)
        with Lag.lock:
            Lag.under_way -= 1
        if Lag.fault is not None:
            raise Lag.fault

    def cat_file(self, path: str, *args: Any, **more: Any) -> Any:
        self._trip(path)
        return super().cat_file(path, *args, **more)

    def get_file(self, path: str, *args: Any, **more: Any) -> Any:
        self._trip(path)
        return super().get_file(path, *args, **more)

    def info(self, path: str, **more: Any) -> Any:
        self._trip()
        return super().info(path, **more)

    @classmethod
    def reset(cls) -> None:
        """A store at hand."""
        cls.delay_s, cls.fault = 0.0, None
        cls.asked.clear()


fsspec.register_implementation("lag", "tests.helpers.lag.Lag", clobber=True)
