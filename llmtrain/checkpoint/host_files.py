"""Finds complete checkpoints whose files are spread over hosts with separate folders, and copies files between hosts.

A host gets the files that its ranks read and its folder lacks, over the network from a host that has them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from llmtrain.base import log
from llmtrain.base.errors import CheckpointError
from llmtrain.checkpoint.durable import DurableFile, remove_tree, sync
from llmtrain.checkpoint.format import (
    HOSTS,
    MANIFEST,
    TRAINER,
    DamagedCheckpoint,
    Manifest,
    hash_file,
    open_file,
    problems,
    step_of,
)
from llmtrain.checkpoint.retain import set_aside
from llmtrain.checkpoint.rundir import CheckpointFolder
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.storage.pieces import byte_view

_CHUNK = 16 << 20  # bytes sent at a time


@dataclass(frozen=True)
class _Offer:
    manifest: str
    """Checksum of the manifest: hosts may have different checkpoints of one step if one of them was never completed."""
    files: frozenset[str]
    """Names of this host's files that have the right size."""
    all_files: frozenset[str]
    hosts: dict[str, str]
    """File -> the host that wrote it."""


def _offer(folder: Path) -> _Offer | None:
    try:
        manifest = Manifest.read(folder)
        digest = hash_file(folder / MANIFEST)
    except (CheckpointError, OSError):
        return None
    files_here = {name for name in manifest.files if not problems(folder, manifest, [name], contents=False)}
    hosts = {str(name): str(host) for name, host in dict(manifest.layout.get(HOSTS) or {}).items()}
    return _Offer(digest, frozenset({MANIFEST, *files_here}), frozenset({MANIFEST, *manifest.files}), hosts)


@dataclass(frozen=True)
class _Version:
    has: dict[int, frozenset[str]]
    example: _Offer

    @property
    def lacking(self) -> list[str]:
        return sorted(self.example.all_files.difference(*self.has.values()))


def _versions(offers: Iterable[tuple[int, _Offer | None]]) -> list[_Version]:
    """Return the versions of a checkpoint: complete ones first, then by the number of hosts that have them."""
    by_manifest: dict[str, dict[int, _Offer]] = {}
    for leader, offer in offers:
        if offer is not None:
            by_manifest.setdefault(offer.manifest, {})[leader] = offer
    versions = [
        _Version({leader: offer.files for leader, offer in offers.items()}, next(iter(offers.values())))
        for _, offers in sorted(by_manifest.items())
    ]
    return sorted(versions, key=lambda version: (bool(version.lacking), -len(version.has)))


def whole(mine: list[Path], where: CheckpointFolder, ranks: Ranks) -> tuple[list[Path], dict[Path, str]]:
    """Return (checkpoints that are complete in all folders together, newest first; other one -> what it lacks)."""
    # Names are the same on all hosts, paths may differ.
    named = {path.name if path.parent == where.path else str(path): path for path in mine}
    offers = {name: _offer(path) for name, path in named.items()} if where.leads else {}
    shares = ranks.gather(offers)
    good, bad = [], {}
    for name in sorted({name for share in shares for name in share}, key=lambda n: -(step_of(Path(n)) or 0)):
        path = where.path / name
        versions = _versions((rank, share.get(name)) for rank, share in enumerate(shares))
        if versions and not versions[0].lacking:
            good.append(path)
        else:
            bad[path] = f"{path.name}: {_what_lacks(versions)}"
    return good, bad


def _what_lacks(versions: list[_Version]) -> str:
    if not versions:
        return f"its {MANIFEST} is damaged"
    lacking, hosts = versions[0].lacking, versions[0].example.hosts
    homes = ", ".join(dict.fromkeys(hosts[name] for name in lacking if name in hosts))
    return f"no host has {', '.join(lacking[:3])}{' ...' if len(lacking) > 3 else ''}" + (
        f", written on {homes}" if homes else ""
    )


