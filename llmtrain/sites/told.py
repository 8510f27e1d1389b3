"""What a site says of itself at a meeting, read with the doubt that it deserves."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmtrain.base.untrusted import shown
from llmtrain.sites.ledger import Ledger
from llmtrain.sites.members import Member

_LARGEST = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Told:
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
        return self.id.partition(":")[0]

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


def told_of(member: Member) -> Told | None:
    """None: it is in another part of a round, or what it says makes no sense."""
    said = member.said
    if said.get("phase") != "meet":
        return None
    try:
        counts = {key: int(said[key]) for key in ("round", "step", "batch", "trained", "weight")}
        step_s = float(said["step_s"])
        if any(not 0 <= count < _LARGEST for count in (*counts.values(), step_s)) or not counts["batch"]:
            return None
        return Told(
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
