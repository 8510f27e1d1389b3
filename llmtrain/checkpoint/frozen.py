"""Frozen parameters that a checkpoint leaves out, because the Hugging Face folder that they came from has them.

No step changes them, and they may be nearly all of a model. The manifest names the folder and their checksums; whoever
reads the checkpoint reads them there again. No torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.base.errors import CheckpointError
from llmtrain.base.untrusted import natural, word
from llmtrain.storage.hub.names import commit_of, here
from llmtrain.storage.region import Region

if TYPE_CHECKING:
    from llmtrain.models.source import ParameterSource

TYPES = ("F32", "BF16", "F16")
"""safetensors' names of the types that values of a checkpoint have, here as there."""


class FrozenSourceError(CheckpointError):
    """The folder is not as it was. The checkpoint itself may be intact."""


@dataclass(frozen=True, kw_only=True)
class FrozenSource:
    """The source of the frozen parameters that a run's checkpoints leave out; see NOWHERE."""

    folder: Path
    """Absolute."""
    checksums: dict[str, int]
    """By Hugging Face name: the layout-free checksum of the whole tensor, as the folder has it."""
    parts: dict[str, list[tuple[str, str, Region]]]
    """By Hugging Face name: (file, tensor in it, which elements of the flat parameter that is)."""

    def only(self, names: Collection[str]) -> FrozenSource:
        """The part of it for these parameters."""
        kept = [name for name in self.parts if name in names]
        checksums = {name: self.checksums[name] for name in kept}
        return replace(self, checksums=checksums, parts={name: self.parts[name] for name in kept})

    def files(self) -> list[Path]:
        """The weight files that hold some of them."""
        return [self.folder / file for file in dict.fromkeys(f for parts in self.parts.values() for f, _, _ in parts)]

    def error(self, wrong: str) -> FrozenSourceError:
        """An error with the fault (`wrong`: a clause that names file and tensor), the rule, and what to do."""
        remedy = (
            "Put that folder, or a link to it, in its place again; or move what is there away: a resume then takes "
            "model.pretrained"
        )
        if found := commit_of(self.folder):
            remedy = f"Fetch it again: hf download {found[0].name} --revision {found[1]}"
        return FrozenSourceError(
            f"{wrong.rstrip('.')}. The checkpoint holds what trains, its frozen parameters are those of {self.folder} "
            f"as they were when the run began. {remedy}."
        )

    def to_json(self) -> dict[str, Any]:
        """{"folder", "tensors": name -> [checksum, [[file, tensor, first element, elements], ...]]}."""
        tensors = {
            name: [self.checksums[name], [[file, tensor, part.start, part.numel] for file, tensor, part in parts]]
            for name, parts in self.parts.items()
        }
        return {"folder": str(self.folder), "tensors": tensors}

    @classmethod
    def from_json(cls, raw: Any) -> FrozenSource:
        """Raises ValueError, TypeError, KeyError or AttributeError: nothing is believed."""
        folder = Path(word(raw["folder"]))
        checksums, parts = {}, {}
        for name, (checksum, held) in raw["tensors"].items():
            checksums[word(name)] = natural(checksum, 2**64)
            parts[name] = [(word(f), word(tensor), Region(natural(at), natural(n))) for f, tensor, at, n in held]
        odd = [file for held in parts.values() for file, _, _ in held if Path(file).name != file]
        if odd or not folder.is_absolute() or not all(parts.values()):
            raise ValueError(f"{[*odd, str(folder)][0]!r} is no place of frozen parameters")
        return cls(folder=here(folder), checksums=checksums, parts=parts)


NOWHERE = FrozenSource(folder=Path("/"), checksums={}, parts={})
"""Nothing is left out."""


def frozen_source(source: ParameterSource, names: Collection[str], checksums: dict[str, int]) -> FrozenSource:
    """The frozen parameters that checkpoints of a run with these initial values leave out: those that a folder holds,
    also below an adapter or a score."""
    from llmtrain.models.source import SafetensorsSource  # not in the checkpoint writer's process

    while (base := getattr(source, "base", None)) is not None:
        source = base
    if not isinstance(source, SafetensorsSource):
        return NOWHERE
    left_out = [name for name in source.order() if name in names and source.dtypes(name) <= {*TYPES}]
    return FrozenSource(
        folder=source.folder.absolute(),  # links are not followed: hosts may have them to places of their own
        checksums={name: checksums[name] for name in left_out},
        parts={name: source.places(name) for name in left_out},
    )
