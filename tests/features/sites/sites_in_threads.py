"""Sites in threads of one process, between engines that hold a few numbers, and coordinators of a few lines."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from llmtrain.engine.api import StateTensor
from llmtrain.features.sites.membership import Heard, Member, MembersError
from llmtrain.features.sites.outer_methods import SitesConfig
from llmtrain.features.sites.site import Site
from llmtrain.features.sites.transport import Server
from llmtrain.storage.region import Region

PIECES = [(0, "w", Region(0, 60)), (60, "v", Region(10, 5))]


def soon(seconds: float = 60) -> float:
    return time.monotonic() + seconds


def answering(reply: Callable[[socket.socket], None]) -> str:
    """The address of a server that does what it likes with one connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with contextlib.suppress(OSError), connection:
            connection.recv(1 << 16)
            reply(connection)
        listener.close()

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


class Meeting:
    """A coordinator: everybody who is expected comes, or the time is up."""

    def __init__(self, *sites: str) -> None:
        self.expected = set(sites)
        self._here: dict[str, Member] = {}
        self._met: list[Member] = []
        self._changed = threading.Condition()

    def member(self, _coordinator: str, member_id: str, _connect_s: float) -> Any:
        return SimpleNamespace(
            id=member_id,
            meet=lambda said, limit_s: self.meet(member_id, said, limit_s),
            close=lambda: None,
            heard=list,
        )

    def meet(self, member_id: str, said: Mapping[str, Any], limit_s: float) -> list[Member]:
        with self._changed:
            self._here[member_id] = Member(id=member_id, message=json.loads(json.dumps(said)))
            mine = self._here[member_id]
            self.look()
            if not self._changed.wait_for(lambda: any(each is mine for each in self._met), timeout=max(limit_s, 0)):
                self._here.pop(member_id, None)
                raise MembersError("nobody came")
            return sorted(self._met, key=lambda member: member.id)

    def leave(self, site: str) -> None:
        with self._changed:
            self.expected.discard(site)
            self._here = {id_: member for id_, member in self._here.items() if id_.partition(":")[0] != site}
            self.look()

    def look(self) -> None:
        if self._here and self.expected <= {id_.partition(":")[0] for id_ in self._here}:
            self._met, self._here = list(self._here.values()), {}
            self._changed.notify_all()


@dataclass
class Numbers:
    """An engine that holds two tensors."""

    values: torch.Tensor = field(default_factory=lambda: torch.zeros(6))
    refreshed: int = 0

    def state(self) -> list[StateTensor]:
        return [
            StateTensor(
                name=name,
                kind="param",
                region=Region(0, 3),
                own=slice(0, 3),
                replica=(0, 1),
                dtype=torch.float32,
                device=torch.device("cpu"),
                open=lambda at=at: contextlib.nullcontext(self.values[at : at + 3]),
            )
            for at, name in ((0, "w"), (3, "v"))
        ]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"w": (3,), "v": (3,)}

    def refresh(self) -> None:
        self.refreshed += 1


def settings_of(name: str, method: str = "local_sgd", **changes: Any) -> SitesConfig:
    """A busy machine may need seconds for a round: `gives_up_after` shortens `timeout_s` for one that must fail."""
    paced = {"sync_every": 2, "pace": "equal"}
    usual = {"coordinator": "127.0.0.1:1", "timeout_s": 60.0, "max_alone_steps": 4, **paced}
    return SitesConfig.of(method, **{**usual, "name": name, **changes})


def gives_up_after(site: Site, seconds: float) -> None:
    """From now on the site waits so long for the others."""
    site._settings = replace(site._settings, timeout_s=seconds)


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def begin_all(*sites: Site) -> list[tuple[int, int]]:
    return at_once(*(lambda site=site: site.begin(0, 0, 60.0) for site in sites))


def two_steps(site: Site, engine: Numbers, value: float) -> Callable[[], list[int]]:
    def run() -> list[int]:
        engine.values += value
        return [site.after_update(step, 0.001, complete=False)[1] for step in (1, 2)]

    return run


def sends_nothing(server: Server) -> None:
    server._serve = lambda *_: time.sleep(60)


SENSE = {
    "phase": "meet",
    "common": {},
    "round": 9,
    "checksum": "0",
    "step": 0,
    "step_s": 1.0,
    "batch": 2,
    "trained": 4,
    "weight": 16,
    "was": "b:0",
    "addresses": ["127.0.0.1:9"],
    "ledger": {"next": 0, "free": [], "dealt": {}},
}


