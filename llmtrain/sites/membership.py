"""Who takes part in a synchronisation. torchft's lighthouse decides; nothing else of torchft is used.

`meet` is the whole of what a site asks of it: everybody who meets is told the same participants, and what each of them
said. A participant that is silent is left out after seconds.
"""

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
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from llmtrain.base.errors import UserError
from llmtrain.base.untrusted import shown
from llmtrain.cluster.watch.heartbeat import heart
from llmtrain.config.sites_rules import private
from llmtrain.sites.sample_ledger import Ledger

SILENT_S = 5.0
"""As the lighthouse's heartbeat_timeout_ms: a site that is silent for longer is left out."""
_STATUS_S = 5.0
_PAGE_BYTES = 1 << 20
_MEMBER = re.compile(r"<b>(.*?)</b>.*?Step: (-?\d+).*?TCPStore: (\S*) <br/>.*?World size: (\d+)", re.DOTALL)
_HEARTBEAT = re.compile(r"^\s*(\S+:[0-9a-f]{8}): seen ([0-9.e+-]+)s ago", re.MULTILINE)
_ID = re.compile(r"[A-Za-z0-9_.-]{1,40}:[0-9a-f]{1,16}")
_HEARTBEAT_S = 1.0
_CALL_S = 5.0


class MembersError(Exception):
    """The sites have not met. The message says why."""

    late = False
    """The coordinator is there; it is the others that have not come."""


class SitesError(UserError):
    """A run cannot take part with its site."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A process group that trains as a site, from its start to its end."""

    id: str
    """Site's name, and a word that tells this process from an earlier one of the same site."""
    said: Mapping[str, Any]
    """What it told the others. Written by others: believe nothing of it."""

    @property
    def site(self) -> str:
        """The name that its user gave it."""
        return name_of(self.id)


def name_of(member: str) -> str:
    """Return the site's name in an id, as its user gave it."""
    return member.partition(":")[0]


def is_site(word: str) -> bool:
    """Return True for a valid id of a site: a stranger's may hold anything, and ids come into lines of the log."""
    return _ID.fullmatch(word) is not None


@dataclass(frozen=True, kw_only=True)
class Heard:
    """A site as the coordinator has heard of it, also one that is gone."""

    id: str
    silent_s: float
    met: bool
    """It took part when sites met last."""
    step: int = 0
    run: str = ""
    """Checksum of the settings that a run's sites share. It and `step` are of the last meeting, if it took part."""
    together: int = 0
    """Sites of its last synchronisation, itself included; 0: it has joined nobody yet."""

    @property
    def site(self) -> str:
        """The name that its user gave it."""
        return name_of(self.id)

    @property
    def there(self) -> bool:
        """It is alive."""
        return self.silent_s < SILENT_S


def heard_at(address: str) -> list[Heard]:
    """The sites that the lighthouse at HOST:PORT has heard of, by its status page. Raises OSError, ValueError."""
    with urllib.request.urlopen(f"http://{address}/status", timeout=_STATUS_S) as answer:
        return heard_on(answer.read(_PAGE_BYTES).decode(errors="replace"))


def heard_on(page: str) -> list[Heard]:
    """The sites on a lighthouse's status page."""
    met = {html.unescape(member): rest for member, *rest in _MEMBER.findall(page)}
    found = []
    for member, age in _HEARTBEAT.findall(page):
        if is_site(id_ := html.unescape(member)):
            step, run, together = met.get(id_, ("0", "", "0"))
            found.append(
                Heard(id=id_, silent_s=float(age), met=id_ in met, step=int(step), run=html.unescape(run),
                      together=int(together))
            )  # fmt: skip
    return sorted(found, key=lambda each: each.id)


class Members(Protocol):
    """The other sites, seen from rank 0 of this one."""

    id: str

    def meet(self, said: Mapping[str, Any], limit_s: float) -> list[Member]:
        """Wait for the other sites, and give all participants, this one included, in the order of their ids.

        Every participant gets the same list. Raises MembersError.
        """
        ...

    def heard(self) -> list[Heard]:
        """Every site that the coordinator has heard of; none where it does not answer."""
        ...

    def close(self) -> None:
        """Leave: the others do not wait for this site any more after some seconds."""
        ...


