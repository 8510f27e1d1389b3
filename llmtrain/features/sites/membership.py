"""Membership of the sites in a run, by torchft's lighthouse, the coordinator; no other part of torchft is used. `meet`
returns the same participants and messages to each, without a participant that is silent for seconds."""

from __future__ import annotations

import html
import ipaddress
import json
import os
import re
import socket
import threading
import urllib.request
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from datetime import timedelta
from http.client import HTTPException
from typing import Any, Protocol, TypeVar

from llmtrain.base.errors import UserError
from llmtrain.base.rank.heartbeat import heart
from llmtrain.base.threads import in_thread
from llmtrain.base.untrusted import shown
from llmtrain.features.sites.rules import private
from llmtrain.features.sites.sample_ledger import Ledger

T = TypeVar("T")

SILENT_S = 5.0
"""The lighthouse's heartbeat_timeout_ms: a site that is silent for longer is left out."""
_STATUS_S = 5.0
_PAGE_BYTES = 1 << 20
_MEMBER = re.compile(r"<b>(.*?)</b>.*?Step: (-?\d+).*?TCPStore: (\S*) <br/>.*?World size: (\d+)", re.DOTALL)
_HEARTBEAT = re.compile(r"^\s*(\S+:[0-9a-f]{8}): seen ([0-9.e+-]+)s ago", re.MULTILINE)
_ID = re.compile(r"[A-Za-z0-9_.-]{1,40}:[0-9a-f]{1,16}")
_HEARTBEAT_S = 1.0
_CALL_S = 5.0


class MembersError(Exception):
    """The sites did not meet; the message gives the reason."""

    late = False
    """The coordinator answers, but the other sites did not come."""


class SitesError(UserError):
    """The site cannot join or continue the run."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A launch that trains as a site."""

    id: str
    """NAME:WORD; the word distinguishes this launch from an earlier one of the same site."""
    message: Mapping[str, Any]
    """Its message to the others, not validated."""

    @property
    def site(self) -> str:
        return name_of(self.id)


def name_of(member: str) -> str:
    return member.partition(":")[0]


def is_site(word: str) -> bool:
    """Check an id: a stranger's may hold anything, and ids come into lines of the log."""
    return _ID.fullmatch(word) is not None


@dataclass(frozen=True, kw_only=True)
class Heard:
    """The coordinator's record of a site, also of one that is gone."""

    id: str
    silent_s: float
    met: bool
    """It came to the last meeting."""
    step: int = 0
    run: str = ""
    """Checksum of the settings that a run's sites share. As `step`, it is known only if the site came to the last
    meeting."""
    together: int = 0
    """Number of sites in its last synchronisation, itself included; 0: it has had none yet."""

    @property
    def site(self) -> str:
        return name_of(self.id)

    @property
    def there(self) -> bool:
        return self.silent_s < SILENT_S


def heard_at(address: str) -> list[Heard]:
    """Return the sites on the status page of the lighthouse at HOST:PORT. Raises OSError, ValueError."""
    with urllib.request.urlopen(f"http://{address}/status", timeout=_STATUS_S) as answer:
        return heard_on(answer.read(_PAGE_BYTES).decode(errors="replace"))


def heard_on(page: str) -> list[Heard]:
    """Return the sites on a lighthouse's status page, sorted by id."""
    met = {html.unescape(member): rest for member, *rest in _MEMBER.findall(page)}
    sites = []
    for member, age in _HEARTBEAT.findall(page):
        if is_site(id_ := html.unescape(member)):
            step, run, together = met.get(id_, ("0", "", "0"))
            heard = Heard(id=id_, silent_s=float(age), met=id_ in met, step=int(step), together=int(together))
            sites.append(replace(heard, run=html.unescape(run)))
    return sorted(sites, key=lambda site: site.id)


class Members(Protocol):
    """Membership of a run, seen from rank 0 of a site."""

    id: str

    def meet(self, said: Mapping[str, Any], limit_s: float) -> list[Member]:
        """Wait for the other sites; return all participants, sorted by id, equal for each participant. Raises
        MembersError."""
        ...

    def heard(self) -> list[Heard]:
        """Return all sites known to the coordinator; none if it does not answer."""
        ...

    def close(self) -> None:
        """Leave: after some seconds the others no longer wait for this site."""
        ...


def join(call: Future[T]) -> T:
    """Wait for a future from `in_thread` and return its result. Heartbeats are sent meanwhile, so that the rank does
    not count as hung."""
    while not wait([call], 0.5).done:
        heart.beat()
    return call.result()


