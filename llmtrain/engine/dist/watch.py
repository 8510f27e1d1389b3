"""What the ranks of a run tell the watch together: who they are, and what they run."""

from __future__ import annotations

from dataclasses import asdict

from llmtrain.cluster.watch import rank_side
from llmtrain.config.run import TrackingConfig
from llmtrain.config.topology import Mix
from llmtrain.engine.dist.control import from_all
from llmtrain.engine.dist.ranks import Ranks


def introduce(ranks: Ranks) -> None:
    """Tell every rank's watch of all the others. Every rank must call it."""
    agents = from_all(ranks, rank_side.agent_address())
    rank_side.met([{**asdict(seat), "agent": agent} for seat, agent in zip(ranks.seats, agents, strict=True)])


def describe(tracking: TrackingConfig, mix: Mix, run_id: str, experts: bool) -> None:
    """Tell the watch what a report of a fault needs to know of the run. `run_id`: W&B's."""
    rank_side.describe(
        run_id=run_id,
        tracking={"wandb": tracking.wandb, "project": tracking.project, "entity": tracking.entity},
        experts=experts,
        zero_stage=mix.zero_stage,
        alike=mix.degrees.pipeline == 1,
    )