def fetch(checkpoint: Path, wanted: Iterable[str], where: CheckpointFolder, ranks: Ranks) -> None:
    """Copy the checkpoint's manifest, trainer.json and the `wanted` files into this rank's folder, from hosts that have
    them. All ranks call it together.

    Raises DamagedCheckpoint: when no host has a file, or a copied file differs from the manifest; CheckpointError: when
    a file cannot be written.
    """
    if not where.split:
        return
    shares = ranks.gather((_offer(checkpoint) if where.leads else None, {MANIFEST, TRAINER, *wanted}))
    versions = _versions((rank, offer) for rank, (offer, _) in enumerate(shares))
    if not versions or versions[0].lacking:
        raise DamagedCheckpoint(_what_lacks(versions))
    has = versions[0].has
    lacks: dict[int, set[str]] = {leader: set() for leader in where.leaders}
    for leader, (_, files) in zip(where.leaders, shares, strict=True):
        lacks[leader] |= files - has.get(leader, frozenset())
    moved = sorted(set().union(*lacks.values()))
    if not moved:
        return
    log.info(f"{checkpoint.name}: {len(moved)} files are copied to hosts whose ranks read them")
    takes = lacks[ranks.rank] if where.leads else set()
    problem: CheckpointError | None = None
    into = checkpoint
    if takes and ranks.rank not in has:
        into = checkpoint.with_name(f"{checkpoint.name}.{secrets.token_hex(4)}.tmp")
        try:
            into.mkdir(parents=True)
        except OSError as error:
            problem = _io_error(error, into)
    for name in moved:
        owner = min(leader for leader, files in has.items() if name in files)
        target = into / name if name in takes and problem is None else None
        problem = _pass_on(checkpoint / name, target, owner, ranks) or problem
    if takes:
        problem = problem or _settle(into, checkpoint, takes)
        with contextlib.suppress(OSError):  # an unfinished file is removed
            if into != checkpoint:
                remove_tree(into)
            for name in takes:
                (checkpoint / f"{name}.part").unlink(missing_ok=True)
    failures = [failure for failure in ranks.gather(problem) if failure is not None]
    if failures:
        raise next((failure for failure in failures if isinstance(failure, DamagedCheckpoint)), failures[0])


def fetch_all(checkpoint: Path, where: CheckpointFolder, ranks: Ranks) -> None:
    """Copy all files that rank 0's folder lacks. All ranks call it together; see `fetch`."""
    wanted = Manifest.read(checkpoint).files if where.split and ranks.rank == 0 else ()
    fetch(checkpoint, wanted, where, ranks)


def _pass_on(source: Path, target: Path | None, owner: int, ranks: Ranks) -> CheckpointError | None:
    """Send a file from its owner to all ranks, which write it to `target`, if any. Returns this rank's error."""
    problem: CheckpointError | None = None
    sends = ranks.rank == owner
    with contextlib.ExitStack() as stack:
        file = out = None
        size = torch.zeros(1, dtype=torch.int64)
        try:
            if sends:
                file = stack.enter_context(open(open_file(source), "rb", buffering=0))
                size[0] = os.fstat(file.fileno()).st_size
            elif target is not None:
                out = stack.enter_context(DurableFile(target.with_name(f"{target.name}.part")))
        except OSError as error:
            problem = _io_error(error, source if sends else target)
        ranks.copy_from(owner, size)
        buffer = torch.empty(min(_CHUNK, int(size)), dtype=torch.uint8)
        for low in range(0, int(size), _CHUNK):
            chunk = buffer[: min(_CHUNK, int(size) - low)]
            try:
                if file is not None:
                    file.readinto(byte_view(chunk))
            except OSError as error:
                problem, file = _io_error(error, source), None
            ranks.copy_from(owner, chunk)
            try:
                if out is not None and problem is None:
                    out.write(byte_view(chunk))
            except OSError as error:
                problem = _io_error(error, target)
        try:
            if out is not None and problem is None:
                out.close()
        except OSError as error:
            problem = _io_error(error, target)
    return problem


def _io_error(error: OSError, path: Path | None) -> CheckpointError:
    return CheckpointError(f"{path}: {error.strerror}")


def _settle(into: Path, checkpoint: Path, names: set[str]) -> CheckpointError | None:
    """Check copied files against the manifest, and give them and a new folder their names. Returns the error."""
    try:
        for name in names:
            (into / f"{name}.part").rename(into / name)
        wrong = problems(into, Manifest.read(into), sorted(names - {MANIFEST}))
        if wrong:
            for name in names - {MANIFEST}:
                (into / name).unlink()
            return DamagedCheckpoint("; ".join(wrong))
        if into != checkpoint:
            if checkpoint.exists():
                set_aside([checkpoint])
            into.rename(checkpoint)
        sync(checkpoint)
        sync(checkpoint.parent)
    except OSError as error:
        return _io_error(error, checkpoint)
    return None
