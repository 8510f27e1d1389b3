"""What goes into a round of synchronisation, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmtrain.sites.exchange import Fetched
from llmtrain.sites.outer import Array
from llmtrain.sites.told import Told


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What this site brings to a round."""

    part: slice
    """Elements of the rank's array that the round is about."""
    own: Array
    """This rank's, as the others read them."""
    live: Array | None
    """The same, as this site had them, if it trains meanwhile."""
    said: dict[str, Any]
    steps: int
    """Since the last synchronisation."""
    overlap: int
    """Steps that are trained while it travels."""
    began_s: float
    published_s: float
    """How long training stood still until it was there for the others."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """What has come of it; nothing has changed yet."""

    leader: Told
    """Whose state counts."""
    told: list[Told]
    committed: list[str]
    """Sites that make the outer step."""
    used: list[str]
    """Sites whose parameters all of them have."""
    got: Fetched
    heals: bool
    """This site takes the common state from the others."""
    met_s: float
