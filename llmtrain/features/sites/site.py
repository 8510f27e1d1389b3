"""Make a launch one of several sites that train one model: its rounds of synchronisation with the others.

In a round every rank serves its parameters, and rank 0 meets the other sites at the coordinator. Every rank fetches its
own elements from the other sites' ranks. In a second meeting rank 0 reports which parameters have arrived. From all
reports every site knows whose parameters all sites have, and makes the same outer step. A site that misses the second
meeting copies the result in the next round. No rank waits for another site longer than the round's limit.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import secrets
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from llmtrain.base import log
from llmtrain.base.errors import TrainingStopped
from llmtrain.base.rank.heartbeat import heart
from llmtrain.base.threads import in_thread
from llmtrain.engine.api import Engine, StateTensor
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.features.sites.exchange import (
    Bytes,
    Exchange,
    Feedback,
    Fetched,
    checksum_of,
    outer_step,
    squared_distance,
)
from llmtrain.features.sites.membership import (
    Heard,
    Members,
    PeerStatus,
    SitesError,
    TorchftMembers,
    join,
    name_of,
    own_address,
)
from llmtrain.features.sites.message_formats import FORMATS
from llmtrain.features.sites.outer_methods import SitesConfig
from llmtrain.features.sites.quorum import AGAIN_S, MeetAgain, Meetings, RoundFailed, leader_of
from llmtrain.features.sites.sample_ledger import SLOWEST, Ledger, Request, Share, steps_each, steps_of
from llmtrain.features.sites.shard import COMMON, MOMENTUM, RESIDUAL, Array, Shard, pieces, read_back, shapes, standing
from llmtrain.features.sites.transport import Pieces, Server


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Contribution of this site to a round."""

    part: slice
    """Slice of the rank's array that the round synchronises."""
    values: Array
    """This rank's values or changes, after decoding."""
    live: Array | None
    """The live values at the same time, if training continues during the round."""
    status: dict[str, Any]
    steps: int
    """Optimizer steps since the last synchronisation."""
    overlap: int
    """Optimizer steps trained while the round runs."""
    began_s: float
    published_s: float
    """Seconds that training stopped for publishing."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """Result of a round, before anything is changed."""

    leader: PeerStatus
    """The site whose state counts."""
    peers: list[PeerStatus]
    committed: list[str]
    """Ids of the sites that make the outer step."""
    used: list[str]
    """Ids of the sites whose parameters all of them have."""
    got: Fetched
    heals: bool
    """This site copies the common state from the others."""
    met_s: float


_STARTS = 100
"""How many rounds without a step are allowed; each start of a site makes one."""
_START_S = 1.0
"""Least seconds between two starts of a site."""
_LARGEST_STEP = 1 << 40


class Site:
    """The rounds of one launch, as a context manager. All ranks of the site call every method together."""

    def __init__(
        self,
        engine: Engine,
        ranks: Ranks,
        settings: SitesConfig,
        common: Mapping[str, Any],
        share: Share,
        tell: Callable[..., None],
        *,
        frozen: Collection[str] = (),
        last_step: int | None = None,
        members: Callable[[str, str, float], Members] = TorchftMembers,
    ) -> None:
        """`common`: settings that must be equal on all sites, JSON values. `tell`: takes an event's kind and fields.
        `last_step`: completes the run; None: unknown. `members`: makes the membership from address, id and seconds to
        connect. Raises AgreedError: the coordinator does not answer, torchft is missing, the address is public."""
        self._ranks, self._settings, self._share, self._tell = ranks, settings, share, tell
        common = json.loads(json.dumps({**common, **shapes(engine)}))
        run = xxhash.xxh3_64_hexdigest(json.dumps(common, sort_keys=True).encode())
        self._every, self._last_step = settings.round_steps, last_step
        self._overlap = settings.travel_steps
        self.id = self._was = ranks.first(lambda: f"{settings.name}:{secrets.token_hex(4)}")
        self._shard = Shard(engine, frozen, settings.parts, ranks)
        self._anchor = self._shard.read()
        self._momentum = np.zeros_like(self._anchor)
        form = FORMATS.get(settings.compress)
        self._feedback = Feedback(form, self._shard.size) if form else None
        net = ranks.another(2 * settings.timeout_s) if settings.travel_steps else ranks
        with ranks.together():
            served = self._shard.regions()
            self._server, self._members = connect(settings, ranks.rank, run, self.id, served, members)
        self._addresses = ranks.gather(self._server.address)
        self._exchange = Exchange(net, self._shard, self.id, run, form, self._every + settings.max_alone_steps)
        self._meetings = Meetings(net, self._members, self.id, run, common, settings.timeout_s)
        self._took_s: list[float] = []
        """Seconds of each step since the last round."""
        self._step = self._round = self._steps = 0
        self._due = self._every  # `_steps` at the next synchronisation
        self._ahead = 0  # steps that the fastest site will be ahead by then
        self._trained = 0  # sequences since the last synchronisation
        self._weights = [0] * settings.parts  # tokens since the last synchronisation of each fragment
        self._flight: tuple[Sent, Future[Round]] | None = None
        self._stands_s = 0.0  # time.monotonic() at which training stopped for the round
        self._agreed: tuple[int, int, float] | None = None  # (round, step, time.monotonic()) of the last one
        self._step_s = 0.0
        self._went_on_s = time.monotonic()  # time at which training continued after the last round, failed or not
        self._ledger: Ledger | None = None
        self._batches: dict[str, int] = {}  # sequences of a step, by site, when sequences were dealt
        self._starts: list[int] = []

    def __enter__(self) -> Site:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # running collectives must not outlive their group
            with contextlib.suppress(RoundFailed):
                if self._flight is not None:
                    join(self._flight[1])
        self._server.close()
        if self._members is not None:
            self._members.close()

    def begin(
        self, step: int, sample_index: int, limit_s: float, stop_asked: Callable[[], bool] = lambda: False
    ) -> tuple[int, int]:
        """Join the other sites; take the common parameters and the step from them if they are further. `limit_s`:
        seconds to wait for `start_sites` sites and their next synchronisation. Returns (step, sample_index) to continue
        with. Raises, on all ranks, StopAsked; SitesError: no site to begin with, or they train something else."""
        self._ledger, self._step = self._ledger or Ledger(next=sample_index), step
        self._meetings.stop_asked = stop_asked
        deadline_s = time.monotonic() + limit_s
        past = self._meetings.past()
        while True:
            try:
                leader = self._synchronise(deadline_s, self._settings.start_sites, joins=True)
                break
            except RoundFailed as error:
                if self._ranks.first(lambda: time.monotonic() + AGAIN_S > deadline_s):
                    failed = SitesError(
                        f"site {self._settings.name} has not joined the run within {limit_s:g} s: {error}. Start the "
                        "other sites, or lower sites.start_sites; fault.start_timeout_s says how long to wait."
                    )
                    failed.everywhere = failed.passing = True
                    raise failed from error
                time.sleep(AGAIN_S)
        self._step = leader.step if leader.id != self.id else step
        if past and self._meetings.before == [self._settings.name]:
            self._say_ended(past)
        return self._step, self._starts.pop()

    def _say_ended(self, past: list[Heard]) -> None:
        names, step = ", ".join(sorted({site.site for site in past})), max(site.step for site in past)
        ended = self._last_step is not None and step >= self._last_step
        log.warn(
            f"site {self._settings.name} is alone: {names} {'ended this run' if ended else 'left this run'} at step "
            f"{step} (heard of {min(site.silent_s for site in past):.0f} s ago), and this site trains it from step "
            f"{self._step} on, without their model. To continue from theirs, stop, and start with --resume and a "
            "checkpoint of their run folders"
        )
        self._tell("alone", step=self._step, others=sorted({site.site for site in past}), at=step)

    def state(self) -> list[StateTensor]:
        tensors = pieces(self._shard, COMMON, lambda: self._anchor)
        if self._settings.keeps_momentum:
            tensors += pieces(self._shard, MOMENTUM, lambda: self._momentum)
        if (feedback := self._feedback) is not None:
            tensors += pieces(self._shard, RESIDUAL, lambda: feedback.residual)
        return tensors

    def to_json(self) -> dict[str, Any]:
        ledger = None if self._ledger is None else self._ledger.to_json()
        counts = {"round": self._round, "trained": self._trained, "weights": self._weights}
        return {"was": self._was, **counts, "ledger": ledger}

    def restore(self, folder: Path, saved: Mapping[str, Any]) -> None:
        """Call before `begin`. `saved`: from `to_json`. Raises AgreedError: the checkpoint is damaged."""
        arrays = read_back(self._shard, folder, (COMMON, MOMENTUM, RESIDUAL), self._ranks)
        with self._ranks.together():
            self._ledger, self._was, self._round, self._trained, weights = standing(saved, folder)
        same = len(weights) == len(self._weights)
        self._weights = weights if same else [max(weights)] * len(self._weights)
        self._anchor = arrays.get(COMMON, self._anchor)
        self._momentum = arrays.get(MOMENTUM, self._momentum)
        if self._feedback is not None and RESIDUAL in arrays:
            self._feedback.residual = arrays[RESIDUAL]

    def after_update(self, step: int, step_s: float, *, complete: bool) -> tuple[int, int]:
        """Count an optimizer step, and synchronise if it is due.

        Args:
            step_s: seconds of the step on this rank.
            complete: the run has no further step.

        Returns: (optimizer steps done, by the count of the fastest site; first sequence of the next step).

        Raises: TrainingStopped: too many steps without the other sites.
        """
        self._took_s.append(step_s)
        self._step = step
        self._steps += 1
        self._trained += self._share.batch
        self._weights = [weight + self._share.tokens for weight in self._weights]
        ends = len(self._shard.parts)  # rounds after the last step: one for each fragment
        if self._flight is not None and self._steps >= self._flight[0].steps + self._flight[0].overlap:
            (sent, travelling), self._flight = self._flight, None
            self._stands_s = time.monotonic() - sent.published_s
            self._try_round(lambda: self._apply_round(join(travelling), sent))
        if not complete and self._flight is None and self._steps >= self._due:
            self._start_round()
            ends -= 1  # the fastest site's first, if this was its last step
        if complete or self._step == self._last_step:
            for _ in range(ends):  # do not wait again for a site that missed one
                if not self._try_round(lambda: self._synchronise(self._deadline())):
                    break
            self._meetings.leave()
            self._say_left_out()
        if not self._starts:
            raise TrainingStopped(
                f"site {self._settings.name} has trained {self._steps} steps without the other sites; "
                f"sites.max_alone_steps is {self._settings.max_alone_steps}. Look at the coordinator "
                f"({self._settings.coordinator}) and the network; the same command continues from the last checkpoint."
            )
        return self._step, self._starts.pop()

    def _say_left_out(self) -> None:
        """Warn of dealt sequences that the run's model has not seen."""
        if self._meetings.missed and self._trained:
            log.warn(
                f"step {self._step}: the run ends here without the other sites: {self._trained} sequences that it "
                "has trained since they met last are in its own model alone"
            )
        elif self._ledger is not None and (count := self._ledger.left_out()):
            log.warn(
                f"step {self._step}: the run ends, and {count} sequences are in no model though later ones are: they "
                "were dealt to a site that did not deliver them, and no round was left to pass them on"
            )
            self._tell("left_out", step=self._step, samples=count)

    def _deadline(self) -> float:
        return time.monotonic() + self._settings.timeout_s

    def _try_round(self, synchronise: Callable[[], object]) -> bool:
        try:
            with heart.during("compare"):
                synchronise()
        except RoundFailed as error:
            self._meetings.missed = True
            self._due, self._went_on_s = self._steps + self._every, time.monotonic()
            stood_s = round(time.monotonic() - self._stands_s, 3)
            self._tell("synchronise_failed", step=self._step, round=self._round, stood_s=stood_s, reason=str(error))
            log.warn(f"step {self._step}: training continues without this synchronisation: {error}")
            return False
        return True

    def _start_round(self) -> None:
        """Start a round: blocking, or in the background."""
        overlap = self._overlap
        if self._last_step is not None:
            overlap = min(overlap, self._last_step - self._step - self._ahead)
        if overlap <= 0:
            self._try_round(lambda: self._synchronise(self._deadline()))
            return
        sent, deadline_s = self._publish_parameters(overlap), self._deadline()
        patience_s = self._patience_s()
        travel = functools.partial(self._meet_and_fetch, sent, deadline_s, patience_s=patience_s)
        self._flight = sent, in_thread(travel, "sites-round")

    def _patience_s(self) -> float:
        """Return the seconds to wait for a peer: twice the seconds of training since the last round."""
        return 2 * (time.monotonic() - self._went_on_s)

    def _synchronise(self, deadline_s: float, least: int = 1, *, joins: bool = False) -> PeerStatus:
        """Run one round; return the leading site's status. Raises RoundFailed, SitesError at the start."""
        patience_s = self._patience_s()
        sent = self._publish_parameters()
        done = self._meet_and_fetch(sent, deadline_s, least, joins=joins, patience_s=patience_s)
        self._apply_round(done, sent)
        return done.leader

    def _meet_and_fetch(
        self, sent: Sent, deadline_s: float, least: int = 1, *, joins: bool = False, patience_s: float = 0.0
    ) -> Round:
        """Run the part of a round that waits for others; it changes no state. Raises RoundFailed, SitesError."""
        ends_s = 0.0
        while True:
            peers = self._meetings.meet(sent.status, deadline_s, least, joins=joins, patience_s=patience_s)
            met_s = time.monotonic()
            if not ends_s:  # a site that joins or was late has the time of a round from here
                longer = joins or self._meetings.missed
                ends_s = max(deadline_s, met_s + self._settings.timeout_s) if longer else deadline_s
            try:
                return self._fetch_and_vote(sent, peers, met_s, ends_s)
            except MeetAgain as again:
                over = self._exchange.ranks.first(lambda until_s=ends_s: time.monotonic() > until_s)  # type: ignore[misc]
                if over:
                    raise RoundFailed(str(again)) from again

    def _fetch_and_vote(self, sent: Sent, peers: list[PeerStatus], met_s: float, deadline_s: float) -> Round:
        """Fetch and vote after a meeting. Raises RoundFailed, MeetAgain."""
        fetched_by_s = (met_s + deadline_s) / 2  # leave time to agree on going on without a silent site
        leader, peers, refused = self._leader_among(peers)
        current = {peer.id: peer for peer in peers if peer.state == leader.state}
        heals = self.id not in current
        got = self._exchange.fetch(
            {peer.id: peer for peer in current.values() if peer.weight},
            list(current.values()) if heals else [],
            sent.values,
            self._anchor,
            leader,
            self._part_of_round(leader.round),
            fetched_by_s,
        )
        have = sorted(got.arrays) if got.outer or not heals else None
        committed, used = self._meetings.commit(leader.round, {peer.id for peer in peers}, have, deadline_s)
        if self.id not in committed:
            why = "the common state has not come" if have is None else "the other sites have gone on without this one"
            raise RoundFailed(f"{why}: {listed(got.failed)}")
        if not used and any(peer.weight for peer in current.values()):
            raise RoundFailed(f"no site's parameters have reached all others: {listed(got.failed)}")
        got = replace(got, failed={**got.failed, **refused})
        return Round(leader=leader, peers=peers, committed=committed, used=used, got=got, heals=heals, met_s=met_s)

    def _leader_among(self, peers: list[PeerStatus]) -> tuple[PeerStatus, list[PeerStatus], dict[str, str]]:
        """Return (leading site, accepted sites, id -> reason of a refused state). Raises RoundFailed."""
        joins, before, trusted = self._agreed is None, self._meetings.known, self._settings.trust
        impossible = self._why_impossible
        leader, refused = self._exchange.ranks.first(
            lambda: leader_of(peers, self.id, joins=joins, known=before, trusted=trusted, impossible=impossible),
        )
        if leader is None:
            states = ", ".join(f"{peer.site}: round {peer.round}" for peer in peers if peer.joined)
            raise RoundFailed(
                f"the sites that train report different states ({states}), and none is reported by more than half: "
                "sites.trust names a site whose state counts"
            )
        return leader, [peer for peer in peers if peer.id not in refused], refused

    def _why_impossible(self, other: PeerStatus) -> str:
        """Return why a peer cannot be as far as it says since this site last agreed with others; "": it can."""
        if other.round == self._round:
            batch = self._batches.get(other.was, other.batch)
            steps = self._every + self._overlap + self._settings.max_alone_steps
            tokens = len(self._shard.parts) * steps * batch * self._share.tokens // self._share.batch
            if other.trained > steps * batch or other.weight > tokens:
                text = f"it reports {other.trained} sequences and {other.weight} tokens in its parameters"
                return f"{text}; {steps} steps of {batch} sequences have fewer"
        if other.round <= self._round:
            return ""
        ends, claim = len(self._shard.parts), f"it reports round {other.round}, step {other.step}"
        if self._last_step is not None and other.step > self._last_step:
            return f"{claim}, and the run ends at step {self._last_step}"
        if self._agreed is None:
            most = other.step // self._every + ends + _STARTS
            return f"{claim}; so few steps have at most {most} rounds" if other.round > most else ""
        round_, step, at_s = self._agreed
        elapsed_s = time.monotonic() - at_s
        steps = self._every + self._settings.max_alone_steps
        steps += math.ceil(elapsed_s / self._step_s / SLOWEST) if self._step_s else _LARGEST_STEP
        rounds = min(steps, max(other.step - step, 0)) // self._every + ends + math.ceil(elapsed_s / _START_S)
        if other.step > step + steps or other.round > round_ + rounds:
            return f"{claim}, and {elapsed_s:.3g} s ago all were at round {round_}, step {step}"
        return ""

    def _apply_round(self, done: Round, sent: Sent) -> None:
        leader, used, arrays = done.leader, done.used, done.got.arrays
        part = self._part_of_round(leader.round)
        anchor, momentum = (array.copy() for array in done.got.outer or (self._anchor, self._momentum))
        if self._feedback:
            for site in used:
                np.add(anchor[part], arrays[site], out=arrays[site])
            if done.heals:
                self._feedback.forget()
            elif self.id in used:
                self._feedback.delivered()
        weights = {peer.id: peer.weight for peer in done.peers}
        after, momentum[part] = outer_step(
            self._settings, anchor[part], momentum[part], {site: arrays[site] for site in used}, weights
        )
        ends = self._ranks.gather((squared_distance(anchor[part], after), self._server.sent_bytes()))
        norm, served = math.sqrt(sum(square for square, _ in ends)), sum(size for _, size in ends)
        anchor[part] = after
        self._anchor, self._momentum = anchor, momentum
        given_up = 0
        if self.id not in used:  # its samples are dealt to others
            given_up = self._trained
            self._shard.write(anchor)
            self._trained, self._weights = 0, [0] * len(self._weights)
        else:
            values = anchor[part]
            if sent.live is not None:  # keep the steps trained since
                values = values + (self._shard.read(part)[part] - sent.live)
            self._shard.write(values, part)
            self._trained -= sent.status["trained"]
            self._weights[leader.round % len(self._weights)] -= sent.status["weight"]
        self._server.publish(leader.round + 1, {})
        self._steps -= sent.steps
        self._plan_next_round(done, sent)
        self._report_round(done, sent, norm, served, given_up)

    def _part_of_round(self, round_: int) -> slice:
        return self._shard.parts[round_ % len(self._shard.parts)]

    def _publish_parameters(self, overlap: int = 0) -> Sent:
        self._stands_s, part = time.monotonic(), self._part_of_round(self._round)
        sums = self._ranks.gather([self._shard.checksum(array) for array in (self._anchor, self._momentum)])
        values = self._shard.read(part)
        sent, live = values[part], values[part].copy() if overlap else None
        served: dict[str, Array | Bytes] = {"values": values}
        if self._feedback is not None:
            records, sent = self._feedback.encode(sent - self._anchor[part], part)
            served = {"changes": records}
        self._server.publish(self._round, {**served, "anchor": self._anchor, "momentum": self._momentum})
        step_s = statistics.median(self._took_s) if self._took_s else 0.0  # 0: no step
        self._took_s.clear()
        self._step_s = step_s or self._step_s
        status = {
            **self.to_json(),
            "checksum": checksum_of(sums),
            "step": self._step,
            "joined": self._agreed is not None,
            "step_s": step_s if self._settings.pace == "measured" else 0.0,
            "batch": self._share.batch,
            "trained": self._trained + overlap * self._share.batch,  # others must not be dealt these
            "weight": self._weights[self._round % len(self._weights)],
            "addresses": self._addresses,
        }
        published_s, began_s = time.monotonic() - self._stands_s, self._stands_s
        times = {"began_s": began_s, "published_s": published_s}
        return Sent(part=part, values=sent, live=live, status=status, steps=self._steps, overlap=overlap, **times)

    def _plan_next_round(self, done: Round, sent: Sent) -> None:
        leader, by_id = done.leader, {peer.id: peer for peer in done.peers}
        trained = {by_id[site].was: by_id[site].trained for site in done.used}
        peer_steps = [peer.step for peer in done.peers if peer.state == leader.state]
        at = min(max(peer_steps), min(peer_steps) + self._every + self._settings.max_alone_steps)
        self._step = max(self._step, self._step + at - sent.status["step"])
        left = self._every if self._last_step is None else self._last_step - at
        most = min(self._every, left) if left > 0 else self._every
        steps = steps_each({site: by_id[site].step_s for site in done.committed}, most, 1 + self._overlap)
        requests = [
            Request(site=site, batch=by_id[site].batch, steps=steps[site], reserve=self._settings.max_alone_steps)
            for site in done.committed
        ]
        self._due, self._ahead = steps[self.id], most - steps[self.id]
        self._ledger = leader.ledger.settled(trained, requests)
        self._batches = {request.site: request.batch for request in requests}
        self._starts = list(steps_of(self._ledger.dealt[self.id], self._share.batch))[::-1]
        self._round, self._meetings.missed = leader.round + 1, False
        self._was, self._went_on_s = self.id, time.monotonic()
        self._agreed = self._round, at, self._went_on_s
        self._exchange.forget_all_but(done.committed)

    def _report_round(self, done: Round, sent: Sent, norm: float, served: int, given_up: int) -> None:
        """Log the event of a round. `norm`: norm of the outer step. `served`: bytes sent since the last successful
        round."""
        assert self._ledger is not None
        now_s, got = time.monotonic(), done.got
        fields: dict[str, Any] = {
            "sites": [name_of(site) for site in done.committed],
            "used": [name_of(site) for site in done.used],
            "participants": len(done.committed),
            "healed": got.outer is not None,
            "received_bytes": got.received_bytes,
            "sent_bytes": served,
            "overlapped_steps": sent.overlap,
            "outer_step_norm": norm,
            "waited_s": round(done.met_s - sent.began_s, 3),
            "stood_s": round(now_s - self._stands_s, 3),
            "seconds": round(now_s - sent.began_s, 3),
            **({"failed": got.failed} if got.failed else {}),
        }
        lost = {"given_up_samples": given_up, "left_out_samples": self._ledger.left_out()}
        self._tell("synchronise", step=self._step, round=self._round, **fields, **lost)
        if given_up:
            log.warn(
                f"step {self._step}: up to {given_up} sequences that this site trained alone are given up: "
                "the other sites trained on in the meantime, and were dealt these sequences"
            )
        say_changes(self._step, done.got.failed, fields["sites"], self._meetings.before, str(self._settings.name))
        self._meetings.before = fields["sites"]
        if len(fields["sites"]) > 1:
            self._meetings.known = fields["sites"]


