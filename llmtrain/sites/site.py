"""This launch as one of several sites that train one model: its rounds of synchronisation with the others.

A round: every rank serves its parameters; rank 0 meets the other sites at the coordinator; every rank fetches what it
owns from the other sites' ranks; rank 0 tells the others what has come, and from what all of them say everybody knows
which sites' parameters all have, and makes the same outer step. Whoever does not get that far makes none, and takes the
result from the others in the next round. No rank waits for another site longer than the round's limit.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from llmtrain import log, units
from llmtrain.cluster.watch.heartbeat import heart
from llmtrain.config.run import SitesConfig
from llmtrain.dist.control import from_all, from_rank_0, together
from llmtrain.dist.ranks import Ranks
from llmtrain.engine.api import Engine, StateTensor
from llmtrain.errors import TrainingStopped
from llmtrain.sites.compress import Feedback, format_of
from llmtrain.sites.exchange import Exchange, Fetched
from llmtrain.sites.kept import COMMON, MOMENTUM, RESIDUAL, pieces, read_back, standing
from llmtrain.sites.ledger import Ledger, Request, steps_of
from llmtrain.sites.members import Member, Members, MembersError, SitesError, TorchftMembers
from llmtrain.sites.outer import Array, Shard, outer_step, shapes
from llmtrain.sites.told import Told, told_of
from llmtrain.sites.wire import Server

_AGAIN_S = 0.5
"""Between two looks for sites that the run's start waits for."""
_HEARD_S = 2.0
"""After it a coordinator that was away has heard of every living site, and a meeting waits for them again."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a site trains between two synchronisations."""

    batch: int
    """Sequences of an optimizer step."""
    tokens: int
    """Tokens of one."""


class RoundFailed(Exception):
    """The sites have not synchronised; all ranks of this site know it with the same words."""


