"""The part of a run that continues texts at each evaluation."""

from __future__ import annotations

import json

from llmtrain.base import log
from llmtrain.features.samples import SamplesConfig
from llmtrain.features.samples.continuing import Prompts, continuations
from llmtrain.training.parts import Launch, Part


class Samples(Part):
    def __init__(self, launch: Launch) -> None:
        self._setup, self._tracker = launch.setup, launch.tracker
        section = self._setup.run.config.section(SamplesConfig)
        self._prompts = Prompts.of(section.prompts, section.tokens, self._setup.data.first)

    def eval_figures(self, step: int) -> dict[str, float]:
        texts = continuations(self._setup, self._prompts)
        self._tracker.event("samples", step=step, prompts=self._prompts.texts, texts=texts)
        for prompt, text in zip(self._prompts.texts, texts, strict=True):
            log.info(
                f"step {step}  sample {json.dumps(prompt, ensure_ascii=False)}: {json.dumps(text, ensure_ascii=False)}"
            )
        return {}