class TorchftMembers:
    """Membership by a lighthouse of torchft 0.2, which `llmtrain sites coordinator` starts."""

    def __init__(self, coordinator: str, member_id: str, connect_s: float) -> None:
        """`coordinator`: HOST:PORT. Raises SitesError: torchft is missing, or nobody answers within `connect_s`."""
        self.id = member_id
        self._coordinator = coordinator
        client = lighthouse_client()
        try:
            self._client = client(f"http://{coordinator}", timedelta(seconds=connect_s))
            self._pulse = client(f"http://{coordinator}", timedelta(seconds=connect_s))
            heard_at(coordinator)  # no heartbeat: the others would wait for a site that still reads its checkpoint
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
        """See `Members`."""
        box: dict[str, Any] = {}
        self._live()
        self._last = {**self._last, **said}

        def ask() -> None:
            try:
                box["quorum"] = self._client.quorum(
                    self.id, timedelta(seconds=max(limit_s, 0.001)), step=self._last.get("step", 0), data=dict(said),
                    store_address=self._last.get("run", ""), world_size=self._last.get("together", 0),
                )  # fmt: skip
            except Exception as error:
                box["error"] = error

        asking = threading.Thread(target=ask, name="sites-quorum", daemon=True)
        asking.start()
        while asking.is_alive():  # the call holds this thread alone: the watch sees that the rank waits, and works
            asking.join(0.5)
            heart.beat()
        if isinstance(error := box.get("error"), TimeoutError):
            late = MembersError(f"the other sites have not come within {limit_s:.1f} s")
            late.late = True
            raise late from error
        if error is not None:
            raise MembersError(f"coordinator {self._coordinator}: {_reason(error)}") from error
        members = [Member(id=each.replica_id, said=each.data or {}) for each in box["quorum"].participants]
        return sorted((each for each in members if is_site(each.id)), key=lambda member: member.id)

    def heard(self) -> list[Heard]:
        """See `Members`."""
        try:
            return heard_at(self._coordinator)
        except (OSError, ValueError):
            return []

    def close(self) -> None:
        """See `Members`."""
        self._closed.set()
        if self._beating is not None:  # one that comes back from torchft when Python is ending aborts the process
            self._beating.join(2 * _CALL_S)

    def _live(self) -> None:
        """Start the heartbeats, if they have not begun: as long as they come, the other sites wait for this one."""
        if self._beating is None:
            self._beating = threading.Thread(target=self._beat, name="sites-heartbeat", daemon=True)
            self._beating.start()

    def _beat(self) -> None:
        while not self._closed.wait(_HEARTBEAT_S):
            try:
                self._pulse.heartbeat(self.id, timedelta(seconds=_CALL_S))
            except Exception:  # the coordinator may be away: `meet` says so
                continue


def own_address(coordinator: str, *, encrypted: bool) -> str:
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
    if not encrypted and not private(own):
        raise SitesError(
            f"sites.coordinator {coordinator} is reached from {own}, a public address, and what sites send is neither "
            "encrypted nor signed. Make keys (sites.keys), or join the sites by a tunnel and name it in sites.listen."
        )
    return own


def lighthouse_client() -> Any:
    """torchft's class. Raises SitesError where it is not installed."""
    os.environ.setdefault("RUST_LOG", "warn")
    try:
        from torchft.coordination import LighthouseClient
    except ImportError as error:
        raise SitesError(
            f"sites need torchft 0.2, which cannot be imported ({error}). Run `pip install 'llmtrain[sites]'`."
        ) from error
    return LighthouseClient


def _reason(error: BaseException) -> str:
    """The words of a gRPC status, which torchft gives with all its fields."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    words = re.search(r'message: "([^"]+)"', text)
    return shown(words[1] if words else text, 200)


# What a site says of itself at a meeting, read with the doubt that it deserves.


_LARGEST = 1 << 62


@dataclass(frozen=True, kw_only=True)
class PeerStatus:
    """A site that is ready to synchronise."""

    id: str
    run: str
    """What sites of one run have in common, as a checksum."""
    common: Mapping[str, Any]
    """The same in words."""
    round: int
    """Synchronisations behind its state."""
    checksum: str
    """Of the common parameters and the outer momentum."""
    step: int
    batch: int
    """Sequences of one of its steps."""
    step_s: float
    """Seconds that one of its steps takes; 0: it has trained none."""
    trained: int
    """Sequences since its last synchronisation, and those that it trains during this one."""
    weight: int
    """Tokens behind what it sends."""
    was: str
    """The id under which it was dealt them: that of the process whose checkpoint it goes on from, or its own."""
    joined: bool
    """It has synchronised since its process began: what it tells of is not only a checkpoint's."""
    addresses: tuple[str, ...]
    """HOST:PORT of each of its ranks."""
    ledger: Ledger

    @property
    def site(self) -> str:
        """The name that its user gave it."""
        return name_of(self.id)

    def difference(self, common: Mapping[str, Any]) -> str:
        """Why it is not of the run that has this in `common`."""
        keys = sorted(key for key in {*common, *self.common} if common.get(key) != self.common.get(key))
        return (
            f"site {self.site} trains something else: its {shown(', '.join(keys) or 'configuration', 200)} differ(s). "
            "Sites of a run have the same model, data, seeds and outer optimizer, and a coordinator of their own."
        )

    @property
    def state(self) -> tuple[int, str, str]:
        """Sites with the same have the same parameters in common, and have been dealt the same samples."""
        return self.round, self.checksum, json.dumps(self.ledger.to_json(), sort_keys=True)


def peer_status(member: Member) -> PeerStatus | None:
    """None: it is in another part of a round, or what it says makes no sense."""
    said = member.said
    if said.get("phase") != "meet":
        return None
    try:
        counts = {key: int(said[key]) for key in ("round", "step", "batch", "trained", "weight")}
        step_s = float(said["step_s"])
        if any(not 0 <= count < _LARGEST for count in (*counts.values(), step_s)) or not counts["batch"]:
            return None
        return PeerStatus(
            id=member.id,
            run=str(said["run"]),
            common={str(key): value for key, value in dict(said["common"]).items()},
            checksum=str(said["checksum"]),
            was=str(said["was"]),
            joined=said.get("joined") is True,
            addresses=tuple(map(_address, said["addresses"])),
            step_s=step_s,
            ledger=Ledger.from_json(said["ledger"]),
            **counts,
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return None


def _address(said: object) -> str:
    """HOST:PORT with an IP address, as it is: no name is looked up for others. Raises ValueError."""
    host, _, port = str(said).rpartition(":")
    ipaddress.ip_address(host)
    if not 0 < int(port) < 1 << 16:
        raise ValueError(port)
    return str(said)