class TorchftMembers:
    """Membership by a lighthouse of torchft 0.2, started by `llmtrain sites coordinator`."""

    def __init__(self, coordinator: str, member_id: str, connect_s: float) -> None:
        """`coordinator`: HOST:PORT. Raises SitesError: torchft is missing, or nobody answers within `connect_s`."""
        self.id = member_id
        self._coordinator = coordinator
        client = lighthouse_client()
        try:
            self._client = client(f"http://{coordinator}", timedelta(seconds=connect_s))
            self._pulse = client(f"http://{coordinator}", timedelta(seconds=connect_s))
            heard_at(coordinator)  # no heartbeat yet: the others would wait for a site that still reads its checkpoint
        except Exception as error:  # RuntimeError, TimeoutError: torchft has no class of its own
            raise SitesError(
                f"sites.coordinator {coordinator}: no coordinator answers ({_reason(error)}). Start it there with "
                f"`llmtrain sites coordinator --bind {coordinator}`, and let this host reach that port."
            ) from error
        self._closed = threading.Event()
        self._beating: threading.Thread | None = None
        self._last: dict[str, Any] = {}
        """Latest value of each key that this site has sent; the status page shows step, run and together."""

    def meet(self, said: Mapping[str, Any], limit_s: float) -> list[Member]:
        self._start_heartbeats()
        self._last = {**self._last, **said}

        def ask() -> Any:
            shown = {"step": self._last.get("step", 0), "store_address": self._last.get("run", "")}
            shown["world_size"] = self._last.get("together", 0)
            return self._client.quorum(self.id, timedelta(seconds=max(limit_s, 0.001)), data=dict(said), **shown)

        try:
            quorum = join(in_thread(ask, "sites-quorum"))
        except TimeoutError as error:
            late = MembersError(f"the other sites have not come within {limit_s:.1f} s")
            late.late = True
            raise late from error
        except Exception as error:
            raise MembersError(f"coordinator {self._coordinator}: {_reason(error)}") from error
        members = [Member(id=participant.replica_id, message=_map(participant)) for participant in quorum.participants]
        return sorted((member for member in members if is_site(member.id)), key=lambda member: member.id)

    def heard(self) -> list[Heard]:
        try:
            return heard_at(self._coordinator)
        except (OSError, ValueError, HTTPException):
            return []

    def close(self) -> None:
        self._closed.set()
        if self._beating is not None:  # a thread that returns from torchft while Python ends aborts the process
            self._beating.join(2 * _CALL_S)

    def _start_heartbeats(self) -> None:
        """Start the heartbeats, once: while they come, the other sites wait for this one."""
        if self._beating is None:

            def beat() -> None:
                while not self._closed.wait(_HEARTBEAT_S):
                    try:
                        self._pulse.heartbeat(self.id, timedelta(seconds=_CALL_S))
                    except Exception:  # the coordinator may be away: `meet` reports it
                        continue

            self._beating = threading.Thread(target=beat, name="sites-heartbeat", daemon=True)
            self._beating.start()


def own_address(coordinator: str) -> str:
    """Return this host's address that reaches the coordinator. Raises SitesError."""
    host, _, port = coordinator.rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            own_address = str(probe.getsockname()[0])
    except OSError as error:
        raise SitesError(
            f"sites.coordinator {coordinator}: {error.strerror}. Give HOST:PORT of `llmtrain sites coordinator`."
        ) from error
    if not private(own_address):
        raise SitesError(
            f"sites.coordinator {coordinator} is reached from {own_address}, a public address, and sites' messages "
            "are neither encrypted nor signed. Join the sites by a tunnel and name its address in sites.listen."
        )
    return own_address


def lighthouse_client() -> Any:
    """Raises SitesError: torchft is not installed."""
    os.environ.setdefault("RUST_LOG", "warn")
    try:
        from torchft.coordination import LighthouseClient
    except ImportError as error:
        raise SitesError(
            f"sites need torchft 0.2, which cannot be imported ({error}). Run `pip install 'llmtrain[sites]'`."
        ) from error
    return LighthouseClient


