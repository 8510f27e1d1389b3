"""Weights & Biases: the tracker of a run that names none."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from llmtrain.features import Feature

if TYPE_CHECKING:
    from llmtrain.features.wandb.sink import WandB


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Weights & Biases. The local files metrics.jsonl and events.jsonl are always written."""

    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: online with an API key and a network, else offline."""
    project: str = "llmtrain"
    """W&B project."""
    entity: str | None = None
    """W&B team or user."""
    name: str | None = None
    """W&B run name. Default: the run folder's name."""
    tags: list[str] = field(default_factory=list)
    """W&B tags."""
    group: str | None = None
    """W&B group: runs that its pages show together, such as a sweep's or several sites'."""
    job_type: str | None = None
    """W&B job type within the group, such as pretrain."""


class Wandb(Feature):
    section = TrackingConfig
    key = "tracking"
    observes = True
    left_out = TrackingConfig(wandb="disabled")
    packages = ("wandb",)

    def tracker(self, section: TrackingConfig) -> WandB | None:
        from llmtrain.features.wandb.mode import asked_mode

        if asked_mode(section.wandb)[0] == "disabled":
            return None
        from llmtrain.features.wandb.sink import WandB

        return WandB(tracking=section)

    def run_id(self) -> str:
        return os.environ.get("WANDB_RUN_ID", "")


FEATURE = Wandb()