def connect(
    settings: SitesConfig, rank: int, run: str, site: str, pieces: Pieces, members: Callable[[str, str, float], Members]
) -> tuple[Server, Members | None]:
    """Return (the server of this rank's elements, the membership on rank 0). `run`: checksum of the shared settings.
    Raises SitesError."""
    assert settings.coordinator is not None
    host = settings.listen or own_address(settings.coordinator)
    server = Server(host, run=run, member=site, pieces=pieces, limit_s=settings.timeout_s)
    if rank:
        return server, None
    log.warn(
        f"site {settings.name}: nothing that sites send is encrypted or signed. Anyone who reaches "
        f"{settings.coordinator} or {server.address} can read the parameters, join under any name, send updates within "
        "the limits, send a state to a site that joins, and stop the synchronisations"
    )
    return server, members(settings.coordinator, site, settings.timeout_s)


_METRICS = {
    "received_bytes": "sites/received_bytes",
    "sent_bytes": "sites/sent_bytes",
    "stood_s": "sites/stood_s",
    "participants": "sites/participants",
    "overlapped_steps": "sites/staleness_steps",
    "outer_step_norm": "sites/outer_step_norm",
    "given_up_samples": "sites/given_up_samples",
    "left_out_samples": "sites/left_out_samples",
}
"""Field of the events -> key of metrics.jsonl."""