def _reason(error: BaseException) -> str:
    """Return the message in a gRPC status, which torchft prints with all its fields."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    words = re.search(r'message: "([^"]+)"', text)
    return shown(words[1] if words else text, 200)


_LARGEST = 1 << 62
_LARGEST_BATCH = 1 << 24


@dataclass(frozen=True, kw_only=True)
class PeerStatus:
    """A peer's status message, validated: peers are not trusted."""

    id: str
    run: str
    """Checksum of `common`."""
    common: Mapping[str, Any]
    """Settings that all sites of a run must share, JSON values."""
    round: int
    """Number of completed synchronisations."""
    checksum: str
    """Checksum of its common parameters and outer momentum."""
    step: int
    batch: int
    """Sequences of an optimizer step."""
    step_s: float
    """Seconds of an optimizer step; 0: it has trained none."""
    trained: int
    """Sequences since its last synchronisation, including those trained during this one."""
    weight: int
    """Tokens trained into the parameters that it sends."""
    was: str
    """The id under which it was dealt its samples: its own, or from the launch whose checkpoint it resumes."""
    joined: bool
    """It has synchronised since its launch: its state is more than a checkpoint's."""
    addresses: tuple[str, ...]
    """HOST:PORT of each of its ranks."""
    ledger: Ledger

    @property
    def site(self) -> str:
        return name_of(self.id)

    def difference(self, common: Mapping[str, Any]) -> str:
        keys = sorted(key for key in {*common, *self.common} if common.get(key) != self.common.get(key))
        return (
            f"site {self.site} differs from the other sites in {shown(', '.join(keys) or 'configuration', 200)}. "
            "Sites of a run have the same model, data, seeds and outer optimizer, and a coordinator of their own."
        )

    @property
    def state(self) -> tuple[int, str, str]:
        """Key of the common state: equal on sites with equal common parameters and ledger."""
        return self.round, self.checksum, json.dumps(self.ledger.to_json(), sort_keys=True)


def peer_status(member: Member) -> PeerStatus | None:
    """Validate a member's status; None: it is in another phase of a round, or its message is malformed."""
    message = member.message
    if message.get("phase") != "meet":
        return None
    try:
        counts = {key: int(message[key]) for key in ("round", "step", "batch", "trained", "weight")}
        step_s = float(message["step_s"])
        possible = all(0 <= count < _LARGEST for count in (*counts.values(), step_s))
        if not possible or not 0 < counts["batch"] <= _LARGEST_BATCH:
            return None
        return PeerStatus(
            id=member.id,
            run=str(message["run"]),
            common={str(key): value for key, value in dict(message["common"]).items()},
            checksum=str(message["checksum"]),
            was=str(message["was"]),
            joined=message.get("joined") is True,
            addresses=tuple(map(_address, message["addresses"])),
            step_s=step_s,
            ledger=Ledger.from_json(message["ledger"]),
            **counts,
        )
    except Exception:  # a stranger's message may cause any error
        return None


def _map(participant: Any) -> Mapping[str, Any]:
    """Return a participant's message, which may be any value of JSON, or text that is none."""
    try:
        return participant.data if isinstance(participant.data, dict) else {}
    except Exception:  # torchft has no class of its own
        return {}


def _address(address: object) -> str:
    """Check that the host is an IP address: no name is resolved for peers. Raises ValueError."""
    host, _, port = str(address).rpartition(":")
    ipaddress.ip_address(host)
    if not 0 < int(port) < 1 << 16:
        raise ValueError(port)
    return str(address)


def start_coordinator(bind: str, wait_s: float) -> Any:
    """Start torchft's lighthouse, which listens on HOST:PORT. Raises UserError."""
    os.environ.setdefault("RUST_LOG", "warn")  # else it logs every meeting with all messages
    try:
        from torchft.coordination import LighthouseServer
    except ImportError as error:
        raise UserError(
            f"the coordinator is torchft's lighthouse, which cannot be imported ({error}). Run "
            "`pip install 'llmtrain[sites]'`."
        ) from error
    _check_private("--bind", bind)
    try:
        return LighthouseServer(
            bind=bind,
            min_replicas=1,
            join_timeout_ms=round(1000 * wait_s),
            quorum_tick_ms=100,
            heartbeat_timeout_ms=round(1000 * SILENT_S),
        )
    except Exception as error:  # torchft has no class of its own
        raise UserError(f"--bind {bind}: {error}. Give an address of this host and a free port.") from error


def _check_private(flag: str, address: str) -> None:
    """Raises UserError: the address is no HOST:PORT, or the host has a public one."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and colon and port.isdecimal() and int(port) < 1 << 16):
        raise UserError(f"{flag} {address}: must be HOST:PORT. Give an address of this host in the sites' network.")
    try:
        addresses = {str(endpoint[0]) for *_, endpoint in socket.getaddrinfo(host, int(port))}
    except OSError as error:
        raise UserError(
            f"{flag} {address}: {error.strerror}. Give HOST:PORT, a private address of this host."
        ) from error
    if public := sorted(host for host in addresses if not private(host)):
        raise UserError(
            f"{flag} {address}: {public[0]} is not a private address, and messages between sites are neither "
            "encrypted nor signed. Join the sites by a tunnel (WireGuard, ssh) and give its address."
        )
