"""sites.method async: between two meetings each site publishes its changes and fetches the others' newest ones, alone.

A site's line is the common parameters plus the sum of its own steps since the meeting. It trains on the mean of the
newest known lines, weighted by their tokens, like a parameter server's; the next meeting makes the mean of all lines
the common parameters. A change is weighted by (1 + late) ** -0.5, where `late` counts another site's updates since the
change's ground beyond USUAL (C. Xie et al., "Asynchronous Federated Optimization", arXiv 1903.03934).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np

from llmtrain.base import log
from llmtrain.base.threads import in_thread
from llmtrain.engine.dist.control import from_all
from llmtrain.engine.dist.ranks import Ranks
from llmtrain.optim.message_formats import Format
from llmtrain.optim.outer_methods import Async
from llmtrain.sites.exchange import CLOCK, NEWEST, Clock, Exchange, Fetched
from llmtrain.sites.membership import PeerStatus, join, name_of
from llmtrain.sites.outer import encode
from llmtrain.sites.shard import Array, Shard
from llmtrain.sites.transport import Array as Served
from llmtrain.sites.transport import Server

USUAL = 2
"""Updates of an equally fast site between two exchanges: one, or two because of their order."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A peer's change since the meeting."""

    clock: Clock
    change: Array
    """Its line minus the common parameters, [elements of this rank]."""


class Newest:
    """Exchanges of one site between meetings. All of its ranks call every method together."""

    def __init__(
        self,
        ranks: Ranks,
        shard: Shard,
        exchange: Exchange,
        server: Server,
        form: type[Format] | None,
        tell: Callable[..., None],
        settings: Async,
    ) -> None:
        """`exchange`: with its own process group unless `overlap_steps` is 0. `form`: format of changes, without error
        feedback. `tell`: takes an event's kind and fields."""
        self._ranks, self._shard, self._exchange, self._server = ranks, shard, exchange, server
        self._form, self._tell = form, tell
        self._every, self._overlap, self._limit_s = settings.sync_every, settings.overlap_steps, settings.timeout_s
        self._asked: Future[tuple[Fetched, dict[str, Clock]]] | None = None
        self.begin(shard.read(), 0, [])

    def begin(self, common: Array, round_: int, others: Sequence[PeerStatus], line: Array | None = None) -> None:
        """Start from a meeting, or from a checkpoint. `common`: [size]. `round_`: synchronisations so far. `line`: this
        site's own line from a checkpoint, which makes the live parameters the ground."""
        self._common, self._round, self._others = common, round_, others
        self._line = common if line is None else line
        self._ground = common if line is None else self._shard.read()
        self._known: dict[str, Line] = {}
        self._under: dict[str, int] = {}
        """Site -> version that is part of the ground."""
        self._clock = Clock(version=0, tokens=0, steps=0)
        self._served: dict[str, Served] = {}

    def line(self, live: Array) -> Array:
        """Return this site's line with its changes since the last exchange. `live`: its parameters, [size]."""
        if self._line is self._ground and not self._late():
            return live
        return self._line + np.float32((1 + self._late()) ** -0.5) * (live - self._ground)

    def advance(self, live: Array) -> Array:
        """Set the line to `line(live)` and return it; later changes count from `live`."""
        self._line = self.line(live)
        self._ground = self._line if not self._known else live
        return self._line

    def served(self) -> Mapping[str, Served]:
        """Return the last two versions: some peers may still fetch the older one."""
        return self._served

    def settle(self) -> None:
        """Wait for a running fetch: its collectives must not mix with a meeting's."""
        if self._asked is not None:
            join(self._asked)
            self._asked = None

    def after_step(self, step: int, steps: int, tokens: int) -> None:
        """Start a fetch, or publish and take, if it is due. `step`: of the run, for events. `steps`, `tokens`: since
        the meeting."""
        if (steps + self._overlap) % self._every == 0 and self._asked is None and self._others:
            known = {site: line.clock.version for site, line in self._known.items()}
            sources, round_, change = self._others, self._round, self.line(self._shard.read()) - self._common
            deadline_s = time.monotonic() + self._limit_s
            newest = partial(self._exchange.newest, sources, known, change, steps, round_, deadline_s)
            self._asked = in_thread(newest, "sites-newest")
        if steps % self._every == 0:
            self._send_and_take(step, steps, tokens)

    def _send_and_take(self, step: int, steps: int, tokens: int) -> None:
        began_s = time.monotonic()
        asked, got = self._asked, None
        if asked is not None and (self._overlap == 0 or all(from_all(self._ranks, asked.done()))):
            got, clocks = join(asked)
            self._asked = None
            self._known |= {
                site: Line(clock=clocks[site], change=change) for site, change in got.found.items() if site in clocks
            }
        late = self._late()
        self._send(self.advance(self._shard.read()), steps, tokens)
        if self._known:
            self._ground = self._mean()
            self._shard.write(self._ground)
            self._under = {site: line.clock.version for site, line in self._known.items()}
        for site, why in (got.failed if got else {}).items():
            log.warn_once(f"nothing new from site {name_of(site)} before the sites meet again: {why}")
        self._tell(
            "exchange", step=step, round=self._round, version=self._clock.version, participants=1 + len(self._known),
            known={name_of(site): line.clock.version for site, line in self._known.items()}, late_updates=late,
            received_bytes=got.received_bytes if got else 0, stood_s=round(time.monotonic() - began_s, 3),
        )  # fmt: skip

    def _send(self, line: Array, steps: int, tokens: int) -> None:
        before = f"{NEWEST} {self._clock.version}"
        self._clock = Clock(version=self._clock.version + 1, tokens=tokens, steps=steps)
        change = line - self._common
        self._served = {
            CLOCK: self._clock.array(),
            f"{NEWEST} {self._clock.version}": change if self._form is None else encode(self._form, change),
            **{kind: array for kind, array in self._served.items() if kind == before},
        }
        self._server.publish(self._round, self._served)

    def _late(self) -> int:
        """Return the largest number of another site's updates since the ground, beyond USUAL."""
        come = [line.clock.version - self._under.get(site, 0) for site, line in self._known.items()]
        return max(0, max(come, default=0) - USUAL)

    def _mean(self) -> Array:
        total = self._clock.tokens + sum(line.clock.tokens for line in self._known.values())
        mean = self._common + np.float32(self._clock.tokens / total) * (self._line - self._common)
        for site in sorted(self._known):
            mean += np.float32(self._known[site].clock.tokens / total) * self._known[site].change
        return mean