def telling(event: Callable[..., None], row: Callable[..., None]) -> Callable[..., None]:
    """Return a function that writes an event of the sites by `event`, and its numbers by `row` as metrics (`more`:
    another row of the step follows)."""

    def tell(kind: str, **fields: Any) -> None:
        event(kind, **fields)
        if metrics := {key: fields[name] for name, key in _METRICS.items() if name in fields}:
            row({"step": fields["step"], **metrics}, more=True)

    return tell


def say_changes(step: int, failed: Mapping[str, str], names: list[str], before: list[str], name: str) -> None:
    """Log the sites that failed, left or came. `names`: sites of this round; `before`: of the last one."""
    for site, text in failed.items():
        log.warn(f"step {step}: site {name_of(site)} is not in this synchronisation: {text}")
    if gone := sorted(set(before) - set(names)):
        log.warn(f"step {step}: {', '.join(gone)} left; its sequences are passed on")
    if names == [name] and before != names:
        (log.warn if before else log.info)(
            f"step {step}: site {name} trains alone: no other site is at the coordinator"
        )
    if come := sorted(set(names) - set(before) - {name}):
        log.info(f"step {step}: training with {', '.join(come)}")


def listed(failed: Mapping[str, str]) -> str:
    return "; ".join(f"site {name_of(site)}: {text}" for site, text in failed.items()) or "nobody has it"
