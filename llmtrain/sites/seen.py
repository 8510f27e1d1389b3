"""What a round of synchronisation looks like from one site: the event of it, its metrics, its lines in the log."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from llmtrain.base import log
from llmtrain.sites.round import Round, Sent

_METRICS = {
    "received_bytes": "sites/received_bytes",
    "sent_bytes": "sites/sent_bytes",
    "stood_s": "sites/stood_s",
    "participants": "sites/participants",
    "overlapped_steps": "sites/staleness_steps",
    "late_updates": "sites/late_updates",
    "outer_step_norm": "sites/outer_step_norm",
}
"""Field of the events -> key of metrics.jsonl."""


def telling(event: Callable[..., None], row: Callable[..., None]) -> Callable[..., None]:
    """Takes the kind of an event of the sites and its fields: writes it, and the numbers of a round as metrics.

    Args:
        event: takes the same.
        row: takes metrics by their keys, and `more`: that another row of the step follows.
    """

    def tell(kind: str, **fields: Any) -> None:
        event(kind, **fields)
        if found := {key: fields[name] for name, key in _METRICS.items() if name in fields}:
            row({"step": fields["step"], **found}, more=True)

    return tell


def told_round(done: Round, sent: Sent, stands_s: float, norm: float, served: int) -> dict[str, Any]:
    """The fields of a round's event.

    Args:
        stands_s: time.monotonic() from which training has stood still for it; where it has done so twice, for both.
        norm: of the outer step.
        served: bytes that the site's ranks have sent since the last round that succeeded.
    """
    now_s, got = time.monotonic(), done.got
    return {
        "sites": [name_of(site) for site in done.committed],
        "used": [name_of(site) for site in done.used],
        "participants": len(done.committed),
        "healed": got.outer is not None,
        "received_bytes": got.received_bytes,
        "sent_bytes": served,
        "overlapped_steps": sent.overlap,
        "outer_step_norm": norm,
        "waited_s": round(done.met_s - sent.began_s, 3),
        "stood_s": round(now_s - stands_s, 3),
        "seconds": round(now_s - sent.began_s, 3),
        **({"failed": got.failed} if got.failed else {}),
    }


def say_changes(step: int, failed: Mapping[str, str], names: list[str], before: list[str], own: str) -> None:
    """Log who failed, left or came. `names`: of this round's sites. `before`: of the last one's."""
    for site, text in failed.items():
        log.warn(f"step {step}: site {name_of(site)} is not in this synchronisation: {text}")
    if gone := sorted(set(before) - set(names)):
        log.warn(f"step {step}: {', '.join(gone)} left; what it was training is handed on")
    if names == [own] and before != names:
        (log.warn if before else log.info)(f"step {step}: site {own} trains alone: no other site is at the coordinator")
    if come := sorted(set(names) - set(before) - {own}):
        log.info(f"step {step}: training with {', '.join(come)}")


def name_of(site: str) -> str:
    """The name that its user gave to the site of this id."""
    return site.partition(":")[0]


def listed(failed: Mapping[str, str]) -> str:
    """Sites (ids) and why they failed, for a sentence."""
    return "; ".join(f"site {name_of(site)}: {text}" for site, text in failed.items()) or "nobody has it"
