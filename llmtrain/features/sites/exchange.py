"""Exchange parameters in a round: each rank of a site fetches its own elements from other sites, and all ranks agree on
the results. Also here: the outer step, the refusal of updates that are too large, and compressed differences.

A site adds the error of a compression to its next difference (error feedback; F. Seide et al., "1-Bit Stochastic
Gradient Descent", Interspeech 2014), so that the sum after decoding differs from the true sum by the last error only.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.features.sites.membership import PeerStatus
from llmtrain.features.sites.message_formats import BLOCK, Format
from llmtrain.features.sites.outer_methods import SitesConfig
from llmtrain.features.sites.shard import Array, Shard
from llmtrain.features.sites.transport import Peer, Rectangle, WireError

CHANGES = "changes"
"""Kind of array: compressed changes of parameters since the last synchronisation."""
Bytes = npt.NDArray[np.uint8]
_CHUNK = 1 << 18
"""Elements updated at a time: the fp64 temporaries stay in the cache."""


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """Result of a fetch, equal on all ranks of the site except for the arrays."""

    arrays: dict[str, Array]
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
        """Ids of sites whose state was not the one that they had reported."""
        self._most_steps = float(most_steps)
        self._peers: dict[str, list[Peer]] = {}

    def fetch(
        self,
        sources: Mapping[str, PeerStatus],
        healers: Sequence[PeerStatus],
        local: Array,
        common: Array,
        leader: PeerStatus,
        part: slice,
        deadline_s: float,
    ) -> Fetched:
        """Fetch other sites' parameters and, if this site has fallen behind, the common state.

        `sources`: sites whose parameters count. `healers`: sites that have the common state; empty if this site has it.
        `local`: this rank's parameters, or its changes after decoding. `common`: the common parameters [size], which
        fetched ones replace. `leader`: site whose report the healers' data must match. `part`: slice that the round
        synchronises. `deadline_s`: a time of time.monotonic()."""
        arrays: dict[str, Array] = {}
        failed: dict[str, str] = {}
        round_ = leader.round
        kind = CHANGES if self._form else "values"
        others = {name: status for name, status in sorted(sources.items()) if name != self._site}
        # All at once, so that a site that sends slowly, or nothing, does not delay the others.
        with ThreadPoolExecutor(len(others) + 1, "sites-fetch") as threads:
            honest = sorted(healers, key=lambda healer: (healer.id in self._liars, healer.id))
            healing = threads.submit(self._fetch_common, honest, round_, deadline_s)
            coming = {
                name: threads.submit(self._fetch_values, status, kind, round_, part, deadline_s)
                for name, status in others.items()
            }
        outer, received, unhealed = healing.result()
        failed |= unhealed
        if healers:
            sums = self._ranks.gather(None if outer is None else [self._shard.checksum(array) for array in outer])
            received_sums = [checksum for checksum in sums if checksum is not None]
            # Unless a rank has received none, the states of all ranks together must be those of the leader's report.
            if len(received_sums) == len(sums) and checksum_of(received_sums) != leader.checksum:
                self._liars.add(self._healer)
                if self._healer:
                    failed[self._healer] = "the state that it sent is not the one that it reported"
                outer = None
        for name in sorted(sources):
            try:
                arrays[name], size = (local, 0) if name == self._site else coming[name].result()
            except WireError as error:
                failed[name] = str(error)
                continue
            received += size
        base = None if self._form else (outer[0] if outer else common)[part]
        squares = {name: squared_distance(base, values) for name, values in arrays.items()}
        # The ranks' results together; updates that are too large are refused.
        reports = self._ranks.gather((failed, outer is not None, received, squares))
        failures = {site: text for other, *_ in reversed(reports) for site, text in other.items()}
        totals = {site: sum(parts[site] for *_, parts in reports) for site in arrays if site not in failures}
        steps = {name: min(status.trained / status.batch, self._most_steps) for name, status in sources.items()}
        failures |= outsized(totals, steps, self._site)
        return Fetched(
            arrays={site: values for site, values in arrays.items() if site not in failures},
            failed=failures,
            outer=outer if all(healed for _, healed, *_ in reports) else None,
            received_bytes=sum(size for _, _, size, _ in reports),
        )

    def _fetch_common(
        self, healers: Sequence[PeerStatus], round_: int, deadline_s: float
    ) -> tuple[tuple[Array, Array] | None, int, dict[str, str]]:
        """Return ((common parameters, outer momentum) from the first healer that sends them, bytes, id -> failure)."""
        failed: dict[str, str] = {}
        for healer in healers:
            last, now_s = healer is healers[-1], time.monotonic()
            by_s = deadline_s if last else (now_s + deadline_s) / 2  # a slow one leaves time for the next
            try:
                anchor, size = self._fetch_values(healer, "anchor", round_, None, by_s)
                momentum, more = self._fetch_values(healer, "momentum", round_, None, by_s)
            except WireError as error:
                failed[healer.id] = str(error)
                continue
            self._healer = healer.id
            return (anchor, momentum), size + more, failed
        return None, 0, failed

    def forget_all_but(self, sites: Collection[str]) -> None:
        """Forget all other sites: one that returns is another process."""
        self._peers = {site: peers for site, peers in self._peers.items() if site in sites}

    def _fetch_values(
        self, site: PeerStatus, kind: str, round_: int, part: slice | None, deadline_s: float
    ) -> tuple[Array, int]:
        """Return (this rank's elements, or a part, from another site; bytes). Raises WireError."""
        first, end = (part.start, part.stop) if part else (0, self._shard.size)
        mine = [(at - first, name, region) for at, name, region in self._shard.regions(part)]
        wanted = sum(region.numel for _, _, region in mine)
        made = [Peer(a, run=self._run, member=site.id) for a in site.addresses]
        peers = self._peers.setdefault(site.id, made)
        pairs = [peer.covers(mine, deadline_s) for peer in peers]
        elements = sum(rows * length for rectangles in pairs for _, (_, _, rows, length) in rectangles)
        if elements != wanted:
            raise WireError(f"it has {elements} of {wanted} elements")
        values = np.zeros(end - first, np.float32)
        for at, _, region in mine:
            values[at : at + region.numel] = np.nan  # an element sent twice must not hide one that is missing
        received = 0
        for peer, rectangles in zip(peers, pairs, strict=True):
            if self._form and kind == CHANGES:  # fills `theirs` from the blocks that hold them
                blocks = Blocks(rectangles)
                records = np.empty(blocks.count * self._form.record, np.uint8)
                received += peer.fetch(kind, round_, blocks.wanted(self._form.record), records, deadline_s)
                blocks.spread(decode(self._form, records), values)
            else:
                received += peer.fetch(kind, round_, rectangles, values, deadline_s)
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
        spans = sorted((source // BLOCK, (source + length - 1) // BLOCK + 1) for source, _, length in self._rows())
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
        for source, target, length in self._rows():
            run = bisect_right(firsts, source // BLOCK) - 1
            at = source + (before[run] - firsts[run]) * BLOCK
            into[target : target + length] = decoded[at : at + length]

    def _rows(self) -> Iterator[tuple[int, int, int]]:
        for (source, step, rows, length), (target, target_step, _, _) in self._pairs:
            for row in range(rows):
                yield source + row * step, target + row * target_step, length


def outer_step(
    method: SitesConfig, common: Array, momentum: Array, arrays: Mapping[str, Array], weights: Mapping[str, float]
) -> tuple[Array, Array]:
    """Return (common, momentum) after the outer update, as new arrays, bit-equal on every site: numpy rounds after each
    operation on every processor, and sums run in the order of the names. `arrays`: site -> its parameters; if empty,
    nothing changes. `weights`: tokens by site. All arrays: fp32 [n]."""
    common, momentum = common.copy(), momentum.copy()
    total = sum(weights[site] for site in sorted(arrays))
    if not total:
        return common, momentum
    for low in range(0, len(common), _CHUNK):
        part = slice(low, low + _CHUNK)
        mean = np.zeros(len(common[part]))
        for site in sorted(arrays):
            mean += arrays[site][part].astype(np.float64) * (weights[site] / total)
        method.step(common[part], momentum[part], mean)
    return common, momentum


def squared_distance(before: Array | None, after: Array) -> float:
    """Return the squared L2 norm of after - before, or of after, fp32 [n], summed in fp64."""
    total = 0.0
    for low in range(0, len(after), _CHUNK):
        difference = after[low : low + _CHUNK].astype(np.float64)
        if before is not None:
            difference -= before[low : low + _CHUNK]
        total += float(difference @ difference)
    return total


LARGEST = 100.0
"""Largest allowed ratio of a site's change per step to the others'. A site of 1 step among sites of 500 stays below:
their summed change is 500 times one step's if all steps agree in direction, 22 times if they are independent."""


def outsized(squares: Mapping[str, float], steps: Mapping[str, float], own_site: str) -> dict[str, str]:
    """Return site -> reason for each update that is too large, compared with the lower median of the changes per step,
    or with this site's own if that is larger: of three sites or more, one cannot make others look too large. `squares`:
    site -> squared L2 norm of its change. `steps`: optimizer steps in it. `own_site`: may be missing in `squares`."""
    changes = {site: math.sqrt(square) / max(steps[site], 1.0) for site, square in squares.items()}
    if not changes:
        return {}
    usual = max(sorted(changes.values())[(len(changes) - 1) // 2], changes.get(own_site, 0.0))
    return {
        site: f"its update is {change / usual:.3g} times what the others change in a step; the limit is {LARGEST:g}"
        for site, change in changes.items()
        if usual and change > LARGEST * usual
    }


_AT_ONCE = 1 << 10
"""Blocks at a time: the temporaries stay in the cache."""


def encode(form: type[Format], values: Array) -> Bytes:
    """Return the concatenated records of `values` [n]; zeros pad the last block."""
    blocks = -(-len(values) // BLOCK)
    records = np.empty((blocks, form.record), np.uint8)
    with np.errstate(all="ignore"):
        for low in range(0, blocks, _AT_ONCE):
            part = values[low * BLOCK : (low + _AT_ONCE) * BLOCK]
            filled = np.zeros((-(-len(part) // BLOCK), BLOCK), np.float32)
            filled.reshape(-1)[: len(part)] = part
            records[low : low + _AT_ONCE] = form.pack(filled)
    return records.reshape(-1)


def decode(form: type[Format], records: Bytes) -> Array:
    """Return the values [blocks * BLOCK] of complete records."""
    rows = records.reshape(-1, form.record)
    values = np.empty((len(rows), BLOCK), np.float32)
    with np.errstate(all="ignore"):
        for low in range(0, len(rows), _AT_ONCE):
            values[low : low + _AT_ONCE] = form.unpack(rows[low : low + _AT_ONCE])
    return values.reshape(-1)


class Feedback:
    """Error feedback of one rank: adds the losses of earlier messages to the next difference."""

    def __init__(self, form: type[Format], size: int) -> None:
        self.form = form
        self.residual: Array = np.zeros(size, np.float32)
        """Sum of the losses that no later message has compensated, fp32 [size]."""
        self._after = slice(0, 0), self.residual[:0]

    def encode(self, difference: Array, part: slice) -> tuple[Bytes, Array]:
        """Return (records of all `size` elements, with difference + residual in `part`; the part after decoding).
        `part` must begin with a block."""
        assert part.start % BLOCK == 0
        wanted = difference + self.residual[part]
        written = encode(self.form, wanted)
        decoded = decode(self.form, written)[: len(wanted)]
        self._after = part, wanted - decoded
        records = np.zeros(-(-len(self.residual) // BLOCK) * self.form.record, np.uint8)
        low = part.start // BLOCK * self.form.record
        records[low : low + len(written)] = written
        return records, decoded

    def forget(self) -> None:
        """Reset: the last update may or may not have been applied."""
        self.residual = np.zeros_like(self.residual)

    def delivered(self) -> None:
        """Record that the last message was applied: its loss becomes the residual of the part."""
        part, lost = self._after
        self.residual = self.residual.copy()  # a save may be reading it
        self.residual[part] = lost
