"""Outer methods: the section `sites` of a run, and the rule that makes common parameters from the sites'.

A new one is a class here: its fields, and its outer step; rules.py has the rules about them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from llmtrain.base.choice import AT_LEAST_1, BELOW_1, NOT_NEGATIVE, POSITIVE, SECONDS, Choice, bounded

Array = Any
"""numpy's."""


@dataclass(frozen=True, kw_only=True)
class SitesConfig(Choice, section="sites", selector="method"):
    """Several sites that train one model over a slow network, each with its own launch."""

    local: ClassVar[frozenset[str]] = frozenset({"name", "coordinator", "start_sites", "timeout_s", "trust", "listen"})
    """Fields in which the sites of a run may differ."""

    method: str = field(init=False)
    """Rule by which the sites' parameters become common ones."""
    name: str | None = None
    """This site's name; with it the run trains together with the other sites of its coordinator."""
    coordinator: str | None = None
    """HOST:PORT of `llmtrain sites coordinator`."""
    compress: Literal["none", "bf16", "int8", "int4"] = "none"
    """Format of the messages. none: the fp32 parameters. The others send changes since the last synchronisation, in
    blocks of 256 elements, and add each message's rounding error to the next one. bf16: The upper 16 bits of each fp32
    change, off by 2^-8 of it at most. int8: Steps of 1/127 of a block's largest change, off by half a step at most.
    int4: Steps of 1/7 of a block's largest change, two to a byte, off by half a step at most."""
    start_sites: int = bounded(1, AT_LEAST_1, "1 waits for nobody")
    """Sites that the start waits for, this one included (for at most fault.start_timeout_s)."""
    timeout_s: float = bounded(60.0, SECONDS, "60 is the default")
    """Seconds that a synchronisation may take; then this site continues without it."""
    max_alone_steps: int = bounded(1000, NOT_NEGATIVE, "1000 is the default")
    """Optimizer steps beyond sync_every that this site trains while no synchronisation succeeds."""
    trust: list[str] = field(default_factory=list)
    """Names of sites whose newer state is taken even if no other site confirms it."""
    listen: str | None = None
    """This host's address for the ranks of other sites. Default: the address that reaches the coordinator."""
    sync_every: int = bounded(100, AT_LEAST_1, "100 is the default")
    """Optimizer steps between two synchronisations, of the fastest site."""
    pace: Literal["measured", "equal"] = "measured"
    """Steps of a slower site in between. measured: fewer, so that all arrive together; equal: the same number."""

    def common(self) -> dict[str, Any]:
        """The fields that must be equal on all sites, by their dotted names."""
        names = sorted(self.own() - self.local)
        return {"sites.method": self.method, **{f"sites.{name}": getattr(self, name) for name in names}}

    @property
    def parts(self) -> int:
        """Parts of the model that synchronise in turn."""
        return 1

    @property
    def travel_steps(self) -> int:
        """Optimizer steps that are trained while parameters travel."""
        return 0

    @property
    def round_steps(self) -> int:
        """Optimizer steps between two rounds of all sites."""
        return self.sync_every

    @property
    def keeps_momentum(self) -> bool:
        """True if the outer step has a momentum."""
        return False

    def step(self, common: Array, momentum: Array, mean: Array) -> None:
        """Update the common parameters and the outer momentum in place, both fp32 [n]. `mean`: the sites' mean
        parameters, fp64 [n]."""
        common[:] = mean


@dataclass(frozen=True, kw_only=True)
class LocalSgd(SitesConfig, choice="local_sgd"):
    """The mean of the sites' parameters."""  # S. Stich, arXiv 1805.09767


@dataclass(frozen=True, kw_only=True)
class DiLoCo(SitesConfig, choice="diloco"):
    """A step of SGD with Nesterov's momentum, whose gradient is the last common parameters minus the sites' mean."""

    # In the form of torch.optim.SGD (A. Douillard et al., arXiv 2311.08105, algorithm 1):
    # g = common - mean;  momentum <- beta momentum + g;  common <- common - lr (g + beta momentum)

    outer_lr: float = bounded(0.7, POSITIVE, "0.7 is the default")
    """Learning rate of the outer step."""
    outer_momentum: float = bounded(0.9, BELOW_1, "0.9 is the default")
    """Nesterov momentum of the outer step."""

    @property
    def keeps_momentum(self) -> bool:
        return self.outer_momentum > 0

    def step(self, common: Array, momentum: Array, mean: Array) -> None:
        lr, beta = self.outer_lr, self.outer_momentum
        if lr == 1 and not beta:  # exactly the mean: before - (before - mean) would round
            common[:] = mean
            return
        before = common.astype("f8")
        gradient = before - mean
        if beta:
            momentum[:] = beta * momentum.astype("f8") + gradient
            gradient += beta * momentum.astype("f8")
        common[:] = before - lr * gradient


@dataclass(frozen=True, kw_only=True)
class Streaming(DiLoCo, choice="streaming"):
    """As diloco, for one fragment of the model after the other, while training continues."""

    fragments: int = bounded(4, AT_LEAST_1, "4 is the default")
    """Parts of the model that are synchronised in turn, each every sync_every steps."""
    overlap_steps: int = bounded(5, NOT_NEGATIVE, "5 is the default")
    """Optimizer steps that are trained while parameters travel, and kept; 0 waits for the parameters."""

    @property
    def most_overlap(self) -> int:
        """Largest `overlap_steps` that the other fields allow."""
        return min(self.round_steps - 1, self.max_alone_steps)

    @property
    def parts(self) -> int:
        return self.fragments

    @property
    def travel_steps(self) -> int:
        return self.overlap_steps

    @property
    def round_steps(self) -> int:
        return self.sync_every // self.fragments
