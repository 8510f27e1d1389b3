"""The part of a run that exchanges with the other sites that train its model."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llmtrain.checkpoint.meaning import other_meaning
from llmtrain.engine.api import StateTensor
from llmtrain.features.sites.outer_methods import SitesConfig
from llmtrain.features.sites.sample_ledger import Share
from llmtrain.features.sites.site import Site, telling
from llmtrain.storage.checksum import weights_hash
from llmtrain.training.parts import Done, Launch, Part
from llmtrain.training.step import Position


class Sites(Part):
    key = "outer"

    def __init__(self, launch: Launch) -> None:
        """Raises AgreedError."""
        setup, tracker, frozen = launch.setup, launch.tracker, launch.start.frozen
        config, batch = setup.run.config, setup.run.batch
        sites = config.section(SitesConfig)
        common = {
            "data": setup.data.first.fingerprint,
            "data.seed": config.data.seed,
            "data.sequence_length": config.data.sequence_length,
            "train.seed": config.train.seed,
            "adapter": asdict(config.adapter),
            "frozen parameters (model.pretrained)": weights_hash(frozen.checksums),
            "configuration of the model": other_meaning({}, setup.spec.config.to_dict()),
            **sites.common(),
        }
        self._start_timeout_s, self._requests = config.fault.start_timeout_s, launch.requests
        self._site = Site(
            setup.engine,
            setup.ranks,
            sites,
            common,
            Share(batch=batch.global_batch, tokens=batch.tokens),
            telling(tracker.event, tracker.log),
            frozen=setup.spec.frozen,
            last_step=setup.run.max_steps,
        )
        self.communicates_beside = sites.travel_steps > 0

    def restore(self, kept: Any, folder: Path) -> None:
        """Continue from a checkpoint. Raises AgreedError: a file is damaged."""
        self._site.restore(folder, kept)

    def begin(self, position: Position) -> Position:
        """Raises, on all ranks: SitesError; StopAsked, if a rank was asked before any step."""
        step, index = self._site.begin(
            position.step, position.sample_index, self._start_timeout_s, lambda: self._requests.stop_reason is not None
        )
        return replace(position, step=step, sample_index=index)

    def after_step(self, done: Done) -> Position:
        """Raises TrainingStopped, on all ranks."""
        step, index = self._site.after_update(done.position.step, done.step_s, complete=done.complete)
        return replace(done.position, step=step, sample_index=index)

    def state(self) -> list[StateTensor]:
        return self._site.state()

    def to_json(self) -> dict[str, Any]:
        return self._site.to_json()

    def close(self, error: BaseException | None) -> None:
        self._site.__exit__(None if error is None else type(error), error, None)
