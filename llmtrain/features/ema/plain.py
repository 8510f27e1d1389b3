"""The moving average by its definition, for the proof of parity."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from llmtrain.features.ema import EmaConfig


class PlainEma:
    def __init__(self, settings: EmaConfig) -> None:
        self._settings = settings
        self._means: dict[str, Tensor] = {}

    def __call__(self, step: int, masters: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        decay = self._settings.decay
        assert decay is not None
        if step == 0:
            self._means = {name: master.clone() for name, master in masters.items()}
        elif step % self._settings.every == 0:
            self._means = {n: decay * mean + (1 - decay) * masters[n] for n, mean in self._means.items()}
        return {"ema": self._means}
