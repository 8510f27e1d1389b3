"""The folder that `llmtrain prepare` writes: new, unfinished, or complete; one process in it at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmtrain.base import log, units
from llmtrain.base.errors import DataError
from llmtrain.base.files import lock_folder, replace_file
from llmtrain.data.chat import sample
from llmtrain.data.manifest import Manifest
from llmtrain.data.prepare.worker import UNFINISHED
from llmtrain.data.shards import PreparedSet

REJECTED = "rejected.jsonl"
_SOON_DONE_AGAIN_BYTES = 64 << 20
"""Size of finished shards, about a minute's work, that other settings may discard: after a mistake that a record shows,
the next attempt has other settings, and was refused as if hours were at stake."""


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Only one `prepare` in a folder. The lock is on the folder itself, so a killed process leaves none behind."""
    existed = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(out)
    except BlockingIOError as error:
        raise DataError(f"--out {out}: another `llmtrain prepare` is at work in it; wait for it") from error
    except OSError as error:
        raise DataError(f"--out {out}: cannot be made a folder ({error.strerror}); choose another") from error
    try:  # from here on, what is unfinished in it is ours
        yield
    except OSError as error:
        raise DataError(
            f"--out {out}: cannot be written ({error.strerror or error}); make room and run the same command again"
        ) from error
    finally:
        for partial in out.glob("*.tmp"):
            shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
        for partial in (out / UNFINISHED).glob("*.tmp"):
            partial.unlink()
        if not existed and not any(out.iterdir()):
            out.rmdir()
        os.close(lock)


def already_complete(out: Path, plan: dict[str, Any]) -> Manifest:
    """The manifest of a complete folder that was prepared as `plan` says. Raises DataError when it was not."""
    manifest = PreparedSet(out).manifest
    different = _differences(manifest.settings, plan["settings"])
    if manifest.source["stat"] != plan["stat"]:
        different.append("the source files have changed since")
    if not manifest.tokens["validation"] and plan["settings"]["validation_fraction"]:
        different.append("an earlier version did not cut long documents, so it has no validation text")
    if different:
        raise DataError(
            f"--out {out}: it already holds data that was prepared differently: {'; '.join(different)}. "
            "Choose another --out, or delete the folder to prepare it anew"
        )
    shutil.rmtree(out / UNFINISHED, ignore_errors=True)  # a kill between manifest and clean-up leaves it
    log.info(f"{out}: already complete, nothing to do ({units.count(sum(manifest.tokens.values()))} tokens)")
    return manifest


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"{key} was {before.get(key)!r} and is now {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]


def start_or_continue(out: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """Leave `out` with `unfinished/plan.json` and nothing in it that belongs to another plan. Returns the plan: that
    of the run that this one continues, with its `moment`, or `plan`."""
    path = out / UNFINISHED / "plan.json"
    if path.exists():
        before = json.loads(path.read_bytes())
        different = _differences(before["settings"], plan["settings"])
        done_bytes = sum(shard.stat().st_size for shard in out.glob("*-*.bin"))
        if different and done_bytes > _SOON_DONE_AGAIN_BYTES:
            raise DataError(
                f"--out {out}: an unfinished preparation with other settings lies there, {units.size(done_bytes)} of "
                f"tokens: {'; '.join(different)}. Repeat its settings to finish it, choose another --out, or delete "
                "the folder"
            )
        if not different and before["stat"] == plan["stat"]:
            return {**plan, **before}
        why = "its settings are others than in" if different else "the source files have changed since"
        log.info(f"{out}: {why} the last, unfinished run: starting over")
        clear(out)
    elif any(entry.suffix != ".tmp" and entry.name != UNFINISHED for entry in out.iterdir()):
        raise DataError(f"--out {out}: the folder is not empty and not made by `llmtrain prepare`; choose another")
    (out / UNFINISHED).mkdir(exist_ok=True)
    replace_file(path, json.dumps(plan).encode())
    return plan


def clear(out: Path) -> None:
    """Delete all that `prepare` has made in the folder."""
    for leftover in (*out.glob("*-*.bin"), *out.glob("*-*.rows"), out / REJECTED, out / sample.NAME):
        leftover.unlink(missing_ok=True)
    for folder in (UNFINISHED, "tokenizer"):
        shutil.rmtree(out / folder, ignore_errors=True)
