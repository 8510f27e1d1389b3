"""During a run an agent on each host reads the ranks' heartbeats, explains a fault or a hang, and ends the job."""

from __future__ import annotations

from llmtrain.features import Feature


class Watch(Feature):
    agent = "llmtrain.features.watch.agent"


FEATURE = Watch()
