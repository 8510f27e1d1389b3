"""Whether a disk has room for checkpoints, told when a run begins and before each save."""

from __future__ import annotations

import shutil
from pathlib import Path

from llmtrain.base import units
from llmtrain.checkpoint.format import complete_checkpoints

_HEADROOM = 64 << 20  # headers, the manifest, what else the run writes meanwhile


def lacks(checkpoints: Path, bytes_each: int) -> str | None:
    """Why one more checkpoint has no room there. Raises OSError."""
    free = shutil.disk_usage(checkpoints).free
    if free >= bytes_each + _HEADROOM:
        return None
    old = complete_checkpoints(checkpoints)[1:]
    could = sum(file.stat().st_size for folder in old for file in folder.iterdir())
    remedy = (
        f"`llmtrain checkpoint prune {checkpoints.parent} --keep 1` would free {units.size(could)}"
        if old
        else "There is no older checkpoint that could go"
    )
    return (
        f"no space for a checkpoint in {checkpoints}: it takes {units.size(bytes_each)}, {units.size(_HEADROOM)} must "
        f"stay free for logs and whatever else the run writes, and {units.size(free)} are free. {remedy}."
    )


def will_lack(checkpoints: Path, bytes_each: int, keep: int) -> str | None:
    """Why a run that saves often will come to its end there: `keep` checkpoints stay while the next one is written."""
    try:
        free = shutil.disk_usage(checkpoints).free
        to_come = max(1, max(1, keep) + 1 - len(complete_checkpoints(checkpoints)))
    except OSError:  # the save will tell
        return None
    if free >= to_come * bytes_each + _HEADROOM:
        return None
    return (
        f"{checkpoints} will run out of space: this run writes {to_come} checkpoints of {units.size(bytes_each)} "
        f"before one is deleted (checkpoint.keep {keep}, and the one that is written), {units.size(_HEADROOM)} must "
        f"stay free for logs and whatever else the run writes, and {units.size(free)} are free. "
        "Make room, or set checkpoint.dir to a larger disk or checkpoint.keep lower."
    )
