"""Curves and figures of runs: one page, and plots."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from llmtrain.features import Feature

if TYPE_CHECKING:
    from llmtrain.config.run import RunConfig
    from llmtrain.data.stream.train_data import TrainData
    from llmtrain.tracking.tracker import Tracker


class Report(Feature):
    commands = (("report", "llmtrain.features.report.command", "draw a run's loss, throughput and memory"),)

    def asked(self, config: RunConfig) -> bool:
        return True

    def at_end(self, data: TrainData, tracker: Tracker) -> Iterable[tuple[str, str]]:
        return (("plots", f"llmtrain report {tracker.run_dir}"),)


FEATURE = Report()
