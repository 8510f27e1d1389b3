"""What a site's outer optimizer keeps in checkpoints: fp32, each element once, in the tensors of the model.

Any number of ranks and any ZeRO stage reads it back, as it does moments. Runs without sites ignore it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmtrain.base.errors import CheckpointError
from llmtrain.base.untrusted import natural
from llmtrain.checkpoint.format import OUTER
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.engine.api import StateTensor
from llmtrain.engine.dist.control import from_all, together
from llmtrain.engine.dist.ranks import Ranks
from llmtrain.sites.ledger import Ledger
from llmtrain.sites.outer import Array, Shard

COMMON = OUTER + "common"
"""The parameters that all sites hold alike."""
MOMENTUM = OUTER + "momentum"
RESIDUAL = OUTER + "residual"
"""What this site's messages have lost so far."""
LINE = OUTER + "line"
"""async: the parameters as this site alone has changed them since all sites met."""


def pieces(shard: Shard, kind: str, array: Callable[[], Array]) -> list[StateTensor]:
    """An array of the shard [size], as what a rank writes to checkpoints. `array`: it, at the time of a save."""
    return [
        StateTensor(
            name=name,
            kind=kind,
            region=region,
            own=slice(0, region.numel),
            replica=(0, 1),
            dtype=torch.float32,
            device=torch.device("cpu"),
            open=lambda low=at, high=at + region.numel: contextlib.nullcontext(torch.from_numpy(array()[low:high])),  # type: ignore[misc]
        )
        for at, name, region in shard.regions()
    ]


def read_back(shard: Shard, folder: Path, kinds: Collection[str], ranks: Ranks) -> dict[str, Array]:
    """The arrays [size] of those kinds that a checkpoint has. All ranks call it together.

    Raises:
        AgreedError: it has them for other parameters, or what was read is not what its manifest says.
    """
    found: dict[str, Array] = {}
    expected: dict[str, int] = {}
    with together(ranks), contextlib.closing(CheckpointReader(folder)) as reader:
        for kind in sorted(reader.kinds() & set(kinds)):
            found[kind] = np.zeros(shard.size, np.float32)
            for at, name, region in shard.regions():
                found[kind][at : at + region.numel] = reader.read_kind_region(kind, name, region).numpy()
            sums = reader.manifest.checksums()
            expected[kind] = sum(value for (each, _), value in sums.items() if each == kind) % 2**64
    parts = from_all(ranks, {kind: shard.checksum(values) for kind, values in found.items()})
    with together(ranks):
        for kind in found:
            if sum(part[kind] for part in parts) % 2**64 != expected[kind]:
                raise CheckpointError(
                    f"{folder}: its {kind} is not what its manifest says. Resume from another checkpoint (resume: "
                    "PATH), or take the parameters alone into a new run (resume_weights_only)."
                )
    return found


def standing(kept: Mapping[str, Any], folder: Path) -> tuple[Ledger, str, int, int, list[int]]:
    """(ledger, id, round, sequences since it, tokens since that of each fragment), as trainer.json has them.

    Raises:
        CheckpointError: they make no sense.
    """
    try:
        round_, trained = natural(kept["round"]), natural(kept["trained"])
        weights = [natural(weight) for weight in kept["weights"]]
        if not weights:
            raise ValueError("no weights")
        return Ledger.from_json(kept["ledger"]), str(kept["was"]), round_, trained, weights
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: the sites' part of its trainer.json makes no sense: {error}") from error