class Site:
    """The rounds of one launch. All ranks of the site call every method together. Use as a context manager."""

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
        members: Callable[[str, str, float], Members] = TorchftMembers,
    ) -> None:
        """
        Args:
            engine: its parameters have their values.
            settings: of a run that has a name for its site.
            common: what must be the same at all sites, JSON values.
            share: of this site.
            tell: takes the kind of an event and its fields.
            frozen: parameters that do not train.
            members: from the coordinator's address, this site's id and seconds to connect.

        Raises:
            AgreedError: the coordinator is not there, torchft is missing, the address is a public one.
        """
        assert settings.name is not None and settings.coordinator is not None
        self._ranks, self._settings, self._share, self._tell = ranks, settings, share, tell
        self._common = json.loads(json.dumps({**common, **shapes(engine)}))
        self._run = xxhash.xxh3_64_hexdigest(json.dumps(self._common, sort_keys=True).encode())
        self.id = from_rank_0(ranks, lambda: f"{settings.name}:{secrets.token_hex(4)}")
        self._shard = Shard(engine, frozen)
        self._anchor = self._shard.read()
        self._momentum = np.zeros_like(self._anchor)
        form = format_of(settings.compress)
        self._feedback = Feedback(form, self._shard.size) if form else None
        self._members: Members | None = None
        with together(ranks):
            host = settings.listen or _own_address(settings.coordinator)
            self._server = Server(
                host, run=self._run, member=self.id, pieces=self._shard.regions(), limit_s=settings.timeout_s
            )
            if ranks.rank == 0:
                self._members = members(settings.coordinator, self.id, settings.timeout_s)
        self._addresses = from_all(ranks, self._server.address)
        self._exchange = Exchange(ranks, self._shard, self.id, self._run, form)
        self._round = self._steps = 0
        self._trained = self._weight = 0  # sequences and tokens since the last synchronisation
        self._was = self.id
        self._ledger: Ledger | None = None
        self._starts: list[int] = []
        self._before: list[str] = []
        self._missed = False

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        if self._members is not None:
            self._members.close()

    def begin(self, step: int, sample_index: int, limit_s: float) -> tuple[int, int]:
        """Join the other sites; take the common parameters and the step from them, if they are further.

        Args:
            step: optimizer steps that this run has done.
            sample_index: where its data goes on.
            limit_s: how long to wait for `start_sites` sites, and for their next synchronisation.

        Returns: (step, sample_index) to go on with.

        Raises:
            SitesError: there is nobody to begin with, or they train something else. On all ranks alike.
        """
        self._ledger = self._ledger or Ledger(next=sample_index)
        deadline_s = time.monotonic() + limit_s
        while True:
            try:
                leader = self._synchronise(step, deadline_s, least=self._settings.start_sites)
                break
            except RoundFailed as error:
                if from_rank_0(self._ranks, lambda: time.monotonic() + _AGAIN_S > deadline_s):
                    failed = SitesError(
                        f"site {self._settings.name} has not joined the run within {limit_s:g} s: {error}. Start the "
                        "other sites, or lower sites.start_sites; fault.start_timeout_s says how long to wait."
                    )
                    failed.everywhere = failed.passing = True
                    raise failed from error
                time.sleep(_AGAIN_S)
        return leader.step if leader.id != self.id else step, self._starts.pop()

    def state(self) -> list[StateTensor]:
        """What checkpoints keep of it, beside `to_json`."""
        found = pieces(self._shard, COMMON, lambda: self._anchor)
        if self._settings.method == "diloco":
            found += pieces(self._shard, MOMENTUM, lambda: self._momentum)
        if (feedback := self._feedback) is not None:
            found += pieces(self._shard, RESIDUAL, lambda: feedback.residual)
        return found

    def to_json(self) -> dict[str, Any]:
        """Where this site is between two synchronisations."""
        return {
            "was": self._was, "round": self._round, "trained": self._trained, "weight": self._weight,
            "ledger": None if self._ledger is None else self._ledger.to_json(),
        }  # fmt: skip

    def restore(self, folder: Path, kept: Mapping[str, Any]) -> None:
        """Before `begin`: go on where a checkpoint's site was. `kept`: what its `to_json` gave.

        Raises:
            AgreedError: the checkpoint is damaged.
        """
        found = read_back(self._shard, folder, (COMMON, MOMENTUM, RESIDUAL), self._ranks)
        with together(self._ranks):
            self._ledger, self._was, self._round, self._trained, self._weight = standing(kept, folder)
        self._anchor = found.get(COMMON, self._anchor)
        self._momentum = found.get(MOMENTUM, self._momentum)
        if self._feedback is not None and RESIDUAL in found:
            self._feedback.residual = found[RESIDUAL]

    def after_update(self, step: int, *, complete: bool) -> int:
        """Count an optimizer step, and synchronise if it is time.

        Args:
            step: optimizer steps done.
            complete: it was the last.

        Returns: the first sample of the next step.

        Raises:
            TrainingStopped: too many steps without the others. On all ranks alike.
        """
        self._steps += 1
        self._trained += self._share.batch
        self._weight += self._share.tokens
        if complete or self._steps % self._settings.sync_every == 0:
            deadline_s = time.monotonic() + self._settings.timeout_s
            try:
                with heart.during("compare"):
                    self._synchronise(step, deadline_s)
            except RoundFailed as error:
                self._failed(step, str(error))
        if not self._starts:
            raise TrainingStopped(
                f"site {self._settings.name} has trained {self._steps} steps without the other sites; "
                f"sites.max_alone_steps is {self._settings.max_alone_steps}. Look at the coordinator "
                f"({self._settings.coordinator}) and the network; the same command goes on from the last checkpoint."
            )
        return self._starts.pop()

    def _failed(self, step: int, reason: str) -> None:
        self._missed = True
        self._tell("synchronise_failed", step=step, round=self._round, reason=reason)
        log.warn(f"step {step}: no synchronisation with the other sites, training goes on without: {reason}")

    def _synchronise(self, step: int, deadline_s: float, least: int = 1) -> Told:
        """One round; returns what the site told whose state counts. Raises RoundFailed, or SitesError at the start."""
        began_s = time.monotonic()
        own = self._publish()
        sums = from_all(self._ranks, [self._shard.checksum(each) for each in (self._anchor, self._momentum)])
        checksum = "-".join(f"{sum(parts) % 2**64:016x}" for parts in zip(*sums, strict=True))
        told = self._meet(step, checksum, deadline_s, least)
        met_s = time.monotonic()
        fetched_by_s = (met_s + deadline_s) / 2  # a site that sends nothing leaves time to agree on going without it
        leader = min(told, key=lambda each: (-each.round, each.id))
        current = {each.id: each for each in told if each.state == leader.state}
        heals = self.id not in current
        got = self._exchange.fetch(
            {each.id: each for each in current.values() if each.weight},
            list(current.values()) if heals else [],
            own,
            leader.round,
            fetched_by_s,
        )
        committed, used = self._commit(leader.round, sorted(got.found) if got.outer or not heals else None, deadline_s)
        if heals and got.outer is None:
            raise RoundFailed(f"the common state has not come: {_listed(got.failed)}")
        if not used and any(each.weight for each in current.values()):
            raise RoundFailed(f"no site's parameters have reached all others: {_listed(got.failed)}")
        anchor, momentum = got.outer or (self._anchor, self._momentum)
        if self._feedback:
            for each in used:
                np.add(anchor, got.found[each], out=got.found[each])
            if heals:
                self._feedback.forget()
            elif self.id in used:
                self._feedback.delivered()
        self._anchor, self._momentum = outer_step(
            anchor, momentum, {each: got.found[each] for each in used}, {each.id: each.weight for each in told},
            method=self._settings.method, lr=self._settings.outer_lr, beta=self._settings.outer_momentum,
        )  # fmt: skip
        self._shard.write(self._anchor)
        self._server.publish(leader.round + 1, {})
        self._go_on(leader, told, committed, used)
        self._report(step, committed, used, got, began_s, met_s)
        return leader

    def _publish(self) -> Array:
        """Serve what this rank has; returns its own part of what is averaged, as the others read it."""
        values = self._shard.read()
        outer = {"anchor": self._anchor, "momentum": self._momentum}
        if self._feedback is None:
            self._server.publish(self._round, {"values": values, **outer})
            return values
        records, own = self._feedback.encode(values - self._anchor)
        self._server.publish(self._round, {"changes": records, **outer})
        return own

    def _meet(self, step: int, checksum: str, deadline_s: float, least: int) -> list[Told]:
        """What all sites of this run say that want to synchronise, this one included."""
        said = {
            "phase": "meet",
            "run": self._run,
            "common": self._common,
            "checksum": checksum,
            "step": step,
            "batch": self._share.batch,
            **self.to_json(),
            "addresses": self._addresses,
        }
        while True:
            told = [each for each in map(told_of, self._ask(said, deadline_s)) if each is not None]
            for each in told:
                if each.run != self._run:
                    self._refuse(each)
            told = [each for each in told if each.run == self._run]
            if len(told) >= least:
                if not self._missed or len(told) >= len(self._before):
                    return told
                self._missed = False
                time.sleep(_HEARD_S)
                continue
            if from_rank_0(self._ranks, lambda: time.monotonic() > deadline_s):
                names = ", ".join(sorted(each.site for each in told))
                raise RoundFailed(f"{units.counted(len(told), 'site')} of {least} are there ({names})")
            time.sleep(_AGAIN_S)

    def _refuse(self, other: Told) -> None:
        """Somebody trains something else at this coordinator: whoever was here first stays."""
        text = other.difference(self._common)
        if self._round:
            log.warn_once(text)
            return
        error = SitesError(text)
        error.everywhere = True
        raise error

    def _ask(self, said: Mapping[str, Any], deadline_s: float) -> list[Member]:
        """All participants, on all ranks. Raises RoundFailed."""

        def ask() -> tuple[list[Member], str]:
            assert self._members is not None
            try:
                return self._members.meet(said, deadline_s - time.monotonic()), ""
            except MembersError as error:
                return [], str(error)

        members, wrong = from_rank_0(self._ranks, ask)
        if wrong:
            known = [each for each in self._before if each != self._settings.name]
            raise RoundFailed(f"{wrong}; last time {', '.join(known)} took part" if known else wrong)
        return members

    def _commit(self, round_: int, have: list[str] | None, deadline_s: float) -> tuple[list[str], list[str]]:
        """(sites that make this outer step, sites whose parameters all of them have)."""
        said = {"phase": "commit", "run": self._run, "round": round_, "have": have}
        votes: dict[str, set[str]] = {}
        for member in self._ask(said, deadline_s):
            theirs = member.said
            same = (theirs.get("phase"), theirs.get("run"), theirs.get("round")) == ("commit", self._run, round_)
            if same and isinstance(theirs.get("have"), list):
                votes[member.id] = set(map(str, theirs["have"]))
        if self.id not in votes and have is not None:
            raise RoundFailed("the other sites have gone on without this one")
        return sorted(votes), sorted(set.intersection(*votes.values())) if votes else []

    def _go_on(self, leader: Told, told: list[Told], committed: list[str], used: list[str]) -> None:
        by_id = {each.id: each for each in told}
        trained = {by_id[site].was: by_id[site].trained for site in used}
        requests = [
            Request(site=site, batch=by_id[site].batch, steps=self._settings.sync_every,
                    reserve=self._settings.max_alone_steps)
            for site in committed
        ]  # fmt: skip
        self._ledger = leader.ledger.settled(trained, requests)
        self._starts = list(steps_of(self._ledger.dealt[self.id], self._share.batch))[::-1]
        self._round, self._steps, self._missed = leader.round + 1, 0, False
        self._trained = self._weight = 0
        self._was = self.id
        self._exchange.forget_all_but(committed)

    def _report(
        self, step: int, committed: list[str], used: list[str], got: Fetched, began_s: float, met_s: float
    ) -> None:
        now_s = time.monotonic()
        names = [_name(site) for site in committed]
        self._tell(
            "synchronise", step=step, round=self._round, sites=names, used=[_name(site) for site in used],
            healed=got.outer is not None, received_bytes=got.received_bytes, waited_s=round(met_s - began_s, 3),
            seconds=round(now_s - began_s, 3), **({"failed": got.failed} if got.failed else {}),
        )  # fmt: skip
        for site, text in got.failed.items():
            log.warn(f"step {step}: site {_name(site)} is not in this synchronisation: {text}")
        if gone := sorted(set(self._before) - set(names)):
            log.warn(f"step {step}: {', '.join(gone)} left; what it was training is handed on")
        if come := sorted(set(names) - set(self._before) - {self._settings.name}):
            log.info(f"step {step}: training with {', '.join(come)}")
        self._before = names


def _own_address(coordinator: str) -> str:
    """The address of this host from which the coordinator is reached. Raises SitesError."""
    host, _, port = coordinator.rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise SitesError(
            f"sites.coordinator {coordinator}: {error.strerror}. Give HOST:PORT of `llmtrain sites coordinator`."
        ) from error
    if ipaddress.ip_address(own).is_global:
        raise SitesError(
            f"sites.coordinator {coordinator} is reached from {own}, a public address, and what sites send is neither "
            "encrypted nor signed. Join the sites by a tunnel (WireGuard, ssh) and give its address in sites.listen."
        )
    return own


def _name(site: str) -> str:
    return site.partition(":")[0]


def _listed(failed: Mapping[str, str]) -> str:
    return "; ".join(f"site {_name(site)}: {text}" for site, text in failed.items()) or "nobody has it"
