"""Downloads shards of prepared folders in object stores into a host's cache while a run trains.

`python -m llmtrain.data.download` is a separate process, because a thread would share the GIL with the steps. One
process at a time downloads into a cache, for all runs that share it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmtrain.base.child import Parent
from llmtrain.base.errors import DataError
from llmtrain.base.files import lock_file
from llmtrain.base.units import GIB
from llmtrain.data.cache import each, make_room, remove_partials, root_of
from llmtrain.data.shards import PreparedSet
from llmtrain.storage.object_store import short

_TOGETHER = 4
"""Shards that are downloaded at the same time."""
_LOCK = ".download"
_AGAIN_S = 30.0
"""Pause in seconds after the store did not answer or the cache was full."""


class _Download:
    """Downloads shards, several at a time, while they fit into the cache."""

    def __init__(self, cache: str | None, gib: float, tell: Callable[..., None]) -> None:
        """`cache`, `gib`: data.cache, data.cache_gib."""
        self._cache, self._root, self._gib, self._tell = cache, root_of(cache), gib, tell
        self._sets: dict[str, PreparedSet] = {}

    def go_on(self, shards: list[tuple[str, str]]) -> None:
        """Download shards in order, (URL of the folder, file) each. Raises DataError: a shard is damaged."""
        left, failing, full = shards, False, False
        self._root.mkdir(parents=True, exist_ok=True)
        while True:
            handle = lock_file(self._root / _LOCK)
            try:
                left = [shard for shard in left if not self._path(shard).is_file()]
                if not left:
                    return
                for url, file in left[:_TOGETHER]:  # no other process fetches them now
                    remove_partials(self._set(url).folder, [file])
                batch = left[:_TOGETHER]
                while batch:  # fewer, until there is room for them
                    wanted = sum(self._set(url).bytes_of(file) for url, file in batch)
                    if make_room(self._root, wanted, self._gib * GIB):
                        break
                    batch = batch[:-1]
                if batch:
                    each(self._fetch, batch)
                    failing, full = False, False
                    continue
                if not full:
                    self._tell("data_cache_full", shards_left=len(left))
                full = True
            except DataError as error:
                if not error.passing:
                    raise
                if not failing:
                    self._tell("data_store_gone", error=str(error))
                failing = True
            finally:
                os.close(handle)
            time.sleep(_AGAIN_S)

    def _set(self, url: str) -> PreparedSet:
        if url not in self._sets:
            self._sets[url] = PreparedSet(url, self._cache)
        return self._sets[url]

    def _path(self, shard: tuple[str, str]) -> Path:
        return self._set(shard[0]).folder / shard[1]

    def _fetch(self, shard: tuple[str, str]) -> None:
        (url, file), began = shard, time.monotonic()
        size = self._set(url).fetch_shard(file)
        self._tell(
            "data_fetched", url=self._set(url).name, file=file, bytes=size, seconds=round(time.monotonic() - began, 3)
        )


def main() -> None:
    """Read a JSON request from stdin (the cache's folder and GiB, the shards) and serve it; exit when stdin closes."""
    parent = Parent()
    parent.listen()
    asked = parent.asked()

    def tell(kind: str, **fields: Any) -> None:
        parent.tell({"kind": kind, **fields})

    try:
        _Download(asked["folder"], asked["gib"], tell).go_on([(url, file) for url, file in asked["shards"]])
    except DataError as error:
        tell("data_store_gone" if error.passing else "data_wrong", error=str(error))
    except Exception as error:  # training continues without it
        tell("data_store_gone", error=short(error))


if __name__ == "__main__":
    main()
