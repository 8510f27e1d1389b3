"""Finds the checkpoints at a path, lists a run's checkpoints, and deletes old ones by hand. No torch."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from llmtrain.base import units, untrusted
from llmtrain.base.errors import CheckpointError, UserError
from llmtrain.base.files import folder_bytes
from llmtrain.checkpoint.format import (
    MANIFEST,
    TRAINER,
    FrozenSource,
    Manifest,
    complete_checkpoints,
    problems,
    read_file,
    step_folder,
    step_of,
)
from llmtrain.checkpoint.retain import Best, best_of, leftovers, lock, outdated, remove
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.checkpoint.verify import verify, verify_frozen
from llmtrain.optim.optimizers import PARAM

T = TypeVar("T")
_DEGREES = ("pipeline", "sequence", "tensor", "expert")
_SHORT_STEP = re.compile(r"step-([0-9]{1,18})")
_LEFTOVER = re.compile(r"step-[0-9]{8,18}.*\.(tmp|trash|damaged)")


@dataclass(frozen=True, kw_only=True)
class Row:
    path: Path | str
    """Folder or URL of the checkpoint."""
    state: str
    """complete, part (files on other hosts, or no frozen parameters), damaged, incomplete, tmp, trash or set aside."""
    detail: str
    """Why the checkpoint is not complete; else empty."""
    bytes: int
    age_s: float
    step: int | None = None
    tokens: int | None = None
    layout: dict[str, Any] | None = None
    weights_only: bool = False
    stage: str = ""
    """Stage and data, for example `1: data/b`; empty for the first stage."""
    began_from: str = ""
    """The checkpoint of another run from which this run began, for example `a/step-500`; empty: none."""
    best: str = ""
    """Figure for which checkpoint.keep_best keeps it, for example `eval/loss 2.3100`; empty: it does not."""


def find_checkpoints(path: Path) -> list[Path]:
    """Return the complete checkpoints of a run folder, newest first. `path`: the run folder, its checkpoints/, a single
    checkpoint, or RUN/step-N. Raises CheckpointError: when there is none."""
    _refuse_data(path)
    folders = [path] if (path / MANIFEST).exists() else complete_checkpoints(checkpoints_of(path))
    short = _SHORT_STEP.fullmatch(path.name)
    if not folders and short:
        places = [step_folder(folder, int(short[1])) for folder in (path.parent, path.parent / "checkpoints")]
        folders = [place for place in places if (place / MANIFEST).exists()]
    if not folders:
        what = "no such folder" if not path.exists() else "it holds no complete checkpoint"
        others = complete_checkpoints(path.parent) or complete_checkpoints(path.parent / "checkpoints")
        steps = f" The run has steps {', '.join(str(step_of(p)) for p in others[:9])}." if short and others else ""
        raise CheckpointError(f"{path}: {what}. Give a run folder, a checkpoint's folder, or RUN/step-N.{steps}")
    return folders


_TRIES = 5
"""Attempts to read a checkpoint of a live run, which may delete it meanwhile (checkpoint.keep)."""


def read_while_there(find: Callable[[], Path], read: Callable[[Path], T]) -> tuple[Path, T]:
    """Return (checkpoint from `find`, what `read` returned for it). If the checkpoint was deleted meanwhile, as a live
    run may do, tries again with the next one from `find`, five times in all. Raises CheckpointError after that; errors
    of `find`, and of `read` if the checkpoint is still there."""
    for left in reversed(range(_TRIES)):
        folder = find()
        try:
            return folder, read(folder)
        except (OSError, UserError) as error:
            if folder.exists():
                raise
            if not left:
                raise CheckpointError(f"{folder}: was deleted while it was read (by its run?); try again") from error
    raise AssertionError


def _refuse_data(path: Path) -> None:
    """Raise CheckpointError if `path` is a data folder, which has a manifest.json, too."""
    try:
        manifest = untrusted.loads(read_file(path / MANIFEST))
    except (OSError, ValueError):  # none, or a damaged one, which is reported elsewhere
        return
    if isinstance(manifest, dict) and "data_fingerprint" in manifest and "manifest" not in manifest:
        raise CheckpointError(
            f"{path}: is prepared data, not a checkpoint. Give a run folder, a checkpoint's folder, or RUN/step-N; "
            "`llmtrain data show` shows what is in it."
        )


def checkpoints_of(path: Path) -> Path:
    """Return the folder with the checkpoints. `path`: a run folder, or itself, of any name (checkpoint.dir)."""
    below = path / "checkpoints"
    return path if not below.is_dir() and (path.name == "checkpoints" or complete_checkpoints(path)) else below


def step_folders(path: Path) -> list[Path]:
    """Return the folders of checkpoints, complete or not, newest first."""
    folder = checkpoints_of(path)
    folders = [p for p in folder.iterdir() if p.is_dir() and step_of(p) is not None] if folder.is_dir() else []
    return sorted(folders, key=lambda p: step_of(p) or 0, reverse=True)


def rows(path: Path) -> list[Row]:
    """Return rows for all in a run's checkpoints/, newest step first, or for one checkpoint. Raises CheckpointError."""
    folder = checkpoints_of(path)
    _refuse_data(path)
    if not folder.is_dir():
        return [_row(folder) for folder in find_checkpoints(path)]
    folders = [p for p in folder.iterdir() if p.is_dir() and (step_of(p) is not None or _LEFTOVER.fullmatch(p.name))]
    if not folders:
        raise CheckpointError(f"{path} holds no checkpoint. Give a run folder or a checkpoint's folder.")
    best = {p: f"{wanted.metric} {figure:.4f}" for wanted, p, figure in _best(folder)}
    ordered = sorted(folders, key=lambda p: (int(p.name[5:13]), p.name), reverse=True)
    return [replace(_row(p), best=best.get(p, "")) for p in ordered]


