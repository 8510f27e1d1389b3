"""Fetching from other sites: each rank of a site fetches its own elements, and all agree on the results."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from llmtrain.engine.dist.control import from_all
from llmtrain.engine.dist.ranks import Ranks
from llmtrain.optim.message_formats import BLOCK, Format
from llmtrain.sites.membership import PeerStatus
from llmtrain.sites.outer import decode, outsized, squared_distance
from llmtrain.sites.shard import Array, Shard
from llmtrain.sites.transport import Peer, Rectangle, WireError

CHANGES = "changes"
"""Kind of array: compressed changes of parameters since the last synchronisation."""


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """Result of a fetch, equal on all ranks of the site except for the arrays."""

    found: dict[str, Array]
    """Site -> its parameters or their changes, [elements of this rank], if received by all ranks."""
    failed: dict[str, str]
    """Site -> reason of the failure."""
    outer: tuple[Array, Array] | None
    """(common parameters, outer momentum), if requested and received by all ranks."""
    received_bytes: int
    """Sum over all ranks."""


class Exchange:
    """Fetches from the ranks of other sites. All ranks of this site call every method together."""

    def __init__(
        self,
        ranks: Ranks,
        shard: Shard,
        site: str,
        run: str,
        form: type[Format] | None,
        most_steps: int,
    ) -> None:
        """`run`: checksum of the settings that the sites share. `form`: format of changes; None: fp32 parameters.
        `most_steps`: limit on a site's steps between two synchronisations; larger reports are capped."""
        self.ranks = self._ranks = ranks
        self._shard, self._site, self._run, self._form = shard, site, run, form
        self._healer = ""
        self._liars: set[str] = set()
        """Ids of sites that sent another state than they had reported."""
        self._most_steps = float(most_steps)
        self._peers: dict[str, list[Peer]] = {}

    def fetch(
        self,
        sources: Mapping[str, PeerStatus],
        healers: Sequence[PeerStatus],
        own: Array,
        common: Array,
        leader: PeerStatus,
        part: slice,
        deadline_s: float,
    ) -> Fetched:
        """`sources`: sites whose parameters count. `healers`: sites with the common state; empty if this site has it.
        `own`: this rank's parameters, or its changes after decoding. `common`: [size]; a fetched common state replaces
        it. `leader`: its report must match the healers' data. `part`: of the round. `deadline_s`: time.monotonic()."""
        found: dict[str, Array] = {}
        failed: dict[str, str] = {}
        round_ = leader.round
        kind = CHANGES if self._form else "values"
        others = {name: told for name, told in sorted(sources.items()) if name != self._site}
        # All at once: a site that sends slowly, or nothing, takes no time from the others.
        with ThreadPoolExecutor(len(others) + 1, "sites-fetch") as threads:
            honest = sorted(healers, key=lambda each: (each.id in self._liars, each.id))
            healing = threads.submit(self._healed, honest, round_, deadline_s)
            coming = {
                name: threads.submit(self._values, told, kind, round_, part, deadline_s)
                for name, told in others.items()
            }
        outer, received, unhealed = healing.result()
        failed |= unhealed
        if healers:
            sums = from_all(self._ranks, None if outer is None else [self._shard.checksum(each) for each in outer])
            there = [each for each in sums if each is not None]
            # Unless a rank has received none, the states of all ranks together must be those of the leader's report.
            if len(there) == len(sums) and checksum_of(there) != leader.checksum:
                self._liars.add(self._healer)
                if self._healer:
                    failed[self._healer] = "the state that it sent is not the one that it reported"
                outer = None
        for name in sorted(sources):
            try:
                found[name], size = (own, 0) if name == self._site else coming[name].result()
            except WireError as error:
                failed[name] = str(error)
                continue
            received += size
        base = None if self._form else (outer[0] if outer else common)[part]
        squares = {name: squared_distance(base, values) for name, values in found.items()}
        steps = {name: told.trained / told.batch for name, told in sources.items()}
        return self._joined(found, failed, outer, received, squares, steps)

    def _healed(
        self, healers: Sequence[PeerStatus], round_: int, deadline_s: float
    ) -> tuple[tuple[Array, Array] | None, int, dict[str, str]]:
        """Return ((common parameters, outer momentum) from the first healer that sends them, bytes, id -> failure)."""
        failed: dict[str, str] = {}
        for each in healers:
            last, now_s = each is healers[-1], time.monotonic()
            by_s = deadline_s if last else (now_s + deadline_s) / 2  # a slow one leaves time for the next
            try:
                anchor, size = self._values(each, "anchor", round_, None, by_s)
                momentum, more = self._values(each, "momentum", round_, None, by_s)
            except WireError as error:
                failed[each.id] = str(error)
                continue
            self._healer = each.id
            return (anchor, momentum), size + more, failed
        return None, 0, failed

    def forget_all_but(self, sites: Collection[str]) -> None:
        """Forget all other sites: one that returns is another process."""
        self._peers = {site: peers for site, peers in self._peers.items() if site in sites}

    def _joined(
        self,
        found: dict[str, Array],
        failed: dict[str, str],
        outer: tuple[Array, Array] | None,
        received: int,
        squares: Mapping[str, float],
        steps: Mapping[str, float],
    ) -> Fetched:
        """Combine the ranks' results and refuse updates that are too large. `squares`: squared norms on this rank."""
        reports = from_all(self._ranks, (failed, outer is not None, received, squares))
        failures = {site: text for other, *_ in reversed(reports) for site, text in other.items()}
        there = [site for site in found if site not in failures]
        totals = {site: sum(parts[site] for *_, parts in reports) for site in there}
        believed = {site: min(count, self._most_steps) for site, count in steps.items()}
        failures |= outsized(totals, believed, self._site)
        return Fetched(
            found={site: values for site, values in found.items() if site not in failures},
            failed=failures,
            outer=outer if all(healed for _, healed, *_ in reports) else None,
            received_bytes=sum(size for _, _, size, _ in reports),
        )

    def _values(
        self, site: PeerStatus, kind: str, round_: int, part: slice | None, deadline_s: float
    ) -> tuple[Array, int]:
        """Return (this rank's elements, or a part, from another site; bytes). Raises WireError."""
        first, end = (part.start, part.stop) if part else (0, self._shard.size)
        mine = [(at - first, name, region) for at, name, region in self._shard.regions(part)]
        wanted = sum(region.numel for _, _, region in mine)
        made = [Peer(a, run=self._run, member=site.id) for a in site.addresses]
        peers = self._peers.setdefault(site.id, made)
        pairs = [peer.covers(mine, deadline_s) for peer in peers]
        elements = sum(rows * length for each in pairs for _, (_, _, rows, length) in each)
        if elements != wanted:
            raise WireError(f"it has {elements} of {wanted} elements")
        values = np.zeros(end - first, np.float32)
        for at, _, region in mine:
            values[at : at + region.numel] = np.nan  # an element sent twice must not hide one that is missing
        received = 0
        for peer, theirs in zip(peers, pairs, strict=True):
            if self._form and kind == CHANGES:  # fills `theirs` from the blocks that hold them
                blocks = Blocks(theirs)
                records = np.empty(blocks.count * self._form.record, np.uint8)
                received += peer.fetch(kind, round_, blocks.wanted(self._form.record), records, deadline_s)
                blocks.spread(decode(self._form, records), values)
            else:
                received += peer.fetch(kind, round_, theirs, values, deadline_s)
        if not np.isfinite(values).all():
            raise WireError(f"its {kind} are not finite")
        return values, received


