"""The part of a run that downloads shards from object stores, in a process on each host (data/download.py)."""

from __future__ import annotations

from llmtrain.base import log
from llmtrain.base.child import Child, of_module
from llmtrain.base.errors import DataError
from llmtrain.training.parts import Done, Launch, Part
from llmtrain.training.step import Position

_LOOKED_AT = 2048
"""The training shards of this many sequences from the run's position on are downloaded first."""


class Fetching(Part):
    """Downloads validation shards, then training shards in the order in which the run needs them."""

    def __init__(self, launch: Launch) -> None:
        self._setup, self._tracker = launch.setup, launch.tracker
        self._process: Child | None = None

    def begin(self, position: Position) -> None:
        shards = self._shards(position)
        if not shards or self._setup.ranks.seats[self._setup.ranks.rank].local_rank != 0:
            return
        data = self._setup.run.config.data
        self._process = Child(of_module("llmtrain.data.download"))
        self._process.send({"folder": data.cache, "gib": data.cache_gib, "shards": shards})

    def _shards(self, position: Position) -> list[tuple[str, str]]:
        setup, course = self._setup, self._setup.course
        first = course.at(position.step).data
        distinct = list({id(data): data for data in (first, *course.data)}.values())
        measured = [choices.prepared for choices in setup.data.choices.values()]
        found = [shard for data in measured for shard in data.shards_in_store("validation")]
        for data in (*distinct, *setup.data.sets.values()):
            found += data.shards_in_store("validation")
        found += first.shards_next(position.sample_index, _LOOKED_AT)
        for data in (*distinct, *(own for own in setup.data.sets.values() if own.whole)):
            found += data.shards_in_store("train")
        return list(dict.fromkeys(found))

    def after_step(self, done: Done) -> None:
        """Report what the process has said. Raises DataError, on this rank: when a shard is damaged."""
        for message in [] if self._process is None else self._process.received():
            kind = message.pop("kind")
            self._tracker.event(kind, **message)
            if kind == "data_wrong":
                raise DataError(message["error"])
            if kind == "data_store_gone":
                log.warn(
                    f"shards cannot be downloaded ({message['error']}); each step reads what it needs from the store"
                )

    def close(self, error: BaseException | None) -> None:
        """End the process; a shard that is not complete is dropped."""
        if self._process is not None:
            self._process.close()
