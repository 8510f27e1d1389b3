"""Before a run: facts of each host, faults among them, the network between hosts. Light, but for all_reduce.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmtrain.features import Feature

if TYPE_CHECKING:
    from llmtrain.cluster.hosts.hostfile import Host
    from llmtrain.config.run import Run


class Doctor(Feature):
    commands = (
        ("doctor", "llmtrain.features.doctor.command", "examine hosts, with a remedy for each fault"),
        ("doctor --versions", "llmtrain.features.doctor.versions", "try the installed torch, DeepSpeed, transformers"),
    )
    passes_on = True

    def before_launch(self, run: Run, words: Sequence[str], hosts: Sequence[Host], port: int) -> str | None:
        from llmtrain.features.doctor.needs import needs
        from llmtrain.features.doctor.preflight import examine

        return examine(hosts, needs(words, run), port)


FEATURE = Doctor()