def checksum_of(ranks: Sequence[Sequence[int]]) -> str:
    """Combine the checksums of the ranks' parts of the common parameters and the outer momentum."""
    return "-".join(f"{sum(parts) % 2**64:016x}" for parts in zip(*ranks, strict=True))


Pairs = Sequence[tuple[Rectangle, Rectangle]]
"""(elements of the other rank's array, the same elements in this rank's), from `Peer.covers`."""


class Blocks:
    """Compressed blocks of another rank that hold the elements of some pairs."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs
        self.runs: list[tuple[int, int]] = []
        """(first block, number of blocks) of each contiguous run, in order; no block twice."""
        spans = sorted((there // BLOCK, (there + length - 1) // BLOCK + 1) for there, _, length in self._rows())
        for begin, end in spans:
            if self.runs and begin <= sum(self.runs[-1]):
                first, count = self.runs[-1]
                self.runs[-1] = (first, max(count, end - first))
            else:
                self.runs.append((begin, end - begin))
        self.count = sum(count for _, count in self.runs)

    def wanted(self, record: int) -> list[tuple[Rectangle, Rectangle]]:
        """Return the records as byte ranges in the other rank's array, and in one of `count` records."""
        pairs: list[tuple[Rectangle, Rectangle]] = []
        at = 0
        for first, count in self.runs:
            size = count * record
            pairs.append(((first * record, size, 1, size), (at, size, 1, size)))
            at += size
        return pairs

    def spread(self, decoded: Array, into: Array) -> None:
        """Copy the decoded records, [count * BLOCK], to the elements of the pairs."""
        firsts = [first for first, _ in self.runs]
        before = [0]
        for _, count in self.runs:
            before.append(before[-1] + count)
        for there, here, length in self._rows():
            run = bisect_right(firsts, there // BLOCK) - 1
            at = there + (before[run] - firsts[run]) * BLOCK
            into[here : here + length] = decoded[at : at + length]

    def _rows(self) -> Iterator[tuple[int, int, int]]:
        for (there, step, rows, length), (here, own_step, _, _) in self._pairs:
            for row in range(rows):
                yield there + row * step, here + row * own_step, length