def steps(
    site: Any, engine: Any, grow: Callable[[int], torch.Tensor], last: int, seen: list
) -> Callable[[], list[int]]:
    """Trains to step `last`; what it has trained: the first samples, in order; `seen`: its parameters after each."""

    def run() -> list[int]:
        starts = []
        _, first = site.begin(0, 0, 60.0)
        for step in range(1, last + 1):
            engine.values += grow(step)
            starts.append(first)
            _, first = site.after_update(step, 0.001, complete=step == last)
            seen.append(engine.values.clone())
        return starts

    return run


def trained(joined: Any, grow: dict[str, float], last: int, **changes: Any) -> tuple[list, list, list]:
    """(sites, their first samples, their parameters after each step)."""
    meeting = Meeting(*grow)
    made = [joined(meeting, name, **changes) for name in grow]
    seen: list[list] = [[] for _ in made]
    slope = torch.tensor([1.0, 2.0, 3.0, 0.1, 0.2, 0.3])
    calls = [
        steps(site, engine, lambda step, size=size: size * step**0.5 * slope, last, mine)
        for (site, engine, _), size, mine in zip(made, grow.values(), seen, strict=True)
    ]
    return made, at_once(*calls), seen


def saved(site: Any) -> tuple[dict[str, np.ndarray], Any]:
    """As checkpoint and trainer.json have it."""
    arrays: dict[str, np.ndarray] = {}
    for piece in site.state():
        with piece.open() as values:
            arrays[piece.kind] = np.append(arrays.get(piece.kind, np.zeros(0, np.float32)), values.numpy())
    return arrays, json.loads(json.dumps(site.to_json()))


def events_of(events: list, kind: str) -> list[dict]:
    return [fields for each, fields in events if each == kind]


class Lighthouse:
    """torchft's coordinator by the rules of its lighthouse.rs (0.2), for threads of one process, with shorter waits.

    A meeting is everybody who has asked, as soon as all of the last meeting have; or, where some of them have not, more
    than half of those that are alive, when all of these have asked or `late_s` after the first. Who gives up has asked
    all the same: its words stay for the next meeting.
    """

    def __init__(self, late_s: float = 0.4, silent_s: float = 0.05) -> None:
        self._late_s, self._silent_s = late_s, silent_s
        self._asked: dict[str, tuple[float, Member]] = {}
        self._last: list[Member] | None = None
        self._heard: dict[str, float] = {}
        """When it was heard of last; of one that is there, infinity."""
        self._meetings: list[list[Member]] = []
        self._changed = threading.Condition()

    def member(self, _coordinator: str, member_id: str, _connect_s: float) -> Any:
        return SimpleNamespace(
            id=member_id,
            meet=lambda said, limit_s: self._meet(member_id, said, limit_s),
            heard=self.heard,
            close=lambda: self.leave(member_id),
        )

    def heard(self) -> list[Heard]:
        """Return the living sites, as the status page lists them."""
        with self._changed:
            return [Heard(id=id_, silent_s=0.0, met=False) for id_ in sorted(self._there())]

    def leave(self, member_id: str) -> None:
        with self._changed:
            if member_id in self._heard:
                self._heard[member_id] = time.monotonic()

    def _there(self) -> set[str]:
        return {id_ for id_, at in self._heard.items() if time.monotonic() - at < self._silent_s}

    def _meet(self, member_id: str, said: Mapping[str, Any], limit_s: float) -> list[Member]:
        deadline_s, me = time.monotonic() + limit_s, Member(id=member_id, message=json.loads(json.dumps(said)))
        with self._changed:
            self._heard[member_id] = math.inf
            self._asked[member_id] = (time.monotonic(), me)
            following = len(self._meetings)
            while True:
                self._look()
                for met in self._meetings[following:]:
                    if any(each.id == member_id for each in met):
                        return sorted(met, key=lambda each: each.id)
                if time.monotonic() >= deadline_s:
                    late = MembersError("the other sites have not come")
                    late.late = True
                    raise late
                self._changed.wait(0.005)

    def _look(self) -> None:
        there = self._there()
        asked = {id_: each for id_, each in self._asked.items() if id_ in there}
        again = self._last is not None and all(each.id in asked for each in self._last)
        enough = 2 * len(asked) > len(there) and bool(asked)
        waited = not asked or time.monotonic() - min(at for at, _ in asked.values()) >= self._late_s
        if asked and (again or (enough and (len(asked) == len(there) or waited))):
            self._last = [member for _, member in asked.values()]
            self._meetings.append(self._last)
            self._asked.clear()
            self._changed.notify_all()
