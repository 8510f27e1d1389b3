"""A second copy of a run's checkpoints, in an object store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmtrain.features import Feature

if TYPE_CHECKING:
    from llmtrain.checkpoint.rundir import CheckpointFolder
    from llmtrain.config.run import RunConfig
    from llmtrain.engine.ranks.ranks import Ranks
    from llmtrain.training.parts import Launch, Part


@dataclass(frozen=True, kw_only=True)
class MirrorConfig:
    """A second copy of the checkpoints in an object store. Complete ones are uploaded in the background,
    `checkpoint.keep` and `checkpoint.keep_best` hold there, too, and a run without a checkpoint in its folder continues
    from there."""

    url: str | None = None
    """URL of a folder (s3://, gs://, az:// or another scheme of fsspec), one for each run; null = no mirror."""


class MirrorFeature(Feature):
    section = MirrorConfig
    observes = True
    renamed = (("checkpoint.mirror", "mirror.url"),)

    def asked(self, config: RunConfig) -> bool:
        return config.section(MirrorConfig).url is not None

    def stores(self, config: RunConfig) -> Mapping[str, str]:
        return {"mirror.url": str(config.section(MirrorConfig).url)}

    def before_resume(self, config: RunConfig, checkpoints: CheckpointFolder, ranks: Ranks) -> None:
        from llmtrain.features.mirror.part import look

        look(config, checkpoints, ranks)

    def part(self, launch: Launch) -> Part:
        from llmtrain.features.mirror.part import Mirror

        return Mirror(launch)


FEATURE = MirrorFeature()