def best_wanted(checkpoints: Path) -> Best | None:
    """Return which best checkpoints the run keeps, by its newest readable checkpoint; None: it keeps none."""
    for folder in complete_checkpoints(checkpoints):
        with contextlib.suppress(CheckpointError):
            return Best.of(TrainerState.read(folder))
    return None


def _best(checkpoints: Path) -> list[tuple[Best, Path, float]]:
    wanted = best_wanted(checkpoints)
    return [] if wanted is None else [(wanted, p, figure) for p, figure in best_of(checkpoints, wanted).items()]


def best_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints that checkpoint.keep_best keeps, best first. Raises CheckpointError if there is none."""
    best = _best(checkpoints_of(path))
    if not best:
        raise CheckpointError(
            f"{path}: holds no checkpoint with the evaluation figure that checkpoint.keep_best names. Give "
            "the folder of a run with one, or choose a checkpoint from `llmtrain checkpoint ls`."
        )
    return [folder for _, folder, _ in best]


def _row(folder: Path) -> Row:
    ending = folder.suffix.removeprefix(".") if step_of(folder) is None else ""
    if ending == "tmp":
        return _unlisted(folder, "tmp", "being written, or left by a process that was killed while it wrote")
    if ending == "trash":
        return _unlisted(folder, "trash", "its deletion was not finished")
    if ending == "damaged":
        return _unlisted(folder, "set aside", "a resume found it damaged")
    if not (folder / MANIFEST).exists():
        return _unlisted(folder, "incomplete", f"it has no {MANIFEST}")
    try:
        manifest = Manifest.read(folder)
        trainer = TrainerState.read(folder)
    except CheckpointError as error:
        return _unlisted(folder, "damaged", str(error).replace(f"{folder}/", ""))
    elsewhere = manifest.elsewhere(folder)
    lost = [path for path in manifest.frozen.files() if not path.is_file()]
    files_here = sorted(manifest.files.keys() - elsewhere.keys())
    wrong = problems(folder, manifest, files_here, contents=False) or problems(folder, manifest, [TRAINER])
    wrong += trainer.disagreements(folder, manifest)
    return Row(
        path=folder,
        state="damaged" if wrong else "part" if elsewhere or lost else "complete",
        detail="; ".join(wrong)
        or (f"{len(elsewhere)} of its files are on {_hosts(elsewhere)}" if elsewhere else "")
        or (f"its frozen parameters are in {lost[0]}, which is not there" if lost else ""),
        bytes=folder_bytes(folder),
        age_s=_age_s(folder / MANIFEST),
        step=manifest.step,
        tokens=trainer.tokens,
        layout=manifest.layout,
        weights_only={kind for kind, _ in manifest.checksums()} == {PARAM},
        stage=_stage(trainer.data_stages),
        began_from=_began_from(trainer.began_from or {}),
    )


def _stage(record: list[dict[str, Any]]) -> str:
    try:
        last = record[-1]
        return f"{last['stage']}: {', '.join(last['folders'])}" if last["stage"] else ""
    except (KeyError, IndexError, TypeError):  # as a conversion may write it
        return ""


def _began_from(began: dict[str, Any]) -> str:
    if not isinstance(path := began.get("checkpoint", began.get("path")), str):
        return ""
    folder = Path(path)
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder.parent
    step = step_of(folder)
    what = folder.name if step is None else f"{run.name}/step-{step}"
    return f"{what} (parameters)" if began.get("weights_only") else what


def _hosts(elsewhere: dict[str, str]) -> str:
    names = sorted(set(elsewhere.values()))
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more hosts" if len(names) > 5 else "")


def _unlisted(folder: Path, state: str, detail: str) -> Row:
    return Row(
        path=folder,
        state=state,
        detail=detail,
        bytes=folder_bytes(folder),
        age_s=_age_s(folder),
        step=int(folder.name[5:13]) if _SHORT_STEP.match(folder.name) else None,
    )


def _age_s(path: Path) -> float:
    try:
        return max(0.0, time.time() - path.lstat().st_mtime)
    except OSError:
        return 0.0


def layout_words(layout: dict[str, Any], weights_only: bool) -> str:
    """Return text such as 'ZeRO 1 x 8 ranks (pipeline 2, tensor 2), bf16', from what a manifest has of it."""
    stage, ranks = layout.get("zero_stage"), layout.get("world_size")
    degrees = ", ".join(f"{key} {layout[key]}" for key in _DEGREES if layout.get(key))
    how = str(layout.get("made_by") or f"ZeRO {stage} x {ranks} ranks" + (f" ({degrees})" if degrees else ""))
    words = [how, str(layout.get("precision") or ""), "weights only" if weights_only else ""]
    return ", ".join(word for word in words if word and word.isprintable())


def table(rows: Sequence[Row]) -> list[str]:
    """Return aligned lines under a heading. The columns STAGE and FROM appear only if a row has a value for them."""
    more = {"STAGE": [row.stage for row in rows], "FROM": [row.began_from for row in rows]}
    more = {name: column for name, column in more.items() if any(column)}
    lines = [("STEP", "TOKENS", *more, "SIZE", "LAYOUT", "AGE", "STATE", "FOLDER")]
    for index, row in enumerate(rows):
        lines.append(
            (
                "" if row.step is None else str(row.step),
                "" if row.tokens is None else units.count(row.tokens),
                *(column[index] for column in more.values()),
                units.size(row.bytes),
                "" if row.layout is None else layout_words(row.layout, row.weights_only),
                units.duration(row.age_s),
                row.state + (f": {row.detail}" if row.detail else "") + (f", best: {row.best}" if row.best else ""),
                str(row.path),
            )
        )
    return units.lines_of(lines)


@dataclass(frozen=True)
class Pruned:
    lines: list[str]
    failed: bool
    """True if something could not be deleted."""


def prune(run: Path, keep: int, dry_run: bool) -> Pruned:
    """Delete old checkpoints, and leftovers that no process has locked. Kept are the `keep` newest good ones, those of
    checkpoint.keep_best, and the newest that verifies; while the frozen parameters of that one are gone, also those
    with another source of them. `dry_run`: only list. Raises CheckpointError if no checkpoint verifies, or `keep` is
    0."""
    if keep < 1:
        raise CheckpointError(f"--keep {keep}: at least one checkpoint must stay. Give 1 or more.")
    checkpoints = checkpoints_of(run)
    lines = []
    for newest in complete_checkpoints(checkpoints):
        damage = verify(newest, whole=False)
        if not damage:
            break
        lines.append(f"damaged  {newest}  {damage[0]}")
    else:
        listed = "; ".join(lines) or "it holds no complete checkpoint"
        raise CheckpointError(f"{run}: no checkpoint verifies, so nothing was deleted. {listed}.")
    best = best_wanted(checkpoints)
    doomed = [folder for folder in outdated(checkpoints, keep, best=best) if folder != newest]
    if changed := verify_frozen(newest):
        lines.append(f"intact, without its frozen parameters  {newest}  {changed[0]}")
        doomed = [folder for folder in doomed if _frozen_of(folder) in (None, _frozen_of(newest))]
    problems: list[str] = []
    with _leftovers(checkpoints) as leftovers:
        total = 0
        for folder in [*doomed, *leftovers]:
            size = folder_bytes(folder)
            if not dry_run and not remove([folder], problems.append):
                continue
            total += size
            lines.append(f"{'would delete' if dry_run else 'deleted'}  {folder}  {units.size(size)}")
    remaining = [folder for folder in complete_checkpoints(checkpoints) if folder not in doomed]
    lines += [f"could not delete  {problem}" for problem in problems]
    lines.append(
        f"{units.size(total)} {'would be ' if dry_run else ''}freed, {len(remaining)} checkpoints kept, "
        f"{newest.name} verified"
    )
    return Pruned(lines, bool(problems))


def _frozen_of(folder: Path) -> FrozenSource | None:
    try:
        return Manifest.read(folder).frozen
    except CheckpointError:
        return None


@contextlib.contextmanager
def _leftovers(checkpoints: Path) -> Iterator[list[Path]]:
    """A context with the folders that killed processes left, locked; none if a live launch may be writing there."""
    with contextlib.ExitStack() as locks:
        free = lock(checkpoints.parent, locks) and lock(checkpoints, locks)
        yield locks.enter_context(leftovers(checkpoints)) if free else []
