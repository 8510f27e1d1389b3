"""Keep the checkpoints before spikes until the steps after them have been replayed."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from pathlib import Path

from llmtrain.base import log, untrusted
from llmtrain.base.files import content_of, replace_file
from llmtrain.checkpoint.format import complete_checkpoints, stale_folders, step_of
from llmtrain.checkpoint.retain import looks_good

_PINS = "spikes.json"


def pins_of(checkpoints: Path) -> list[int]:
    """Return the steps of the spikes that have not been replayed."""
    try:
        pins = untrusted.loads(content_of(checkpoints / _PINS))
    except (OSError, ValueError):
        return []
    return [step for step in pins if type(step) is int] if isinstance(pins, list) else []


def pinned(checkpoints: Path) -> list[Path]:
    """Return the newest good checkpoint before each spike that has not been replayed."""
    if not (spikes := pins_of(checkpoints)):
        return []
    folders = sorted((step_of(p) or 0, p) for p in complete_checkpoints(checkpoints) if looks_good(p))
    places = {bisect_left(folders, (spike,)) for spike in spikes}
    return [folders[place - 1][1] for place in places if place]


def pin(checkpoints: Path, spike: int, most: int) -> int | None:
    """Keep the newest checkpoint before a spike, and those before the `most` - 1 earlier spikes.

    Returns the checkpoint's step, also if it is still being written; None: there is no checkpoint.
    """
    write_pins(checkpoints, [*(step for step in pins_of(checkpoints) if step != spike), spike][-most:] if most else [])
    save = re.compile(r"step-\d+\.[0-9a-f]{8}\.tmp")  # no folder that is being deleted, nor a mirror's links
    under_way = [folder for folder in stale_folders(checkpoints) if save.fullmatch(folder.name)]
    steps = [step_of(Path(folder.name.split(".")[0])) for folder in (*complete_checkpoints(checkpoints), *under_way)]
    return max((step for step in steps if step is not None and step < spike), default=None) if most else None


def write_pins(checkpoints: Path, spikes: list[int]) -> None:
    try:
        replace_file(checkpoints / _PINS, json.dumps(spikes).encode())
    except OSError as error:
        text = f"{checkpoints / _PINS} cannot be written ({error.strerror})"
        log.warn(f"{text}: retention may delete a checkpoint that a replay needs")
