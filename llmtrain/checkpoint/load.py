"""Read a checkpoint into an engine of any layout; choose which one; compare it with the run that resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llmtrain.checkpoint.format import PARAM, Manifest, complete_checkpoints, problems, read_trainer
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.engine.build import Ranks
from llmtrain.engine.fragments import fragments, refresh, set_loss_scale_state, set_optimizer_step
from llmtrain.engine.weights import differing_parameters, write_parameters
from llmtrain.errors import CheckpointError


@torch.no_grad()
def load_checkpoint(engine: Any, reader: CheckpointReader, trainer: dict[str, Any], ranks: Ranks) -> None:
    """Fill the engine from a checkpoint of any layout and prove that the parameters arrived.

    Raises:
        CheckpointError: the optimizer's moments are others, or a parameter differs after loading.
    """
    live = fragments(engine)
    kinds = {fragment.kind for fragment in live}
    all_kinds: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(all_kinds, kinds, group=ranks.control)
    wanted = set().union(*all_kinds)
    if wanted != reader.kinds():
        raise CheckpointError(
            f"{reader.folder}: it holds {', '.join(sorted(reader.kinds()))}, this run's optimizer keeps "
            f"{', '.join(sorted(wanted))}. Use the optimizer that the checkpoint was made with (optim.name)."
        )
    write_parameters(engine, reader)
    for fragment in live:
        if fragment.kind != PARAM:
            stop = fragment.start + fragment.view.numel()
            fragment.view.copy_(reader.read_kind(fragment.kind, fragment.name, fragment.start, stop))
    set_optimizer_step(engine, trainer["optimizer_step"])
    set_loss_scale_state(engine, trainer["loss_scale"])
    refresh(engine)
    bad = differing_parameters(
        engine, {name: value for (kind, name), value in reader.manifest.checksums().items() if kind == PARAM}, ranks
    )
    if bad:
        raise CheckpointError(
            f"{reader.folder}: after loading, {len(bad)} parameters differ from the manifest, first "
            f"{', '.join(bad[:3])}. The run ends before its first step; resume from another checkpoint."
        )


def choose_checkpoint(resume: str, checkpoints: Path, ranks: Ranks) -> tuple[Path | None, list[str]]:
    """The checkpoint to resume from, the same on every rank, and what was wrong with newer ones.

    Damaged ones that are walked past get another name (NAME.damaged), or retention would count them as newest.

    Rank 0 lists the candidates and tells the others: each rank looking for itself could see another newest
    one on a shared file system (DeepSpeed's ranks do). Their bytes are verified by all ranks together.

    Raises:
        CheckpointError: `resume` names a path that is not a complete, intact checkpoint, or every one is damaged.
    """
    listing: list[Any] = [[str(p) for p in _candidates(resume, checkpoints)] if ranks.rank == 0 else None]
    dist.broadcast_object_list(listing, src=0, group=ranks.control)
    rejected: dict[Path, str] = {}
    for candidate in map(Path, listing[0]):
        wrong = _verify_together(candidate, ranks)
        if not wrong:
            if ranks.rank == 0:
                for damaged in rejected:
                    damaged.rename(damaged.with_name(f"{damaged.name}.damaged"))
            return candidate, list(rejected.values())
        rejected[candidate] = f"{candidate.name}: {'; '.join(wrong)}"
    if rejected:
        raise CheckpointError(
            f"no checkpoint can be resumed from. {' | '.join(rejected.values())}. To start over, give another "
            "train.run_dir; training never starts from scratch on top of damaged checkpoints."
        )
    return None, []


def _candidates(resume: str, checkpoints: Path) -> list[Path]:
    if resume == "none":
        return []
    return complete_checkpoints(checkpoints) if resume == "auto" else [Path(resume)]


def _verify_together(folder: Path, ranks: Ranks) -> list[str]:
    found: list[str]
    try:
        manifest = Manifest.read(folder)
        found = problems(folder, manifest, sorted(manifest.files)[ranks.rank :: ranks.world_size])
        if not found and ranks.rank == 0:
            CheckpointReader(folder, manifest)
            read_trainer(folder)
    except CheckpointError as error:
        found = [str(error)]
    shares: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(shares, found, group=ranks.control)
    return list(dict.fromkeys(text for share in shares for text in share))


def refuse_other_run(saved: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """What cannot travel into this run, by name. Both are trainer states.

    Raises:
        CheckpointError: another optimizer, vocabulary or data.
    """
    remedies = {
        "optimizer": "Its moments mean something else. Use the same optim.name",
        "vocab_size": "The embedding has other rows. Use the same model and tokenizer",
        "data_fingerprint": "The data order would not continue. Use the same prepared data, sequence length, "
        "mixture and data.seed, or start a new run from the exported weights (model.pretrained)",
    }
    for key, remedy in remedies.items():
        if saved[key] != now[key]:
            raise CheckpointError(f"{folder}: {key} is {saved[key]!r} there and {now[key]!r} in this run. {remedy}.")


def differences(saved: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Lines `key: saved -> now` for every leaf that differs in two nested dicts."""
    lines = []
    for key in sorted(saved.keys() | now.keys()):
        path = f"{prefix}{key}"
        old, new = saved.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += differences(old, new, f"{path}.")
        elif old != new:
            lines.append(f"{path}: {old!r} -> {new!r}")
    return lines
