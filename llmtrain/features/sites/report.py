"""What a run's page and its metrics say about its synchronisations."""

from __future__ import annotations

from typing import Any

from llmtrain.base import units
from llmtrain.tracking.metrics import MetricKey

METRICS: dict[str, MetricKey] = {
    "sites/received_bytes": MetricKey("bytes", "Bytes that this site's ranks received in a synchronisation of sites."),
    "sites/sent_bytes": MetricKey(
        "bytes", "Elements that this site's ranks sent to all others since the last successful synchronisation."
    ),
    "sites/stood_s": MetricKey("s", "Time in which training waited for a synchronisation, or for a failed one."),
    "sites/participants": MetricKey("sites", "Sites that made the outer step, this one included."),
    "sites/staleness_steps": MetricKey(
        "optimizer steps", "Steps that this site trained between sending its parameters and taking the result."
    ),
    "sites/outer_step_norm": MetricKey("1", "L2 norm of the common parameters' change, over all ranks of the site."),
    "sites/given_up_samples": MetricKey(
        "sequences",
        "Upper bound on sequences that this site trained while cut off and that are given up: other sites got them.",
    ),
    "sites/left_out_samples": MetricKey(
        "sequences", "Sequences in no model although later ones are, and not passed on: a later round assigns them."
    ),
}


def facts(done: list[dict[str, Any]], failed: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Lines of a report: (label, text). `done`, `failed`: events of synchronisations."""
    if not done and not failed:
        return []
    received, sent = (sum(_number(event.get(f"{way}_bytes")) for event in done) for way in ("received", "sent"))
    stood_s = sum(_number(event.get("stood_s", event.get("seconds"))) for event in (*done, *failed))
    alone = [event for event in done if event.get("participants") == 1]
    apart = [event for event in failed if "this site is alone" in str(event.get("reason"))]
    steps = [round(_number(event.get("step"))) for event in (*alone, *apart)]
    words = f"{len(alone)} of {len(done)}" + (f", and failed {len(apart)}" if apart else "")
    return [
        *([("Without another site", f"{words}; steps {min(steps)} to {max(steps)}")] if steps else []),
        ("Synchronisations of sites", f"{len(done)}, failed {len(failed)}"),
        ("Received from other sites", units.size(round(received))),
        ("Sent to other sites", units.size(round(sent))),
        ("Waiting for other sites, sum", units.duration(stood_s)),
    ]


def _number(value: Any) -> float:
    valid = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e18
    return float(value) if valid else 0.0
