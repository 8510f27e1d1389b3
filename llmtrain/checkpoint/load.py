"""Reads a checkpoint into an engine of any layout, and compares the checkpoint with the run that resumes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from llmtrain import features
from llmtrain.base.errors import CheckpointError, ConfigError
from llmtrain.base.rank.heartbeat import heart
from llmtrain.checkpoint.format import (
    OUTER,
    TRAINER,
    DamagedCheckpoint,
    FrozenSource,
    FrozenSourceError,
    Manifest,
    UnknownFormat,
    problems,
)
from llmtrain.checkpoint.host_files import fetch
from llmtrain.checkpoint.meaning import other_meaning, other_scale
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.checkpoint.retain import set_aside
from llmtrain.checkpoint.rundir import Candidates, CheckpointFolder, origin
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.checkpoint.verify import damaged_parts, wrong_frozen
from llmtrain.config import plugins
from llmtrain.config.problems import show
from llmtrain.config.reader import saved_stages
from llmtrain.config.run import RunConfig
from llmtrain.engine.api import Counters, Engine, StateTensor
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.engine.weights import Key, check_names, differing_tensors, fill, fill_rounding, prove_masters
from llmtrain.models.rope import turned
from llmtrain.optim.optimizers import PARAM

_PARAMETERS_ALONE = (
    "take the parameters alone into a new run (resume_weights_only): moments, learning rate, step count and the place "
    "in the data begin again"
)


@dataclass(frozen=True, kw_only=True)
class Resumed:
    folder: Path
    trainer: TrainerState
    """The checkpoint's state, in which data that continues has this run's fingerprints."""
    step: int
    weights_only: bool
    """True if only the parameters were taken, and the run begins at step 0."""
    began_from: dict[str, Any] | None
    """What the run's own checkpoints record as the run's origin: see `origin`."""
    frozen: FrozenSource
    """Where the frozen parameters are that the checkpoint leaves out."""
    lines: list[str]
    """Lines to log: skipped checkpoints, what was resumed, changes, warnings."""


def resume(
    engine: Engine, config: RunConfig, candidates: Candidates, where: CheckpointFolder, now: TrainerState, ranks: Ranks
) -> Resumed:
    """Fill the engine from the newest intact checkpoint of `candidates` (not empty). `now`: this run's state. All ranks
    call it together, and raise the same CheckpointError, FrozenSourceError or ModelError."""
    own_run, rejected = candidates.own, dict(candidates.incomplete)
    for candidate in candidates.paths:
        weights_only = config.resume_weights_only and not own_run
        try:
            fetch(candidate, (), where, ranks)
            fetch(candidate, _needed(engine, candidate, weights_only) if where.split else (), where, ranks)
            parts = not weights_only and bool(features.asked(config) or config.parts)
            reader, saved = _open(candidate, config.model.folder, where, ranks, parts=parts)
            _refuse_other_adapter(saved, now, candidate)
            new_data, new_model = (key == "new" and not own_run for key in (config.resume_data, config.resume_model))
            current = now if weights_only else as_of(saved.step, now)
            meaning = refuse_other_model(saved, current, candidate, weights_only=weights_only, meant=new_model)
            notes: list[str] = []
            if not weights_only:
                notes = refuse_other_run(saved, current, candidate, own=own_run, other_data=new_data)
                saved = saved.with_names_of(current)
            with contextlib.closing(reader):
                load_checkpoint(engine, reader, saved, ranks, weights_only=weights_only)
        except DamagedCheckpoint as error:
            rejected[candidate] = f"{candidate.name}: {error}"
            continue
        if where.leads and own_run:  # another run's folder stays unchanged
            set_aside(list(rejected))
        if weights_only:
            what = f"took the parameters of {candidate} (step {reader.manifest.step})"
            taken = [f"{what}; moments, schedule and data begin again"]
        else:
            taken = [f"resumed from {candidate} at step {saved.step}"]
            taken += [*(f"changed since: {line}" for line in saved.differences(current)), *_rate_jump(saved, current)]
        return Resumed(
            folder=candidate,
            trainer=saved,
            step=reader.manifest.step,
            weights_only=weights_only,
            began_from=saved.began_from if own_run else {**origin(config), "checkpoint": str(candidate.resolve())},
            frozen=reader.manifest.frozen,
            lines=[*(f"skipped {text}" for text in rejected.values()), *taken, *meaning, *notes],
        )
    raise CheckpointError(
        f"no checkpoint can be resumed from. {' | '.join(rejected.values())}. Name another one (resume: PATH), or "
        "start over in another train.run_dir: training never begins on top of damaged checkpoints."
    )


def _rate_jump(saved: TrainerState, now: TrainerState) -> list[str]:
    """Return a warning if a changed length or schedule makes the learning rate jump at the resumed step."""
    step = saved.step
    planned, last, first = _rate(saved, step), _rate(saved, step - 1), _rate(now, step)
    if not step or planned is None or last is None or first is None or math.isclose(planned, first, rel_tol=0.01):
        return []
    return [
        f"the learning rate jumps to {first:.3g} at step {step + 1}, where {planned:.3g} was planned (it was "
        f"{last:.3g} at step {step}): the run's length or schedule has changed. If you do not want that, set schedule "
        "and optim.lr for the remaining steps"
    ]


def _rate(state: TrainerState, step: int) -> float | None:
    """Return the learning rate of a step (0 is the first); None if it is not recorded."""
    run = state.run or {}
    try:
        train, stages = run["train"], saved_stages(run)
        epochs, epoch = train.get("epochs"), state.epoch_sequences
        if epochs is not None and epoch is None:
            return None
        steps = stages.length(train["max_steps"], train["max_tokens"], epochs, epoch)
        if steps is None and stages.at(step).schedule.needs_length:
            return None
        return float(run["optim"]["lr"] * stages.factor(step, steps))
    except (KeyError, TypeError, ConfigError):  # written by another tool or version
        return None


def _needed(engine: Engine, folder: Path, weights_only: bool) -> set[str]:
    """Return the files that this rank reads; none if the checkpoint is damaged, which `_open` reports."""
    try:
        reader = CheckpointReader(folder)
    except CheckpointError:
        return set()
    saved_tensors = reader.tensors()
    outer = [kind for kind in reader.kinds() if kind.startswith(OUTER)]
    return {
        file
        for f in engine.state()
        for kind in (f.kind, *(outer if f.kind == PARAM else ()))
        if (kind, f.name) in saved_tensors and (kind == PARAM or not weights_only)
        for file in reader.files_of(kind, f.name, f.region)
    }


def _open(
    folder: Path, pretrained: Path | None, where: CheckpointFolder, ranks: Ranks, *, parts: bool
) -> tuple[CheckpointReader, TrainerState]:
    """Check everything except the values. The ranks do it together, and each file is checked once.

    `pretrained`: folder for the frozen parameters if their own is gone. `parts`: also check the tensors of the run's
    parts (such as an average), which are read later, when no older checkpoint can be taken instead.

    Raises:
        FrozenSourceError: the frozen parameters are missing.
        DamagedCheckpoint: the manifest, a file's size or header, or trainer.json is wrong.
        UnknownFormat: another version wrote it. That is no damage, so no older checkpoint is tried.
    """
    wrong: list[str] = []
    trainer = TrainerState()
    reader: CheckpointReader | None = None
    lost: FrozenSourceError | None = None
    try:
        manifest = Manifest.read(folder)
        files = manifest.frozen.files()
        if pretrained and files and not any(file.is_file() for file in files):  # a mount leaves an empty folder
            manifest = replace(manifest, frozen=replace(manifest.frozen, folder=pretrained.absolute()))
        reader = CheckpointReader(folder, manifest)
        if ranks.rank == 0:
            wrong += problems(folder, manifest, [TRAINER])
            if not wrong:
                trainer = TrainerState.read(folder)
                wrong += trainer.disagreements(folder, manifest)
        elsewhere = manifest.elsewhere(folder).keys() if where.split else set()
        files_here = sorted({name for name, entry in manifest.files.items() if entry.pieces} - elsewhere)
        # Ranks that see the same files share the work.
        for name in files_here[where.members.index(where.rank) :: len(where.members)]:
            wrong_header = problems(folder, manifest, [name], contents=False) or _header_problems(reader, name)
            wrong += wrong_header or (damaged_parts(folder, name, manifest.files[name], heart.beat) if parts else [])
        reader.frozen_types()
    except UnknownFormat:
        raise
    except FrozenSourceError as error:
        lost = error
    except CheckpointError as error:
        wrong.append(str(error))
    shares = ranks.gather((wrong, lost, trainer))
    if damaged := _joined([texts for texts, *_ in shares]):
        raise DamagedCheckpoint("; ".join(damaged))
    if source_errors := [error for _, error, _ in shares if error]:
        raise source_errors[0]
    assert reader is not None
    return reader, shares[0][2]


def _header_problems(reader: CheckpointReader, file: str) -> list[str]:
    try:
        reader.check(file)
    except CheckpointError as error:
        return [str(error)]
    return []


def _joined(shares: list[list[str]]) -> list[str]:
    return list(dict.fromkeys(text for share in shares for text in share))


@torch.no_grad()
def load_checkpoint(
    engine: Engine, reader: CheckpointReader, trainer: TrainerState, ranks: Ranks, *, weights_only: bool = False
) -> None:
    """Fill the engine from a checkpoint of any layout, and prove that every value arrived. Each rank reads its slices
    in chunks of a few MiB. `weights_only`: leave the optimizer's state unchanged. Raises DamagedCheckpoint,
    FrozenSourceError; CheckpointError if the moments differ; ModelError if the parameters do."""
    live = engine.state()
    check_names(engine, reader)
    if not weights_only:
        _refuse_other_state(live, reader, ranks)
    rounded: dict[Key, int] = {}
    failure: CheckpointError | ConfigError | None = None
    try:
        rounded = _fill([piece for piece in live if piece.kind == PARAM or not weights_only], reader)
    except (CheckpointError, ConfigError) as problem:  # the other ranks must not wait for this one
        failure = problem
    if failures := [problem for problem in ranks.gather(failure) if problem is not None]:
        cause = next((error for error in failures if isinstance(error, FrozenSourceError | ConfigError)), None)
        raise cause or DamagedCheckpoint("; ".join(dict.fromkeys(map(str, failures))))
    if not weights_only:
        step = reader.manifest.step if trainer.optimizer_step is None else trainer.optimizer_step
        engine.set_counters(Counters(optimizer_step=step, loss_scale=trainer.loss_scale))
    engine.refresh()
    prove_masters(engine, ranks)
    sums = reader.manifest.checksums()
    sums = {key: value for key, value in sums.items() if not key[0].startswith(OUTER)}
    expected = {key: value for key, value in sums.items() if key[0] == PARAM or not weights_only}
    bad = differing_tensors(engine, expected, ranks, rounded)
    if bad:
        raise _mismatch(reader, bad, ranks)


def _fill(pieces: list[StateTensor], reader: CheckpointReader) -> dict[Key, int]:
    """Fill the pieces. Returns checksums of values that the engine rounds (Muon's momentum, frozen bf16 weights)."""
    exact: dict[Key, int] = {}
    for piece in pieces:
        key = (piece.kind, piece.name)
        read = partial(reader.read_kind_region, *key)
        if piece.dtype == torch.float32 and piece.write is None:
            fill(piece, read)
        else:
            exact[key] = exact.get(key, 0) + fill_rounding(piece, read)
    return exact


def _refuse_other_state(live: list[StateTensor], reader: CheckpointReader, ranks: Ranks) -> None:
    if reader.kinds() == {PARAM}:
        raise CheckpointError(
            f"{reader.folder} holds parameters alone, without an optimizer's state. Begin a new run from it: --resume "
            f"{reader.folder} --resume-weights-only, with a train.run_dir of its own."
        )
    saved_keys = sorted(key for key in reader.tensors() if not key[0].startswith(OUTER))
    saved_kinds = {kind for kind, _ in saved_keys}
    live_keys = {(piece.kind, piece.name) for piece in live}
    owners = ranks.sum(torch.tensor([int(key in live_keys) for key in saved_keys], dtype=torch.int64))
    unwanted = [key for key, count in zip(saved_keys, owners.tolist(), strict=True) if count == 0]
    surplus = sorted(live_keys.difference(saved_keys))
    shares = ranks.gather(({kind for kind, _ in live_keys}, surplus))
    kinds = set().union(*(kinds for kinds, _ in shares))
    missing = sorted({key for _, keys in shares for key in keys})
    if kinds != saved_kinds:
        raise CheckpointError(
            f"{reader.folder}: it holds {', '.join(sorted(saved_kinds))}, this run's optimizer keeps "
            f"{', '.join(sorted(kinds))}. Use the optimizer that the checkpoint was made with (optim.name), or "
            f"{_PARAMETERS_ALONE}."
        )
    no_maps = sorted({name for kind, name in unwanted if kind == "momentum_buffer"} & {name for _, name in missing})
    if no_maps:
        raise CheckpointError(
            f"{reader.folder}: Muon trained {', '.join(no_maps[:3])} in the checkpoint; now it trains only matrices "
            f"of linear maps, AdamW the rest. To continue without those moments, {_PARAMETERS_ALONE}."
        )
    if unwanted or missing:
        texts = [f"it holds {_listed(unwanted)}, which this run does not train"] if unwanted else []
        texts += [f"it lacks {_listed(missing)}, which this run trains"] if missing else []
        raise CheckpointError(
            f"{reader.folder}: {'; '.join(texts)}. Train the same parameters with the same optimizer, or "
            f"{_PARAMETERS_ALONE}."
        )


def _listed(keys: list[Key]) -> str:
    shown = ", ".join(f"{kind} of {name}" for kind, name in keys[:3])
    return shown if len(keys) <= 3 else f"{shown} ({len(keys)} in all)"


def _mismatch(reader: CheckpointReader, bad: list[Key], ranks: Ranks) -> CheckpointError:
    """Return the error for tensors that differ from the manifest, after all ranks have read their files again."""
    files = {
        name
        for name, entry in reader.manifest.files.items()
        if any((piece.kind, piece.name) in bad for piece in entry.pieces)
    }
    elsewhere = reader.manifest.elsewhere(reader.folder).keys()
    names = sorted(files - elsewhere) if elsewhere else sorted(files)[ranks.rank :: ranks.world_size]
    mine = problems(reader.folder, reader.manifest, names)
    changed = wrong_frozen(reader.manifest.frozen, [name for kind, name in bad if kind == PARAM])
    shares = ranks.gather((mine, changed))
    differs = f"{_listed(bad)} differs from the manifest after loading"
    if damage := _joined([texts for texts, _ in shares]):
        return DamagedCheckpoint(f"{'; '.join(damage)} ({differs})")
    if source_errors := [error for _, error in shares if error]:
        return source_errors[0]
    return CheckpointError(
        f"{reader.folder}: {differs}, though its files are intact. The disk or memory returned wrong bytes once, or "
        "this is a bug. The run ends before its first step; start it again, or resume from another checkpoint."
    )


def _refuse_other_adapter(saved: TrainerState, now: TrainerState, folder: Path) -> None:
    """Raise CheckpointError if only one side has an adapter, or the adapters' scales differ, which no shape shows."""
    saved_adapter, current_adapter = saved.section("adapter"), now.section("adapter")
    if bool(saved_adapter.get("r")) != bool(current_adapter.get("r")):
        holds, wants, merge = "no adapter", "trains one", ""
        if not current_adapter.get("r"):
            holds, wants, merge = f"an adapter (adapter.r {saved_adapter['r']})", "trains the model itself", " --merge"
        raise CheckpointError(
            f"{folder} holds {holds}, and this run {wants}. Export it (llmtrain checkpoint to-hf RUN FOLDER{merge}), "
            "and begin with that: model.pretrained: FOLDER, resume: none."
        )
    if scale := other_scale(saved_adapter, current_adapter):
        raise CheckpointError(
            f"{folder}: {scale[0]} in this run, which changes the scale of the adapter. Use the old value."
        )


def _other_data(saved: TrainerState, now: TrainerState) -> str:
    was, now_is = saved.section("data"), now.section("data")
    keys = ("path", "mixture", "sequence_length", "seed", "pack")
    changes = [
        f"data.{key} was {show(was.get(key))} and is {show(now_is.get(key))}"
        for key in keys
        if was and was.get(key) != now_is.get(key)
    ]
    return "; ".join(changes) or "The data was prepared again, or has changed since"


def as_of(step: int, now: TrainerState) -> TrainerState:
    """Return this run's state after a step, with the data and the model configuration of its stage."""
    planned = [stage for stage in now.plan if stage[0] < max(1, step)]
    if not planned:
        return now
    rope = [(fields, length) for _, _, fields, length in planned]
    return replace(now, data_fingerprint=planned[-1][1], model_config=dict(turned(now.model_config or {}, rope)))


def refuse_other_model(
    saved: TrainerState, now: TrainerState, folder: Path, *, weights_only: bool, meant: bool
) -> list[str]:
    """Refuse a model, teacher or tokenizer that computes something else; `meant` (resume_model: new): only warn."""
    changes = other_meaning(saved.model_config, now.model_config)
    if weights_only and saved.tokenizer not in (None, now.tokenizer):
        changes.append(f"tokenizer of the data: {saved.tokenizer} -> {now.tokenizer}")
    if not weights_only:
        changes += [f"teacher's {text}" for text in other_meaning(saved.teacher_config, now.teacher_config)]
    if meant and changes:
        return [f"warning: resume_model new: the weights of {folder} now compute something else: {'; '.join(changes)}"]
    if changes:
        raise CheckpointError(
            f"{folder}: its weights would compute something else in this run: {'; '.join(changes)}. Give the run "
            "the old values (config.json of its model, model.config, the rope of data.stages so far), or begin "
            f"with them: llmtrain checkpoint to-hf {folder} FOLDER, model.pretrained: FOLDER. For the new values: "
            f"--resume {folder} --resume_model new, with a train.run_dir of its own."
        )
    return []


def _left_out(state: TrainerState, step: int) -> dict[str, list[Any]]:
    """Return the sequences of each stage and the steps up to `step` that count no token, by their keys."""
    data = state.section("data")
    return {
        "data.exclude": [sorted(stage.get("exclude") or ()) for stage in (data, *(data.get("stages") or ()))],
        "data.skip_steps": sorted(skipped for skipped in data.get("skip_steps") or () if skipped <= step),
    }


def refuse_other_run(
    saved: TrainerState, now: TrainerState, folder: Path, *, own: bool = False, other_data: bool = False
) -> list[str]:
    """Raise CheckpointError if optimizer, vocabulary or data differ. `now`: this run `as_of` the checkpoint's step.
    `own`: False for another run's checkpoint, after which this run may exclude other sequences. `other_data`: accept
    other data of the same tokenizer. Returns a note if the checkpoint names no data."""
    step = saved.step
    if own and saved.order == now.order:
        before, current = _left_out(saved, step), _left_out(now, step)
        if before != current:
            key = next(key for key in before if before[key] != current[key])
            raise CheckpointError(
                f"{folder}: {key} is {before[key]} in the checkpoint and {current[key]} in this run. Set the old value "
                f"as in the steps so far, or continue in another train.run_dir: --resume {folder}."
            )
    remedies = {
        "optimizer": f"Its moments mean something else. Use the same optim.name, or {_PARAMETERS_ALONE}",
        "vocab_size": "The embedding has another number of rows. Use the same model and tokenizer",
        "data_fingerprint": f"{_other_data(saved, now)}. The order of the sequences would not continue. Continue with "
        f"the data as it was, change it in a stage (data.stages) from step {step} on or later, give --resume_data new "
        f"with a train.run_dir of its own to read the other data from its first sequence, or {_PARAMETERS_ALONE}",
        "reference": "The answers would be compared with another model than so far. Set model.pretrained to "
        "the one that the run began from, and for a column run llmtrain reference RUN.yaml",
        "teacher": "The student would learn from other weights than so far. Use the same objective.teacher, or "
        f"{_PARAMETERS_ALONE}",
    }
    if other_data or saved.order == now.order:
        del remedies["data_fingerprint"]
    if other_data:
        remedies["tokenizer"] = "Its ids mean other text. Prepare the data with the tokenizer of the run (--tokenizer)"
    for key, remedy in remedies.items():
        before, current = getattr(saved, key), getattr(now, key)
        if before not in (None, current):
            raise CheckpointError(f"{folder}: {key} was {before!r} and is {current!r} in this run. {remedy}.")
    other = plugins.difference(saved.plugins, now.plugins)
    if other and not plugins.changed_ok:
        remedy = "continue with the plugins as they were (--plugin FILE.py), or give --plugin-changed ok"
        raise CheckpointError(f"{folder}: {other}; {remedy}")
    if saved.data_fingerprint is None:
        return [f"{folder} does not name its data: this run's data is assumed, from sequence {saved.sample_index} on"]
    return []


def compare_checksums(
    folder: Path, mine: Mapping[str, int], expected: Mapping[str, int], ranks: Ranks, what: str = ""
) -> None:
    """Compare the sums over all ranks of their checksums with the manifest's values, on all ranks together. `what`: put
    before a name in the message. Raises AgreedError."""
    parts = ranks.gather(dict(mine))
    with ranks.together():
        for name, value in expected.items():
            if sum(part.get(name, 0) for part in parts) % 2**64 != value:
                raise CheckpointError(
                    f"{folder}: its {what}{name} is not what its manifest says. Resume from another checkpoint "
                    "(resume: PATH), or take the parameters alone into a new run (resume_weights_only)."
                )
