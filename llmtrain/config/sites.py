"""The sites section of the run's YAML."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from llmtrain.base.choice import AT_LEAST_1, BELOW_1, NOT_NEGATIVE, POSITIVE, SECONDS, bounded


@dataclass(frozen=True, kw_only=True)
class SitesConfig:
    """Several sites that train one model over a slow network, each with its own launch."""

    name: str | None = None
    """This site's name; with it the run trains together with the other sites of its coordinator."""
    coordinator: str | None = None
    """HOST:PORT of `llmtrain sites coordinator`."""
    method: Literal["local_sgd", "diloco", "streaming", "async", "every_step"] = "diloco"
    """local_sgd averages the sites' parameters; diloco takes their difference from the last common ones as a gradient
    for Nesterov's momentum; streaming does so for one fragment of the model after the other, while training goes on;
    async sends what this site has changed and takes the newest of the others every sync_every steps, without waiting;
    every_step averages what one optimizer step has changed, after each."""
    sync_every: int = bounded(100, AT_LEAST_1, "100 is the default")
    """Optimizer steps between two synchronisations, of the fastest site (every_step: 1, whatever this says)."""
    pace: Literal["measured", "equal"] = "measured"
    """measured: slower sites train fewer steps in between, so that all come together; equal: every site as many."""
    outer_lr: float | None = bounded(None, POSITIVE, "leave it out for the method's default")
    """Learning rate of the outer step. Default: 0.7; of every_step 1, the mean of the sites."""
    outer_momentum: float | None = bounded(None, BELOW_1, "leave it out for the method's default")
    """Nesterov momentum of the outer step. Default: 0.9; of every_step 0."""
    fragments: int = bounded(4, AT_LEAST_1, "4 is the default")
    """Parts of the model that streaming synchronises in turn, each every sync_every steps."""
    overlap_steps: int = bounded(5, NOT_NEGATIVE, "5 is the default")
    """Optimizer steps that streaming and async train while parameters are on their way, and keep; 0 waits for them."""
    meet_every: int = bounded(10, AT_LEAST_1, "10 is the default")
    """async: after so many times sync_every steps all sites meet, so that none is staler."""
    compress: Literal["none", "bf16", "int8", "int4", "sign"] = "none"
    """Format of the messages: fp32 parameters (none); or changes since the last synchronisation in bf16, in 8 or 4 bits
    with a scale for 256 elements, or as signs with a scale. What one message loses is added to the next."""
    start_sites: int = bounded(1, AT_LEAST_1, "1 waits for nobody")
    """Sites that the start waits for, this one included (as long as fault.start_timeout_s)."""
    timeout_s: float = bounded(60.0, SECONDS, "60 is the default")
    """Seconds that a synchronisation may take; after them this site goes on without it."""
    max_alone_steps: int = bounded(1000, NOT_NEGATIVE, "1000 is the default")
    """Optimizer steps beyond sync_every that this site trains while no synchronisation succeeds."""
    trust: list[str] = field(default_factory=list)
    """Names of sites whose state is taken where it is ahead, though no others tell the same."""
    keys: str | None = None
    """This site's folder of `llmtrain sites keys`: connections are encrypted, and of sites that have one of the run."""
    listen: str | None = None
    """This host's address for the ranks of other sites. Default: that from which the coordinator is reached."""

    @property
    def outer(self) -> tuple[float, float]:
        """Learning rate and momentum of the outer step; with (1, 0) it takes the sites' mean."""
        lr, momentum = (0.7, 0.9) if self.method in ("diloco", "streaming") else (1.0, 0.0)
        return (
            lr if self.outer_lr is None else self.outer_lr,
            momentum if self.outer_momentum is None else self.outer_momentum,
        )

    @property
    def round_steps(self) -> int:
        """Optimizer steps between two rounds of all sites; a round of streaming is about one fragment."""
        if self.method == "every_step":
            return 1
        if self.method == "streaming":
            return self.sync_every // self.fragments
        return self.sync_every * (self.meet_every if self.method == "async" else 1)
